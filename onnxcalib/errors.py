"""Errors that a user can act on: one sentence, a hint that says what to try, and an exit code."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence

from onnxcalib.names import in_brief, printable

COMPARED = 100  # characters of a name, and names: looking for near ones takes the square of both


class OnnxcalibError(Exception):
    """The base of every error that onnxcalib raises on purpose.

    A message names parameters in backticks, as Python does: `steps=0`. The command line shows its options instead.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = in_brief(printable(message))
        self.hint = in_brief(printable(hint))
        super().__init__(self.message, self.hint)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class RecipeError(OnnxcalibError):
    """What was asked for is unknown, out of range or contradictory."""

    exit_code = 2


class ModelError(OnnxcalibError):
    """The model file cannot be read or cannot be quantized."""

    exit_code = 3


class DataError(OnnxcalibError):
    """Calibration or evaluation data does not fit the model."""

    exit_code = 4


class RuntimeMissingError(OnnxcalibError):
    """No usable runtime is installed, or two fight over the same folder."""

    exit_code = 5


class OutputError(OnnxcalibError):
    """The result cannot be written."""

    exit_code = 6


class OnnxcalibWarning(UserWarning):
    """Something that a user should know of, where no listener of events is at hand."""


@contextlib.contextmanager
def understanding(source: str) -> Iterator[None]:
    """Whatever a library raises about a model that contradicts itself becomes one sentence about that model."""
    try:
        yield
    except (OnnxcalibError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged model can break any step in its own way
        raise ModelError(
            f"{source} cannot be understood: {type(error).__name__}: {first_line(error)}.",
            "Check it with onnx.checker, or export it again.",
        ) from error


def first_line(error: BaseException) -> str:
    """What a library's error says first, without a full stop; what it is called where it says nothing."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def near(word: str, known: Iterable[str]) -> str:
    """A hint with the nearest known names, for a name that matches nothing."""
    names = list(known)
    close = difflib.get_close_matches(word[:COMPARED], [name[:COMPARED] for name in names[:1000]], n=5, cutoff=0.4)
    if close:
        return f"Near names: {', '.join(close)}."
    return f"Known names: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}." if names else ""
