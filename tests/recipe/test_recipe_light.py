"""Recipes of the light pipeline: which options go together, and TOML there and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_files import assert_there_and_back, lists_of_words, words, written
from said import refused

from onnxcalib import Pipeline, Precision, Recipe, RecipeError, read_recipe
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.recipe import BatchNormReference, parse_bits, parse_pair, read_options

MIX = parse_bits("w4a4,w4a8,w8a8")
VALUES = ("w4a8", "w8", "float", "minmax", "w8a8+symmetric", "per-tensor+mse")
OPTIONS: dict[str, tuple[Any, str]] = {
    "compression": (0.2, "--compression"),
    "max_loss": (0.1, "--max-loss"),
    "limits": (("bops=0.05",), "--limit"),
    "costs": (("latency=a.csv",), "--cost"),
    "minimise": ("bops", "--minimise"),
}


def light(**options: Any) -> Recipe:
    return Recipe(Pipeline.LIGHT, **options)


def test_one_precision_needs_no_aim() -> None:
    assert light().bits == (Precision(8, 8),)
    assert light(bits=parse_bits("w3a5"), edge_bits=8, loss=LossKind.MSE).base == Precision(3, 5)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_mixed_precision_are_refused_where_they_have_no_effect(option: str) -> None:
    value, flag = OPTIONS[option]
    with refused(RecipeError, flag, "--bits"):
        light(**{option: value})
    with refused(RecipeError, flag, "plain", "--pipeline light"):
        Recipe(**{option: value})


@pytest.mark.parametrize(
    ("option", "value", "flag"),
    [("loss", LossKind.MSE, "--loss"), ("bn_reference", BatchNormReference.FLOAT, "--bn-reference")],
)
def test_options_of_the_light_pipeline_are_refused_in_the_plain_one(option: str, value: Any, flag: str) -> None:
    with refused(RecipeError, flag, "plain", "--pipeline light"):
        Recipe(**{option: value})
    assert getattr(light(**{option: value}), option) is value


@pytest.mark.parametrize("chosen", ["compression", "max_loss", "limits"])
def test_any_one_aim_will_do(chosen: str) -> None:
    assert getattr(light(bits=MIX, **{chosen: OPTIONS[chosen][0]}), chosen) == OPTIONS[chosen][0]


def test_a_list_of_bits_needs_an_aim() -> None:
    for options in ({}, {"overrides": ("fc=8",)}, {"costs": ("latency=a.csv",)}):
        with refused(RecipeError, "--compression", "--max-loss", "--limit"):
            light(bits=MIX, **options)


def test_minimise_needs_a_loss_budget() -> None:
    with refused(RecipeError, "--minimise", "--max-loss"):
        light(bits=MIX, compression=0.2, minimise="bops")
    assert light(bits=MIX, max_loss=0.2, minimise="bops").minimise == "bops"


@pytest.mark.parametrize("name", ["compression", "max_loss"])
@pytest.mark.parametrize("value", [0.0, -0.1, math.inf, math.nan])
def test_an_aim_is_a_positive_number(name: str, value: float) -> None:
    with refused(RecipeError, f"--{name.replace('_', '-')} {value}"):
        light(bits=MIX, **{name: value})


def test_the_base_is_the_highest_in_both() -> None:
    assert light(bits=parse_bits("w4a6,w2a2,w6a6"), compression=0.2).base == Precision(6, 6)
    with refused(RecipeError, "--bits", "w8a8"):
        light(bits=parse_bits("w4a8,w8a4"), compression=0.2)


def test_edge_bits_are_in_range() -> None:
    with refused(RecipeError, 9, "2 to 8"):
        light(bits=MIX, compression=0.2, edge_bits=9)


@pytest.mark.parametrize(
    ("text", "pair"),
    [("bops=0.05", ("bops", "0.05")), ("a=b=w4a8", ("a=b", "w4a8")), ("*fc*=8", ("*fc*", "8"))],
)
def test_pairs_are_read(text: str, pair: tuple[str, str]) -> None:
    assert parse_pair("overrides", text) == pair


@pytest.mark.parametrize("text", ["", "=", "a", "a=", "=b"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with refused(RecipeError, f"--override '{text}'", "NAME=VALUE"):
        parse_pair("overrides", text)


positive = st.floats(0, exclude_min=True, allow_infinity=False)
shared = {
    "bits": st.permutations(MIX).map(tuple),
    "edge_bits": st.none() | st.integers(2, 8),
    "limits": lists_of_words,
    "costs": lists_of_words,
    "overrides": st.lists(st.builds("{}={}".format, words.filter(bool), st.sampled_from(VALUES)), max_size=3).map(
        tuple
    ),
    "loss": st.none() | st.sampled_from(LossKind),
    "bn_reference": st.none() | st.sampled_from(BatchNormReference),
}
recipes = st.builds(light, compression=positive, max_loss=st.none() | positive, **shared) | st.builds(
    light, max_loss=positive, minimise=st.none() | words, **shared
)


@settings(max_examples=120)
@given(recipes)
def test_toml_there_and_back(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    assert_there_and_back(tmp_path_factory.getbasetemp(), recipe)


def test_a_recipe_by_hand(tmp_path: Path) -> None:
    text = """
    pipeline = "light"
    bits = "w4a4,w8a8"
    compression = 1
    limits = ["bops=0.05"]
    pins = ["*fc*=w8a8"]
    loss = "cross-entropy"
    bn_reference = "batchnorm"
    """
    assert read_recipe(written(tmp_path, text)) == light(
        bits=parse_bits("w4a4,w8a8"), compression=1.0, limits=("bops=0.05",), overrides=("*fc*=w8a8",),
        loss=LossKind.CROSS_ENTROPY, bn_reference=BatchNormReference.BATCHNORM,
    )  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        'compression = "0.2"', "compression = true", "compression = [0.2]", "max_loss = false", 'limits = "bops=1"',
        "limits = [0.05]", 'costs = "latency=a.csv"', "overrides = 8", 'overrides = ["a=8", 8]',
        "overrides = { a = 8 }", "minimise = 1", "loss = 3", "bn_reference = true",
    ],
)  # fmt: skip
def test_wrong_types_are_refused(line: str, tmp_path: Path) -> None:
    path = written(tmp_path, line)
    with refused(RecipeError, path, f"'{line.split(maxsplit=1)[0]}'"):
        read_options(path)


@pytest.mark.parametrize(("key", "choice"), [("loss", "cross-entropy"), ("bn_reference", "batchnorm")])
def test_an_unknown_choice_lists_the_known_ones(key: str, choice: str, tmp_path: Path) -> None:
    with refused(RecipeError, "'xyz'", f"--{key.replace('_', '-')}", choice):
        read_options(written(tmp_path, f'{key} = "xyz"'))


@pytest.mark.parametrize(
    ("key", "near"), [("override", "overrides"), ("max-loss", "max_loss"), ("minimize", "minimise")]
)
def test_an_unknown_key_lists_near_names(key: str, near: str, tmp_path: Path) -> None:
    with refused(RecipeError, f"'{key}'", near):
        read_options(written(tmp_path, f"{key} = 1"))
