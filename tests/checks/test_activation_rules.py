"""What `check` says of a Relu or Clip before a quantizer, held to what onnxruntime really fuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from models import Arrays, build
from onnxcalib.checks.check import check_model
from onnxcalib.runtime.optimized import optimized
from onnxcalib.targets import Severity, find_target

# Older versions absorb less; what they make of a file is what `ort-compat` tells.
OLD = tuple(map(int, ort.__version__.split(".")[:2])) < (1, 20)
TARGET = find_target("ort-compat" if OLD else "ort")
FLOAT_OPS = {"Conv", "FusedConv", "Gemm", "FusedGemm", "Add"}
OPS = {"Conv": "Conv (xd, wd)", "Add": "Add (xd, ed)", "Gemm": "Gemm (fd, gd)"}
SHARED = {
    "Conv": "wd = DequantizeLinear (w, t, v)",
    "Add": "eq = QuantizeLinear (x, t, z) ed = DequantizeLinear (eq, t, z)",
    "Gemm": "fq = QuantizeLinear (f, s, z) fd = DequantizeLinear (fq, s, z) gd = DequantizeLinear (g, t, v)",
}
UINT8, INT8 = np.dtype(np.uint8), np.dtype(np.int8)


@dataclass(frozen=True)
class Case:
    """An op, the activation after it and the quantizer after that."""

    scale: np.ndarray | float
    zero: int | None = 0
    bounds: tuple[float | None, float | None] | None = (0.0, 6.0)  # None: a Relu
    dtype: np.dtype = UINT8
    op: str = "Conv"
    read_twice: bool = False  # by another quantizer too

    def stored(self, name: str) -> Arrays:
        """The constants of the activation and of its quantizer."""
        scale = np.asarray(self.scale, np.float32)
        ends = dict(zip(("low", "high"), self.bounds or (None, None), strict=True))
        found = {f"{name}_{end}": np.float32(value) for end, value in ends.items() if value is not None}
        zero = {} if self.zero is None else {f"{name}_zero": np.full(scale.shape, self.zero, self.dtype)}
        return {**found, f"{name}_scale": scale, **zero}

    def nodes(self, name: str) -> str:
        """The op, which is called like its case, and what comes after it."""
        given = self.stored(name)
        low, high = (end if (end := f"{name}_{which}") in given else "" for which in ("low", "high"))
        clip = f"Clip ({name}_c, {low}, {high})" if high else f"Clip ({name}_c, {low})"
        qparams = f"{name}_scale, {name}_zero" if self.zero is not None else f"{name}_scale"
        act = f"Relu ({name}_c)" if self.bounds is None else clip
        lines = [f"[{name}] {name}_c = {OPS[self.op]} {name}_r = {act}"]
        for place, read in enumerate((qparams, "t, z") if self.read_twice else (qparams,)):
            lines.append(f"{name}_q{place} = QuantizeLinear ({name}_r, {read})")
            lines.append(f"{name}_y{place} = DequantizeLinear ({name}_q{place}, {read})")
        return " ".join(lines)

    def outputs(self, name: str) -> str:
        """What the model gives."""
        shape = "N,2" if self.op == "Gemm" else "N,2,H,W"
        return ", ".join(f"float[{shape}] {name}_y{place}" for place in range(1 + self.read_twice))


def model_of(cases: Mapping[str, Case]) -> onnx.ModelProto:
    """All cases side by side."""
    used = {case.op for case in cases.values()}
    shared = [nodes for op, nodes in SHARED.items() if op in used]
    text = f"""
    net (float[N,2,4,4] x, float[N,8] f) => ({", ".join(case.outputs(name) for name, case in cases.items())}) {{
        xq = QuantizeLinear (x, s, z) xd = DequantizeLinear (xq, s, z)
        {" ".join([*shared, *(case.nodes(name) for name, case in cases.items())])}
    }}"""
    quantized = {"w": np.full((2, 2, 1, 1), 7, np.int8), "g": np.full((8, 2), 7, np.int8)}
    qparams = {"s": np.float32(0.02), "t": np.float32(0.01), "z": np.uint8(128), "v": np.int8(0)}
    stored = {key: value for name, case in cases.items() for key, value in case.stored(name).items()}
    return build(text, **quantized, **qparams, **stored)


def kept_in_float(model: onnx.ModelProto, path: Path) -> set[str]:
    """The cases whose op onnxruntime computes in float."""
    onnx.save(model, path)
    left = [node for node in optimized(path).graph.node if node.op_type in FLOAT_OPS]
    return {node.output[0].rpartition("_")[0] for node in left}


def said_to_be_float(model: onnx.ModelProto) -> set[str]:
    return {it.node for it in check_model(model, TARGET) if it.severity is Severity.FLOAT}


def at(cut: float, *, steps: float = 0.0, ulps: int = 0) -> np.float32:
    """The scale at which 255 steps reach so many steps beyond a cut, and some of float32's smallest steps more."""
    scale = np.float32(cut / (255 - steps))
    for _ in range(ulps):
        scale = np.nextafter(scale, np.float32(np.inf))
    return scale


CASES = {
    "inside": Case(at(5)),
    "exact": Case(at(6)),
    "ulp": Case(at(6, ulps=1)),
    "smaller_ulp": Case(at(0.25, ulps=1), bounds=(0.0, 0.25)),
    "less_than_half": Case(at(6, steps=0.4)),
    "more_than_half": Case(at(6, steps=0.6)),
    "percent": Case(at(6, steps=2.5)),
    "signed": Case(at(6), -128, dtype=INT8),
    "signed_percent": Case(at(6, steps=2.5), -128, dtype=INT8),
    "symmetric": Case(6 / 127, 0, dtype=INT8),
    "negative_code": Case(at(5), 1),
    "both": Case(1 / 128, 128, (-1.0, 1.0)),
    "both_less_than_half": Case(1 / 127.6, 128, (-1.0, 1.0)),
    "both_low": Case(1 / 128, 130, (-1.0, 1.0)),
    "low_alone": Case(at(60), bounds=(0.0, None)),
    "high_alone": Case(at(6), bounds=(None, 6.0)),
    "high_alone_percent": Case(at(6, steps=2.5), bounds=(None, 6.0)),
    "relu": Case(0.1, bounds=None),
    "relu_negative_code": Case(0.1, 1, None),
    "relu_middle": Case(0.1, 128, None),
    "relu_signed": Case(0.1, -128, None, INT8),
    "relu_signed_negative_code": Case(0.1, -127, None, INT8),
    "no_zero": Case(at(5), None),
    "relu_no_zero": Case(0.1, None, None),
    "listed": Case(np.array([at(5)])),
    "relu_listed": Case(np.array([0.1]), bounds=None),
    "two_readers": Case(at(5), read_twice=True),
    "sum": Case(at(6), op="Add"),
    "sum_percent": Case(at(6, steps=2.5), op="Add"),
    "sum_relu_negative_code": Case(0.1, 3, None, op="Add"),
}
# Here versions differ: older ones keep integers, with a float result for the activation.
PRODUCTS = {
    "product": Case(at(6), op="Gemm"),
    "product_percent": Case(at(6, steps=2.5), op="Gemm"),
    "product_relu": Case(0.1, bounds=None, op="Gemm"),
    "product_relu_negative_code": Case(0.1, 1, None, op="Gemm"),
}


def test_what_stays_float_is_what_the_check_names(tmp_path: Path) -> None:
    model = model_of(CASES if OLD else CASES | PRODUCTS)
    stayed = kept_in_float(model, tmp_path / "model.onnx")
    assert said_to_be_float(model) == stayed
    assert {"percent", "symmetric", "relu_negative_code", "two_readers", "sum_percent"} <= stayed
    assert not {"inside", "exact", "signed", "both", "relu", "relu_signed", "sum"} & stayed
    assert ("less_than_half" in stayed) == OLD


def test_the_same_for_random_scales_about_random_cuts(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    cases = {}
    for number in range(80):
        cut, steps = np.float32(rng.uniform(0.5, 30)), rng.uniform(-0.45, 0.45) + rng.integers(-1, 2)
        qparams = (0, UINT8) if number % 2 else (-128, INT8)
        cases[f"n{number}"] = Case(at(float(cut), steps=steps), qparams[0], (0.0, float(cut)), qparams[1])
    model = model_of(cases)
    stayed = kept_in_float(model, tmp_path / "model.onnx")
    assert said_to_be_float(model) == stayed
    assert 0 < len(stayed) < len(cases)


def test_a_finding_names_the_activation_and_the_quantizer() -> None:
    (found,) = check_model(model_of({"layer": CASES["percent"]}), TARGET)
    assert (found.node, found.op, found.rule) == ("layer", "Conv", "clip-not-absorbed")
    assert "layer_r" in found.what
    assert "layer_q0" in found.what
