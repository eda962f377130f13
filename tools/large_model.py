"""Transformers of random weights, and the peak memory of commands on them.

    python tools/large_model.py FOLDER [--gigabytes 3]
    python tools/large_model.py FOLDER --encoder

Makes FOLDER/large.onnx with its weights beside it, then runs inspect, plain 8-bit and weight-only 4-bit in processes of
their own, and prints the peak memory and the time of each beside the size of the model. The encoder has the size of
BERT-base and its weights within the file; it is quantized by light at eight bits, alone and with a report.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

WIDTH, HEAD, TOKENS, SAMPLES = 2560, 64, 16, 4
COMMANDS = {
    "inspect": ("inspect", "{model}"),
    "plain 8-bit": ("quantize", "{model}", "-c", "{data}", "--ranges", "minmax", "-o", "{folder}/w8a8.onnx"),
    "weights alone, 4-bit": (
        "quantize", "{model}", "-c", "{data}", "--bits", "w4", "--block-size", "32", "--ranges", "minmax",
        "-o", "{folder}/w4.onnx",
    ),
}  # fmt: skip
LAYERS, NARROW, VOCABULARY, LONG, MANY = 12, 768, 30522, 96, 64  # of the encoder: blocks, width, tokens, samples
LIGHT = ("quantize", "{model}", "-c", "{data}", "--pipeline", "light", "-o", "{folder}/light.onnx")
ENCODER_COMMANDS = {"light": LIGHT, "light with a report": (*LIGHT, "--report", "{folder}/light.html")}


class Writer:
    """Nodes, and weights that go straight to a file."""

    def __init__(self, data: Path) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._path, self._rng, self._bytes = data, np.random.default_rng(0), 0
        data.write_bytes(b"")

    def weight(self, name: str, *shape: int) -> str:
        """Normal values, of which some columns are several times as large as others."""
        spread = np.exp(0.4 * self._rng.standard_normal(shape[-1])).astype(np.float32)
        values = self._rng.standard_normal(shape, np.float32) * spread / np.float32(np.sqrt(shape[0]))
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        told = {"location": self._path.name, "offset": self._bytes, "length": values.nbytes}
        for key, value in told.items():
            tensor.external_data.add(key=key, value=str(value))
        with self._path.open("ab") as file:
            file.write(values.data)
        self._bytes += values.nbytes
        self.weights.append(tensor)
        return name

    def small(self, name: str, values: list[float] | list[int], kind: int) -> str:
        self.weights.append(helper.make_tensor(name, kind, [len(values)], values))
        return name

    def node(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output


def block(writer: Writer, number: int, x: str, width: int = WIDTH) -> str:
    """Attention and two layers after it, each behind a norm and beside a way around."""
    at = f"block{number}"
    normed = writer.node("LayerNormalization", [x, "ones", "zeros"], f"{at}_norm")
    heads = {}
    for name, perm in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
        made = writer.node("MatMul", [normed, writer.weight(f"{at}_{name}_w", width, width)], f"{at}_{name}")
        cut = writer.node("Reshape", [made, "heads"], f"{at}_{name}_cut")
        heads[name] = writer.node("Transpose", [cut], f"{at}_{name}_heads", perm=perm)
    scores = writer.node("MatMul", [heads["query"], heads["key"]], f"{at}_scores")
    scaled = writer.node("Mul", [scores, "scale"], f"{at}_scaled")
    mixed = writer.node("MatMul", [writer.node("Softmax", [scaled], f"{at}_soft"), heads["value"]], f"{at}_mixed")
    back = writer.node("Transpose", [mixed], f"{at}_back", perm=[0, 2, 1, 3])
    joined = writer.node("Reshape", [back, "whole"], f"{at}_whole")
    out = writer.node("MatMul", [joined, writer.weight(f"{at}_out_w", width, width)], f"{at}_out")
    x = writer.node("Add", [x, out], f"{at}_added")
    normed = writer.node("LayerNormalization", [x, "ones", "zeros"], f"{at}_norm2")
    up = writer.node("MatMul", [normed, writer.weight(f"{at}_up_w", width, 4 * width)], f"{at}_up")
    relu = writer.node("Relu", [up], f"{at}_relu")
    down = writer.node("MatMul", [relu, writer.weight(f"{at}_down_w", 4 * width, width)], f"{at}_down")
    return writer.node("Add", [x, down], f"{at}_end")


def make(folder: Path, gigabytes: float) -> tuple[Path, Path]:
    """The model's file, and that of its data."""
    writer = _begun(folder, WIDTH, TOKENS)
    x = "x"
    for number in range(round(gigabytes * 2**30 / (4 * 12 * WIDTH**2))):
        x = block(writer, number, x)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", TOKENS, WIDTH])
    rng = np.random.default_rng(1)
    np.savez(folder / "data.npz", x=rng.standard_normal((SAMPLES, TOKENS, WIDTH), np.float32))
    return _written(writer, folder, given, x, ["N", TOKENS, WIDTH]), folder / "data.npz"


def make_encoder(folder: Path) -> tuple[Path, Path]:
    """The same of a text encoder; weights go into its file, as exporters write them below 2 GB."""
    writer = _begun(folder, NARROW, LONG)
    found = writer.node("Gather", [writer.weight("tokens_w", VOCABULARY, NARROW), "ids"], "embedded")
    x = writer.node("Add", [found, writer.weight("places_w", LONG, NARROW)], "placed")
    for number in range(LAYERS):
        x = block(writer, number, x, NARROW)
    x = writer.node("LayerNormalization", [x, "ones", "zeros"], "last_hidden_state")
    given = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", LONG])
    model = _written(writer, folder, given, x, ["N", LONG, NARROW])
    onnx.save(onnx.load(model), model)
    model.with_name("large.onnx.data").unlink()
    np.savez(folder / "data.npz", ids=np.random.default_rng(1).integers(0, VOCABULARY, (MANY, LONG)))
    return model, folder / "data.npz"


def _begun(folder: Path, width: int, tokens: int) -> Writer:
    folder.mkdir(exist_ok=True)
    writer = Writer(folder / "large.onnx.data")
    writer.small("ones", [1.0] * width, TensorProto.FLOAT)
    writer.small("zeros", [0.0] * width, TensorProto.FLOAT)
    writer.small("scale", [HEAD**-0.5], TensorProto.FLOAT)
    writer.small("heads", [0, tokens, width // HEAD, HEAD], TensorProto.INT64)
    writer.small("whole", [0, tokens, width], TensorProto.INT64)
    return writer


def _written(writer: Writer, folder: Path, given: onnx.ValueInfoProto, output: str, shape: list[str | int]) -> Path:
    ends = [given], [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)]
    graph = helper.make_graph(writer.nodes, "large", *ends, writer.weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "large.onnx").write_bytes(proto.SerializeToString())
    return folder / "large.onnx"


def main() -> None:
    """Makes the model and measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--encoder", action="store_true")
    asked = parser.parse_args()
    model, data = make_encoder(asked.folder) if asked.encoder else make(asked.folder, asked.gigabytes)
    size = sum(file.stat().st_size for file in asked.folder.glob("large.onnx*"))
    print(f"model: {size / 2**30:.2f} GB of weights", flush=True)
    for name, words in (ENCODER_COMMANDS if asked.encoder else COMMANDS).items():
        given = [word.format(model=model, data=data, folder=asked.folder) for word in words]
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "onnxcalib.cli.main", *given], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        said = process.stderr.read().decode().strip().splitlines()
        _, status, used = os.wait4(process.pid, 0)
        peak, code = used.ru_maxrss * 1024, os.waitstatus_to_exitcode(status)
        spent = f"{time.perf_counter() - start:.0f} s, CPU {used.ru_utime + used.ru_stime:.0f} s"
        told = f"peak {peak / 2**30:.2f} GB, {peak / size:.2f} x the model, {spent}"
        print(f"{name}: exit {code}, {told}; {said[-1] if said else ''}", flush=True)


if __name__ == "__main__":
    main()
