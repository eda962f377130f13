"""Options and output that several commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from onnxcalib.cli.watch import Watch, watching
from onnxcalib.data import Preprocess
from onnxcalib.engine.runtime import find_runtime
from onnxcalib.errors import RecipeError

Function = TypeVar("Function", bound=Callable[..., Any])
FILE = click.Path(path_type=Path)
WIDTH_WHEN_PIPED = 200


def console(*, stderr: bool = False) -> Console:
    """A console that does not fold tables when its output goes to a file."""
    screen = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return screen if screen.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH_WHEN_PIPED)


def progress_bar() -> contextlib.AbstractContextManager[Watch]:
    """A bar with stage, count, rate and time left; nothing at all where no terminal watches."""
    return watching()


def with_runtime(function: Function) -> Function:
    """Runs before a command: without a sound runtime, say at once what to type."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        find_runtime()
        return function(*args, **kwargs)

    checked.__name__, checked.__doc__ = function.__name__, function.__doc__
    checked.__dict__.update(function.__dict__)
    return checked  # type: ignore[return-value]


def image_options(function: Function) -> Function:
    """Options for data that is a folder of images."""
    options = (
        click.option("--resize", type=int, help="Images: shorter side in pixels before the crop."),
        click.option("--crop", type=int, help="Images: centre crop in pixels (default: the model's input size)."),
        click.option("--mean", help="Images: mean to subtract, such as 0.485,0.456,0.406 (the default)."),
        click.option("--std", help="Images: deviation to divide by, such as 0.229,0.224,0.225 (the default)."),
        click.option("--pixel-scale", type=float, help="Images: divide pixels by this first (default 255)."),
        click.option("--layout", type=click.Choice(["nchw", "nhwc"]), help="Images: layout of the model's input."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def preprocess_from(options: dict[str, Any]) -> Preprocess | None:
    """The image options that were given, None when none was."""
    given = {
        "resize": options["resize"],
        "crop": options["crop"],
        "mean": _numbers("mean", options["mean"]),
        "std": _numbers("std", options["std"]),
        "scale": options["pixel_scale"],
        "layout": options["layout"],
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return Preprocess(**chosen) if chosen else None


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise RecipeError(
            f"--{option} '{text}' is not a list of numbers.", "Write 0.5 or 0.485,0.456,0.406."
        ) from error
