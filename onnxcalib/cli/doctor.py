"""onnxcalib doctor."""

from __future__ import annotations

import platform

import click

from onnxcalib import __version__
from onnxcalib.runtime.installed import find_runtime, version_of

PACKAGES = ("onnx", "numpy", "onnx-graphsurgeon", "highspy", "click", "rich", "pillow")


@click.command()
def doctor() -> None:
    """Print versions, the runtime, and whether gradients are available.

    \b
    onnxcalib doctor
    """
    click.echo(f"onnxcalib {__version__}")
    click.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        click.echo(f"{name} {version_of(name)}")
    runtime = find_runtime()
    click.echo(f"runtime {', '.join(runtime.packages) or 'onnxruntime'} {runtime.version}")
    through = "through ONNX Runtime training" if runtime.gradients else "not through this runtime"
    click.echo(f"gradients {'available' if runtime.gradients else 'not available'}, {through}")
