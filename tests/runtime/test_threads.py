"""Work shared among threads of one process."""

from __future__ import annotations

import threading
import time

import pytest

from onnxcalib.runtime.threads import ahead, in_threads


def test_results_come_in_the_order_of_the_items() -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.02 * (5 - number))
        return number * number

    assert in_threads(slow_first, range(5)) == [0, 1, 4, 9, 16]
    assert list(ahead(slow_first, range(5), 2)) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("run", [in_threads, lambda work, items: list(ahead(work, items, 2))])
def test_an_interrupt_inside_the_pool_leaves_no_work_behind(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    start, begun, ended = threading.Thread.start, threading.Event(), threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        assert begun.wait(10)
        raise KeyboardInterrupt

    def work(_item: int) -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(work, range(2))
    assert ended.is_set()
