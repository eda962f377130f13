"""How a command ends when it does not come to its end: one sentence and an exit code."""

from __future__ import annotations

import os
import signal

import click

from onnxcalib.cli.wording import as_typed
from onnxcalib.errors import OnnxcalibError, OutputError, first_line
from onnxcalib.names import in_brief, printable

MEMORY, UNEXPECTED = 7, 70
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
TRACEBACK = "ONNXCALIB_TRACEBACK"  # set in the environment, it shows where an unexpected error came from


class Terminated(KeyboardInterrupt):
    """Another program asks this one to end, which goes the way of Ctrl-C."""


def wants_traceback() -> bool:
    """Whether the user asks for tracebacks."""
    return bool(os.environ.get(TRACEBACK))


def was_stopped(error: BaseException) -> bool:
    """Whether somebody wanted it to end."""
    return isinstance(error, KeyboardInterrupt | click.exceptions.Abort)


def last_words(error: BaseException) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    if was_stopped(error):
        asked = isinstance(error, Terminated) or isinstance(error.__cause__, Terminated)
        return str(error) or "interrupted; nothing was written.", TERMINATED if asked else INTERRUPTED
    if isinstance(error, OnnxcalibError):
        return as_typed(str(error)), error.exit_code
    if isinstance(error, MemoryError):
        return "there is too little memory. Free some, or give fewer samples.", MEMORY
    if isinstance(error, OSError):  # a full disk can strike anywhere
        said = f"{error.filename or 'a file'} cannot be read or written: {error.strerror or first_line(error)}."
        return f"{in_brief(printable(said))} Check the free disk space.", OutputError.exit_code
    said = in_brief(printable(f"{type(error).__name__}: {first_line(error)}"))
    hint = f"Please report it; {TRACEBACK}=1 before the command shows where it came from."
    return f"an unexpected error, which is a bug of onnxcalib: {said}. {hint}", UNEXPECTED
