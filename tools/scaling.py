#!/usr/bin/env python3
"""How time and memory grow with layers and with samples: a chain of convolutions, quantized in processes of their own.

    python tools/scaling.py FOLDER                     # run, plain, light, light with a report, light mixed
    python tools/scaling.py FOLDER --kind report --layers 50 100

Writes FOLDER/scaling.csv, FOLDER/scaling.md and FOLDER/scaling.png.
CPU seconds are those of all threads, and of processes that measure layers: on a busy machine they say more. Memory is
that of the first process. `run` is the float model, read by onnx and run by onnxruntime with as much imported: what of
memory is the model itself. `light mixed` has w4a8 and w8a8 at a compression of 0.18.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from own_process import measured as in_own_process
from own_process import tell

import onnxcalib
from onnxcalib import Pipeline, Recipe
from onnxcalib.api import report
from onnxcalib.recipe import OnBroken, parse_bits

LAYERS, SAMPLES = (50, 100, 200, 400), (128, 512, 2048)
FEW_SAMPLES, FEW_LAYERS = 64, 50  # while the other number grows
CHANNELS, SIZE, OFF = 16, 8, 0.004
RUN, MIXED, KINDS = "run", "light mixed", ("plain", "light", "report", "light mixed")
BATCH = 16
COLUMNS = ("kind", "layers", "samples", "seconds", "cpu", "MB", "model_MB")

Row = dict[str, Any]
MODEL = "the model's file, MB"
CELLS: dict[str, Callable[[Row], str]] = {
    "CPU s": lambda row: f"{row['cpu']:.2f}",
    "CPU ms a layer": lambda row: f"{1000 * row['cpu'] / row['layers']:.1f}",
    "peak MB": lambda row: str(row["MB"]),
    MODEL: lambda row: f"{row['model_MB']:.2f}",
}


def chain(layers: int) -> onnx.ModelProto:
    """Convolutions of one size, one after the other, each near the identity, so that the signal lasts."""
    rng, same = np.random.default_rng(0), np.zeros((CHANNELS, CHANNELS, 3, 3))
    same[range(CHANNELS), range(CHANNELS), 1, 1] = 1
    drawn = (same + OFF * rng.normal(size=same.shape) for _ in range(layers))
    weights = [onnx.numpy_helper.from_array(each.astype(np.float32), f"w{i}") for i, each in enumerate(drawn)]
    nodes = []
    for i in range(layers):
        source = f"r{i - 1}" if i else "x"
        nodes += [
            onnx.helper.make_node("Conv", [source, f"w{i}"], [f"c{i}"], f"conv{i}", pads=[1, 1, 1, 1]),
            onnx.helper.make_node("Relu", [f"c{i}"], [f"r{i}"], f"relu{i}"),
        ]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", CHANNELS, SIZE, SIZE])
        for name in ("x", f"r{layers - 1}")
    ]
    graph = onnx.helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def measured(kind: str, layers: int, samples: int, folder: Path) -> Row:
    """One chain quantized in a process of its own."""
    model, data = folder / f"chain_{layers}.onnx", folder / f"samples_{samples}.npz"
    if not model.exists():
        onnx.save(chain(layers), model)
    if not data.exists():
        values = np.random.default_rng(0).normal(size=(samples, CHANNELS, SIZE, SIZE))
        np.savez(data, x=values.astype(np.float32))
    size = {"layers": layers, "samples": samples, "model_MB": round(model.stat().st_size / 2**20, 2)}
    return {"kind": kind, **size, **in_own_process(__file__, "--one", kind, model, data)}


def _one(kind: str, model: Path, data: Path) -> None:
    """Prints what one way of quantizing took in this process."""
    tell(lambda: _run(model, data) if kind == RUN else _quantize(kind, model, data))


def _run(model: Path, data: Path) -> None:
    read, samples = onnx.load(model), np.load(data)["x"]
    session = ort.InferenceSession(read.SerializeToString(), providers=["CPUExecutionProvider"])
    for start in range(0, len(samples), BATCH):
        session.run(None, {"x": samples[start : start + BATCH]})


def _quantize(kind: str, model: Path, data: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline, output = Pipeline.PLAIN if kind == "plain" else Pipeline.LIGHT, Path(folder) / "written.onnx"
        # Hundreds of layers in a row do drown a signal in noise, and no real network has them.
        recipe = Recipe(pipeline, on_broken=OnBroken.KEEP)
        if kind == MIXED:
            recipe = replace(recipe, bits=parse_bits("w4a8,w8a8"), compression=0.18)
        result = onnxcalib.quantize(model, data, recipe, output=output)
        if kind == "report":
            report(result, model, data, Path(folder) / "report.html")


def told(row: Row) -> str:
    """A row of the table."""
    each = f"{1000 * row['cpu'] / row['layers']:6.1f} ms a layer, {1000 * row['cpu'] / row['samples']:6.1f} ms a sample"
    return (
        f"{row['kind']:11} {row['layers']:4} layers {row['samples']:5} samples {row['seconds']:7.2f} s, "
        f"CPU {row['cpu']:7.2f} s, {each}, peak {row['MB']:4} MB, the model {row['model_MB']:.2f} MB"
    )


def table(rows: Sequence[Row]) -> str:
    """All measurements in Markdown, a column for each number of layers and of samples."""
    columns = list(dict.fromkeys((row["layers"], row["samples"]) for row in rows))
    few = [f"{layers} layers" if samples == FEW_SAMPLES else f"{samples:,} samples" for layers, samples in columns]
    found = {(row["kind"], row["layers"], row["samples"]): row for row in rows}
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [["", *few], ["---"] * (len(few) + 1)]
    for name, cell in CELLS.items():
        for kind in kinds if name != MODEL else kinds[:1]:
            cells = (found.get((kind, *column)) for column in columns)
            told = name if name == MODEL else f"{kind}, {name}"
            lines.append([told, *("" if row is None else cell(row) for row in cells)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def chains(folder: Path, kinds: Sequence[str] = KINDS[:2], layers: Sequence[int] = LAYERS) -> list[Row]:
    """A layer more costs the same however many there are, and no memory but its own."""
    return _told(folder, [(kind, count, FEW_SAMPLES) for kind in kinds for count in layers])


def more_samples(folder: Path, kinds: Sequence[str], samples: Sequence[int] = SAMPLES) -> list[Row]:
    """A sample more costs the same, and no memory."""
    return _told(folder, [(kind, FEW_LAYERS, count) for kind in kinds for count in samples])


def _told(folder: Path, asked: Sequence[tuple[str, int, int]]) -> list[Row]:
    rows = []
    for kind, layers, samples in asked:
        rows.append(measured(kind, layers, samples, folder))
        print(told(rows[-1]), flush=True)
    return rows


def draw(rows: Sequence[Row], path: Path) -> None:
    """CPU time above, peak memory below; against layers on the left, against samples on the right."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
    fixed = {"layers": ("samples", FEW_SAMPLES), "samples": ("layers", FEW_LAYERS)}
    for place, (name, (other, value)) in enumerate(fixed.items()):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            own = [row for row in rows if row["kind"] == kind and row[other] == value]
            for axis, key in ((axes[0, place], "cpu"), (axes[1, place], "MB")):
                axis.plot([row[name] for row in own], [row[key] for row in own], "o-", label=kind)
        axes[1, place].set_xlabel(f"{name} ({value} {other})")
        for axis in axes[:, place]:
            axis.set_ylim(bottom=0)
            axis.set_xlim(left=0)
    axes[0, 0].set_ylabel("CPU seconds")
    axes[1, 0].set_ylabel("peak MB")
    axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Both tables, or one measurement."""
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", nargs="+", choices=(RUN, *KINDS), default=(RUN, *KINDS))
    parser.add_argument("--layers", nargs="*", type=int, default=LAYERS)
    parser.add_argument("--samples", nargs="*", type=int, default=SAMPLES)
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    rows = [*chains(asked.folder, asked.kind, asked.layers), *more_samples(asked.folder, asked.kind, asked.samples)]
    with (asked.folder / "scaling.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (asked.folder / "scaling.md").write_text(table(rows), encoding="utf-8")
    print(table(rows), end="")
    draw(rows, asked.folder / "scaling.png")


if __name__ == "__main__":
    main()
