#!/usr/bin/env python3
"""What quantizing costs beside the least that it could: a float pass over the samples, and onnxruntime's quantizer.

    python tools/floor_cost.py MODEL.onnx DATA.npz      # any model; arrays by the names of its inputs, samples first
    python tools/floor_cost.py chain                    # time and memory of 50, 100, 200 and 400 layers
    python tools/benchmark.py ZOO floor                 # both, on the models of the benchmark

Every figure comes from a process of its own. CPU seconds are those of all threads: on a busy machine they say more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import onnxcalib
from onnxcalib import Pipeline, Recipe
from onnxcalib.model.read import read_prepared
from onnxcalib.targets import find_target

Feed = dict[str, np.ndarray[Any, Any]]
BATCH = 8
CHAIN = (50, 100, 200, 400)
CHANNELS, SIZE = 16, 8


def floor(cases: dict[str, Any], folder: Path) -> None:
    """The benchmark's models, and chains."""
    for case in (cases["mobilenet_v2"], cases["resnet20"]):
        compare(case.model, case.calibration)
    chains(folder)


def compare(model: Path, data: Path) -> None:
    """One model: each way of quantizing it in float passes, and beside quantize_static."""
    found = {kind: _measured(kind, model, data) for kind in KINDS}
    floats, static = found["float"], found["quantize_static"]
    print(f"{model.stem}: a float pass takes {floats['seconds']:.2f} s, {floats['cpu']:.2f} s of CPU")
    for kind in list(KINDS)[1:]:
        row = found[kind]
        passes, beside = row["seconds"] / floats["seconds"], row["seconds"] / static["seconds"]
        print(
            f"  {kind:16} {row['seconds']:7.2f} s {passes:6.1f} float passes {beside:5.2f} x quantize_static"
            f"   CPU {row['cpu']:7.2f} s {row['cpu'] / static['cpu']:5.2f} x   peak {row['MB']:5} MB",
            flush=True,
        )


def chains(folder: Path) -> None:
    """A layer more costs the same however many there are, and no memory but its own."""
    for layers in CHAIN:
        model, data = folder / f"chain_{layers}.onnx", folder / "chain.npz"
        onnx.save(_chain(layers), model)
        np.savez(data, x=np.random.default_rng(0).normal(size=(32, CHANNELS, SIZE, SIZE)).astype(np.float32))
        for kind in ("plain", "light"):
            row = _measured(kind, model, data)
            print(
                f"  {layers:3} layers, {kind:5} {row['seconds']:6.2f} s, CPU {row['cpu']:6.2f} s, "
                f"{1000 * row['cpu'] / layers:5.1f} ms a layer, peak {row['MB']:4} MB",
                flush=True,
            )


def _chain(layers: int) -> onnx.ModelProto:
    rng, scale = np.random.default_rng(0), np.sqrt(2 / (9 * CHANNELS))
    weights = [
        onnx.numpy_helper.from_array((scale * rng.normal(size=(CHANNELS, CHANNELS, 3, 3))).astype(np.float32), f"w{i}")
        for i in range(layers)
    ]
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


def _measured(kind: str, model: Path, data: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind, str(model), str(data)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _one(kind: str, model: Path, data: Path) -> None:
    """Prints what one way of quantizing took in this process."""
    ort.set_default_logger_severity(4)
    wall, cpu = time.perf_counter(), time.process_time()
    KINDS[kind](model, data)
    row: dict[str, Any] = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    # getrusage would report the parent's peak where that is higher: it outlives exec, this does not.
    status = Path("/proc/self/status").read_text().splitlines()
    row["MB"] = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024
    print(json.dumps(row))


def _feeds(data: Path, size: int) -> Iterator[Feed]:
    with np.load(data) as held:
        arrays = {name: held[name] for name in held.files if name != "labels"}
    samples = len(next(iter(arrays.values())))
    return ({name: array[at : at + size] for name, array in arrays.items()} for at in range(0, samples, size))


def _float(model: Path, data: Path) -> None:
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    fixed = session.get_inputs()[0].shape[:1]
    for feed in _feeds(data, fixed[0] if fixed and isinstance(fixed[0], int) else BATCH):
        session.run(None, feed)


def _static(model: Path, data: Path) -> None:
    """Min-max and a scale a channel, on the model with batch norm folded, as its pre-processing would."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, feeds: Iterable[Feed]) -> None:
            self._feeds = iter(feeds)

        def get_next(self) -> Feed | None:
            return next(self._feeds, None)

    with tempfile.TemporaryDirectory() as folder:
        folded = Path(folder) / "folded.onnx"
        onnxcalib.write_model(read_prepared(model, find_target("ort")).proto, folded)
        written = str(Path(folder) / "static.onnx")
        quantization.quantize_static(str(folded), written, Reader(_feeds(data, 1)), per_channel=True)


def _ours(pipeline: Pipeline, model: Path, data: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        onnxcalib.quantize(model, data, Recipe(pipeline), output=Path(folder) / "written.onnx")


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "float": _float,
    "quantize_static": _static,
    "plain": lambda model, data: _ours(Pipeline.PLAIN, model, data),
    "light": lambda model, data: _ours(Pipeline.LIGHT, model, data),
}


def main() -> None:
    """One model, the chains, or one measurement of either."""
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    elif sys.argv[1:] == ["chain"]:
        with tempfile.TemporaryDirectory() as folder:
            chains(Path(folder))
    elif len(sys.argv) == 3:
        compare(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
