"""Every command's help has examples, and every example is one that the command understands."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Iterator

import click
import pytest

from onnxcalib.cli.commands import cli


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with its words, those of groups too."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


COMMANDS = {" ".join(words): command for words, command in commands(cli)}
LEAVES = [name for name, command in COMMANDS.items() if not isinstance(command, click.Group)]


def examples(command: click.Command) -> list[str]:
    """The lines of a help text that begin with the program's name."""
    lines = inspect.cleandoc(command.help or "").splitlines()
    return [line for line in lines if line.startswith("onnxcalib ")]


EXAMPLES = [line for command in (cli, *COMMANDS.values()) for line in examples(command)]


@pytest.mark.parametrize("name", LEAVES)
def test_the_help_has_an_example_of_the_command(name: str) -> None:
    found = examples(COMMANDS[name])
    assert found
    assert all(line.split()[1 : 1 + len(name.split())] == name.split() for line in found)


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_is_understood(line: str) -> None:
    words, command = shlex.split(line)[1:], cli
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    context = command.make_context(command.name, words)
    assert context.args == []


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_says_what_it_does(name: str) -> None:
    for option in COMMANDS[name].params:
        if isinstance(option, click.Option):
            assert (option.help or "").endswith("."), option.name
