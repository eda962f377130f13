"""The written file: its structure, its quantized weights, and that runtimes compute what the plan says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models import BUILDERS, UNOPTIMIZED, build, conv_net, feed_for, initializer, normal, op_types, optimized_ops, run
from onnxcalib import Precision, RangeMethod, Recipe, Result, quantize
from onnxcalib.model.builder import SurgeonBuilder
from onnxcalib.model.layers import find_layers
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.read import read_prepared
from onnxcalib.model.storage import Packed, pack, unpacking_nodes
from onnxcalib.numerics.quant_params import dequantize, of_each
from onnxcalib.numerics.quant_params import quantize as codes_of
from onnxcalib.targets import Storage, find_target

TARGETS = ("ort", "paper")


def quantized(model: onnx.ModelProto, target: str = "ort", bits: str = "w8a8", **options: object) -> Result:
    recipe = Recipe(bits=(Precision.parse(bits),), target=target, ranges=RangeMethod.MINMAX, **options)
    return quantize(model, feed_for(model), recipe)


def makers_of(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output}


def data_flow(model: onnx.ModelProto) -> list[str]:
    """Each node that activations pass through, with where its inputs come from; weights are only marked."""
    makers, stored = makers_of(model), {tensor.name for tensor in model.graph.initializer}
    pairs = {"QuantizeLinear": "Q", "DequantizeLinear": "DQ"}

    def constant(name: str) -> bool:
        return name in stored or (name in makers and all(constant(read) for read in makers[name].input if read))

    def word(name: str) -> str:
        if constant(name):
            return "DQ(const)" if name in makers else "const"
        maker = makers.get(name)
        return name if maker is None else pairs.get(maker.op_type, maker.name)

    return [
        f"{pairs.get(node.op_type, node.name)}({', '.join(word(name) for name in node.input)})"
        for node in model.graph.node
        if not all(constant(name) for name in node.input if name)
    ]


Q, DQ = "Q({}, const, const)".format, "DQ(Q, const, const)"
FULL = "(DQ, DQ(const), DQ(const))"  # a layer with integer bias
PAPER = "(DQ, DQ(const), const)"  # and one with a float bias

CONV_NET = {
    "ort": [
        Q("x"), DQ, f"stem{FULL}", "clip1(stem, const, const)", Q("clip1"), DQ, f"depth{FULL}",
        "clip2(depth, const, const)", Q("clip2"), DQ, f"project{FULL}", Q("project"), DQ, "sum(DQ, DQ)", Q("sum"), DQ,
        f"head{FULL}", "relu(head)", Q("relu"), DQ, "pool(DQ)", Q("pool"), DQ, "flat(DQ)", Q("flat"), DQ, f"fc{FULL}",
    ],
    "paper": [
        Q("x"), DQ, f"stem{PAPER}", "clip1(stem, const, const)", Q("clip1"), DQ, f"depth{PAPER}",
        "clip2(depth, const, const)", Q("clip2"), DQ, f"project{PAPER}", "sum(clip1, project)", Q("sum"), DQ,
        f"head{PAPER}", "relu(head)", "pool(relu)", "flat(pool)", Q("flat"), DQ, f"fc{PAPER}",
    ],
}  # fmt: skip

TRANSFORMER = [
    # A layer with a bias is a Gemm of rows, and what both products of attention read has a grid.
    Q("x"), "x_input_dequantized_rows(Q, const)", DQ, "DQ(x_input_dequantized_rows, const, const)",
    "key(DQ, DQ(const))", "value(DQ, DQ(const))", f"query{FULL}", "turn(key)", Q("value"), "q(query, const)", Q("turn"),
    DQ, Q("q"), DQ, DQ, "scores(DQ, DQ)", "soft(scores)", Q("soft"), DQ, "mix(DQ, DQ)", "skip(x, mix)", Q("skip"),
    "h_input_dequantized_rows(Q, const)", "DQ(h_input_dequantized_rows, const, const)", f"up{FULL}", "u1(up, const)",
    "act(u1)", Q("act"), "u_input_dequantized_rows(Q, const)", "DQ(u_input_dequantized_rows, const, const)",
    f"down{FULL}", "d(down, const)", "out(skip, d)",
]  # fmt: skip

FLOAT_BIASES = [
    Q("x"), DQ, "query(DQ, DQ(const))", "key(DQ, DQ(const))", "value(DQ, DQ(const))", "query_bias(query, const)",
    "turn(key)", "scores(query_bias, turn)", "soft(scores)", "mix(soft, value)", "skip(x, mix)", Q("skip"), DQ,
    "up(DQ, DQ(const))", "up_bias(const, up)", "act(up_bias)", Q("act"), DQ, "down(DQ, DQ(const))",
    "down_bias(down, const)", "out(skip, down_bias)",
]  # fmt: skip
TRANSFORMERS = {"ort": TRANSFORMER, "paper": FLOAT_BIASES}

BRANCHES = {
    "ort": [
        Q("x"), DQ, f"stem{FULL}", "relu(stem)", Q("relu"), DQ, f"left{FULL}", "shrink(DQ)", Q("left"), Q("shrink"),
        DQ, DQ, "sigmoid(DQ)", Q("sigmoid"), DQ, "silu(DQ, DQ)", Q("silu"), DQ, "both(DQ, DQ)", Q("both"), DQ,
        f"last{FULL}", Q("last"), DQ,
    ],
    "paper": [
        Q("x"), DQ, f"stem{PAPER}", "relu(stem)", Q("relu"), "shrink(relu)", DQ, f"left{PAPER}", "sigmoid(left)",
        "silu(left, sigmoid)", "both(silu, shrink)", Q("both"), DQ, f"last{PAPER}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("builder", "golden"),
    [("conv_net", CONV_NET), ("transformer_block", TRANSFORMERS), ("branches", BRANCHES)],
)
def test_structure(builder: str, golden: dict[str, list[str]], target: str) -> None:
    model = quantized(BUILDERS[builder](), target).model
    # The order of independent nodes is nobody's promise.
    assert sorted(data_flow(model)) == sorted(golden[target])


def test_narrow_activations_add_an_integer_clip_and_drop_the_relu_that_it_repeats() -> None:
    flow = data_flow(quantized(conv_net(), bits="w4a4").model)
    clip = "x_input_clipped(Q, const, const)"
    assert clip in flow
    assert Q("x") in flow
    assert "DQ(x_input_clipped, const, const)" in flow
    # Only the depthwise layer's Clip is read by nothing but a layer: its quantizer takes its place.
    assert [line for line in flow if line.startswith("clip2")] == []
    assert "clip1(stem, const, const)" in flow


EXPECTED = {
    "conv_net": {"QLinearConv": 4, "QLinearAdd": 1, "QLinearGlobalAveragePool": 1, "QGemm": 1},
    "conv1d": {"QLinearConv": 2},
    "conv3d": {"QLinearConv": 2},
    "grouped": {"QLinearConv": 2},
    "branches": {"QLinearConv": 3, "QLinearSigmoid": 1, "QLinearMul": 1, "QLinearConcat": 1},
}


@pytest.mark.parametrize("bits", ["w8a8", "w4a8", "w3a5"])
@pytest.mark.parametrize("builder", EXPECTED)
def test_onnxruntime_finds_only_integer_kernels_for_ort(builder: str, bits: str, tmp_path: Path) -> None:
    ops = optimized_ops(quantized(BUILDERS[builder](), bits=bits).model, tmp_path)
    assert not {"Conv", "FusedConv", "Gemm", "FusedGemm", "Add", "Concat", "MatMul", "GlobalAveragePool"} & set(ops)
    assert {op: ops.count(op) for op in EXPECTED[builder]} == EXPECTED[builder]


def test_the_paper_target_keeps_convolutions_float(tmp_path: Path) -> None:
    ops = optimized_ops(quantized(conv_net(), "paper").model, tmp_path)
    assert "QLinearConv" not in ops
    assert ops.count("Conv") + ops.count("FusedConv") == 4


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("builder", BUILDERS)
def test_every_kind_of_layer_runs_near_float(builder: str, target: str) -> None:
    model = BUILDERS[builder]()
    feed = feed_for(model)
    reference, result = run(model, feed)["y"], quantized(model, target)
    assert len(result.plan.layers) == len(result.layers.layers) > 1
    output = run(result.model, feed)["y"]
    assert output.shape == reference.shape
    noise = np.sqrt(np.mean((output - reference) ** 2) / np.mean(reference**2))
    assert 0 < noise < 0.02


@pytest.mark.parametrize("bits", ["w8a8", "w4a4"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("builder", BUILDERS)
def test_deployment_equals_simulation_within_one_step(builder: str, target: str, bits: str) -> None:
    model = BUILDERS[builder]()
    result, feed = quantized(model, target, bits), feed_for(model, seed=1)
    deployed, simulated = run(result.model, feed)["y"], run(result.model, feed, **UNOPTIMIZED)["y"]
    last = result.layers.layers[-1]
    if "y" in result.plan.shared:
        step = float(result.plan.shared["y"].scale)
    else:  # a float output: what one step of each of the last layer's inputs can do
        params = result.plan.layers[last.name]
        reach = np.abs(dequantize(params.quantized, params.qparams)).sum() / last.channels
        step = float(result.plan.layer_input(last.input).scale * reach)
    assert np.abs(deployed - simulated).max() <= 1.001 * step


def weight_codes_tensor(model: onnx.ModelProto, layer: str) -> str:
    """The name of the integer tensor that a layer's weight is dequantized from."""
    makers = makers_of(model)
    node = makers[next(node for node in model.graph.node if node.name == layer).input[1]]
    while node.op_type != "DequantizeLinear":
        node = makers[node.input[0]]
    return node.input[0]


def codes_in_file(model: onnx.ModelProto, layer: str) -> np.ndarray:
    """The quantized values as the runtime sees them."""
    name = weight_codes_tensor(model, layer)
    if name in {tensor.name for tensor in model.graph.initializer}:
        return initializer(model, name)
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    zero = next(node.input[2] for node in model.graph.node if node.input[:1] == [name])
    del shown.graph.output[:]
    kind = onnx.helper.np_dtype_to_tensor_dtype(initializer(model, zero).dtype)
    shown.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    return run(shown, feed_for(model, 1))[name]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_in_the_file_are_the_plans(bits: int, target: str) -> None:
    result = quantized(conv_net(), target, f"w{bits}a8")
    for name, params in result.plan.layers.items():
        found = codes_in_file(result.model, name)
        assert found.dtype == params.quantized.dtype
        assert len(np.unique(params.quantized)) > 2
        shifts = find_target(target).shifts(bits)  # so that kernels for symmetric weights run
        taken_off = of_each(params.qparams, params.quantized.shape)[1] if shifts else 0
        assert np.any(taken_off) == shifts
        np.testing.assert_array_equal(found.reshape(params.quantized.shape), params.quantized - taken_off)
        assert params.qparams.low <= params.quantized.min() < params.quantized.max() <= params.qparams.high


@pytest.mark.parametrize("target", TARGETS)
def test_narrow_weights_lie_in_the_file_as_bits(target: str) -> None:
    model = build(
        "net (float[N,64] x) => (float[N,64] y) { [a] h = Gemm (x, w, b) [b] y = Gemm (h, v, b) }",
        w=normal(64, 64), v=normal(64, 64, seed=1), b=normal(64),
    )  # fmt: skip
    sizes = {bits: quantized(model, target, f"w{bits}a8").model.ByteSize() for bits in range(2, 9)}
    stored = {bits: 2 * 64 * 64 * bits // 8 for bits in sizes}
    overhead = {bits: sizes[bits] - stored[bits] for bits in sizes}
    assert max(overhead.values()) < 6000
    assert all(sizes[bits] < sizes[bits + 1] for bits in range(2, 7))


SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)


@st.composite
def code_arrays(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    bits, signed = draw(st.integers(2, 7)), draw(st.booleans())
    low = -(2 ** (bits - 1)) if signed else 0
    dtype = np.int8 if signed else np.uint8
    return draw(hnp.arrays(dtype, SHAPES, elements=st.integers(low, low + 2**bits - 1))), bits, low


def unpack(packed: Packed) -> np.ndarray:
    """The reference for what the unpacking nodes compute."""
    bits = np.unpackbits(packed.planes, axis=1, bitorder="little").astype(np.int32)
    stored = (bits << np.arange(len(packed.planes))[:, None]).sum(axis=0)[: int(np.prod(packed.shape))]
    return (stored + packed.low).astype(packed.dtype).reshape(packed.shape)


def unpacked_by_runtime(packed: Packed) -> np.ndarray:
    graph = gs.Graph(opset=13, ir_version=8)
    source = gs.Variable("x", np.float32, [1])
    kept = gs.Variable("kept", np.float32, [1])
    graph.inputs, graph.nodes = [source], [gs.Node("Identity", "keep", {}, [source], [kept])]
    integers = unpacking_nodes(SurgeonBuilder(graph), packed, "w")
    integers.dtype = packed.dtype
    graph.outputs = [kept, integers]
    model = gs.export_onnx(graph.toposort(), do_type_check=False)
    return run(model, {"x": np.zeros(1, np.float32)})[integers.name]


@settings(max_examples=60)
@given(code_arrays())
def test_bit_planes_give_the_codes_back(case: tuple[np.ndarray, int, int]) -> None:
    integers, bits, low = case
    packed = pack(integers, bits, low)
    assert packed.planes.shape == (bits, -(-integers.size // 8))
    for found in (unpack(packed), unpacked_by_runtime(packed)):
        assert found.dtype == integers.dtype
        np.testing.assert_array_equal(found, integers)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", ["w2a8", "w4a4", "w7a6"])
@pytest.mark.parametrize("builder", ["conv_net", "conv_transpose", "transformer_block"])
def test_storage_does_not_change_a_bit_of_the_output(builder: str, bits: str, target: str) -> None:
    model = BUILDERS[builder]()
    result, feed = quantized(model, target, bits), feed_for(model, seed=2)
    found = find_target(target)
    plain = dataclasses.replace(found, storage=Storage.INT8)
    bytewise = write_qdq(read_prepared(model, found), result.layers.layers, result.plan, plain)
    assert "BitShift" in op_types(result.model)
    assert "BitShift" not in op_types(bytewise)
    np.testing.assert_array_equal(run(result.model, feed)["y"], run(bytewise, feed)["y"])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_of_a_narrow_input_are_those_of_the_numerics(bits: int, target: str) -> None:
    model = conv_net()
    result = quantized(model, target, f"w8a{bits}")
    readers = {node.input[0]: node for node in result.model.graph.node}
    node = readers["x"]
    assert node.op_type == "QuantizeLinear"
    if bits < 8:
        node = readers[node.output[0]]
        assert node.op_type == "Clip"
    assert readers[node.output[0]].op_type == "DequantizeLinear"
    shown = onnx.ModelProto()
    shown.CopyFrom(result.model)
    shown.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.UINT8, None))
    feed = {"x": 2 * feed_for(model, seed=3)["x"]}  # beyond the calibrated range
    integers = run(shown, feed, **UNOPTIMIZED)[node.output[0]]
    assert integers.min() == 0
    assert integers.max() == 2**bits - 1
    np.testing.assert_array_equal(integers, codes_of(feed["x"], result.plan.layer_input("x")))


def test_metadata_and_names_survive() -> None:
    model = conv_net()
    model.producer_name, model.doc_string = "somebody", "some words"
    model.metadata_props.add(key="author", value="me")
    written = quantized(model).model
    assert (written.producer_name, written.doc_string) == ("somebody", "some words")
    assert [(entry.key, entry.value) for entry in written.metadata_props] == [("author", "me")]
    assert list(written.graph.input) == list(model.graph.input)
    assert list(written.graph.output) == list(model.graph.output)


TWO_OUTPUTS = """
    net (float[N,3,6,6] x) => (float[N,4,6,6] middle, float[N,2,6,6] y) {
        [first] c = Conv <pads=[1,1,1,1]> (x, w1, b1)
        [relu] middle = Relu (c)
        [second] y = Conv (middle, w2, b2)
    }"""


@pytest.mark.parametrize("bits", ["w8a8", "w4a4"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_tensor_that_is_output_and_layer_input(target: str, bits: str) -> None:
    model = build(TWO_OUTPUTS, w1=normal(4, 3, 3, 3), b1=normal(4), w2=normal(2, 4, 1, 1), b2=normal(2))
    feed = feed_for(model)
    reference, outputs = run(model, feed), run(quantized(model, target, bits).model, feed)
    assert list(outputs) == ["middle", "y"]
    for name in outputs:
        noise = np.sqrt(np.mean((outputs[name] - reference[name]) ** 2) / np.mean(reference[name] ** 2))
        assert noise < (0.02 if bits == "w8a8" else 0.4)
    assert outputs["middle"].min() >= 0


@pytest.mark.parametrize("target", TARGETS)
def test_the_bias_of_an_almost_dead_channel_does_not_overflow(target: str) -> None:
    weight = normal(4, 3, 3, 3)
    weight[1] *= 1e-12
    weight[2] = 0
    model = build(
        "net (float[N,3,6,6] x) => (float[N,4,4,4] y) {"
        " [one] c = Conv (x, w, b) [relu] r = Relu (c) [two] y = Conv (r, v) }",
        w=weight, b=np.array([0.5, 3.0, 40.0, -0.5], np.float32), v=np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1),
    )  # fmt: skip
    feed = feed_for(model)
    reference, result = run(model, feed)["y"], quantized(model, target)
    step = float(result.plan.layer_input("r").scale)
    for settings_ in ({}, UNOPTIMIZED):
        output = run(result.model, feed, **settings_)["y"]
        assert np.abs(output - reference)[:, 1:3].max() <= 1.5 * step
    if target == "ort":
        bias = next(value for value in result.model.graph.initializer if value.name.startswith("one_bias_codes"))
        integers = onnx.numpy_helper.to_array(bias)
        assert integers.dtype == np.int32
        assert np.abs(integers.astype(np.int64)).max() <= 2**30 + 2**8


def test_an_integer_bias_is_the_float_one_within_half_a_step() -> None:
    result = quantized(conv_net())
    written, plan = result.model, result.plan
    nodes = {node.name: node for node in written.graph.node}
    makers = makers_of(written)
    for layer in result.layers.layers:
        node = makers[nodes[layer.name].input[2]]
        integers, scale = initializer(written, node.input[0]), initializer(written, node.input[1])
        params = plan.layers[layer.name]
        expected = plan.layer_input(layer.input).scale * params.qparams.scale
        np.testing.assert_allclose(scale, expected, rtol=1e-6)
        assert (np.abs(integers * scale.astype(np.float64) - params.bias) <= 0.5001 * scale).all()


def test_excluded_layers_keep_their_float_weight() -> None:
    model = conv_net()
    result = quantized(model, exclude=("head", "stem"))
    assert set(result.plan.layers) == {"depth", "project", "fc"}
    by_name = {node.name: node for node in result.model.graph.node}
    np.testing.assert_array_equal(initializer(result.model, by_name["head"].input[1]), initializer(model, "w4"))
    noise = run(result.model, feed_for(model))["y"] - run(model, feed_for(model))["y"]
    assert np.abs(noise).max() < 0.2


def test_layers_that_share_a_weight_each_keep_their_own_codes() -> None:
    model = build(
        "net (float[N,4] x) => (float[N,4] y) { [one] h = Gemm (x, w, b) [two] y = Gemm (h, w, b) }",
        w=normal(4, 4), b=normal(4),
    )  # fmt: skip
    layers = find_layers(read_prepared(model, find_target("ort"))).layers
    assert [layer.weight for layer in layers] == ["w", "w"]
    result = quantized(model)
    for name in ("one", "two"):
        np.testing.assert_array_equal(codes_in_file(result.model, name), result.plan.layers[name].quantized)
    np.testing.assert_allclose(run(result.model, feed_for(model))["y"], run(model, feed_for(model))["y"], atol=0.3)
