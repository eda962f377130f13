"""Runs a file in stock onnxruntime: predictions of all samples, and its latency beside that of the float model.

    python judge.py FLOAT.onnx FILE.onnx TEST.npz PREDICTIONS.npy

TEST holds one array for each model input, samples first, and `labels`. The last line is JSON: the runtime's version,
latency as a ratio (batch of one, one thread, the thread's own time, best of rounds in turn with float).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import onnxruntime

BATCH, ROUNDS = 50, 60


def session_of(path: str, threads: int = 0) -> Any:
    """A session as any user makes it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # there may be other work here
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def predictions(path: str, arrays: dict[str, Any]) -> Any:
    """The class of every sample; a file with a fixed batch gets that."""
    session = session_of(path)
    fixed = session.get_inputs()[0].shape[0]
    batch = fixed if isinstance(fixed, int) else BATCH
    count = len(next(iter(arrays.values())))
    found = [
        session.run(None, {name: values[start : start + batch] for name, values in arrays.items()})[0].argmax(1)
        for start in range(0, count, batch)
    ]
    return np.concatenate(found)


def latency_ratio(path: str, reference: str, feed: dict[str, Any]) -> float:
    """Best time of the one beside best time of the other."""
    sessions, best = [session_of(path, 1), session_of(reference, 1)], [np.inf, np.inf]
    for _ in range(ROUNDS):
        for place, session in enumerate(sessions):
            begin = time.thread_time()
            session.run(None, feed)
            best[place] = min(best[place], time.thread_time() - begin)
    return float(best[0] / best[1])


def main() -> None:
    """Judges one file."""
    reference, path, test, out = sys.argv[1:5]
    arrays = {name: values for name, values in np.load(test).items() if name != "labels"}
    np.save(out, predictions(path, arrays))
    ratio = latency_ratio(path, reference, {name: values[:1] for name, values in arrays.items()})
    print(json.dumps({"onnxruntime": onnxruntime.__version__, "latency": ratio}))


if __name__ == "__main__":
    main()
