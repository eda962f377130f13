"""All that a recipe file can hold: the recipe, and where the data is and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxcalib.data.preprocess import Preprocess
from onnxcalib.errors import RecipeError
from onnxcalib.recipe.choices import Pipeline
from onnxcalib.recipe.keys import IMAGES
from onnxcalib.recipe.recipe import RECIPE_KEYS, Recipe


@dataclass(frozen=True)
class Settings:
    """What `quantize` takes beside the model.

    Attributes:
        recipe: What is asked for.
        calibration: Where the calibration data is.
        output: The file to write.
        run_dir: A folder that keeps what is finished.
        report: The report's .html file.
        test_data: What the report measures on.
        workers: Jobs that are done side by side on this machine.
        preprocess: How images become arrays.
        scheduler: The Dask scheduler whose workers do the jobs: its address or its file.
        provider: The execution provider of onnxruntime that runs the model.
        memory: What to keep to as far as possible, such as "2GB".
    """

    recipe: Recipe
    calibration: Path | None = None
    output: Path | None = None
    run_dir: Path | None = None
    report: Path | None = None
    test_data: Path | None = None
    workers: int | None = None
    preprocess: Preprocess | None = None
    scheduler: str | None = None
    provider: str | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        if self.test_data is not None and self.report is None:
            raise RecipeError("`test_data` has no effect without `report`.", "Add `report`, a .html file.")
        check_sent(self.recipe, scheduler=self.scheduler)
        if self.workers is None:
            return
        if self.workers < 1:
            raise RecipeError(f"`workers={self.workers}` is not a number of workers.", "Give 1 or more.")
        if self.scheduler is not None:
            raise RecipeError("`workers` and `scheduler` both say where jobs run.", "Give one of them.")
        if self.recipe.pipeline is not Pipeline.ADVANCED and not has_jobs(self.recipe):
            raise RecipeError(
                f"`workers` has no effect in the {self.recipe.pipeline} pipeline.", "Add `pipeline='advanced'`."
            )


def has_jobs(recipe: Recipe) -> bool:
    """Whether there are jobs that do not depend on each other: layers at several precisions."""
    return len(recipe.bits) > 1 and recipe.pipeline is not Pipeline.PLAIN


def check_sent(recipe: Recipe, **where: Any) -> None:
    """Fails where jobs are to be sent somewhere, and there are none."""
    name = next((name for name, value in where.items() if value is not None), None)
    if name is not None and not has_jobs(recipe):
        hint = "Give `bits` a list such as w4a4,w8a8, and `pipeline='light'` or 'advanced'."
        raise RecipeError(f"`{name}` has no effect: at one precision there are no independent jobs.", hint)


def settings_of(options: Mapping[str, Any]) -> Settings:
    """The settings that options by key make, those of images in a table of their own."""
    own = {name: value for name, value in options.items() if name in RECIPE_KEYS}
    others = {name: value for name, value in options.items() if name not in RECIPE_KEYS and name != IMAGES}
    return Settings(Recipe(**own), preprocess=preprocess_of(options.get(IMAGES, {})), **others)


def preprocess_of(images: Mapping[str, Any]) -> Preprocess | None:
    """How images are prepared, None when nothing was said about it."""
    given = {("scale" if name == "pixel_scale" else name): value for name, value in images.items()}
    return Preprocess(**given) if given else None


def options_of(settings: Settings) -> dict[str, Any]:
    """All options that are set, by key."""
    others = fields_set(settings)
    options = recipe_options(others.pop("recipe")) | others
    if settings.preprocess is not None:
        images = fields_set(options.pop("preprocess"))
        images["pixel_scale"] = images.pop("scale")
        options[IMAGES] = images
    return options


def recipe_options(recipe: Recipe) -> dict[str, Any]:
    """All options that the recipe sets, by key."""
    return {name: value for name, value in recipe.options().items() if value is not None}


def fields_set(record: Settings | Preprocess) -> dict[str, Any]:
    """The fields that are not None, in their order."""
    return {name: value for name, value in vars(record).items() if value is not None}
