"""All commands under one name."""

from __future__ import annotations

import click

from onnxcalib import __version__
from onnxcalib.cli.allocate import allocate
from onnxcalib.cli.check import check
from onnxcalib.cli.compare import compare
from onnxcalib.cli.completion import completion
from onnxcalib.cli.curve import curve
from onnxcalib.cli.demo import demo
from onnxcalib.cli.doctor import doctor
from onnxcalib.cli.evaluate import evaluate
from onnxcalib.cli.explain import explain
from onnxcalib.cli.inspect import inspect
from onnxcalib.cli.quantize import quantize
from onnxcalib.cli.recipe import recipe
from onnxcalib.cli.runs import runs
from onnxcalib.cli.sensitivity import sensitivity
from onnxcalib.cli.targets import targets


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Post-training quantization from ONNX to ONNX.

    \b
    onnxcalib inspect  model.onnx
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx
    onnxcalib evaluate small.onnx -d test.npz --reference model.onnx
    """


COMMANDS = (
    inspect, quantize, evaluate, explain, compare, sensitivity, allocate, curve, check, targets, recipe, runs, demo,
    doctor, completion,
)  # fmt: skip
for command in COMMANDS:
    cli.add_command(command)
