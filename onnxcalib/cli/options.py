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
from onnxcalib.errors import RecipeError
from onnxcalib.recipe import IMAGE_KEYS, preprocess_of
from onnxcalib.runtime.installed import find_runtime

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
    kinds = {"resize": int, "crop": int, "pixel_scale": float, "layout": click.Choice(["nchw", "nhwc"])}
    options = [
        click.option(
            f"--{key.name.replace('_', '-')}",
            type=kinds.get(key.name),
            help=f"Images: {key.help[0].lower()}{key.help[1:]}",
        )
        for key in IMAGE_KEYS
    ]
    for option in reversed(options):
        function = option(function)
    return function


def images_from(options: dict[str, Any]) -> dict[str, Any]:
    """The image options that were given, by key."""
    given = {key.name: options[key.name] for key in IMAGE_KEYS}
    given |= {name: _numbers(name, given[name]) for name in ("mean", "std")}
    return {name: value for name, value in given.items() if value is not None}


def preprocess_from(options: dict[str, Any]) -> Preprocess | None:
    """How images are prepared, None when no image option was given."""
    return preprocess_of(images_from(options))


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise RecipeError(
            f"--{option} '{text}' is not a list of numbers.", "Write 0.5 or 0.485,0.456,0.406."
        ) from error
