"""onnxcalib completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "onnxcalib"
INSTALL = {
    "bash": 'add this line to ~/.bashrc: eval "$(onnxcalib completion bash)"',
    "zsh": 'add this line to ~/.zshrc: eval "$(onnxcalib completion zsh)"',
    "fish": "type: onnxcalib completion fish > ~/.config/fish/completions/onnxcalib.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(INSTALL)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands and options in SHELL; its last line says how to install it.

    \b
    onnxcalib completion bash
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # The variable is the one that click looks for when a command of this name starts.
    click.echo(kind(context.find_root().command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
    click.echo(f"# {INSTALL[shell]}")
