"""Which runtime is there; and that everything imports without one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from types import SimpleNamespace

import onnxruntime as ort
import pytest
from said import names, one_error, refused

from onnxcalib.errors import RuntimeMissingError
from onnxcalib.runtime import installed as runtime
from onnxcalib.runtime.installed import Runtime, find_runtime, how_to_train


def pretend(monkeypatch: pytest.MonkeyPatch, *names: str | None) -> None:
    """As if these packages were installed."""
    found = [SimpleNamespace(metadata={"Name": name}) for name in ("numpy", None, *names)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: iter(found))


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # type: ignore[arg-type]


def test_the_runtime_of_this_environment() -> None:
    found = find_runtime()
    assert found.version == ort.__version__
    assert len(found.packages) == 1
    assert found.gradients == hasattr(ort.capi._pybind_state, "GradientGraphBuilder")


def test_no_runtime_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    hide(monkeypatch)
    with refused(RuntimeMissingError, "pip install 'onnxcalib[runtime]'") as caught:
        find_runtime()
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("version", "machine", "offered"),
    [((3, 11), "x86_64", True), ((3, 13), "x86_64", False), ((3, 11), "aarch64", False)],
)
def test_training_is_offered_only_where_its_wheel_exists(
    version: tuple[int, int], machine: str, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    hide(monkeypatch)
    monkeypatch.setattr(runtime, "sys", SimpleNamespace(version_info=version))
    monkeypatch.setattr(runtime.platform, "machine", lambda: machine)
    with pytest.raises(RuntimeMissingError) as caught:
        find_runtime()
    assert ("onnxcalib[training]" in caught.value.hint) == offered


@pytest.mark.parametrize(("version", "offered"), [((3, 12), True), ((3, 13), False)])
def test_training_in_place_of_another_runtime(
    version: tuple[int, int], offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "sys", SimpleNamespace(version_info=version))
    monkeypatch.setattr(runtime.platform, "machine", lambda: "AMD64")
    told = how_to_train(Runtime(("onnxruntime-gpu",), "1.31", gradients=False))
    assert ("pip uninstall -y onnxruntime-gpu && pip install 'onnxcalib[training]'" in told) == offered
    assert offered or "no wheel" in told


@pytest.mark.parametrize(
    ("packages", "extra"),
    [
        (("onnxruntime", "onnxruntime-training-cpu"), "training"),
        (("onnxruntime", "onnxruntime_gpu"), "runtime"),
        (("ONNXRuntime", "onnxruntime-training"), "training"),
    ],
)
def test_two_runtimes_say_what_to_type(packages: tuple[str, str], extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, *packages)
    with pytest.raises(RuntimeMissingError) as caught:
        find_runtime()
    normal = [name.lower().replace("_", "-") for name in packages]
    names(caught.value.hint, f"pip uninstall -y {' '.join(normal)}", f"pip install 'onnxcalib[{extra}]'")


def test_a_broken_runtime_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "onnxruntime")
    hide(monkeypatch)
    with refused(RuntimeMissingError, "pip install --force-reinstall --no-deps onnxruntime"):
        find_runtime()


def in_process(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", "import sys; sys.modules['onnxruntime'] = None\n" + code]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_every_module_imports_without_a_runtime() -> None:
    done = in_process(
        "import importlib, pkgutil, onnxcalib\n"
        "names = [found.name for found in pkgutil.walk_packages(onnxcalib.__path__, 'onnxcalib.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))"
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


@pytest.mark.parametrize("command", [["quantize", "a", "-c", "b", "-o", "c"], ["inspect", "a"], ["doctor"]])
def test_the_first_command_says_what_to_type(command: list[str]) -> None:
    done = in_process(
        "import importlib.metadata; importlib.metadata.distributions = lambda: iter(())\n"
        f"sys.argv = ['onnxcalib', *{command!r}]\n"
        "from onnxcalib.cli.main import main; main()"
    )
    assert done.returncode == 5, done.stderr
    one_error(done.stderr, "pip install 'onnxcalib[runtime]'")
