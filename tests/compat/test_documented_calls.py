"""Calls as onnxruntime's guide, its docstrings and its end-to-end examples make them, beside those of test_compat."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession
from onnxruntime import quantization as ort_quantization
from onnxruntime.quantization.shape_inference import quant_pre_process
from said import names

import onnxcalib
from models import conv_net, feed_for, op_types
from onnxcalib import Precision, RangeMethod, Recipe, RecipeError
from onnxcalib.compat import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    get_qdq_config,
    quantize,
    quantize_dynamic,
    quantize_static,
)
from onnxcalib.compat.extra import EXTRAS

SAMPLES = feed_for(conv_net(), 12)["x"]
ORT_FUNCTIONS = importlib.import_module("onnxruntime.quantization.quantize")


class ImageReader(CalibrationDataReader):
    """As the example of image classification has it: it opens the model, and prepares all images at the first call."""

    def __init__(self, model_path: str) -> None:
        self.model_path, self.preprocess_flag = model_path, True
        self.enum_data_dicts: Iterator[dict[str, np.ndarray]] = iter([])
        self.datasize = 0

    def get_next(self) -> dict[str, np.ndarray] | None:
        if self.preprocess_flag:
            self.preprocess_flag = False
            session = InferenceSession(self.model_path, providers=["CPUExecutionProvider"])
            name = session.get_inputs()[0].name
            self.datasize = len(SAMPLES)
            self.enum_data_dicts = iter([{name: sample} for sample in np.expand_dims(SAMPLES, 1)])
        return next(self.enum_data_dicts, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("documented") / "model.onnx"
    onnx.save(conv_net(), path)
    return str(path)


def parsed(*arguments: str) -> argparse.Namespace:
    """The arguments of the image classification example."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--quant_format", default=QuantFormat.QDQ, type=QuantFormat.from_string, choices=list(QuantFormat)
    )
    parser.add_argument("--per_channel", default=False, type=bool)
    return parser.parse_args(arguments)


def test_the_example_of_image_classification(model: str, tmp_path: Path) -> None:
    for given in ((), ("--quant_format", "QDQ", "--per_channel", "True")):
        args = parsed(*given)
        output = str(tmp_path / "out.onnx")
        quantize_static(
            model, output, ImageReader(model), quant_format=args.quant_format, per_channel=args.per_channel,
            weight_type=QuantType.QInt8,
        )  # fmt: skip
        assert onnx.load(output) == onnxcalib.quantize(model, {"x": SAMPLES}).model
    args = parsed("--quant_format", "QOperator")
    with pytest.raises(RecipeError) as caught:
        quantize_static(model, output, ImageReader(model), quant_format=args.quant_format)
    names(caught.value, "QOperator", "QDQ")


def test_a_word_on_the_command_line_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--quant_format", "QQ")
    assert "QQ" in capsys.readouterr().err
    assert [str(member) for member in QuantFormat] == [member.name for member in ort_quantization.QuantFormat]


def test_a_model_that_onnxruntime_prepared(model: str, tmp_path: Path) -> None:
    """The guide's advice: shape inference and optimization first, whose model has no batch norm left."""
    prepared, output = str(tmp_path / "infer.onnx"), tmp_path / "out.onnx"
    quant_pre_process(model, prepared, skip_symbolic_shape=True)
    assert "BatchNormalization" not in op_types(onnx.load(prepared))
    result = quantize_static(prepared, output, ImageReader(model), quant_format=QuantFormat.QDQ)
    assert set(result.plan.precisions) == {"stem", "depth", "project", "head", "fc"}
    assert {"QuantizeLinear", "DequantizeLinear"} <= set(op_types(onnx.load(output)))


def test_the_guide_s_dynamic_call(model: str, tmp_path: Path) -> None:
    assert quantize_dynamic(model, str(tmp_path / "model.quant.onnx")).plan.precisions["fc"] == Precision(8, 8)


# Arguments of quantize_static, and what recipe they come to; from the examples of large models, and the docstrings.
STATIC: dict[str, tuple[dict[str, Any], Recipe]] = {
    "words for members": ({"quant_format": "QDQ", "calibrate_method": "Entropy"}, Recipe(ranges=RangeMethod.ENTROPY)),
    "ops of a whole network": (
        {"op_types_to_quantize": sorted({node.op_type for node in conv_net().graph.node})},
        Recipe(),
    ),
    "a type for tensors without one": ({"extra_options": {"DefaultTensorType": onnx.TensorProto.FLOAT}}, Recipe()),
    "a percentile at its default": (
        {"calibrate_method": CalibrationMethod.Percentile, "extra_options": {"CalibPercentile": 99.999}},
        Recipe(ranges=RangeMethod.PERCENTILE),
    ),
    "both symmetries as they are": (
        {"extra_options": {"WeightSymmetric": True, "ActivationSymmetric": False, "AddQDQPairToWeight": False}},
        Recipe(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATIC)
def test_a_call_of_the_docstrings(name: str, model: str, tmp_path: Path) -> None:
    arguments, recipe = STATIC[name]
    assert quantize_static(model, tmp_path / "out.onnx", ImageReader(model), **arguments).recipe == recipe


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "the example of smooth quantization": (
        {
            "quant_format": "QOperator", "op_types_to_quantize": ["MatMul"], "use_external_data_format": True,
            "extra_options": {"SmoothQuant": True, "SmoothQuantAlpha": 0.6},
        },
        ("QOperator",),
    ),
    "its options alone": (
        {"extra_options": {"SmoothQuantAlpha": 0.6, "OpTypesToExcludeOutputQuantization": ["MatMul"]}},
        ("SmoothQuantAlpha", "0.6"),
    ),
    "weights as they are, for TensorRT": ({"extra_options": {"AddQDQPairToWeight": True}}, ("AddQDQPairToWeight",)),
    "pairs of their own": ({"extra_options": {"DedicatedQDQPair": True}}, ("DedicatedQDQPair",)),
    "symmetric ranges": (
        {"extra_options": {"CalibTensorRangeSymmetric": True}}, ("CalibTensorRangeSymmetric", "target"),
    ),
    "weights off centre": ({"extra_options": {"WeightSymmetric": False}}, ("WeightSymmetric", "symmetric")),
    "axes by hand": (
        {"extra_options": {"QDQOpTypePerChannelSupportToAxis": {"MatMul": 1}}}, ("QDQOpTypePerChannelSupportToAxis",),
    ),
    "a least range": ({"extra_options": {"MinimumRealRange": 1e-4}}, ("MinimumRealRange", "0.0001")),
    "float biases": ({"extra_options": {"QuantizeBias": False}}, ("QuantizeBias", "target")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_such_a_call_cannot_have_is_named(name: str, model: str, tmp_path: Path) -> None:
    arguments, facts = REFUSED[name]
    with pytest.raises(RecipeError) as caught:
        quantize_static(model, tmp_path / "out.onnx", ImageReader(model), **arguments)
    names(caught.value, *facts)


@pytest.mark.parametrize("place", ["quantize_static", "quantize_dynamic", "StaticQuantConfig", "DynamicQuantConfig"])
def test_every_key_that_onnxruntime_documents_is_known(place: str) -> None:
    found = getattr(ORT_FUNCTIONS, place)
    text = (found if inspect.isfunction(found) else found.__init__).__doc__
    keys = set(re.findall(r"^\s+([A-Z]\w+|extra\.[\w.]+) = ", text, re.MULTILINE))
    assert len(keys) > 4
    assert keys <= EXTRAS.keys()
    if "ynamic" in place:
        assert not any(EXTRAS[key].static_only for key in keys)


class TestQdqConfig:
    """A configuration for the whole model, by onnxcalib and by onnxruntime."""

    def test_the_shortest(self, model: str, tmp_path: Path) -> None:
        result = quantize(model, tmp_path / "out.onnx", get_qdq_config(model, ImageReader(model)))
        assert result.recipe == Recipe()
        assert onnx.load(tmp_path / "out.onnx") == onnxcalib.quantize(model, {"x": SAMPLES}).model

    def test_its_arguments_come_to_those_of_the_call(self, model: str, tmp_path: Path) -> None:
        config = get_qdq_config(
            onnx.load(model), ImageReader(model), CalibrationMethod.MinMax, {"moving_average": True},
            weight_type=QuantType.QInt4, op_types_to_quantize=["Conv"],
            nodes_to_exclude=lambda whole, node: node.op_type == "Conv" and node.name == whole.graph.node[0].name,
        )  # fmt: skip
        expected = Recipe(
            bits="w4a8", ranges="averaged", include=("stem", "depth", "project", "head"), exclude=("stem",)
        )
        assert quantize(model, tmp_path / "out.onnx", config).recipe == expected

    @pytest.mark.parametrize(
        ("arguments", "fact"),
        [
            ({"activation_symmetric": True}, "ActivationSymmetric"),
            ({"min_real_range": 0.1}, "MinimumRealRange"),
            ({"keep_removable_activations": True}, "QDQKeepRemovableActivations"),
            ({"tensor_quant_overrides": {"x": [{"quant_type": QuantType.QUInt16}]}}, "TensorQuantOverrides"),
            ({"calibrate_args": {"percentil": 99.0}}, "percentile"),
            ({"calibrate_args": {"percentile": 99.0}}, "CalibPercentile"),
            ({"extra_options": {"Unknown": 1}}, "Unknown"),
        ],
    )
    def test_what_cannot_be_honoured(self, arguments: dict[str, Any], fact: str, model: str, tmp_path: Path) -> None:
        with pytest.raises(RecipeError) as caught:
            quantize(model, tmp_path / "out.onnx", get_qdq_config(model, ImageReader(model), **arguments))
        names(caught.value, fact)

    def test_onnxruntime_s_own_says_where_to_take_it_from(self, model: str, tmp_path: Path) -> None:
        if not hasattr(ort_quantization, "get_qdq_config"):
            pytest.skip("this onnxruntime has none")
        theirs = inspect.signature(ort_quantization.get_qdq_config).parameters
        assert list(inspect.signature(get_qdq_config).parameters) == list(theirs)
        with pytest.raises(RecipeError) as caught:
            quantize(model, tmp_path / "out.onnx", ort_quantization.get_qdq_config(model, ImageReader(model)))
        names(caught.value, "ForceQuantizeNoInputCheck", "onnxcalib.compat")
