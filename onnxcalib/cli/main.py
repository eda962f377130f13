"""The onnxcalib command."""

from __future__ import annotations

import sys

import click

from onnxcalib import __version__
from onnxcalib.cli.allocate import allocate
from onnxcalib.cli.check import check
from onnxcalib.cli.compare import compare
from onnxcalib.cli.completion import PROGRAM, completion
from onnxcalib.cli.curve import curve
from onnxcalib.cli.demo import demo
from onnxcalib.cli.doctor import doctor
from onnxcalib.cli.evaluate import evaluate
from onnxcalib.cli.explain import explain
from onnxcalib.cli.inspect import inspect
from onnxcalib.cli.quantize import quantize
from onnxcalib.cli.recipe import recipe
from onnxcalib.cli.sensitivity import sensitivity
from onnxcalib.cli.targets import targets
from onnxcalib.errors import OnnxcalibError

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Post-training quantization from ONNX to ONNX.

    \b
    onnxcalib inspect  model.onnx
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx
    onnxcalib evaluate small.onnx -d test.npz --reference model.onnx
    """


for command in (
    inspect,
    quantize,
    evaluate,
    explain,
    compare,
    sensitivity,
    allocate,
    curve,
    check,
    targets,
    recipe,
    demo,
    doctor,
    completion,
):
    cli.add_command(command)


def main() -> None:
    """Runs the command; what a user can mend is one sentence and an exit code, never a traceback."""
    try:
        cli.main(prog_name=PROGRAM, standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(_stop("interrupted; nothing was written.", INTERRUPTED))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OnnxcalibError as error:
        sys.exit(_stop(str(error), error.exit_code))


def _stop(message: str, code: int) -> int:
    click.echo(f"Error: {message}", err=True)
    return code


if __name__ == "__main__":
    main()
