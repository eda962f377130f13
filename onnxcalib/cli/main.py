"""The onnxcalib command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

INTERRUPTED = 130


def main() -> None:
    """Runs the command; what a user can mend is one sentence and an exit code, never a traceback."""
    with _quiet_interrupt():
        import click

        from onnxcalib.cli.commands import cli
        from onnxcalib.cli.completion import PROGRAM
        from onnxcalib.errors import OnnxcalibError, OutputError
    try:
        cli.main(prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.Abort as stop:
        # Whoever is impatient now would only see tracebacks of a process that is ending anyway.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(_stop(str(stop) or "interrupted; nothing was written.", INTERRUPTED))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OnnxcalibError as error:
        sys.exit(_stop(f"Error: {error}", error.exit_code))
    except OSError as error:
        # A full disk can strike anywhere.
        sys.exit(_stop(f"Error: {error.filename or 'a file'}: {error.strerror or error}.", OutputError.exit_code))


@contextlib.contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """While modules are imported, an interrupt ends the process at once: nothing was begun yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    yield
    signal.signal(signal.SIGINT, before)


def _stop(message: str, code: int) -> int:
    sys.stderr.write(f"{message}\n")
    return code


if __name__ == "__main__":
    main()
