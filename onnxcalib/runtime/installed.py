"""Which runtime is installed, and what to type when none or two are."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from functools import cache

from onnxcalib.errors import RuntimeMissingError

# Packages that own the same folder, onnxruntime/: whichever was installed last wins, removing one breaks both.
STOCK = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
TRAINING = ("onnxruntime-training-cpu", "onnxruntime-training")


@dataclass(frozen=True)
class Runtime:
    """The runtime of this environment."""

    packages: tuple[str, ...]
    version: str
    gradients: bool  # those of ONNX Runtime training; the standard engine needs none of them


def installed_packages() -> tuple[str, ...]:
    """The installed packages that bring an onnxruntime folder."""
    names = {(dist.metadata["Name"] or "").lower().replace("_", "-") for dist in importlib.metadata.distributions()}
    return tuple(name for name in (*STOCK, *TRAINING) if name in names)


def find_runtime() -> Runtime:
    """The one runtime, or an error that says what to type."""
    packages = installed_packages()
    if len(packages) > 1:
        extra = "training" if any(name in TRAINING for name in packages) else "runtime"
        raise RuntimeMissingError(
            f"{' and '.join(packages)} are installed side by side and overwrite each other's files.",
            f"Type: pip uninstall -y {' '.join(packages)} && pip install 'onnxcalib[{extra}]'",
        )
    try:
        module = importlib.import_module("onnxruntime")
        version = module.__version__
        native = importlib.import_module("onnxruntime.capi._pybind_state")
    except (ImportError, AttributeError) as error:
        if packages:
            raise RuntimeMissingError(
                f"{packages[0]} is installed but broken: {error}.",
                f"Type: pip install --force-reinstall --no-deps {packages[0]}",
            ) from error
        also = " or, with ONNX Runtime training, pip install 'onnxcalib[training]'" if _has_training_wheel() else ""
        raise RuntimeMissingError(
            "no ONNX runtime is installed.", f"Type: pip install 'onnxcalib[runtime]'{also}"
        ) from error
    # Package metadata cannot tell whether gradients are there; the native module can.
    return Runtime(packages, version, hasattr(native, "GradientGraphBuilder"))


def _has_training_wheel() -> bool:
    return sys.version_info < (3, 13) and platform.machine() in ("x86_64", "AMD64")


def how_to_train(runtime: Runtime) -> str:
    """What to type for ONNX Runtime training in place of this runtime, where there is a wheel of it."""
    if not _has_training_wheel():
        return "There is no wheel of ONNX Runtime training for this Python on this machine"
    first = f"pip uninstall -y {' '.join(runtime.packages)} && " if runtime.packages else ""
    return f"Type: {first}pip install 'onnxcalib[training]'"


@cache
def check_runtime() -> Runtime:
    """Fails where there is no runtime; looks once, for it takes longer than opening a small session."""
    return find_runtime()


def version_of(package: str) -> str:
    """The version of an installed package, for people."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
