"""All commands under one name."""

from __future__ import annotations

import click

from onnxcalib import __version__
from onnxcalib.cli.allocate import allocate
from onnxcalib.cli.curve import curve
from onnxcalib.cli.demo import demo
from onnxcalib.cli.doctor import doctor
from onnxcalib.cli.evaluate import evaluate
from onnxcalib.cli.inspect import inspect
from onnxcalib.cli.quantize import quantize
from onnxcalib.cli.runs import runs
from onnxcalib.cli.sensitivity import sensitivity


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Post-training quantization from ONNX to ONNX.

    \b
    onnxcalib inspect  model.onnx
    onnxcalib quantize model.onnx -c calibration.npz -o small.onnx
    onnxcalib evaluate small.onnx -d test.npz --reference model.onnx
    """


for command in (inspect, quantize, evaluate, sensitivity, allocate, curve, runs, demo, doctor):
    cli.add_command(command)
