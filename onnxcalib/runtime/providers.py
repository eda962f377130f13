"""Execution providers of onnxruntime: where sessions compute, by the names that people use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from onnxcalib.errors import RecipeError, near
from onnxcalib.runtime.installed import check_runtime

SUFFIX = "ExecutionProvider"
CPU = "cpu"
# What to install for a provider; others need a build of one's own.
PACKAGES = {
    "cuda": "onnxruntime-gpu",
    "tensorrt": "onnxruntime-gpu",
    "openvino": "onnxruntime-openvino",
    "dml": "onnxruntime-directml",
    "qnn": "onnxruntime-qnn",
    "migraphx": "onnxruntime-migraphx",
    "cann": "onnxruntime-cann",
}
# Of one call of ours, and of the jobs that it sends; no other call sees it.
_CHOSEN: ContextVar[str] = ContextVar("provider", default=CPU)


def chosen() -> str:
    """The provider of sessions that are opened now."""
    return _CHOSEN.get()


@contextlib.contextmanager
def using(provider: str | None) -> Iterator[None]:
    """Sessions that are opened in the block compute there; None changes nothing."""
    before = _CHOSEN.set(chosen() if provider is None else find_provider(provider))
    try:
        yield
    finally:
        _CHOSEN.reset(before)


def find_provider(asked: str) -> str:
    """The short name of an installed provider, or an error that lists those there are."""
    check_runtime()
    import onnxruntime as ort

    there, known = (_short(names) for names in (ort.get_available_providers(), ort.get_all_providers()))
    name = asked.lower().removesuffix(SUFFIX.lower())
    if name in there:
        return name
    listed = f"This onnxruntime has {', '.join(sorted(there))}."
    if name not in known and name not in PACKAGES:
        raise RecipeError(f"`provider={asked!r}` is unknown.", f"{listed} {near(name, sorted({*known, *PACKAGES}))}")
    how = f"pip install {PACKAGES[name]} in its place" if name in PACKAGES else "install a build that has it"
    raise RecipeError(f"`provider={asked!r}` is not in this onnxruntime {ort.__version__}.", f"{listed} Else {how}.")


def providers_for(name: str) -> list[str]:
    """What a session is opened with: ops that the provider does not have run on the CPU."""
    import onnxruntime as ort

    own = _short(ort.get_available_providers())
    return list(dict.fromkeys([own[name], own[CPU]]))


def _short(names: list[str]) -> dict[str, str]:
    return {name.removesuffix(SUFFIX).lower(): name for name in names}
