"""The future of a job that is done elsewhere, and that may have to be sent more than once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from onnxcalib.executors.jobs import value_of

# Sends the job, after the error that the last try ended in; None where another try is of no use.
Send = Callable[[BaseException | None], Future[Any] | None]


class Relay(Future[Any]):
    """Done once a try is, unless its error is one that another try may mend.

    Apart: another thread sends again, where the one that tells of an end is the loop that sending has to wait for.
    """

    def __init__(self, send: Send, *, apart: bool = False) -> None:
        super().__init__()
        self._send, self._apart = send, apart
        self._last: Future[Any] | None = None
        self._watch(send(None))

    def cancel(self) -> bool:
        """Also the try that is under way."""
        cancelled = super().cancel()
        if cancelled and self._last is not None:
            self._last.cancel()
        return cancelled

    def _watch(self, future: Future[Any] | None) -> None:
        assert future is not None
        self._last = future
        future.add_done_callback(self._settle)

    def _settle(self, future: Future[Any]) -> None:
        if self.cancelled():
            return
        try:
            value = value_of(future.result())
        except BaseException as error:  # the future carries it to whoever waits
            if self._apart:
                threading.Thread(target=self._fail, args=(error,), daemon=True).start()
            else:
                self._fail(error)
        else:
            if self.set_running_or_notify_cancel():
                self.set_result(value)

    def _fail(self, error: BaseException) -> None:
        try:
            again = self._send(error)
        except BaseException as other:
            again, error = None, other
        if again is not None:
            self._watch(again)
        elif self.set_running_or_notify_cancel():
            self.set_exception(error)
