"""What must hold of a random graph: a clean refusal, or a quantized file that a user can work with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime import GraphOptimizationLevel

from fuzzing.graphs import Arrays, Case, random_graph
from fuzzing.half import in_float32
from models import session_of
from onnxcalib.api import OnnxcalibError, Pipeline, Precision, RangeMethod, Recipe, quantize
from onnxcalib.model.read import read_prepared
from onnxcalib.targets import find_target

TARGETS = ("ort", "ort-compat", "openvino", "rknn", "tensorrt", "qnn", "xnnpack", "vitis", "paper", "qonnx")
# Least distance of a float output from float, in dB.
LEAST = {"quiet": 10.0, "noisy": 0.0}
# Why a valid graph may be refused.
FAIR = (
    "has no layer that can be quantized", "no Gemm or MatMul to quantize", "no Gemm or MatMul that could be so",
    "needs opset", "cannot be raised from opset",
    "never takes the branches", "no assignment reaches",
)  # fmt: skip
MASKS = ("attention_mask", "mask")
LARGEST = 1e4  # a graph whose outputs are larger is not a fair one


class BrokenPromiseError(Exception):
    """The file or the refusal is not what was promised."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one try ended."""

    outcome: str  # dropped, refused, written
    detail: str = ""
    worst_db: float | None = None


def recipe_of(seed: int) -> Recipe:
    """Plain w8a8 for most; the others in turn."""
    eight, four = Precision(8, 8), Precision(4, 8)
    kind, target = seed % 10, TARGETS[seed // 10 % len(TARGETS)]
    if kind == 4:
        if seed % 20 == 4:
            return Recipe(ranges=RangeMethod.MINMAX, activations="dynamic")
        return Recipe(pipeline=Pipeline.LIGHT, ranges=RangeMethod.MINMAX, activations="auto")
    if kind < 4:
        return Recipe(ranges=RangeMethod.AUTO if seed % 20 == 0 else RangeMethod.MINMAX)
    if kind == 5:
        return Recipe(
            ranges=RangeMethod.MINMAX, bits=(Precision.parse("w8"),), block_size=16 if seed % 20 == 5 else None
        )
    if kind == 6:
        return Recipe(pipeline=Pipeline.LIGHT, ranges=RangeMethod.MINMAX)
    if kind == 7:
        floats = seed % 20 == 7
        bits, most = ("w4a8,w8a8,float", 2.0) if floats else ("w4a8,w8a8", 4.0)
        return Recipe(pipeline=Pipeline.LIGHT, ranges=RangeMethod.MINMAX, bits=bits, compression=most)
    if kind == 8 and seed % 20 == 8:
        mixed: dict[str, Any] = {"bits": (four, eight), "compression": 4.0} if seed % 40 == 8 else {}
        return Recipe(pipeline=Pipeline.ADVANCED, ranges=RangeMethod.MINMAX, steps=2, **mixed)
    return Recipe(target=target, ranges=RangeMethod.MINMAX)


def judge_graph(seed: int, folder: Path) -> Verdict:
    """Quantizes the graph of a seed, with its files in a folder; raises whatever is no clean end."""
    case, recipe = random_graph(seed), recipe_of(seed)
    expected = float_outputs(case)
    if expected is None:
        return Verdict("dropped")
    source, output = folder / "float.onnx", folder / "quantized.onnx"
    onnx.save(case.model, source)
    try:
        check_prepared(case, recipe, source, expected)
        quantize(source, case.feed, recipe, output=output, workers=1)
    except OnnxcalibError as error:
        check_refusal(error, output)
        if not any(reason in error.message for reason in FAIR):
            raise BrokenPromiseError(f"a valid graph is refused: {error}") from error
        return Verdict("refused", error.message)
    return Verdict("written", str(recipe.pipeline), check_file(case, recipe, output, expected))


def float_outputs(case: Case) -> Arrays | None:
    """The outputs of the float model, None where the graph is not valid or not fair."""
    try:
        outputs = run_whole(case.model, case.feed)
    except Exception:  # the runtime's exceptions share no base class but this one
        return None
    if any(value.dtype.kind not in "fiub" for value in outputs.values()):
        return None
    fair = all(np.isfinite(value).all() and np.abs(value).max(initial=0) < LARGEST for value in outputs.values())
    return outputs if fair else None


def run_whole(model: onnx.ModelProto | Path, feed: Arrays, step: int | None = None, **settings: Any) -> Arrays:
    """All outputs for all samples, in batches of this size or of the one that the model asks for."""
    session = session_of(model, **settings)
    rows = len(next(iter(feed.values())))
    step = step or batch_of(session, feed) or rows
    parts = [
        session.run(None, {name: value[start : start + step] for name, value in feed.items()})
        for start in range(0, rows, step)
    ]
    names = [value.name for value in session.get_outputs()]
    return {name: np.concatenate([np.atleast_1d(part[place]) for part in parts]) for place, name in enumerate(names)}


def batch_of(session: Any, feed: Arrays) -> int | None:
    """The batch that a model asks for, None where any will do."""
    sizes = [value.shape[0] for value in session.get_inputs() if value.name in feed and value.shape]
    return next((size for size in sizes if isinstance(size, int)), None)


def check_prepared(case: Case, recipe: Recipe, source: Path, expected: Arrays) -> None:
    """Preparation changes no output by more than rounding errors do."""
    prepared = read_prepared(source, find_target(recipe.target))
    try:
        found = run_whole(prepared.proto, case.feed)
    except Exception:  # 1.19 makes a MatMul of three axes with a batch norm a Gemm; then we measure without that, too
        found = run_whole(prepared.proto, case.feed, graph_optimization_level=GraphOptimizationLevel.ORT_DISABLE_ALL)
    if case.half:  # norms make heard what half precision itself rounds, and preparing does not
        floats = {name: it.astype(np.float32) if it.dtype == np.float16 else it for name, it in case.feed.items()}
        expected = run_whole(in_float32(case.model), floats)
    least = 20 if case.noisy else 40  # folding rounds anew, and a steep Softmax makes that heard
    largest = _largest(expected)
    for name, value in expected.items():
        compared = value.dtype.kind == "f" and not _is_zero(value, largest) and name not in case.loose
        if compared and distance_db(value, found[name]) < least:
            raise BrokenPromiseError(f"preparing the model changes its output '{name}'")


def check_refusal(error: OnnxcalibError, output: Path) -> None:
    if not error.message.endswith((".", "!", "?")) or not error.hint or "\n" in error.message:
        raise BrokenPromiseError(f"a refusal without a sentence and a hint: {error.message!r} {error.hint!r}")
    if output.exists():
        raise BrokenPromiseError("a refusal that leaves a file")


def _worst_distance(case: Case, written: onnx.ModelProto, expected: Arrays) -> float | None:
    """The least distance of an output from float; types and shapes are those of float."""
    found = run_whole(written, case.feed)
    batch = batch_of(session_of(written), case.feed)
    if batch is not None:  # a target that fixes the batch: an op across samples sees as many of them
        expected = run_whole(case.model, case.feed, batch)
    largest = _largest(expected)
    worst = None
    for name, value in expected.items():
        if found[name].dtype != value.dtype or (found[name].shape != value.shape and name not in case.loose):
            raise BrokenPromiseError(f"output '{name}' has another shape or type")
        if name in case.loose:
            continue
        if value.dtype.kind == "f" and _is_zero(value, largest):
            if np.abs(found[name]).max(initial=0) > 0.1 * max(largest, 1.0):
                raise BrokenPromiseError(f"output '{name}' should be zero")
        elif value.dtype.kind == "f":
            distance = distance_db(counted(case, value), counted(case, found[name]))
            worst = distance if worst is None else min(worst, distance)
    return worst


def _largest(outputs: Arrays) -> float:
    return max((float(np.abs(it).max(initial=0)) for it in outputs.values() if it.dtype.kind == "f"), default=0.0)


def _is_zero(value: np.ndarray, largest: float) -> bool:
    """Whether an output is a difference of equals, which has no signal but what float32 rounds."""
    return bool(np.abs(value).max(initial=0) <= 1e-6 * largest)


def _mask(case: Case) -> np.ndarray | None:
    return next((case.feed[name] for name in MASKS if name in case.feed), None)


def counted(case: Case, output: np.ndarray) -> np.ndarray:
    """An output without the positions that the mask calls padding."""
    mask = _mask(case)
    return output if mask is None or output.shape[:2] != mask.shape else output[mask != 0]


def check_file(case: Case, recipe: Recipe, output: Path, expected: Arrays) -> float | None:
    """Valid, loaded with full optimization, of the same ends, and near float; gives the least distance."""
    written = onnx.load(output)
    target = find_target(recipe.target)
    bare = [value.name for value in case.model.graph.output if not value.type.tensor_type.HasField("shape")]
    if target.name != "qonnx" and not bare:  # the checker wants shapes of outputs, runtimes do not
        onnx.checker.check_model(written)
    stored = {tensor.name for tensor in case.model.graph.initializer}
    asked = [value for value in case.model.graph.input if value.name not in stored]
    for before, after in ((asked, written.graph.input), (case.model.graph.output, written.graph.output)):
        if [_declared(value) for value in before] != [_declared(value) for value in after]:
            raise BrokenPromiseError("the file has other inputs or outputs than the model")
    if target.name == "qonnx":
        return None
    worst = _worst_distance(case, written, expected)
    # Padding counts in no range, and what mixes it with the rest hears that.
    noisy = case.noisy or case.half or _mask(case) is not None or _coarse(recipe)
    least = LEAST["noisy" if noisy else "quiet"]
    if worst is not None and worst < least:
        raise BrokenPromiseError("an output is too far from float")
    return worst


def _coarse(recipe: Recipe) -> bool:
    return len(recipe.bits) > 1 or recipe.target in ("rknn", "vitis", "paper")


def _declared(value: onnx.ValueInfoProto) -> tuple[str, int]:
    return value.name, value.type.tensor_type.elem_type


def distance_db(expected: np.ndarray, found: np.ndarray) -> float:
    """Signal to noise of an output; both zero are equal."""
    signal, noise = (float((each.astype(np.float64) ** 2).sum()) for each in (expected, expected - found))
    if not np.isfinite(found).all():
        return -np.inf
    return 200.0 if noise <= 1e-20 * max(signal, 1) else float(10 * np.log10(max(signal, 1e-20) / noise))
