"""Plots as PNG or SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxcalib.errors import OutputError
from onnxcalib.files import check_writable, replacing
from onnxcalib.mixed_precision.curve import Point

# Told apart by shape as well as by colour.
LOOKS = {
    "integer program": ("#0b6e99", "o", "-"),
    "greedy-accuracy": ("#c4622d", "s", "--"),
    "greedy-compression": ("#7a7a7a", "^", ":"),
}


def check_plot(path: Path) -> None:
    """Fails now rather than after the measurements when the plot cannot be drawn or written."""
    pyplot()
    if path.suffix not in (".png", ".svg"):
        raise OutputError(f"plot {path} is neither .png nor .svg.", "Name a .png or .svg file.")
    check_writable(path)


def plot_curve(points: Sequence[Point], loss: str, path: Path) -> None:
    """The compression-loss curve, measured where it was measured."""
    check_plot(path)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method, (colour, marker, line) in LOOKS.items():
        chosen = [point for point in points if point.method == method]
        losses = [point.estimated_loss if point.measured_loss is None else point.measured_loss for point in chosen]
        axes.plot([point.size for point in chosen], losses, line, color=colour, marker=marker, label=method, ms=5)
    measured = any(point.measured_loss is not None for point in points)
    axes.set_yscale("log")
    axes.set_xlabel("size relative to the float file")
    axes.set_ylabel(f"{'measured' if measured else 'estimated'} {loss} loss")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix[1:])
    plt.close(figure)


def pyplot() -> Any:
    """matplotlib without a screen, or what to type to get it."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise OutputError("plots need matplotlib.", "Type: pip install 'onnxcalib[report]'") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
