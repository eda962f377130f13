"""The onnxcalib command."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


def main() -> None:
    """Runs the command; whatever goes wrong is one sentence and an exit code, never a traceback."""
    with _quiet_interrupt():
        import click

        from onnxcalib.cli.commands import cli
        from onnxcalib.cli.completion import PROGRAM
        from onnxcalib.cli.ending import last_words, wants_traceback, was_stopped
        from onnxcalib.errors import OnnxcalibError
        from onnxcalib.names import printable
    _prepare_streams()
    with _terminable():
        try:
            cli.main(prog_name=PROGRAM, standalone_mode=False)
        except click.ClickException as error:
            said = io.StringIO()
            error.show(said)
            sys.stderr.writelines(f"{printable(line)}\n" for line in said.getvalue().splitlines())
            sys.exit(error.exit_code)
        except (Exception, KeyboardInterrupt) as error:
            if wants_traceback() and not isinstance(error, OnnxcalibError | click.exceptions.Abort):
                raise
            if was_stopped(error):
                # Whoever is impatient now would only see tracebacks of a process that is ending anyway.
                _handle(signal.SIGINT, signal.SIG_IGN)
            message, code = last_words(error)
            sys.stderr.write(f"{message}\n" if was_stopped(error) else f"Error: {message}\n")
            sys.exit(code)


def _prepare_streams() -> None:
    """A name that the terminal's encoding does not have is shown as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """While modules are imported, an interrupt ends the process at once: nothing was begun yet."""
    before = _handle(signal.SIGINT, lambda _number, _frame: os._exit(128 + signal.SIGINT))
    yield
    _handle(signal.SIGINT, before)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the process like Ctrl-C: files that are temporary go, and what is finished stays."""
    from onnxcalib.cli.ending import Terminated

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = _handle(signal.SIGTERM, stop)
    try:
        yield
    finally:
        _handle(signal.SIGTERM, before)


def _handle(number: int, handler: signal._HANDLER) -> signal._HANDLER:
    """Sets a handler and gives back the one before; only the main thread may."""
    return signal.signal(number, handler) if threading.current_thread() is threading.main_thread() else None


if __name__ == "__main__":
    main()
