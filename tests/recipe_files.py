"""Recipes as files, and the words in them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from onnxcalib import Recipe, read_recipe, write_recipe

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
lists_of_words = st.lists(words, max_size=3).map(tuple)


def written(folder: Path, text: str) -> Path:
    """The text as a recipe file."""
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def assert_there_and_back(folder: Path, recipe: Recipe) -> None:
    """A recipe reads what it writes."""
    path = folder / "recipe.toml"
    path.write_text(write_recipe(recipe), encoding="utf-8", newline="")
    assert read_recipe(path) == recipe
