"""Run as a script of its own: does one job after the other for the process that started it, and goes when that goes.

The script of the user is not run again here, as the processes of multiprocessing would do.
"""

from __future__ import annotations

import os
import pickle
import queue
import struct
import sys
import threading
from typing import IO, Any

SIZE = struct.Struct("<Q")


def send(file: IO[bytes], content: bytes) -> None:
    """One message."""
    file.write(SIZE.pack(len(content)))
    file.write(content)
    file.flush()


def receive(file: IO[bytes]) -> bytes | None:
    """The next message, None at the end."""
    head = file.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    (size,) = SIZE.unpack(head)
    content = file.read(size)
    return content if len(content) == size else None


def main() -> None:
    """Works until nobody asks any more, or the process that asked is gone."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    first = receive(asked)
    if first is None:
        return
    sys.path[:] = pickle.loads(first)
    from onnxcalib.executors.jobs import failed_to_load

    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked, jobs), daemon=True).start()
    while True:
        try:
            call, given = pickle.loads(jobs.get())
            answer = call(*given)
        except BaseException as error:
            answer = failed_to_load(error)
        send(answers, _as_bytes(answer))


def _as_bytes(answer: Any) -> bytes:
    from onnxcalib.executors.jobs import failed_to_load

    try:
        return pickle.dumps(answer, protocol=5)
    except Exception as error:
        return pickle.dumps(failed_to_load(error))


def _listen(asked: IO[bytes], jobs: queue.SimpleQueue[bytes]) -> None:
    while (content := receive(asked)) is not None:
        jobs.put(content)
    os._exit(0)  # also in the middle of a job that nobody waits for any more


if __name__ == "__main__":
    main()
