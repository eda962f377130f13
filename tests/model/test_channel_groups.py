"""Channels that several tensors share: factors on them leave a model as it is, and stop where it would change."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from prepared import prepared

from models import build, conv_net, feed_for, normal, run
from onnxcalib.model.channel_groups import ChannelGroup, find_channel_groups
from onnxcalib.model.equalize import equalized
from onnxcalib.model.layers import find_layers
from onnxcalib.model.prepare import Model


def groups_of(model: Model) -> list[ChannelGroup]:
    return find_channel_groups(model, find_layers(model).layers)


def named(model: Model) -> list[tuple[list[str], list[str]]]:
    """Makers and readers of each group."""
    return [([it.name for it in each.makers], [it.name for it in each.readers]) for each in groups_of(model)]


def assert_scaled_alike(float_model: onnx.ModelProto, names: list[tuple[list[str], list[str]]]) -> None:
    """Any factors leave the outputs, whatever passes between the layers."""
    model = prepared(float_model)
    assert named(model) == names
    exponents = {}
    for number, group in enumerate(groups_of(model)):
        drawn = np.random.default_rng(number).integers(0, 12, group.channels)
        exponents |= {maker.name: drawn for maker in group.makers}
    scaled = equalized(model, exponents)
    assert not np.allclose(_weights(model), _weights(scaled))
    feed = feed_for(float_model, 4)
    reference, found = (run(each.proto, feed)["y"] for each in (model, scaled))
    np.testing.assert_allclose(found, reference, rtol=0, atol=1e-5 * np.abs(reference).max())
    assert equalized(scaled, {}) is scaled


def _weights(model: Model) -> np.ndarray:
    return np.concatenate([onnx.numpy_helper.to_array(it).reshape(-1) for it in model.proto.graph.initializer])


def residual(inner: str, joined: str = "Add (a, b)", **more: np.ndarray) -> onnx.ModelProto:
    """A stem, a branch beside it, what joins both, and a head behind all that follows."""
    text = f"""
    net (float[N,3,8,8] x) => (float[N,5] y) {{
        [stem] s = Conv <pads=[1,1,1,1]> (x, ws, bs)
        a = Relu (s)
        [branch] b = Conv <pads=[1,1,1,1], group=2> (a, wb, bb)
        j = {joined}
        {inner}
        g = GlobalAveragePool (p)
        f = Flatten (g)
        [head] y = Gemm <transB=1> (f, wh, bh)
    }}"""
    return build(
        text, ws=normal(8, 3, 3, 3, scale=0.3), bs=normal(8), wb=normal(8, 4, 3, 3, scale=0.2), bb=normal(8),
        wh=normal(5, 8), bh=normal(5), **more,
    )  # fmt: skip


def test_an_add_joins_what_it_sums_and_grouped_layers_read_their_own() -> None:
    inner = "k = PRelu (j, slopes)  p = MaxPool <kernel_shape=[2,2]> (k)"
    model = residual(inner, slopes=normal(8, 1, 1))
    assert_scaled_alike(model, [(["stem", "branch"], ["branch", "head"])])


def test_a_gate_lets_factors_of_what_it_multiplies_pass() -> None:
    inner = """
        q = GlobalAveragePool (j)
        [squeeze] t = Conv (q, wq)
        [excite] u = Conv (t, wu)
        v = Sigmoid (u)
        p = Mul (j, v)
    """
    model = residual(inner, wq=normal(4, 8, 1, 1, scale=0.3), wu=normal(8, 4, 1, 1, scale=0.3))
    groups = [(["stem", "branch"], ["branch", "squeeze", "head"]), (["squeeze"], ["excite"])]
    assert_scaled_alike(model, groups)


def test_a_flattened_map_has_several_rows_of_a_channel() -> None:
    text = """
    net (float[N,3,4,4] x) => (float[N,5] y) {
        [one] a = Conv (x, w)
        r = Relu (a)
        f = Flatten (r)
        [fc] y = Gemm (f, v)
    }"""
    model = build(text, w=normal(6, 3, 1, 1), v=normal(96, 5))
    assert_scaled_alike(model, [(["one"], ["fc"])])


def test_a_mean_over_places_keeps_channels_apart_and_sizes_have_no_factors() -> None:
    model = residual("m = Relu (j)  z = Shape (m)  p = ReduceMean <axes=[-1,2], keepdims=1> (m)")
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.INT64, [4]))
    assert_scaled_alike(model, [(["stem", "branch"], ["branch", "head"])])


@pytest.mark.parametrize(
    "inner",
    [
        "p = Sigmoid (j)",
        "p = Add (j, one)",
        "p = Mul (j, j)",
        "p = PRelu (j, j)",
        "p = ReduceMean <axes=[1], keepdims=1> (j)",
        "h = HardSwish (j)  p = Mul (j, h)",
        "p = Concat <axis=1> (j)",
        "t = Transpose <perm=[0,1,3,2]> (j)  p = Relu (t)",
    ],
)
def test_what_changes_with_factors_stops_them(inner: str) -> None:
    heads = 1 if "ReduceMean" in inner else 8
    model = residual(inner, one=np.ones(1, np.float32))
    model.opset_import[0].version = 14
    head = next(it for it in model.graph.initializer if it.name == "wh")
    head.CopyFrom(onnx.numpy_helper.from_array(normal(5, heads), "wh"))
    assert named(prepared(model)) == []


def test_an_output_keeps_its_values() -> None:
    model = residual("p = Relu (j)")
    model.graph.output.append(onnx.helper.make_tensor_value_info("j", onnx.TensorProto.FLOAT, None))
    assert named(prepared(model)) == []


def test_channels_that_are_made_anew_are_another_group() -> None:
    found = named(prepared(conv_net()))
    assert found == [(["stem", "project"], ["depth", "head"]), (["depth"], ["project"]), (["head"], ["fc"])]


def test_layers_of_a_group_that_say_different_things_are_left_alone() -> None:
    model = prepared(residual("p = Relu (j)"))
    told = {"stem": np.ones(8, np.int64), "branch": np.zeros(8, np.int64)}
    np.testing.assert_array_equal(_weights(equalized(model, told)), _weights(model))
    assert equalized(model, {"stem": np.ones(8, np.int64)}).batch_norms == model.batch_norms
