"""onnxcalib demo."""

from __future__ import annotations

from pathlib import Path

import click

import onnxcalib
from onnxcalib.cli.options import FILE, console, progress_bar, with_runtime
from onnxcalib.errors import ModelError
from onnxcalib.pipeline import evaluate, quantize
from onnxcalib.recipe import Precision, Recipe
from onnxcalib.report.tables import evaluation_table

MODEL, CALIBRATION, TEST = "fashion_mobilenet.onnx", "fashion_calibration.npz", "fashion_test.npz"
BITS = ("w8a8", "w4a8")


@click.command()
@click.option("--out", type=FILE, default=Path("demo"), show_default=True, help="Folder for the quantized files.")
@with_runtime
def demo(out: Path) -> None:
    """Quantize the small model in models/ and compare it with float."""
    folder = find_models()
    out.mkdir(parents=True, exist_ok=True)
    written: list[str | Path] = [folder / MODEL]
    with progress_bar() as progress:
        for bits in BITS:
            path = out / f"fashion_{bits}.onnx"
            recipe = Recipe(bits=(Precision.parse(bits),))
            quantize(folder / MODEL, folder / CALIBRATION, recipe, output=path, progress=progress)
            written.append(path)
        rows = evaluate(written, folder / TEST, folder / MODEL, progress=progress)
    console().print(evaluation_table(rows))


def find_models() -> Path:
    """The models/ folder of the checkout."""
    for folder in (Path("models"), Path(onnxcalib.__file__).parents[1] / "models"):
        if (folder / MODEL).exists():
            return folder
    raise ModelError("models/ with the demo model is not here.", "Run the demo in a checkout of the repository.")
