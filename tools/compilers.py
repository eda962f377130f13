#!/usr/bin/env python3
"""Compiles and runs our files with real runtimes and compilers, each in an environment of its own.

    python tools/compilers.py ZOO                          # every tool; the first run installs them below --work
    python tools/compilers.py ZOO --tool openvino --work /tmp/compilers
    python tools/compilers.py ZOO --encoder paraphrase_minilm_l3.onnx     # a sentence encoder instead of images
    python tools/compilers.py ZOO --storage                # bytes, latency and identity of narrow weights instead

ZOO holds mobilenet_v2_bn.onnx, cifar_resnet20_bn.onnx, imagenet_train512.npz and cifar10_train2k.npz, for an encoder
stsb_minilm_tokens.npz. Needs pillow.
A step is that of the file's own output grid or, where outputs are float, of an eight-bit grid over the outputs of the
newest onnxruntime, the reference. The row "unfused" is
the same runtime without its own optimisations: what two correct ways to compute one file differ by.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper
from zoo import decoded, normalized

from onnxcalib.model.io import write_model
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.shapes import with_fixed_batch
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.stages import final_scales, statistics, uniform_plan
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Pipeline, Precision, RangeMethod, Recipe, parse_bits
from onnxcalib.targets import Storage

Floats = npt.NDArray[Any]
PROBES = Path(__file__).resolve().parent / "probes"
LONGEST = 1800.0  # seconds of one probe
MIXED = "mixed 2..8"
CASES = (("resnet20", "8"), ("mobilenet_v2", "8"), ("mobilenet_v2", "w3a8"), ("mobilenet_v2", "w4a8"),
         ("mobilenet_v2", MIXED))  # fmt: skip
ENCODER, TOKENS = "encoder", 24  # its name here, and the length that sentences are cut or padded to
ENCODER_CASES = ((ENCODER, "8"), (ENCODER, "w4a8"))


@dataclass(frozen=True)
class Tool:
    """One runtime or compiler: what to install, what to ask it, and the target whose files it gets."""

    probe: str
    target: str
    needs: tuple[str, ...]
    environment: str  # tools may share one
    settings: Mapping[str, str] = field(default_factory=dict)


NEWEST = ("onnxruntime", "onnx")
# What rknn-toolkit2 2.3.2 was published for: it does not start with newer ones.
RKNN = ("rknn-toolkit2==2.3.2", "onnx==1.16.1", "onnxruntime==1.18.1", "numpy<2", "protobuf<5", "setuptools<81")
TOOLS = {
    "onnxruntime-newest": Tool("onnxruntime", "ort", NEWEST, "onnxruntime-newest"),
    "onnxruntime-unfused": Tool("onnxruntime", "ort", NEWEST, "onnxruntime-newest", {"PROBE_UNFUSED": "1"}),
    "onnxruntime-1.19": Tool(
        "onnxruntime", "ort", ("onnxruntime==1.19.2", "onnx==1.17.0", "numpy<2"), "onnxruntime-1.19"
    ),
    "onnxruntime-1.15": Tool(
        "onnxruntime", "ort-compat", ("onnxruntime==1.15.0", "onnx==1.14.1", "numpy<2"), "onnxruntime-1.15"
    ),
    "openvino": Tool("openvino", "openvino", ("openvino==2026.4.1",), "openvino"),
    "rknn-2.3": Tool("rknn", "rknn", RKNN, "rknn-2.3"),
    "rknn-2.5": Tool("rknn", "rknn", ("rknn-toolkit2==2.5.0", "setuptools<81"), "rknn-2.5"),
    "iree": Tool("iree", "rknn", ("iree-base-compiler==3.13.0", "iree-base-runtime==3.13.0", "onnx"), "iree"),
    "tvm": Tool("tvm", "rknn", ("apache-tvm==0.27.0.post1", "onnx"), "tvm"),
    "qonnx": Tool("qonnx", "qonnx", ("qonnx==1.0.0", "onnx==1.18.0"), "qonnx"),
}
REFERENCE = "onnxruntime-newest"


@dataclass(frozen=True)
class Row:
    """What a tool made of a file."""

    tool: str
    version: str
    file: str
    loads: bool
    layers: int | None = None
    int8: int | None = None
    within: float | None = None  # share of elements no further than a step
    most: float | None = None  # steps
    note: str = ""


def output_step(file: Path) -> float | None:
    """The step of the grid on which the file quantizes its first output, None if that is float."""
    graph = onnx.load(file).graph
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and graph.output[0].name in node.output:
            return next(float(numpy_helper.to_array(each)) for each in graph.initializer if each.name == node.input[1])
    return None


def agreement(reference: Floats, found: Floats, step: float | None = None) -> tuple[float, float]:
    """The share of elements within one step of the reference's grid, and how many steps the worst is off."""
    if reference.shape != found.shape:
        raise ValueError(f"the outputs have shapes {found.shape} and {reference.shape}")
    step = (reference.max() - reference.min()) / 255 if step is None else step
    off = np.abs(found.astype(np.float64) - reference) / (step if step > 0 else 1.0)
    return float((off <= 1 + 1e-4).mean()), float(off.max())


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [("tool", "version", "file", "loads", "int8 layers", "within a step", "most steps", "note")]
    for row in rows:
        counted = "-" if row.layers is None else f"{row.int8} of {row.layers}"
        within = "-" if row.within is None else f"{100 * row.within:.2f} %"
        most = "-" if row.most is None else f"{row.most:.2f}"
        lines.append((row.tool, row.version, row.file, "yes" if row.loads else "no", counted, within, most, row.note))
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def environment(tool: Tool, work: Path) -> tuple[Path | None, str]:
    """The tool's own Python, installed at its first use; None, and pip's last words, where it does not install."""
    folder = work / tool.environment
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *tool.needs]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return None, f"does not install: {(errors or ['pip failed'])[0]}"
        (folder / ".ready").touch()
    return python, ""


def ask(
    tool: Tool, python: Path, model: Path, feeds: Path, outputs: Path, probes: Path = PROBES, longest: float = LONGEST
) -> dict[str, Any]:
    """The probe's answer; one that stops or never ends is an answer too."""
    outputs.unlink(missing_ok=True)
    command = [python, probes / f"probe_{tool.probe}.py", model, feeds, outputs]
    settings = {**os.environ, **tool.settings, "PYTHONPATH": ""}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=longest, env=settings, cwd=outputs.parent
        )
    except subprocess.TimeoutExpired:
        return {"loads": False, "error": f"no answer in {longest:.0f} s"}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        words = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"loads": False, "error": f"stopped with code {done.returncode}: {words}"[:300]}
    answer: dict[str, Any] = json.loads(last)
    return answer


def row_of(
    name: str, file: str, answer: Mapping[str, Any], outputs: Path, reference: Path, step: float | None = None
) -> Row:
    """The table's row for an answer."""
    version, loads = str(answer.get("version", "?")), bool(answer["loads"])
    row = Row(name, version, file, loads, answer.get("layers"), answer.get("int8"), note=answer.get("note", ""))
    if not loads:
        return replace(row, note=answer["error"])
    if not reference.exists():
        return replace(row, note="no reference to compare with")
    within, most = agreement(np.load(reference)["arr_0"], np.load(outputs)["arr_0"], step)
    return replace(row, within=within, most=most)


class Files:
    """Quantized files, each made at its first use."""

    def __init__(self, zoo: Path, work: Path, encoder: Path | None = None) -> None:
        self.zoo, self.folder, self.encoder = zoo, work / "files", encoder
        self.folder.mkdir(parents=True, exist_ok=True)

    def feeds(self, model: str) -> Path:
        """Samples that the tools run on; calibration took others."""
        path = self.folder / f"{model}_feeds.npz"
        if not path.exists():
            count = {"mobilenet_v2": 8, "resnet20": 64, ENCODER: 16}[model]
            np.savez(path, **{name: values[-count:] for name, values in self._samples(model).items()})
        return path

    def file(self, model: str, bits: str, target: str) -> Path:
        """The file for a target, with a batch of one."""
        return self._written(model, bits, target, lambda job, plan: job.write(plan))

    def simulated(self, model: str, bits: str, target: str) -> Path:
        """The same in the form that onnxruntime computes."""
        return self._written(model, bits, target, lambda job, plan: job.simulate(plan), "_simulated")

    def _written(
        self, model: str, bits: str, target: str, write: Callable[[Job, QuantPlan], onnx.ModelProto], mark: str = ""
    ) -> Path:
        path = self.folder / f"{model}_{bits.replace(' ', '_')}_{target}{mark}.onnx"
        if not path.exists():
            write_model(with_fixed_batch(write(*self.planned(model, bits, target))), path)
        return path

    def planned(self, model: str, bits: str, target: str) -> tuple[Job, QuantPlan]:
        """What decides a file."""
        source = self._source(model)
        data = {name: values[:64] for name, values in self._samples(model).items()}
        if bits != MIXED:
            job = start(source, data, Recipe(bits=parse_bits(bits), target=target, ranges=RangeMethod.MSE)).jobs[0]
            return job, final_scales(job, uniform_plan(job, statistics(job)))
        menu = tuple(Precision(width, 8) for width in range(2, 9))
        recipe = Recipe(Pipeline.LIGHT, menu, target=target, ranges=RangeMethod.MSE, compression=1.0)
        job = start(source, data, recipe).jobs[0]
        in_turn = {layer.name: menu[place % len(menu)] for place, layer in enumerate(job.layers)}
        return job, final_scales(job, candidates_of(job).stitch(in_turn))

    def _source(self, model: str) -> Path | onnx.ModelProto:
        if model != ENCODER:
            return self.zoo / {"mobilenet_v2": "mobilenet_v2_bn.onnx", "resnet20": "cifar_resnet20_bn.onnx"}[model]
        assert self.encoder is not None
        proto = onnx.load(self.encoder)
        del proto.graph.output[:-1]  # the embedding alone
        for value in proto.graph.input:
            value.type.tensor_type.shape.dim[1].dim_value = TOKENS
        return proto

    def _samples(self, model: str) -> dict[str, Floats]:
        if model != ENCODER:
            return {"input": self._images(model)}
        ids = np.load(self.zoo / "stsb_minilm_tokens.npz")["train_a"][:80, :TOKENS].astype(np.int64)
        return {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}

    def _images(self, model: str) -> Floats:
        if model == "resnet20":
            return normalized(np.load(self.zoo / "cifar10_train2k.npz")["x"][:128])
        return normalized(decoded(self.zoo / "imagenet_train512.npz")[0][:72])


def compiled(files: Files, names: Sequence[str], work: Path, cases: Sequence[tuple[str, str]] = CASES) -> list[Row]:
    """Every tool on every file; the reference runs each tool's own file."""
    rows = []
    for name in names:
        tool = TOOLS[name]
        python, trouble = environment(tool, work)
        newest, _ = environment(TOOLS[REFERENCE], work)
        for model, bits in cases:
            label = f"{model} {bits}"
            if python is None or newest is None:
                rows.append(Row(name, "-", label, loads=False, note=trouble or "no reference to compare with"))
                continue
            file, feeds = files.file(model, bits, tool.target), files.feeds(model)
            outputs, reference = work / f"{file.stem}_{name}.npz", work / f"{file.stem}_reference.npz"
            if not reference.exists():
                # Nodes that only QONNX knows are compared with the same plan as QDQ.
                known = files.simulated(model, bits, tool.target) if tool.target == "qonnx" else file
                ask(TOOLS[REFERENCE], newest, known, feeds, reference)
            answer = ask(tool, python, file, feeds, outputs)
            rows.append(row_of(name, label, answer, outputs, reference, output_step(file)))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def stored(files: Files) -> None:
    """Narrow weights beside plain int8 storage of the same integers: bytes, outputs, and latency beside w8a8."""
    base = files.file("mobilenet_v2", "8", "ort")
    feeds = dict(np.load(files.feeds("mobilenet_v2")))
    for model, bits in CASES[2:]:
        job, plan = files.planned(model, bits, "ort")
        narrow, plain = (files.folder / f"{model}_{bits.replace(' ', '_')}_{kind}.onnx" for kind in ("stored", "plain"))
        write_model(with_fixed_batch(job.write(plan)), narrow)
        target = replace(job.target, storage=Storage.INT8)
        write_model(with_fixed_batch(write_qdq(job.model, job.layers, plan, target)), plain)
        nominal = nominal_bytes(plan, plain.stat().st_size)
        same = all((run_file(narrow, feeds)[place] == one).all() for place, one in enumerate(run_file(plain, feeds)))
        size = narrow.stat().st_size
        print(
            f"{model} {bits}: {size:,} bytes, {size / nominal - 1:+.2%} beside nominal "
            f"{nominal:,.0f}; outputs {'identical' if same else 'differ'}; latency / w8a8 "
            f"{latency_ratio(narrow, base, feeds):.2f}",
            flush=True,
        )


def nominal_bytes(plan: QuantPlan, plain: int) -> float:
    """Weights at their bits, and all else as it is in the file with one byte a code."""
    quantized = {name: params.quantized.size for name, params in plan.layers.items()}
    return (
        plain
        - sum(quantized.values())
        + sum(plan.precisions[name].weight * size / 8 for name, size in quantized.items())
    )


def run_file(path: Path, feeds: Mapping[str, Floats]) -> list[Floats]:
    """The outputs of every sample, on the onnxruntime at hand."""
    session = _session(path)
    count = len(next(iter(feeds.values())))
    made = [session.run(None, {name: value[i : i + 1] for name, value in feeds.items()}) for i in range(count)]
    return [np.concatenate(parts) for parts in zip(*made, strict=True)]


def latency_ratio(one: Path, other: Path, feeds: Mapping[str, Floats], rounds: int = 60) -> float:
    """The best time of one beside that of the other, in turn; of the thread alone, whatever else the machine does."""
    sessions, best = [_session(one), _session(other)], [np.inf, np.inf]
    feed = {name: value[:1] for name, value in feeds.items()}
    for _ in range(rounds):
        for place, session in enumerate(sessions):
            begin = time.thread_time()
            session.run(None, feed)
            best[place] = min(best[place], time.thread_time() - begin)
    return float(best[0] / best[1])


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Makes the files, asks the tools, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("--tool", action="append", choices=sorted(TOOLS), help="Only these (default: all).")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "onnxcalib-compilers")
    parser.add_argument("--encoder", type=Path, help="A sentence encoder that reads input_ids and attention_mask.")
    parser.add_argument("--storage", action="store_true", help="Narrow weights: bytes, latency, identity.")
    given = parser.parse_args()
    files = Files(given.zoo, given.work.resolve(), given.encoder)
    if given.storage:
        stored(files)
    else:
        cases = CASES if given.encoder is None else ENCODER_CASES
        print(table(compiled(files, given.tool or list(TOOLS), given.work.resolve(), cases)))


if __name__ == "__main__":
    main()
