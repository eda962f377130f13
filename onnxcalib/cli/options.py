"""Options and output that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.text import Text

from onnxcalib.cli.wording import flag
from onnxcalib.data import Preprocess
from onnxcalib.errors import RecipeError
from onnxcalib.names import printable
from onnxcalib.recipe import IMAGE_KEYS, preprocess_of
from onnxcalib.recipe.keys import Key, Kind
from onnxcalib.runtime.installed import find_runtime

Function = TypeVar("Function", bound=Callable[..., Any])
Option = Callable[[Any], Any]
FILE = click.Path(path_type=Path)
TYPES = {Kind.INTEGER: int, Kind.SIZE: int, Kind.NUMBER: float, Kind.PATH: FILE}
WIDTH_WHEN_PIPED = 200


class PlainConsole(Console):
    """Shows texts as they are: names hold brackets that are no markup, and characters that a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a line or of a cell of a table."""
        return super().render_str(printable(text), **options)


def console(*, stderr: bool = False) -> Console:
    """A console that does not fold tables when its output goes to a file."""
    screen = PlainConsole(stderr=stderr)
    return screen if screen.is_terminal else PlainConsole(stderr=stderr, width=WIDTH_WHEN_PIPED)


def echo(line: str, *, err: bool = False) -> None:
    """Prints a line as it is, however long."""
    click.echo(printable(line), err=err)


def with_runtime(function: Function) -> Function:
    """Runs before a command: without a sound runtime, say at once what to type."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        find_runtime()
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def with_options(*groups: Sequence[Option]) -> Option:
    """Adds groups of options to a command, in their order."""

    def decorate(function: Any) -> Any:
        for option in reversed([option for group in groups for option in group]):
            function = option(function)
        return function

    return decorate


def _image_option(key: Key) -> Option:
    kind = click.Choice(["nchw", "nhwc"]) if key.name == "layout" else TYPES.get(key.kind)
    return click.option(flag(key.name), type=kind, help=f"Images: {key.help[0].lower()}{key.help[1:]}")


image_options = with_options([_image_option(key) for key in IMAGE_KEYS])  # for data that is a folder of images


def images_from(options: dict[str, Any]) -> dict[str, Any]:
    """The image options that were given, by key."""
    given = {key.name: options[key.name] for key in IMAGE_KEYS if options[key.name] is not None}
    return given | {name: _numbers(name, given[name]) for name in ("mean", "std") if name in given}


def preprocess_from(options: dict[str, Any]) -> Preprocess | None:
    """How images are prepared, None when no image option was given."""
    return preprocess_of(images_from(options))


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        hint = "Write 0.5 or 0.485,0.456,0.406."
        raise RecipeError(f"--{option} '{text}' is not a list of numbers.", hint) from error
