"""Groups of a recipe's fields: given whole, as a word, or field by field; in files as tables or as single keys."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from recipe_files import assert_there_and_back, written
from said import refused

from onnxcalib import (
    ActivationOptions,
    MixedPrecisionOptions,
    Pipeline,
    Recipe,
    RecipeError,
    TrainingOptions,
    WeightOptions,
    read_recipe,
    read_settings,
    write_recipe,
    write_settings,
)
from onnxcalib.pipeline.stage import only
from onnxcalib.recipe import GROUPS, RECIPE_FIELDS, RECIPE_KEYS, Engine, Rounding, Training

FLAT: dict[str, Any] = {
    "pipeline": "advanced", "bits": "w4a8,w8a8", "rounding": "nearest", "compression": 0.3, "limits": {"bops": 0.5},
    "training": "paper", "steps": 40, "engine": "standard", "strict": True, "activations": "auto",
}  # fmt: skip
GROUPED = Recipe(
    "advanced",
    "w4a8,w8a8",
    activations=ActivationOptions("auto"),  # type: ignore[arg-type]
    weights=WeightOptions(Rounding.NEAREST),
    mixed_precision=MixedPrecisionOptions(compression=0.3, limits=("bops=0.5",)),
    training=TrainingOptions(Training.PAPER, Engine.STANDARD, steps=40, strict=True),
)
TABLES = """
pipeline = "advanced"
bits = "w4a8,w8a8"
[weights]
rounding = "nearest"
[activations]
mode = "auto"
[mixed_precision]
compression = 0.3
limits = ["bops=0.5"]
[training]
schedule = "paper"
engine = "standard"
steps = 40
strict = true
"""


def test_single_fields_and_groups_are_the_same_recipe() -> None:
    assert Recipe(**FLAT) == GROUPED
    assert hash(Recipe(**FLAT)) == hash(GROUPED)
    assert (GROUPED.steps, GROUPED.limits, GROUPED.schedule) == (40, ("bops=0.5",), Training.PAPER)
    assert pickle.loads(pickle.dumps(GROUPED)) == copy.deepcopy(GROUPED) == GROUPED
    with pytest.raises(AttributeError, match="stepz"):
        _ = GROUPED.stepz  # type: ignore[attr-defined]


def test_single_fields_go_on_top_and_leave_the_rest_of_the_group() -> None:
    changed = replace(GROUPED, steps=7, compression=None)
    assert changed.training == TrainingOptions(Training.PAPER, Engine.STANDARD, steps=7, strict=True)
    assert changed.mixed_precision == MixedPrecisionOptions(limits=("bops=0.5",))
    assert replace(GROUPED, training=TrainingOptions(steps=3)).training == TrainingOptions(steps=3)


def test_no_two_fields_have_one_name() -> None:
    names = [field.name for kind in (Recipe, *GROUPS.values()) for field in fields(kind)]
    assert len(set(names)) == len(names) == len(RECIPE_FIELDS) + len(GROUPS)
    assert len(RECIPE_KEYS) == len(RECIPE_FIELDS)


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"training": "papr"}, ("'papr'", "--training", "paper")),
        ({"training": TrainingOptions(steps=0)}, ("--steps 0",)),
        ({"training": 3}, ("--training 3", "TrainingOptions")),
        ({"weights": "nearest"}, ("weights", "WeightOptions")),
        ({"mixed_precision": MixedPrecisionOptions(0.5)}, ("--compression", "--bits")),
    ],
)
def test_what_is_wrong_is_named_as_it_was_given(given: dict[str, Any], facts: tuple[str, ...]) -> None:
    with refused(RecipeError, *facts):
        Recipe(Pipeline.ADVANCED, **given)
    with refused(RecipeError, "--training", "--pipeline advanced"):
        Recipe(training=TrainingOptions("paper"))  # type: ignore[arg-type]


def test_an_unknown_field_is_what_it_is_in_python() -> None:
    with pytest.raises(TypeError, match=r"'stepz'.*steps"):
        Recipe("advanced", stepz=3)


def test_tables_and_single_keys_are_the_same_recipe(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, TABLES)) == GROUPED
    flat = "pipeline = 'advanced'\nbits = 'w4a8,w8a8'\nrounding = 'nearest'\ncompression = 0.3\nlimits = ['bops=0.5']"
    more = "activations = 'auto'\ntraining = 'paper'\nengine = 'standard'\nsteps = 40\nstrict = true"
    assert read_recipe(written(tmp_path, f"{flat}\n{more}")) == GROUPED
    assert read_recipe(written(tmp_path, f"{more}\n{flat.replace('rounding', 'weights.rounding')}")) == GROUPED


def test_what_is_written_has_tables(tmp_path: Path) -> None:
    assert_there_and_back(tmp_path, GROUPED)
    text = write_recipe(GROUPED)
    assert text.index("[weights]") < text.index("rounding") < text.index("[mixed_precision]") < text.index("[training]")
    assert "schedule" in text
    path = written(tmp_path, f"{TABLES}\nworkers = 2")
    settings = read_settings(path)
    assert settings.workers == 2
    path.write_text(write_settings(settings))
    assert read_settings(path) == settings


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("steps = 3\n[training]\nsteps = 3", ("'steps'", "[training]")),
        ("[weights]\nsteps = 3", ("'steps'", "[training]")),
        ("[training]\nseed = 3", ("'seed'", "above")),
        ("[training]\nstepz = 3", ("'stepz'", "steps")),
        ("[training]\ntraining = 'paper'", ("'training'", "schedule")),
        ("schedule = 'paper'", ("'schedule'", "[training]")),
        ("[training]\nschedule = 'papr'", ("'papr'", "schedule", "paper")),
        ("[training]\nsteps = 'many'", ("'steps'", "integer")),
        ("training = 3", ("'training'", "string")),
        ("weights = 'nearest'", ("'weights'", "[weights]")),
    ],
)
def test_what_a_file_has_wrong_is_named_with_its_place(text: str, facts: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with refused(RecipeError, path, *facts):
        read_recipe(path)


def test_a_stage_reads_no_more_of_a_group_than_it_declares() -> None:
    view = only(GROUPED, frozenset({"steps"}))
    assert view.training.steps == view.steps == view.get("steps") == 40
    for read in (lambda: view.training.engine, lambda: view.engine, lambda: view.mixed_precision.compression):
        with pytest.raises(AssertionError, match="without declaring it"):
            read()
