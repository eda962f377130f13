"""onnxcalib demo."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

import onnxcalib
from onnxcalib.analysis.evaluate import evaluate
from onnxcalib.cli.options import FILE, console, with_runtime
from onnxcalib.cli.tables import evaluation_table
from onnxcalib.cli.watch import Watch, watching
from onnxcalib.errors import ModelError, OutputError
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.progress import Event
from onnxcalib.recipe import MixedPrecisionOptions, Pipeline, Recipe, TrainingOptions
from onnxcalib.reports.write import write_report

MODEL, CALIBRATION, TEST = "fashion_mobilenet.onnx", "fashion_calibration.npz", "fashion_test.npz"
# Fewer steps than by default: nobody likes to wait for a demo.
TRAINING = TrainingOptions(steps=60)
RECIPES = {
    "w8a8_plain": Recipe(),
    "w4a4_plain": Recipe(bits="w4a4", edge_bits=8),
    "w4a4_light": Recipe(Pipeline.LIGHT, bits="w4a4", edge_bits=8),
    "w4a4_advanced": Recipe(Pipeline.ADVANCED, bits="w4a4", edge_bits=8, training=TRAINING),
    "mixed_advanced": Recipe(
        Pipeline.ADVANCED,
        bits="w4a4,w8a8",
        mixed_precision=MixedPrecisionOptions(compression=0.2),
        training=TRAINING,
    ),
}


@click.command()
@click.option("--out", type=FILE, default=Path("demo"), show_default=True, help="Folder for the quantized files.")
@with_runtime
def demo(out: Path) -> None:
    """Quantize a small model, which comes with onnxcalib, five ways and compare each with float.

    \b
    onnxcalib demo --out demo
    """
    folder = find_models()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"output folder {out} cannot be made: {error.strerror}.", "Choose another.") from error
    report = out / "report.html" if importlib.util.find_spec("matplotlib") else None
    written: list[str | Path] = [folder / MODEL]
    # One run directory for all: what two recipes have in common is computed once.
    with watching() as watch, tempfile.TemporaryDirectory(prefix="onnxcalib-") as run:
        progress = _Afresh(watch)
        for name, recipe in RECIPES.items():
            path = out / f"{name}.onnx"
            result = quantize(
                folder / MODEL, folder / CALIBRATION, recipe, output=path, progress=progress, run_dir=Path(run) / "run"
            )
            written.append(path)
        # Of the last, which has everything that a report can show.
        if report is not None:
            write_report(result, folder / MODEL, folder / CALIBRATION, report, test=folder / TEST, progress=progress)
        rows = evaluate(written, folder / TEST, folder / MODEL, progress=progress)
    console().print(evaluation_table(rows))
    console().print(f"report: {report or 'none without matplotlib; type pip install onnxcalib[report]'}")


@dataclass(frozen=True)
class _Afresh:
    """Shows what happens, but nothing of resuming and no warnings: of what few bits lose the table tells."""

    watch: Watch

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.watch(stage, done, total)

    def event(self, event: Event) -> None:
        if event.name not in ("resumed", "warning"):
            self.watch.event(event)


def find_models() -> Path:
    """Where the demo's model and data are: here, installed with the package, or in the checkout."""
    package = Path(onnxcalib.__file__).parent
    for folder in (Path("models"), package / "models", package.parent / "models"):
        if (folder / MODEL).exists():
            return folder
    hint = "Install onnxcalib again: its wheel holds them."
    raise ModelError(f"the demo's model {MODEL} is missing.", hint)
