"""Damaged models are refused with a sentence before anything else reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import build, conv_net, feed_for, normal, run
from onnxcalib.api import ModelError, inspect, quantize
from onnxcalib.model.wellformed import check_well_formed


def _bytes_missing(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-3]


def _values_missing(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    values = numpy_helper.to_array(tensor).reshape(-1)[1:].tolist()
    tensor.ClearField("raw_data")
    tensor.float_data.extend(values)


def _unknown_type(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


def _negative_size(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[0] *= -1


def _unknown_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 1000


def _bare_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].ClearField("type")


def _reference(model: onnx.ModelProto) -> None:
    attribute = model.graph.node[0].attribute[0]
    attribute.ref_attr_name = "outer"


def _no_groups(model: onnx.ModelProto) -> None:
    depthwise = next(node for node in model.graph.node if node.name == "depth")
    next(attribute for attribute in depthwise.attribute if attribute.name == "group").i = 0


def _no_strides(model: onnx.ModelProto) -> None:
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("strides", [1, 0]))


@pytest.mark.parametrize(
    "damage",
    [
        _bytes_missing, _values_missing, _unknown_type, _negative_size, _unknown_input, _bare_input, _reference,
        _no_groups, _no_strides,
    ],
)  # fmt: skip
def test_damage_is_named(damage: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    model = conv_net()
    feed = feed_for(model, 4)
    damage(model)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    for source in (model, tmp_path / "model.onnx"):
        with pytest.raises(ModelError) as caught:
            quantize(source, feed, output=tmp_path / "out.onnx")
        assert caught.value.hint
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("name", [b"stem", b"r1", b"net"])
def test_names_that_are_no_text_are_refused(name: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(conv_net().SerializeToString().replace(name, b"\xff" * len(name)))
    with pytest.raises(ModelError):
        inspect(path)


def test_packed_values_fill_their_shape() -> None:
    model = conv_net()
    for kind, sizes in ((TensorProto.INT4, (3, 4)), (TensorProto.BFLOAT16, (2,)), (TensorProto.COMPLEX64, (2,))):
        model.graph.initializer.extend(helper.make_tensor(f"{kind}_{size}", kind, [size], [1] * size) for size in sizes)
    check_well_formed(model, "the model")


def test_numbers_instead_of_bytes_and_hints_of_unknown_types_are_read() -> None:
    model = build("net (float[N,4] x) => (float[N,3] y) { [one] a = MatMul (x, w) [two] y = Relu (a) }", w=normal(4, 3))
    feed = feed_for(model, 12)
    expected = run(model, feed)["y"]
    model.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [4, 3], normal(4, 3).reshape(-1)))
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, None))
    model.graph.value_info[0].type.tensor_type.elem_type = 99
    found = run(quantize(model, feed).model, feed)["y"]
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_an_input_that_is_an_output_too_keeps_its_shape() -> None:
    text = "net (float[N,4] x) => (float[N,3] y, float[N,4] x) { [one] y = MatMul (x, w) }"
    model = build(text, w=normal(4, 3))
    model.graph.output[1].type.tensor_type.ClearField("shape")
    written = quantize(model, feed_for(model, 12)).model
    assert [dim.dim_value for dim in written.graph.input[0].type.tensor_type.shape.dim] == [0, 4]


def test_a_split_into_more_than_it_says_is_refused() -> None:
    """onnx's shape inference would abort the process."""
    text = """net (float[2,4] x) => (float[2,2] y) {
        [cut] a, b = Split <axis = 1, num_outputs = 2> (x)
        [only] y = MatMul (a, w)
    }"""
    model = build(text, 18, w=normal(2, 2))
    model.graph.node[0].attribute[1].i = 1
    with pytest.raises(ModelError) as caught:
        quantize(model, {"x": normal(2, 4)})
    assert "num_outputs" in str(caught.value)
