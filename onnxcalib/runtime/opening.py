"""Opens sessions of onnxruntime, and tells apart why one fails."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.errors import ModelError, OnnxcalibWarning, RecipeError, first_line
from onnxcalib.runtime.installed import check_runtime
from onnxcalib.runtime.providers import CPU, providers_for
from onnxcalib.runtime.trial import DIED, LEVELS, is_risky, try_levels

# What the runtime says of each cause, whatever its own class for the error.
MEMORY = ("bad_alloc", "bad allocation", "failed to allocate memory")
UNSUPPORTED = (
    "is under development", "unsupported model ir version", "no op registered for", "is not a registered function/op",
    "could not find an implementation", "invalid tensor data type", "does not have valid data type",
)  # fmt: skip
INVALID = "Check it with onnx.checker, or export it again."


def new_options() -> Any:
    """Options of a session that prints nothing."""
    check_runtime()
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def open_session(
    model: bytes | Path,
    options: Any,
    source: str,
    hint: str = INVALID,
    levels: Sequence[str] = LEVELS,
    provider: str = CPU,
) -> Any:
    """A session, at the first of these levels of optimization that works; says so where it is a lower one.

    The hint is for a model that is at fault itself.
    """
    import onnxruntime as ort

    content, first = model if isinstance(model, bytes) else str(model), None
    for level in levels:
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        try:
            session = ort.InferenceSession(content, options, providers=providers_for(provider))
        except Exception as error:  # the runtime's exceptions share no base class but this one
            first = first or error
            if is_memory(error):
                break
            continue
        _check_provider(session, provider)
        if first is not None:
            tell_level(source, level, first_line(first))
        return session
    assert first is not None
    raise ModelError(
        f"onnxruntime {ort.__version__} cannot load {source}: {first_line(first)}.", hint_for(first, hint)
    ) from first


def _check_provider(session: Any, provider: str) -> None:
    """Fails where onnxruntime went on without the provider, of which it only logs that it cannot be started."""
    if providers_for(provider)[0] not in session.get_providers():
        raise RecipeError(
            f"`provider={provider!r}` is installed, but onnxruntime cannot start it here.",
            "Check its drivers and libraries, or leave `provider` out.",
        )


def safe_levels(model: onnx.ModelProto, source: str) -> Sequence[str]:
    """The levels of optimization that do not end the process, of a model of the kind that some do end it with."""
    if not is_risky(model):
        return LEVELS
    level, why = try_levels(model)
    if level is None:
        if why == DIED:
            raise ModelError(f"onnxruntime dies of {source} at every level of optimization.", INVALID)
        return LEVELS
    if level != LEVELS[0]:
        tell_level(source, level, why)
    return LEVELS[LEVELS.index(level) :]


def tell_level(source: str, level: str, why: str) -> None:
    """Warns, once for each model and cause, that less than full optimization is measured."""
    import onnxruntime as ort

    words = f"onnxruntime {ort.__version__} cannot optimize {source} fully: {why}; it runs at {level} here."
    if words not in _TOLD:
        _TOLD.add(words)
        warnings.warn(words, OnnxcalibWarning, stacklevel=3)


_TOLD: set[str] = set()


def failed(doing: str, error: Exception, hint: str) -> ModelError:
    """What to raise when a run fails; the hint is for what was fed."""
    return ModelError(f"onnxruntime failed while {doing}: {first_line(error)}.", hint_for(error, hint))


def hint_for(error: Exception, otherwise: str) -> str:
    """What to do about an error of the runtime: memory and the runtime's age have hints of their own."""
    text = str(error).lower()
    if is_memory(error):
        return "There is too little memory: free some, or work on a machine with more."
    if any(sign in text for sign in UNSUPPORTED):
        return "This runtime lacks what the model uses: install a newer one, or export the model with an older opset."
    return otherwise


def is_memory(error: Exception) -> bool:
    """Whether the runtime ran out of memory."""
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in MEMORY)
