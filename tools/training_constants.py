#!/usr/bin/env python3
"""Whether constants of end-to-end training hold for a network: each is changed alone, and judged on unseen samples.

    python tools/training_constants.py MODEL.onnx DATA.npz --out docs/training_constants.csv
    python tools/training_constants.py MODEL.onnx DATA.npz --out FILE.csv --bits w4a8 --steps 25 --change 'hints none'

The first samples of DATA calibrate, all others judge: the softened loss, and the share of predictions that are those of
the float model. What training makes is judged as it is, whether `advanced` would keep it or not. Rows that lie in the
CSV file are not measured again, so that the command can be stopped, and several networks share a file; all of them are
printed as a table.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import trained_start
from trained_start import Begun, Judge

from onnxcalib.algorithms.reconstruction import end_to_end
from onnxcalib.model import model_loss
from onnxcalib.pipeline import stages
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import DEFAULTS

START, AS_IT_IS = "start", "as it is"
SCHEDULES = ("END_TO_END", "FINAL_SCALES")


@dataclass(frozen=True)
class Change:
    """One constant with another value."""

    factors: tuple[tuple[str, float], ...] = ()  # of the schedules' fields
    constant: tuple[Any, str, float] | None = None  # of a module
    steps: float = 1.0  # times as many


CHANGES = {
    AS_IT_IS: Change(),
    **{f"temperature {it}": Change(constant=(model_loss, "TEMPERATURE", float(it))) for it in (1, 2, 8)},
    **{f"hints x {it:g}": Change(constant=(end_to_end, "HINT_SHARE", 3.0 * it)) for it in (1 / 3, 3)},
    "hints none": Change(factors=(("hints", 0),)),
    "not shrunk": Change(constant=(end_to_end, "SHRINK", 1.0)),
    **{
        f"{name}s x {factor:.2g}": Change(factors=((name, factor),))
        for name in ("weight", "scale", "bias")
        for factor in (1 / 3, 3)
    },
    **{f"steps x {factor:.2g}": Change(steps=factor) for factor in (0.5, 2)},
}


@dataclass(frozen=True)
class Row:
    """What came of one change."""

    network: str
    bits: str
    change: str
    steps: int  # a layer
    unseen: int
    loss: float
    agreement: float

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What it is known by."""
        return self.network, self.bits, self.change, self.steps


@contextlib.contextmanager
def changed(change: Change) -> Iterator[None]:
    """Training in the block has it."""
    patches = [(end_to_end, name, _scaled(getattr(end_to_end, name), change)) for name in SCHEDULES]
    patches += [change.constant] if change.constant else []
    before = [(module, name, getattr(module, name)) for module, name, _ in patches]
    try:
        for module, name, value in patches:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _scaled(schedule: end_to_end.Schedule, change: Change) -> end_to_end.Schedule:
    """What does not train there stays so."""
    own = {name: getattr(schedule, name) for name, _ in change.factors}
    return replace(schedule, **{name: own[name] and own[name] * factor for name, factor in change.factors})


def measured(begun: Begun, change: Change, steps: int) -> QuantPlan:
    """What training makes of the start with one constant changed."""
    recipe = replace(begun.job.recipe, steps=max(round(steps * change.steps), 1))
    with changed(change):
        return stages.end_to_end_training(replace(begun.job, recipe=recipe), begun.trained).plan


def read(path: Path) -> list[Row]:
    """The rows of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    kinds = {"steps": int, "unseen": int, "loss": float, "agreement": float}
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**{name: kinds.get(name, str)(text) for name, text in row.items()}) for row in csv.DictReader(file)]


def write(rows: Sequence[Row], path: Path) -> None:
    """All rows as a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def table(rows: Sequence[Row]) -> str:
    """In Markdown, a column a network: the loss relative to that of the constants as they are, and the agreement."""
    columns = list(dict.fromkeys((row.network, row.bits, row.steps, row.unseen) for row in rows))
    heads = [f"{network}, {bits}, {steps} steps, n = {unseen:,}" for network, bits, steps, unseen in columns]
    lines = [["loss, agreement", *heads], ["---"] * (len(heads) + 1)]
    found = {row.key: row for row in rows}
    for change in dict.fromkeys((START, *CHANGES)):
        own = [found.get((network, bits, change, steps)) for network, bits, steps, _ in columns]
        usual = [found.get((network, bits, AS_IT_IS, steps)) for network, bits, steps, _ in columns]
        lines.append([change, *(_cell(row, than) for row, than in zip(own, usual, strict=True))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: Row | None, usual: Row | None) -> str:
    if row is None:
        return ""
    ratio = f" ({100 * (row.loss / usual.loss - 1):+.0f} %)" if usual is not None and usual is not row else ""
    return f"{row.loss:.5f}{ratio}, {row.agreement:.2f}"


def main() -> None:
    """Measures what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="The CSV file.")
    parser.add_argument("--calibrate", type=int, default=512)
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--steps", type=int, default=DEFAULTS["steps"], help="Steps a layer.")
    parser.add_argument("--change", action="append", choices=CHANGES, help="Only these.")
    given = parser.parse_args()
    samples, rows = trained_start.read(given.data, given.calibrate), read(given.out)
    changes = (START, *(given.change or CHANGES))
    keys = {change: (given.model.stem, given.bits, change, given.steps) for change in changes}
    missing = [change for change in changes if all(row.key != keys[change] for row in rows)]
    if missing:
        begun = trained_start.begin(given.model, samples, given.calibrate, given.bits)
        judge = Judge(begun.job, begun.unseen)
        for change in missing:
            started = stages.final_scales(begun.job, begun.trained.plan)
            plan = started if change == START else measured(begun, CHANGES[change], given.steps)
            scored, loss = judge(plan)
            agreement = float("nan") if scored.agreement is None else scored.agreement
            rows.append(Row(*keys[change], scored.samples, loss, agreement))
            write(rows, given.out)
            print(f"{given.model.stem} {change}: loss {rows[-1].loss:.5f}, {rows[-1].agreement:.2f} agree", flush=True)
    print(table(rows), end="")


if __name__ == "__main__":
    main()
