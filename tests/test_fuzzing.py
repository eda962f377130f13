"""Random valid graphs are quantized or refused with a reason; damaged files end in a sentence.

A failure names its seed: python tools/fuzz.py replay graphs SEED. The tool tries thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from fuzzing.pool import Worker

GRAPHS, MUTANTS, BATCH = 300, 300, 50


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.close()


def tried(worker: Worker, kind: str, first: int) -> Counter[str]:
    """How the seeds of a batch ended; none may fail."""
    answers = {seed: worker.ask(kind, seed) for seed in range(first, first + BATCH)}
    failed = [
        f"{kind} {seed}: {it['detail']} ({it['where']})" for seed, it in answers.items() if it["outcome"] == "failed"
    ]
    assert not failed, "\n".join(failed)
    return Counter(it["outcome"] for it in answers.values())


@pytest.mark.parametrize("first", range(0, GRAPHS, BATCH))
def test_random_graphs(worker: Worker, first: int) -> None:
    outcomes = tried(worker, "graphs", first)
    assert outcomes["written"] > BATCH / 2  # else the generator makes little that counts


@pytest.mark.parametrize("first", range(0, MUTANTS, BATCH))
def test_damaged_files(worker: Worker, first: int) -> None:
    outcomes = tried(worker, "mutants", first)
    assert outcomes["refused"] > BATCH / 3
