"""Quantizes thousands of random graphs and reads thousands of damaged files; nothing may end in a traceback.

python tools/fuzz.py graphs --count 5000
python tools/fuzz.py mutants --count 20000
python tools/fuzz.py replay graphs 4711 --keep folder

Tries run in other processes, so that an abort, a hang or too much memory (2 GB, 60 s) is a failure of one seed. Answers
go to a log, one JSON object a line; the same command again goes on from there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("graphs", "mutants")

Answer = dict[str, Any]


def main() -> None:
    asked = _arguments()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if asked.what == "replay":
        replay(asked.kind, asked.seed, asked.keep)
        return
    from fuzzing.pool import try_all

    wanted = range(asked.seed, asked.seed + asked.count)
    done = _done(asked.log, asked.what) if asked.log.exists() else {}
    seeds = [seed for seed in wanted if seed not in done]
    tally = Tally(asked.what, len(seeds), asked.log)
    for seed in set(wanted) & set(done):
        tally.count(seed, done[seed])
    try_all(asked.what, seeds, asked.jobs, tally.hear)
    print(tally.summary())
    sys.exit(1 if tally.failures else 0)


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    for name in KINDS:
        part = parts.add_parser(name)
        part.add_argument("--count", type=int, default=1000)
        part.add_argument("--seed", type=int, default=0, help="the first seed")
        part.add_argument("--jobs", type=int, default=2, help="processes")
        part.add_argument("--log", type=Path, default=Path(f"fuzz-{name}.jsonl"), help="answers so far")
    part = parts.add_parser("replay", help="one try in this process, where a debugger can look at it")
    part.add_argument("kind", choices=KINDS)
    part.add_argument("seed", type=int)
    part.add_argument("--keep", type=Path, help="a new folder for the files of this try")
    return parser.parse_args()


class Tally:
    """What the answers were; failures by the places they came from."""

    def __init__(self, kind: str, count: int, log: Path) -> None:
        self.kind, self.total, self.log = kind, count, log
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.failures: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.slowest, self.largest, self.fresh = (0.0, -1), (0, -1), 0
        self.distances: list[float] = []
        self.began = time.monotonic()

    def hear(self, seed: int, answer: Answer) -> None:
        self.count(seed, answer)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": self.kind, "seed": seed, **answer}) + "\n")
        self.fresh += 1
        if answer["outcome"] == "failed":
            print(f"\r{self.kind} {seed}: {answer['detail'][:150]}  [{answer['where']}]", flush=True)
        if self.fresh % 20 == 0:
            rate = 60 * self.fresh / (time.monotonic() - self.began)
            failed = sum(map(len, self.failures.values()))
            print(f"\r{self.fresh} of {self.total}, {rate:.0f} a minute, {failed} failed ", end="", flush=True)

    def count(self, seed: int, answer: Answer) -> None:
        self.outcomes[answer["outcome"]] += 1
        if answer["outcome"] == "failed":
            self.failures[f"{answer['where']}: {_kind(answer['detail'])}"].append((seed, answer["detail"]))
        if answer["outcome"] == "refused":
            self.refusals[_kind(answer["detail"])] += 1
        if answer.get("db") is not None:
            self.distances.append(answer["db"])
        self.slowest = max(self.slowest, (answer.get("seconds", 0.0), seed))
        self.largest = max(self.largest, (answer.get("peak", 0), seed))

    def summary(self) -> str:
        spent = time.monotonic() - self.began
        lines = [f"\n{self.fresh} {self.kind} in {spent:.0f} s ({60 * self.fresh / max(spent, 1e-9):.0f} a minute)"]
        lines += [f"{count} {outcome}" for outcome, count in self.outcomes.most_common()]
        memory = f"most memory {self.largest[0] / 2**20:.0f} MB (by seed {self.largest[1]})"
        lines += [f"slowest {self.slowest[0]:.1f} s (seed {self.slowest[1]}), {memory}"]
        if self.distances:
            ordered = sorted(self.distances)
            shown = " ".join(f"{ordered[int(share * (len(ordered) - 1))]:.1f}" for share in (0, 0.01, 0.1, 0.5))
            lines.append(f"worst output of a file, dB: least, 1 %, 10 % and half of the files below {shown}")
        lines += [f"refused {count} times: {reason}" for reason, count in self.refusals.most_common(25)]
        for where, found in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            seeds = " ".join(str(seed) for seed, _ in found[:8])
            lines.append(f"FAILED {len(found)} times, seeds {seeds}: {where}\n    {found[0][1][:300]}")
        return "\n".join(lines)


def _kind(detail: str) -> str:
    """A message without what differs from file to file: quoted names, numbers, paths."""
    return re.sub(r"'[^']*'|\S*/\S*|[-+]?\d[\d.,e+-]*", "_", detail)[:160]


def _done(log: Path, kind: str) -> dict[int, Answer]:
    answers = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    return {answer["seed"]: answer for answer in answers if answer["kind"] == kind}


def replay(kind: str, seed: int, keep: Path | None) -> None:
    """One try; its traceback is the whole one."""
    from fuzzing.worker import tries

    if keep is not None:
        keep.mkdir()
        print(tries()[kind](seed, keep))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(tries()[kind](seed, Path(folder)))


if __name__ == "__main__":
    main()
