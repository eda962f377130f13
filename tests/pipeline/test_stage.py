"""Stages: what they declare is all that they can read, and all that their keys are made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from models import conv_net, feed_for
from onnxcalib import Pipeline, Recipe
from onnxcalib.mixed_precision.assignment import Assigned
from onnxcalib.pipeline.begin import running
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.stage import Stage, only, stage, value_classes
from onnxcalib.pipeline.stages import STAGES
from onnxcalib.progress import Event
from onnxcalib.recipe import Precision, parse_bits

RECIPE = Recipe(Pipeline.ADVANCED, parse_bits("w4a4,w8a8"), compression=0.5, steps=3)


def test_only_declared_fields_can_be_read() -> None:
    view = only(RECIPE, frozenset({"bits", "loss"}))
    assert view.bits == RECIPE.bits
    assert view.base == RECIPE.base  # made of the bits
    assert view.get("loss") == RECIPE.get("loss")
    for read in (lambda: view.seed, lambda: view.get("steps"), lambda: dataclasses.replace(view, bits=RECIPE.bits)):
        with pytest.raises(AssertionError, match="without declaring it"):
            read()


def test_a_stage_cannot_reach_what_it_does_not_declare() -> None:
    @stage("careless", ("bits",))
    def careless(job: Job) -> int:
        return job.recipe.seed

    model = conv_net()
    with pytest.raises(AssertionError, match="'seed'"):
        careless(start(model, feed_for(model, 2), RECIPE).jobs[0])


def computed(recipe: Recipe, number: int, tried: Stage[Any, Any], folder: Path) -> bool:
    """Whether the stage was computed, not taken from the run directory."""
    events: list[Event] = []
    model = conv_net()
    with running(start(model, feed_for(model, 8), recipe), folder, events.append) as begun:
        tried(begun.jobs[0], number)
    (end,) = [event for event in events if event.name == "stage_end"]
    return not end.values["reused"]


def test_a_value_is_used_again_until_an_input_or_a_declared_field_changes(tmp_path: Path) -> None:
    @stage("odd", ("steps",))
    def odd(job: Job, number: int) -> Precision:
        return Precision(number, job.recipe.get("steps"))

    assert computed(RECIPE, 4, odd, tmp_path)
    assert not computed(RECIPE, 4, odd, tmp_path)
    assert computed(RECIPE, 5, odd, tmp_path)
    assert not computed(dataclasses.replace(RECIPE, compression=0.6), 4, odd, tmp_path)
    assert computed(dataclasses.replace(RECIPE, steps=4), 4, odd, tmp_path)


def test_training_depends_on_the_seed() -> None:
    for each in STAGES:
        assert ("engine" in each.reads) == ("seed" in each.reads), each.name


def test_the_classes_of_values_are_found_from_what_stages_return() -> None:
    found = value_classes(STAGES)
    assert found["Assigned"] is Assigned
    assert {"LayerParams", "Optimised", "Precision", "QuantPlan", "Statistics", "TensorStatistics"} <= found.keys()
