"""onnxcalib doctor."""

from __future__ import annotations

import platform

import click

from onnxcalib import __version__
from onnxcalib.runtime.installed import find_runtime, how_to_train, version_of

PACKAGES = ("onnx", "numpy", "onnx-graphsurgeon", "highspy", "click", "rich", "pillow")


@click.command()
def doctor() -> None:
    """Print versions, the runtime, and which engine gives the gradients.

    \b
    onnxcalib doctor
    """
    click.echo(f"onnxcalib {__version__}")
    click.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        click.echo(f"{name} {version_of(name)}")
    runtime = find_runtime()
    click.echo(f"runtime {', '.join(runtime.packages) or 'onnxruntime'} {runtime.version}")
    if runtime.gradients:
        click.echo("gradients by engine training: ONNX Runtime training")
        click.echo("--engine standard works here too: graphs of standard ops")
    else:
        click.echo("gradients by engine standard: graphs of standard ops, on any runtime")
        click.echo(f"--engine training needs ONNX Runtime training, which is not installed. {how_to_train(runtime)}")
