"""The files that a run reads: no output may take the place of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from onnxcalib.data import data_files
from onnxcalib.files import Inputs
from onnxcalib.model.files import model_files
from onnxcalib.recipe import Recipe, parse_pair


def models_read(*models: Any) -> Inputs:
    """The files of models that are given as paths."""
    return _named("the model, or its weights", model_files, models)


def data_read(*sources: Any) -> Inputs:
    """The files of data that is given as paths."""
    return _named("data", data_files, sources)


def files_read(*files: Any) -> Inputs:
    """Files that are read as they are, such as tables."""
    return _named("read here", lambda path: (path,), files)


def recipe_read(recipe: Recipe, file: str | Path | None = None) -> Inputs:
    """The file of a recipe, and those that it names: its target and its cost tables."""
    costs = [parse_pair("cost", text)[1] for text in recipe.mixed_precision.costs]
    return files_read(file, *costs, *([recipe.target] if recipe.target.endswith(".toml") else []))


def _named(what: str, files: Callable[[Path], Iterable[Path]], sources: Iterable[Any]) -> Inputs:
    paths = [Path(source) for source in sources if isinstance(source, str | os.PathLike)]
    return tuple((what, partial(files, path)) for path in paths)
