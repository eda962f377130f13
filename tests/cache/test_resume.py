"""Runs that are cut off and go on: the same bytes, and nothing done twice."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import COMMAND, ENVIRONMENT, call
from said import names, refused

from models import change, conv_net, feed_for, normal, two_gemms
from onnxcalib import OutputError, Pipeline, Recipe, quantize
from onnxcalib.cache.lock import locked
from onnxcalib.cache.store import Store
from onnxcalib.pipeline.rounding import STRENGTHS
from onnxcalib.progress import Event
from onnxcalib.recipe import RangeMethod, parse_bits

MIXED = Recipe(Pipeline.ADVANCED, parse_bits("w4a4,w8a8"), compression=0.6, steps=1, ranges=RangeMethod.MINMAX, seed=2)
BY_LAYERS = dataclasses.replace(MIXED, rounding="nearest")  # layers are trained one by one


class Heard:
    """A progress that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        assert 0 < done <= total, stage

    def event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [dict(event.values) for event in self.events if event.name == name]

    @property
    def computed(self) -> list[str]:
        return [end["stage"] for end in self.of("stage_end") if not end["reused"]]


def quantized(model: onnx.ModelProto, data: Any, recipe: Recipe = MIXED, **options: Any) -> bytes:
    return quantize(model, data, recipe, **options).model.SerializeToString(deterministic=True)


class Stop(BaseException):
    """A power failure."""


def test_cut_off_after_every_single_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run stores one more value and dies, with one worker or two in turn."""
    model, folder, recipe = two_gemms("Relu", 40), tmp_path / "run", dataclasses.replace(BY_LAYERS, compression=0.9)
    data = feed_for(model, 24)
    whole = quantized(model, data, recipe)
    put = Store.put

    def put_and_stop(self: Store, *arguments: Any, **more: Any) -> None:
        put(self, *arguments, **more)
        raise Stop

    monkeypatch.setattr(Store, "put", put_and_stop)
    for attempt in itertools.count():
        assert attempt < 80
        try:
            resumed = quantized(model, data, recipe, run_dir=folder, workers=1 + attempt % 2)
            break
        except Stop:
            continue
    assert attempt >= 20  # layers at two precisions, layers in turn, states of bias tuning, and stages
    assert resumed == whole


def test_a_changed_aim_repeats_only_what_depends_on_it(tmp_path: Path) -> None:
    model = conv_net()
    data, first, second = feed_for(model, 24), Heard(), Heard()
    quantized(model, data, run_dir=tmp_path, progress=first)
    assert first.of("resumed") == []
    changed = dataclasses.replace(MIXED, compression=0.55)
    bytes_ = quantized(model, data, changed, run_dir=tmp_path, progress=second)
    tried = len(STRENGTHS)
    roundings = ["quick tuning", *["second-order"] * tried, *["quick tuning"] * tried]
    # Two roundings that a quick tuning does not tell apart both get the whole one; what second-order rounding has
    # solved is not trained layer by layer as well.
    maybe = ("sequential", "biases")
    computed = [name for name, _ in itertools.groupby(it for it in second.computed[tried * 2 + 2 :] if it not in maybe)]
    assert second.computed[: tried * 2 + 2] == ["allocation", *roundings]
    assert computed == ["batch norm", "end-to-end", "output noise"]
    assert second.computed.count("batch norm") <= 2
    (told,) = second.of("resumed")
    assert told["reused"] == [
        "equalization",
        "statistics",
        "ranges",
        "output noise",
        "sensitivity",
    ]
    assert bytes_ == quantized(model, data, changed)


def test_options_of_training_leave_the_statistics_alone(tmp_path: Path) -> None:
    model = conv_net()
    data, heard = feed_for(model, 24), Heard()
    light = dataclasses.replace(MIXED, pipeline=Pipeline.LIGHT, steps=None)
    quantized(model, data, light, run_dir=tmp_path)
    quantized(model, data, dataclasses.replace(light, ranges=RangeMethod.MSE), run_dir=tmp_path, progress=heard)
    assert heard.computed[0] == "ranges"
    heard = Heard()
    quantized(model, data, BY_LAYERS, run_dir=tmp_path, progress=heard)
    assert heard.computed[0] == "parallel"


def test_another_seed_never_returns_what_the_first_one_trained(tmp_path: Path) -> None:
    model = conv_net()
    data, heard = feed_for(model, 24), Heard()
    quantized(model, data, BY_LAYERS, run_dir=tmp_path)
    other = dataclasses.replace(BY_LAYERS, seed=MIXED.seed + 1)
    assert quantized(model, data, other, run_dir=tmp_path, progress=heard) == quantized(model, data, other)
    assert {"parallel", "sequential", "end-to-end"} <= set(heard.computed)


def test_other_data_or_another_model_is_noticed_and_nothing_of_it_is_reused(tmp_path: Path) -> None:
    model, plain = conv_net(), Recipe()
    other = conv_net()
    change(other, "w1", normal(8, 3, 3, 3, seed=9))
    data = feed_for(model, 24)
    quantized(model, data, plain, run_dir=tmp_path)
    for words, given in {
        "other calibration data": (model, feed_for(model, 24, seed=5)),
        "another model": (other, feed_for(model, 24, seed=5)),
    }.items():
        heard = Heard()
        assert quantized(*given, plain, run_dir=tmp_path, progress=heard) == quantized(*given, plain)
        (warning,) = heard.of("warning")
        names(warning["message"], tmp_path, words)
        assert heard.computed == ["statistics", "ranges", "output noise"]
    heard = Heard()
    quantized(model, data, plain, run_dir=tmp_path, progress=heard)
    assert heard.computed == []  # the values of the first model are still there


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "swap"])
def test_a_damaged_value_is_named_and_computed_again(harm: str, tmp_path: Path) -> None:
    model, plain = conv_net(), Recipe(ranges=RangeMethod.MINMAX)
    data = feed_for(model, 24)
    whole = quantized(model, data, plain, run_dir=tmp_path)
    statistics, ranges, _ = sorted((tmp_path / "values").iterdir(), reverse=True)
    content = bytearray(ranges.read_bytes())
    if harm == "flip":
        place = content.index(b"a3.npy") + 300  # within the array
        content[place] ^= 16
    ranges.write_bytes({"flip": content, "cut": content[:-200], "empty": b"", "swap": statistics.read_bytes()}[harm])
    with pytest.warns(UserWarning, match=ranges.name):
        assert quantized(model, data, plain, run_dir=tmp_path) == whole
    heard = Heard()
    assert quantized(model, data, plain, run_dir=tmp_path, progress=heard) == whole
    assert heard.computed == []


@pytest.mark.parametrize(
    "kind", ["files", "a file", "damaged", "of another program", "no parent", "no lock", "scratch", "values"]
)
def test_what_is_no_run_directory_is_left_alone(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    if kind == "a file":
        folder.write_text("mine")
    elif kind in ("scratch", "values"):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "thesis.txt").write_text("mine")
    elif kind == "no lock":
        (folder / "lock").mkdir(parents=True)
    elif kind == "no parent":
        folder = folder / "deep" / "down"
    else:
        folder.mkdir()
        text = {"files": None, "damaged": '{"format": "onnx', "of another program": '{"format": "zip"}'}[kind]
        (folder / "thesis.txt").write_text("mine")
        if text is not None:
            (folder / "run.json").write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model = conv_net()
    with refused(OutputError, folder, "--run-dir"):
        quantized(model, feed_for(model, 8), Recipe(), run_dir=folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_one_process_at_a_time(tmp_path: Path) -> None:
    model, plain = conv_net(), Recipe(ranges=RangeMethod.MINMAX)
    data = feed_for(model, 8)
    quantized(model, data, plain, run_dir=tmp_path)
    with locked(tmp_path / "lock"), refused(OutputError, tmp_path, f"process {os.getpid()}"):
        quantized(model, data, plain, run_dir=tmp_path)
    hold = """if True:
        import sys, time, pathlib
        from onnxcalib.cache.lock import locked
        with locked(pathlib.Path(sys.argv[1])):
            print('held', flush=True)
            time.sleep(60)"""
    process = subprocess.Popen(
        [COMMAND[0], "-c", hold, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with refused(OutputError, tmp_path, f"process {process.pid}"):
        quantized(model, data, plain, run_dir=tmp_path)
    process.kill()
    process.communicate()
    quantized(model, data, plain, run_dir=tmp_path)  # the lock died with its process


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is quick to train."""
    where, model = tmp_path_factory.mktemp("small"), two_gemms("Relu", 40)
    onnx.save(model, where / "model.onnx")
    np.savez(where / "data.npz", **feed_for(model, 64))
    return where


def command(where: Path, output: Path, *more: str) -> list[str]:
    options = "--pipeline advanced --bits w4a4,w8a8 --compression 0.9 --steps 40 --ranges minmax"
    words = ["quantize", where / "model.onnx", "-c", where / "data.npz", "-o", output, *options.split(), *more]
    return [*COMMAND, *map(str, words)]


def test_killed_at_random_moments(small: Path, tmp_path: Path) -> None:
    def run(output: Path) -> None:
        done = subprocess.run(command(small, output), capture_output=True, text=True, env=ENVIRONMENT, check=False)
        assert done.returncode == 0, done.stderr

    begun = time.monotonic()
    run(tmp_path / "whole.onnx")
    lasted, rng = time.monotonic() - begun, random.Random(4)
    torn = tmp_path / "torn.onnx"
    for _ in range(3):
        process = subprocess.Popen(
            command(small, torn), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
        )
        time.sleep(lasted * rng.uniform(0.3, 0.9))
        process.kill()
        process.communicate()
    run(torn)
    assert torn.read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    assert not list(tmp_path.rglob("*.part"))
    assert not (tmp_path / "torn.onnx.run" / "scratch").exists()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What runs in the background of a shell is deaf to SIGINT, and so would its children be."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_says_how_to_go_on(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    words = command(small, output, "--steps", "4000")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    values = tmp_path / "out.onnx.run" / "values"
    while not (values.is_dir() and len(list(values.glob("*.npz"))) >= 3):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.count("\n") == 1
    names(err, "interrupted", "same command", f"{output}.run")
    assert not output.exists()
    shown = call("runs", "show", f"{output}.run")
    assert shown.returncode == 0, shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["finished", "not", "yet"] in lines
    assert any(line[:2] == ["statistics", "finished"] for line in lines)


def test_an_interrupt_while_modules_are_imported_leaves_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'onnx':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "from onnxcalib.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 130
    assert done.stderr == ""
