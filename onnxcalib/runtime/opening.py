"""Opens sessions of onnxruntime, and tells apart why one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxcalib.errors import ModelError, first_line
from onnxcalib.runtime.installed import check_runtime

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


def open_session(model: bytes | Path, options: Any, source: str, hint: str = INVALID) -> Any:
    """A session on the CPU; the hint is for a model that is at fault itself."""
    import onnxruntime as ort

    content = model if isinstance(model, bytes) else str(model)
    try:
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's exceptions share no base class but this one
        raise ModelError(
            f"onnxruntime {ort.__version__} cannot load {source}: {first_line(error)}.", hint_for(error, hint)
        ) from error


def failed(doing: str, error: Exception, hint: str) -> ModelError:
    """What to raise when a run fails; the hint is for what was fed."""
    return ModelError(f"onnxruntime failed while {doing}: {first_line(error)}.", hint_for(error, hint))


def hint_for(error: Exception, otherwise: str) -> str:
    """What to do about an error of the runtime: memory and the runtime's age have hints of their own."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(sign in text for sign in MEMORY):
        return "There is too little memory: free some, or work on a machine with more."
    if any(sign in text for sign in UNSUPPORTED):
        return "This runtime lacks what the model uses: install a newer one, or export the model with an older opset."
    return otherwise
