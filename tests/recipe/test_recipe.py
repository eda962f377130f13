"""Recipes: what is accepted, what is refused in words, and TOML there and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_files import assert_there_and_back, lists_of_words, words, written
from said import refused

from onnxcalib import Pipeline, Precision, RangeMethod, Recipe, RecipeError, read_recipe, write_recipe
from onnxcalib.recipe import parse_bits, read_options

BITS = st.integers(2, 8)
precisions = st.builds(Precision, BITS, BITS)

shared = {
    "edge_bits": st.none() | BITS,
    "target": words,
    "ranges": st.sampled_from(RangeMethod),
    "include": lists_of_words,
    "exclude": lists_of_words,
    "seed": st.integers(0, 2**31),
}
recipes = st.builds(Recipe, bits=precisions.map(lambda one: (one,)), **shared) | st.builds(
    Recipe,
    pipeline=st.just(Pipeline.LIGHT),
    bits=st.permutations([Precision(8, 8), Precision(4, 8), Precision(4, 4)]).map(tuple),
    compression=st.floats(0.01, 1.0),
    **shared,
)


@pytest.mark.parametrize(
    ("text", "weight", "activation"),
    [("8", 8, 8), ("w4a8", 4, 8), ("W2A3", 2, 3), (" w8a2 ", 8, 2), ("5", 5, 5)],
)
def test_precisions_are_read(text: str, weight: int, activation: int) -> None:
    assert Precision.parse(text) == Precision(weight, activation)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(RecipeError, match="`seed=-1`"):
        Recipe(seed=-1)


@given(precisions)
def test_a_precision_reads_what_it_prints(precision: Precision) -> None:
    assert Precision.parse(str(precision)) == precision


@pytest.mark.parametrize("text", ["w4x", "", "a8w4", "w4a", "4.5", "-8", "w4a8b2", "eight", "w4 a8", "w4a8,"])
def test_what_is_no_precision_is_refused(text: str) -> None:
    with refused(RecipeError, "precision", "w4a8"):
        parse_bits(text)


@pytest.mark.parametrize("text", ["1", "9", "w1a8", "w8a9", "0", "w16a16", "w8a0"])
def test_bits_out_of_range_are_refused(text: str) -> None:
    with refused(RecipeError, "bits", "2 to 8"):
        Precision.parse(text)


def test_lists_of_precisions() -> None:
    assert parse_bits("w4a4, 8,w4a8") == (Precision(4, 4), Precision(8, 8), Precision(4, 8))
    with refused(RecipeError, "w8a8"):
        parse_bits("8,w8a8")


def test_contradictions_are_refused() -> None:
    with refused(RecipeError, "plain", "--pipeline light"):
        Recipe(bits=(Precision(4, 4), Precision(8, 8)))
    with refused(RecipeError, "bits"):
        Recipe(bits=())
    for bits in (1, 9):
        with refused(RecipeError, bits, "2 to 8"):
            Recipe(edge_bits=bits)


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().seed = 1  # type: ignore[misc]


@settings(max_examples=150)
@given(recipes)
def test_toml_there_and_back(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    assert_there_and_back(tmp_path_factory.getbasetemp(), recipe)


@pytest.mark.parametrize("line", ['bits = "w4a8"', 'bits = ["w4a8"]'])
def test_bits_may_be_a_word_or_a_list(line: str, tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, line)) == Recipe(bits=(Precision(4, 8),))


def test_bits_may_be_a_number(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, "bits = 4")).bits == (Precision(4, 4),)


def test_an_empty_recipe_is_the_default(tmp_path: Path) -> None:
    assert read_recipe(written(tmp_path, "")) == Recipe()


def test_options_hold_only_what_the_file_sets(tmp_path: Path) -> None:
    assert read_options(written(tmp_path, 'seed = 3\nranges = "mse"')) == {"seed": 3, "ranges": RangeMethod.MSE}


@pytest.mark.parametrize(
    ("key", "near"), [("bit", "bits"), ("excludes", "exclude"), ("Seed", "seed"), ("edgebits", "edge_bits")]
)
def test_an_unknown_key_lists_near_names(key: str, near: str, tmp_path: Path) -> None:
    path = written(tmp_path, f"{key} = 1")
    with refused(RecipeError, path, f"'{key}'", near):
        read_recipe(path)


@pytest.mark.parametrize(
    "line",
    [
        'edge_bits = "8"', "edge_bits = 8.0", "edge_bits = true", "seed = false", 'seed = "0"', "seed = [1]",
        "target = 3", 'include = "stem"', "exclude = [1]", 'exclude = ["stem", 2]', "pipeline = 1",
        'pipeline = ["plain"]', "ranges = 4", "bits = true", "bits = 4.5", "bits = [4]", "bits = []",
        "[bits]\nweight = 4",
    ],
)  # fmt: skip
def test_wrong_types_are_refused(line: str, tmp_path: Path) -> None:
    path = written(tmp_path, line)
    with refused(RecipeError, path, line.split(maxsplit=1)[0].strip("[]")):
        read_recipe(path)


@pytest.mark.parametrize(("key", "choice"), [("pipeline", "light"), ("ranges", "entropy")])
def test_an_unknown_choice_lists_the_known_ones(key: str, choice: str, tmp_path: Path) -> None:
    with refused(RecipeError, "'xyz'", choice):
        read_recipe(written(tmp_path, f'{key} = "xyz"'))


@pytest.mark.parametrize("content", [b"bits = [", b"= 3", b"bits 4", b"\xff\xfe\x00"])
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with refused(RecipeError, path, "TOML"):
        read_recipe(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with refused(RecipeError, path):
            read_recipe(path)


WORDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pipeline": "light"}, {"pipeline": Pipeline.LIGHT}),
    ({"ranges": "mse"}, {"ranges": RangeMethod.MSE}),
    ({"bits": "w4a8"}, {"bits": (Precision(4, 8),)}),
    ({"bits": Precision(4, 8)}, {"bits": (Precision(4, 8),)}),
    ({"exclude": "*fc*"}, {"exclude": ("*fc*",)}),
    ({"include": ["a", "b"]}, {"include": ("a", "b")}),
    (
        {"pipeline": "light", "bits": ["w4a4", "w8a8"], "limits": {"bops": 0.5}, "overrides": {"fc": "w8a8"}},
        {"pipeline": Pipeline.LIGHT, "bits": (Precision(4, 4), Precision(8, 8)), "limits": ("bops=0.5",),
         "overrides": ("fc=w8a8",)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "values"), WORDS)
def test_words_stand_for_what_they_name(words: dict[str, Any], values: dict[str, Any]) -> None:
    assert Recipe(**words) == Recipe(**values)
    assert write_recipe(Recipe(**words)) == write_recipe(Recipe(**values))


@pytest.mark.parametrize("words", [{"pipeline": "ligth"}, {"bits": "w9"}, {"bits": ()}, {"loss": "nice"}])
def test_words_that_name_nothing_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        Recipe(**words)
