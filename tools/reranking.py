#!/usr/bin/env python3
"""Whether measuring assignments around the integer program's optimum finds a better one, judged on unseen samples.

    python tools/reranking.py MODEL.onnx DATA.npz --calibrate 512 --bits w4a4,w8a8 --compression 0.18 --seeds 3

The first samples of DATA calibrate, all others judge: the divergence from the float model, and the agreement with it.
Beside the optimum stand both greedy assignments, and what is taken of these, the optimum and a dozen around it by the
loss of the assembled models: on calibration samples, or on such samples mixed in pairs, which resemble unseen ones.
Every row gets a quick batch-norm tuning. Differences from the optimum have their standard error over samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxcalib import Pipeline, Recipe
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import Dataset, Feed, first
from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.allocate import minimise_loss
from onnxcalib.mixed_precision.assignment import METHODS, solve
from onnxcalib.mixed_precision.request import Request
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.pipeline import stages
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.pipelines import with_equal_channels
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import Candidates, QuantPlan
from onnxcalib.recipe import Precision, parse_bits
from onnxcalib.runtime.session import Session

Array = np.ndarray[Any, Any]
Choices = Mapping[str, Precision]
Score = Callable[[Choices, int], float]  # on the first so many sets of samples
BATCH = 8
SAMPLES, PLACES, SHARE = 128, (1, 3, 5), 0.6  # of pairs: how far apart the two stand, and the part of the first
ROUNDS, ROUND, FINALISTS = 2, 6, 3  # the second round looks around the best other assignment of the first


@dataclass(frozen=True, eq=False)
class Pairs:
    """The samples of a dataset, each mixed with one that stands some places before it."""

    plain: Dataset
    places: int
    labels = None

    @property
    def source(self) -> str:
        """Where the samples came from."""
        return self.plain.source

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.plain)

    def batches(self, size: int) -> Iterator[Feed]:
        """The feeds, mixed."""
        for feed in self.plain.batches(size):
            yield {
                name: (SHARE * array + (1 - SHARE) * np.roll(array, self.places, 0)).astype(array.dtype)
                for name, array in feed.items()
            }


def measure(model: Path, data: Mapping[str, Array], calibrate: int, recipe: Recipe) -> None:
    """Prints a row for every method, and for what re-ranking takes."""
    known = {name: array[:calibrate] for name, array in data.items()}
    job = with_equal_channels(start(model, known, recipe).jobs[0])
    candidates = candidates_of(job)
    table = stages.sensitivities(job, candidates).table
    request, few = Request.of(table, recipe), first(job.data, SAMPLES)
    found = {method: solve(table, request, method).choices for method in METHODS}
    for label, sets in {"samples": [few], "pairs": [Pairs(few, places) for places in PLACES]}.items():
        score = scores(job, candidates, sets)
        found[f"re-ranked on {label}"] = reranked(table, request, list(found.values())[:3], score, len(sets))
    judge = Judge(job, {name: array[calibrate:] for name, array in data.items()})
    judged: dict[str, tuple[Array, Array]] = {}
    for method, choices in found.items():
        same = next((other for other in judged if found[other] == choices), None)
        plan = candidates.stitch(choices)
        judged[method] = judged[same] if same else judge.of(stages.quick_tuning(job, plan).plan)
        (loss, agrees), optimum = judged[method], judged[METHODS[0]][0]
        more, share = loss - optimum, 100 / optimum.mean()
        print(
            f"{model.stem} {','.join(map(str, recipe.bits))} {recipe.mixed_precision.compression} seed {recipe.seed} "
            f"n {len(loss)} {method:20} loss {loss.mean():.5f} ({share * more.mean():+6.1f} % "
            f"+- {share * more.std() / len(more) ** 0.5:4.1f}) agrees {100 * agrees.mean():5.2f}"
            + (f" = {same}" if same else ""),
            flush=True,
        )


def scores(job: Job, candidates: Candidates, sets: Sequence[Dataset]) -> Score:
    """What measures assembled models, each once."""
    teachers, known = [Teacher(job.model, data) for data in sets], dict[Any, float]()

    def score(choices: Choices, count: int) -> float:
        for part in range(count):
            if (part, tuple(choices.items())) not in known:
                found = teachers[part].loss_of(job.simulate(candidates.stitch(choices)))
                known[part, tuple(choices.items())] = found
        return sum(known[part, tuple(choices.items())] for part in range(count)) / count

    return score


def reranked(table: SensitivityTable, request: Request, given: Sequence[Choices], score: Score, sets: int) -> Choices:
    """The least score of the optimum, the greedy assignments, and the best of those around the optimum."""
    others: list[tuple[Choices, SensitivityTable]] = []
    centre = given[0], table
    for _ in range(ROUNDS):
        asked = [*given, *(choices for choices, _ in others)]
        others += islice(around(*centre, request, asked), ROUND)
        centre = min(others, key=lambda each: score(each[0], 1), default=centre)
    best = sorted((choices for choices, _ in others), key=lambda each: score(each, 1))[:FINALISTS]
    return min([*given, *best], key=lambda each: score(each, sets))


def around(
    choices: Choices, table: SensitivityTable, request: Request, asked: Sequence[Choices]
) -> Iterator[tuple[Choices, SensitivityTable]]:
    """The program without one of the choices, those that are to lose most first; with the table that it was left."""
    lowered = [row for row in table.layers if choices[row.layer] not in (table.base, request.overrides.get(row.layer))]
    for row in sorted(lowered, key=lambda row: -row.losses[choices[row.layer]]):
        fewer = without(table, row.layer, choices[row.layer])
        try:
            found = minimise_loss(fewer, request.limits, request.overrides).choices
        except RecipeError:
            continue  # no assignment reaches the limits without that choice
        if all(found != other for other in asked):
            asked = [*asked, found]
            yield found, fewer


def without(table: SensitivityTable, layer: str, choice: Precision) -> SensitivityTable:
    """The table with one choice fewer."""

    def less(values: Mapping[Precision, float]) -> dict[Precision, float]:
        return {each: value for each, value in values.items() if each != choice}

    rows = (
        replace(row, losses=less(row.losses), costs={name: less(cost) for name, cost in row.costs.items()})
        if row.layer == layer
        else row
        for row in table.layers
    )
    return replace(table, layers=tuple(rows))


class Judge:
    """The float model's logits on unseen samples."""

    def __init__(self, job: Job, unseen: Mapping[str, Array]) -> None:
        self._job, self._unseen = job, unseen
        self._float = self._logits(job.model.proto)

    def of(self, plan: QuantPlan) -> tuple[Array, Array]:
        """By sample: the divergence from the float model, and whether the class is the same."""
        given = self._logits(self._job.simulate(stages.final_scales(self._job, plan)))
        exact, found = _log_softmax(self._float), _log_softmax(given)
        return (np.exp(exact) * (exact - found)).sum(1), exact.argmax(1) == found.argmax(1)

    def _logits(self, model: Any) -> Array:
        session, samples = Session(model), len(next(iter(self._unseen.values())))
        feeds = (
            {name: array[at : at + BATCH] for name, array in self._unseen.items()} for at in range(0, samples, BATCH)
        )
        return np.concatenate([next(iter(session.run(feed).values())) for feed in feeds]).astype(np.float64)


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def main() -> None:
    """One model, one mix of bits, one size, some seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--calibrate", type=int, default=512)
    parser.add_argument("--bits", default="w4a4,w8a8")
    parser.add_argument("--compression", type=float, default=0.18)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    with np.load(given.data) as held:
        data = {name: held[name] for name in held.files if name != "labels"}
    for seed in range(given.seeds):
        recipe = Recipe(Pipeline.LIGHT, parse_bits(given.bits), compression=given.compression, seed=seed)
        measure(given.model, data, given.calibrate, recipe)


if __name__ == "__main__":
    main()
