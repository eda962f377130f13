"""A process that does tries one after another, within limits; what it says goes through a pipe of its own."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

MEMORY = 2 * 2**30


def main() -> None:
    """Reads one try a line, answers one line each."""
    faulthandler.enable()  # where an abort came from
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print
    known = tries()
    _limit_memory()
    for line in sys.stdin:
        kind, seed = json.loads(line)
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                answer = known[kind](seed, Path(folder))
            told = {"outcome": answer.outcome, "detail": answer.detail, "db": answer.worst_db}
        except BaseException as error:
            told = {"outcome": "failed", **_told(error)}
        told["seconds"] = round(time.monotonic() - began, 3)
        told["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answers.write(json.dumps(told) + "\n")
        answers.flush()


def tries() -> dict[str, Any]:
    """Imported first: the limit holds for what comes on top of them."""
    from fuzzing.judge import judge_graph
    from fuzzing.mutants import judge_mutant

    return {"graphs": judge_graph, "mutants": judge_mutant}


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _told(error: BaseException) -> dict[str, str]:
    """The error, and where it came from: the last frames of our own, and the very last."""
    frames = [
        f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.name}"
        for f in traceback.extract_tb(error.__traceback__)
    ]
    own = [
        frame
        for frame, f in zip(frames, traceback.extract_tb(error.__traceback__), strict=True)
        if "onnxcalib" in f.filename
    ]
    where = " < ".join(dict.fromkeys([frames[-1], *own[:-4:-1]]))
    return {"detail": f"{type(error).__name__}: {error}"[:500], "where": where, "trace": traceback.format_exc()[-6000:]}


if __name__ == "__main__":
    main()
