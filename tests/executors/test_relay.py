"""A job that is sent again: not by the thread that tells of its end, which may have to do the sending."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from onnxcalib.executors.relay import Relay


def ended(future: Future[Any], error: BaseException) -> int:
    """Ends a future in a thread of its own, and gives that thread."""
    thread = threading.Thread(target=lambda: future.set_exception(error))
    thread.start()
    thread.join()
    assert thread.ident is not None
    return thread.ident


def test_another_thread_sends_again() -> None:
    tries: list[Future[Any]] = [Future(), Future()]
    senders: list[int] = []
    sent = threading.Event()

    def send(error: BaseException | None) -> Future[Any]:
        senders.append(threading.get_ident())
        if error is not None:
            sent.set()
        return tries[len(senders) - 1]

    relay = Relay(send, apart=True)
    teller = ended(tries[0], CancelledError())
    assert sent.wait(10)
    assert senders[1] != teller
    assert not relay.done()


@pytest.mark.parametrize("apart", [True, False])
def test_an_error_that_no_try_mends_arrives(apart: bool) -> None:
    first: Future[Any] = Future()
    relay = Relay(lambda error: first if error is None else None, apart=apart)
    ended(first, ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        relay.result(10)
