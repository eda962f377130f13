"""Recipe files as a whole: data and images in them, presets, and the file to start from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_files import words, written
from said import refused

from onnxcalib import (
    DataError,
    Pipeline,
    Precision,
    Preprocess,
    Recipe,
    RecipeError,
    Settings,
    read_recipe,
    read_settings,
    write_settings,
)
from onnxcalib.algorithms.reconstruction.adaquant import SCHEDULES
from onnxcalib.recipe import IMAGE_KEYS, KEYS, PRESETS, RECIPE_KEYS, read_options, template
from onnxcalib.recipe.keys import SECTIONS
from onnxcalib.recipe.toml import to_toml

NAMES = [name for section in SECTIONS for name in section.by_name]  # as they are called in a file
positive = st.floats(0.01, 1000)
preprocesses = st.builds(
    Preprocess,
    resize=st.none() | st.integers(300, 400),
    crop=st.none() | st.integers(1, 300) | st.tuples(st.integers(1, 300), st.integers(1, 300)),
    mean=st.tuples(st.floats(-9, 9)) | st.tuples(*[st.floats(-9, 9)] * 3),
    std=st.tuples(positive) | st.tuples(positive, positive, positive),
    scale=positive,
    layout=st.sampled_from([None, "nchw", "nhwc"]),
)
settings = st.builds(
    Settings,
    recipe=st.sampled_from([PRESETS["best"], PRESETS["paper"]]),
    calibration=st.none() | words.map(Path),
    output=st.none() | words.map(Path),
    run_dir=st.none() | words.map(Path),
    report=st.none() | words.map(Path),
    workers=st.none() | st.integers(1, 64),
    preprocess=st.none() | preprocesses,
)


def uncommented(text: str) -> str:
    """The text with every key switched on."""
    return re.sub(rf"^# (?=(?:{'|'.join(NAMES)}) = )", "", text, flags=re.MULTILINE)


@given(settings)
def test_settings_there_and_back(tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> None:
    path = tmp_path_factory.getbasetemp() / "settings.toml"
    path.write_text(write_settings(settings), encoding="utf-8", newline="")
    assert read_settings(path) == settings


def test_the_file_to_start_from_changes_nothing(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, template())) == Settings(Recipe())
    assert read_options(written(tmp_path, template())) == {}


@pytest.mark.parametrize("name", PRESETS)
def test_the_file_to_start_from_holds_the_preset(name: str, tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, template(name))) == PRESETS[name] == read_recipe(name)


def test_the_file_to_start_from_explains_every_key() -> None:
    lines = template().splitlines()
    for name in NAMES:
        place = next(place for place, line in enumerate(lines) if line.startswith(f"# {name} = "))
        assert re.match(r"# \S.{8,}[.:]$", lines[place - 1]), name
    assert set(KEYS) >= RECIPE_KEYS


def test_what_the_file_to_start_from_shows_is_what_happens(tmp_path: Path) -> None:
    shown = read_options(written(tmp_path, uncommented(template())))
    assert set(shown) == {*KEYS, "images"}
    assert set(shown["images"]) == {key.name for key in IMAGE_KEYS}
    plain = Recipe().options()
    for key in KEYS.values():
        default = plain.get(key.name)
        if key.has_default and default is not None:
            assert shown[key.name] == default, key.name
    images, untouched = shown["images"], Preprocess()
    assert (images["mean"], images["std"], images["pixel_scale"]) == (untouched.mean, untouched.std, untouched.scale)
    assert {schedule.steps for schedule in SCHEDULES.values()} == {shown["steps"]}


def test_the_paper_is_as_published() -> None:
    paper = PRESETS["paper"]
    assert (paper.target, paper.training.schedule, paper.bn_reference, paper.ranges) == (
        "paper",
        "paper",
        "batchnorm",
        "averaged",
    )
    assert (paper.bits, paper.edge_bits, paper.steps) == ((Precision(4, 4),), 8, 100)


def test_fast_needs_no_gradients_and_best_takes_more_steps() -> None:
    assert PRESETS["fast"].pipeline is Pipeline.LIGHT
    assert PRESETS["best"].pipeline is Pipeline.ADVANCED
    assert (PRESETS["best"].steps or 0) > max(schedule.steps for schedule in SCHEDULES.values())


def test_all_that_quantize_takes(tmp_path: Path) -> None:
    text = """
    pipeline = "advanced"
    workers = 2
    calibration = "images"
    output = "small.onnx"
    run_dir = "run"
    report = "r.html"
    test_data = "t"
    [images]
    resize = 32
    crop = [28, 24]
    mean = 0.5
    std = [0.1, 0.2, 0.3]
    pixel_scale = 1
    layout = "nhwc"
    """
    preprocess = Preprocess(32, (28, 24), (0.5,), (0.1, 0.2, 0.3), 1.0, "nhwc")
    expected = Settings(
        Recipe(Pipeline.ADVANCED),
        Path("images"),
        Path("small.onnx"),
        Path("run"),
        Path("r.html"),
        Path("t"),
        2,
        preprocess,
    )
    assert read_settings(written(tmp_path, text)) == expected


def test_a_recipe_alone_cannot_hold_the_rest(tmp_path: Path) -> None:
    with refused(RecipeError, "'images'", "read_settings"):
        read_recipe(written(tmp_path, "[images]\nresize = 8"))


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("workers = '2'", ("'workers'", "integer", "'2'")),
        ("calibration = 3", ("'calibration'", "path", 3)),
        ("images = 3", ("'images'", "[images]")),
        ("[images]\nresize = 3.5", ("'resize'", "integer", 3.5)),
        ("[images]\ncrop = [1, 2, 3]", ("'crop'", "height", "width", [1, 2, 3])),
        ("[images]\nmean = '0.5'", ("'mean'", "number", "'0.5'")),
        ("[images]\nmean = [true]", ("'mean'", "number", [True])),
        ("[images]\nresise = 3", ("'resise'", "resize")),
        ("[images]\nbits = 4", ("'bits'", "above all tables")),
        ("mean = 0.5", ("'mean'", "below [images]")),
        ("bits = 'w4x'", ("'w4x'", 8, "w4a8")),
        ("engine = 'trainig'", ("'trainig'", "--engine", "auto", "training", "standard")),
    ],
)
def test_what_is_wrong_is_named_with_its_file(text: str, facts: tuple[object, ...], tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with refused(RecipeError, path, *facts):
        read_settings(path)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("workers = 0\npipeline = 'advanced'", ("--workers 0", 1)),
        ("workers = 2", ("--workers", "plain", "--pipeline advanced")),
    ],
)
def test_workers_that_nobody_can_give_are_refused(text: str, facts: tuple[object, ...], tmp_path: Path) -> None:
    with refused(RecipeError, *facts):
        read_settings(written(tmp_path, text))


def test_images_that_no_model_reads_are_refused(tmp_path: Path) -> None:
    with refused(DataError, "layout", "'chwn'"):
        read_settings(written(tmp_path, "[images]\nlayout = 'chwn'"))


def test_a_missing_file_lists_the_presets() -> None:
    with refused(RecipeError, "fsat", *PRESETS):
        read_options("fsat")


@pytest.mark.parametrize("value", [(), "a", 3, 2.5, True, ("x", "y"), Path("a/b"), Precision(4, 8)])
def test_values_are_written_as_toml(value: Any) -> None:
    read = tomllib.loads(f"key = {to_toml(value)}")["key"]
    plain = str(value) if isinstance(value, Path | Precision) else value
    assert read == (list(plain) if isinstance(plain, tuple) else plain)
    assert type(read) in (type(plain), list)
