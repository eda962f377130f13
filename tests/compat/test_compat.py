"""Calls as onnxruntime's documentation and examples have them, answered by onnxcalib."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import quantization as ort_quantization
from said import names

import onnxcalib
from models import build, conv_net, feed_for, normal, op_types, run
from onnxcalib import DataError, OnnxcalibError, Precision, RangeMethod, Recipe, RecipeError
from onnxcalib.compat import (
    CalibrationDataReader,
    CalibrationMethod,
    DynamicQuantConfig,
    QuantFormat,
    QuantType,
    StaticQuantConfig,
    quantize,
    quantize_dynamic,
    quantize_static,
)

SAMPLES = feed_for(conv_net(), 12)["x"]


class Reader(CalibrationDataReader):
    """A reader as the examples write it: an iterator that is made at the first call, and can be rewound."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.feeds: Iterator[dict[str, np.ndarray]] | None = None

    def get_next(self) -> dict[str, np.ndarray] | None:
        if self.feeds is None:
            self.feeds = iter([{"x": SAMPLES[at : at + self.size]} for at in range(0, len(SAMPLES), self.size)])
        return next(self.feeds, None)

    def rewind(self) -> None:
        self.feeds = None


class OrtReader(ort_quantization.CalibrationDataReader):
    """The same, derived from onnxruntime's class, and good for one reading only."""

    def __init__(self) -> None:
        self.feeds = iter([{"x": SAMPLES[[at]]} for at in range(len(SAMPLES))])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compat") / "model.onnx"
    onnx.save(with_softmax(), path)
    return path


def with_softmax() -> onnx.ModelProto:
    """A model with a node that stays float."""
    net = conv_net()
    net.graph.node.append(onnx.helper.make_node("Softmax", ["y"], ["shares"], name="soft"))
    net.graph.output.append(onnx.helper.make_tensor_value_info("shares", onnx.TensorProto.FLOAT, ["N", 5]))
    return net


def recipe_of(**fields: Any) -> Recipe:
    return Recipe(**fields)


W8A8, W4A8, W7A8 = (Precision(weight, 8) for weight in (8, 4, 7))
ORT = ort_quantization
# What is called beside files and data, and the recipe that it comes to.
STATIC: dict[str, tuple[dict[str, Any], Recipe]] = {
    "the shortest": ({}, Recipe()),
    "image classification on the CPU": (
        {"quant_format": QuantFormat.QDQ, "per_channel": False, "weight_type": QuantType.QInt8},
        Recipe(),
    ),
    "with onnxruntime's own enums": (
        {
            "quant_format": ORT.QuantFormat.QDQ,
            "activation_type": ORT.QuantType.QUInt8,
            "weight_type": ORT.QuantType.QInt8,
            "calibrate_method": ORT.CalibrationMethod.MinMax,
            "per_channel": True,
        },
        Recipe(),
    ),
    "signed activations": ({"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}, Recipe()),
    "unsigned both": ({"activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8}, Recipe()),
    "no VNNI": ({"activation_type": QuantType.QUInt8, "reduce_range": True}, Recipe(bits=(W7A8,))),
    "four-bit weights": ({"weight_type": ORT.QuantType.QInt4, "per_channel": True}, Recipe(bits=(W4A8,))),
    "percentile": ({"calibrate_method": CalibrationMethod.Percentile}, Recipe(ranges=RangeMethod.PERCENTILE)),
    "entropy": ({"calibrate_method": ORT.CalibrationMethod.Entropy}, Recipe(ranges=RangeMethod.ENTROPY)),
    "moving average": (
        {"extra_options": {"CalibMovingAverage": True}},
        Recipe(ranges=RangeMethod.AVERAGED),
    ),
    "only convolutions": (
        {"op_types_to_quantize": ["Conv"]},
        Recipe(include=("stem", "depth", "project", "head")),
    ),
    "op types that the model lacks": ({"op_types_to_quantize": ["Conv", "Gemm", "LSTM", "Add"]}, Recipe()),
    "some nodes": ({"nodes_to_quantize": ["stem", "head"]}, Recipe(include=("stem", "head"))),
    "without the last": ({"nodes_to_exclude": ["fc"]}, Recipe(exclude=("fc",))),
    "without what is float anyway": ({"nodes_to_exclude": ["fc", "soft"]}, Recipe(exclude=("fc",))),
    "empty lists, as programs give them": (
        {"nodes_to_exclude": [], "nodes_to_quantize": [], "op_types_to_quantize": [], "extra_options": {}},
        Recipe(),
    ),
    "extra options at their defaults": (
        {
            "extra_options": {
                "ActivationSymmetric": False, "WeightSymmetric": True, "EnableSubgraph": False,
                "MatMulConstBOnly": True, "AddQDQPairToWeight": False, "DedicatedQDQPair": False,
                "OpTypesToExcludeOutputQuantization": [], "QDQOpTypePerChannelSupportToAxis": {},
                "CalibTensorRangeSymmetric": False, "CalibMaxIntermediateOutputs": 16, "SmoothQuant": False,
                "TensorQuantOverrides": {}, "MinimumRealRange": None, "UseQDQContribOps": False,
            }
        },
        Recipe(),
    ),
    "on the CPU": ({"calibration_providers": ["CPUExecutionProvider"]}, Recipe()),
}  # fmt: skip


@pytest.mark.parametrize("name", STATIC)
def test_a_static_call_gives_our_file(name: str, model: Path, tmp_path: Path) -> None:
    arguments, recipe = STATIC[name]
    output = tmp_path / "out.onnx"
    result = quantize_static(str(model), str(output), Reader(), **arguments)
    assert result.recipe == recipe
    assert onnx.load(output) == onnxcalib.quantize(model, {"x": SAMPLES}, recipe).model


@pytest.mark.parametrize("reader", [Reader(4), OrtReader(), [{"x": SAMPLES}], {"x": SAMPLES}])
def test_any_reader_will_do(reader: Any, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    quantize_static(onnx.load(model), output, reader)
    assert onnx.load(output) == onnxcalib.quantize(model, {"x": SAMPLES}).model


def test_arguments_by_place_as_onnxruntime_has_them(model: Path, tmp_path: Path) -> None:
    result = quantize_static(
        model, tmp_path / "out.onnx", Reader(), QuantFormat.QDQ, ["Conv"], False, True, QuantType.QUInt8,
        QuantType.QInt8, ["stem", "head"], ["head"], False, CalibrationMethod.Percentile, None, {}, None,
    )  # fmt: skip
    asked = recipe_of(bits=(W7A8,), include=("stem", "head"), exclude=("head",), ranges=RangeMethod.PERCENTILE)
    assert result.recipe == asked


DYNAMIC: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "the shortest": ({}, {"stem": 8, "depth": 8, "project": 8, "head": 8, "fc": 8}),
    "unsigned": (
        {"weight_type": QuantType.QUInt8},
        {"stem": 8, "depth": 8, "project": 8, "head": 8, "fc": 8},
    ),
    "only products": (
        {
            "op_types_to_quantize": ["MatMul", "Gemm"], "per_channel": True, "reduce_range": False,
            "extra_options": {"MatMulConstBOnly": True, "EnableSubgraph": True},
        },
        {"fc": 8},
    ),
    "no VNNI": ({"reduce_range": True, "nodes_to_quantize": ["fc", "head"]}, {"head": 7, "fc": 7}),
    "only convolutions": ({"op_types_to_quantize": ["Conv"]}, {"stem": 8, "depth": 8, "project": 8, "head": 8}),
    "four bits": ({"weight_type": ORT.QuantType.QInt4, "nodes_to_quantize": ["fc"]}, {"fc": 4}),
    "without some": ({"nodes_to_exclude": ["stem", "depth"]}, {"project": 8, "head": 8, "fc": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_dynamic_call_quantizes_products_at_run_time(name: str, model: Path, tmp_path: Path) -> None:
    arguments, bits = DYNAMIC[name]
    output = tmp_path / "out.onnx"
    result = quantize_dynamic(model, output, **arguments)
    assert {layer: precision.weight for layer, precision in result.plan.precisions.items()} == bits
    alone = {layer for layer, precision in result.plan.precisions.items() if precision.weight_only}
    assert alone == bits.keys() - {"fc"}  # a Conv is stored in few bits, and computed in float
    written = onnx.load(output)
    assert "QuantizeLinear" not in op_types(written)
    assert ("DynamicQuantizeLinear" in op_types(written)) == ("fc" in bits)
    found, expected = (run(each, {"x": SAMPLES})["y"] for each in (written, onnx.load(model)))
    assert np.abs(found - expected).max() < (0.02 if 4 not in bits.values() else 0.2) * np.abs(expected).max()


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "QOperator": ({"quant_format": ORT.QuantFormat.QOperator}, ("quant_format", "QDQ")),
    "16-bit activations": ({"activation_type": ORT.QuantType.QUInt16}, ("activation_type=QUInt16", "8-bit")),
    "float8": ({"weight_type": ORT.QuantType.QFLOAT8E4M3FN}, ("weight_type=QFLOAT8E4M3FN",)),
    "a type that is none": ({"weight_type": "int8"}, ("weight_type=int8", "QInt8")),
    "a distribution": ({"calibrate_method": CalibrationMethod.Distribution}, ("Distribution", "Percentile")),
    "a GPU": ({"calibration_providers": ["CUDAExecutionProvider"]}, ("calibration_providers",)),
    "a cache": ({"calibration_cache_path": "cache.json"}, ("calibration_cache_path", "run_dir")),
    "no data": ({"calibration_data_reader": None}, ("calibration_data_reader",)),
    "an unknown key": ({"extra_options": {"ActivationSymetric": True}}, ("ActivationSymetric", "ActivationSymmetric")),
    "symmetric activations": ({"extra_options": {"ActivationSymmetric": True}}, ("ActivationSymmetric", "target")),
    "SmoothQuant": ({"extra_options": {"SmoothQuant": True}}, ("SmoothQuant", "light")),
    "another percentile": ({"extra_options": {"CalibPercentile": 99.9}}, ("CalibPercentile", "99.9", "99.99")),
    "overrides": ({"extra_options": {"TensorQuantOverrides": {"x": [{}]}}}, ("TensorQuantOverrides", "overrides")),
    "an op that stays float": ({"op_types_to_quantize": ["Conv", "Softmax"]}, ("Softmax", "op_types_to_quantize")),
    "no layer at all": ({"op_types_to_quantize": ["MatMul"]}, ("op_types_to_quantize", "Conv", "Gemm")),
    "a node that is not there": ({"nodes_to_exclude": ["steam"]}, ("nodes_to_exclude", "steam", "stem")),
    "a sum between layers": ({"nodes_to_exclude": ["sum"]}, ("nodes_to_exclude", "sum", "Add")),
    "a folded batch norm": ({"nodes_to_exclude": ["bn1"]}, ("nodes_to_exclude", "bn1")),
    "a node that is no layer": ({"nodes_to_quantize": ["soft"]}, ("nodes_to_quantize", "soft", "Softmax")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_named(name: str, model: Path, tmp_path: Path) -> None:
    arguments, facts = REFUSED[name]
    with pytest.raises(OnnxcalibError) as caught:
        quantize_static(model, tmp_path / "out.onnx", **{"calibration_data_reader": Reader(), **arguments})
    assert isinstance(caught.value, RecipeError | DataError)
    assert caught.value.hint
    names(caught.value, *facts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"extra_options": {"ActivationSymmetric": True}}, ("ActivationSymmetric",)),
        ({"weight_type": QuantType.QInt16}, ("weight_type=QInt16",)),
        ({"extra_options": {"CalibMovingAverage": True}}, ("CalibMovingAverage",)),
        ({"extra_options": {"ForceQuantizeNoInputCheck": True}}, ("ForceQuantizeNoInputCheck",)),
    ],
)
def test_the_dynamic_call_refuses_too(
    arguments: dict[str, Any], facts: tuple[str, ...], model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        quantize_dynamic(model, tmp_path / "out.onnx", **arguments)
    names(caught.value, *facts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", [ort_quantization, onnxcalib.compat])
def test_configurations_of_both(module: Any, model: Path, tmp_path: Path) -> None:
    static = module.StaticQuantConfig(
        Reader(), calibrate_method=module.CalibrationMethod.Percentile, nodes_to_exclude=["fc"]
    )
    result = quantize(model, tmp_path / "static.onnx", static)
    assert result.recipe == recipe_of(ranges=RangeMethod.PERCENTILE, exclude=("fc",))
    dynamic = module.DynamicQuantConfig(op_types_to_quantize=["Gemm"])
    assert list(quantize(model, tmp_path / "dynamic.onnx", dynamic).plan.precisions) == ["fc"]
    with pytest.raises(RecipeError, match="quant_config"):
        quantize(model, tmp_path / "none.onnx", {"weight_type": 8})


def test_weights_in_a_file_of_their_own(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    quantize_static(model, output, Reader(), use_external_data_format=True)
    assert (tmp_path / "out.onnx.data").stat().st_size >= 0
    assert np.isfinite(run(output, {"x": SAMPLES})["y"]).all()


@pytest.mark.parametrize("name", ["quantize_static", "quantize_dynamic", "quantize"])
def test_the_arguments_are_those_of_onnxruntime(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (onnxcalib.compat, ORT))
    newer = {"calibration_providers", "calibration_cache_path"}  # not in every version that we run with
    assert [key for key in ours if key in theirs or key not in newer] == list(theirs)
    for key, parameter in theirs.items():
        assert (
            getattr(ours[key].default, "name", ours[key].default)
            == getattr(parameter.default, "name", parameter.default)
            or key == "calibration_data_reader"
        ), key


@pytest.mark.parametrize("kind", [QuantType, QuantFormat, CalibrationMethod, StaticQuantConfig, DynamicQuantConfig])
def test_words_are_those_of_onnxruntime(kind: type) -> None:
    theirs = getattr(ORT, kind.__name__)
    if hasattr(kind, "__members__"):
        assert {name: member.value for name, member in theirs.__members__.items()}.items() <= {
            name: member.value for name, member in kind.__members__.items()
        }.items()
    else:
        assert set(inspect.signature(theirs).parameters) <= set(inspect.signature(kind).parameters)


def test_a_transformer_whose_products_are_named(tmp_path: Path) -> None:
    """As language models are called: only MatMul, attention's own products left alone."""
    text = """
    net (float[N,S,8] x) => (float[N,S,8] y) {
        [query] q = MatMul (x, w1)
        [turned] t = Transpose <perm=[0,2,1]> (x)
        [scores] s = MatMul (q, t)
        [soft] a = Softmax <axis=-1> (s)
        [mixed] m = MatMul (a, x)
        [out] y = MatMul (m, w2)
    }"""
    onnx.save(build(text, w1=normal(8, 8), w2=normal(8, 8)), tmp_path / "text.onnx")
    options = {"MatMulConstBOnly": True}
    result = quantize_dynamic(
        tmp_path / "text.onnx", tmp_path / "out.onnx", op_types_to_quantize=["MatMul"], extra_options=options
    )
    assert {name: str(bits) for name, bits in result.plan.precisions.items()} == {"query": "w8a8", "out": "w8a8"}
    assert set(result.plan.dynamic) == {"x", "m"}


def test_a_dynamic_file_computes_what_onnxruntime_s_computes(tmp_path: Path) -> None:
    """Both find the range of what a product reads in the run: only the rounding of weights may differ."""
    text = (
        "net (float[N,16] x) => (float[N,4] y) { [one] h = MatMul (x, a) [act] r = Relu (h) [two] y = MatMul (r, b) }"
    )
    onnx.save(build(text, a=normal(16, 16), b=normal(16, 4, seed=1)), tmp_path / "model.onnx")
    for module in (onnxcalib.compat, ORT):
        module.quantize_dynamic(tmp_path / "model.onnx", tmp_path / f"{module.__name__}.onnx", per_channel=True)
    feed = {"x": 100 * normal(64, 16, seed=2)}  # of a size that no calibration would have told of
    ours, theirs, exact = (
        run(onnx.load(tmp_path / f"{name}.onnx"), feed)["y"]
        for name in (onnxcalib.compat.__name__, ORT.__name__, "model")
    )
    errors = [np.mean((found - exact) ** 2) / np.mean(exact**2) for found in (ours, theirs)]
    assert 0 < errors[0] < 2 * errors[1] < 1e-2


def test_onnxruntime_s_quantization_is_not_imported() -> None:
    code = "import sys, onnxcalib.compat; assert 'onnxruntime' not in sys.modules, 'imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
