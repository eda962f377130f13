"""Weights alone: activations stay float, weights lie in the form that onnxruntime multiplies with as they are."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from by_hand import held_out_loss
from onnx import TensorProto, numpy_helper
from said import refused

from models import (
    UNOPTIMIZED,
    build,
    change,
    conv_net,
    feed_for,
    initializer,
    mlp,
    normal,
    op_types,
    optimized_ops,
    run,
    transformer_block,
)
from onnxcalib import Pipeline, Precision, RangeMethod, Recipe, quantize
from onnxcalib.checks.check import check_model, matters
from onnxcalib.errors import RecipeError
from onnxcalib.model.quantized import read_quantized
from onnxcalib.numerics.quant_params import QuantScheme, dequantize
from onnxcalib.numerics.quant_params import quantize as codes_of
from onnxcalib.numerics.range_estimators import blockwise_qparams
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import FLOAT_BITS, Rounding, parse_bits
from onnxcalib.targets import NAMES, find_target
from onnxcalib.targets.target import Blocks

NEWEST = tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 30)
W4, W8 = Precision(4, FLOAT_BITS), Precision(8, FLOAT_BITS)


def with_weights(model: onnx.ModelProto, plan: QuantPlan, weights: dict[str, str]) -> onnx.ModelProto:
    """The float model with the real values of the plan's quantized values."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for layer, name in weights.items():
        change(changed, name, dequantize(plan.layers[layer].quantized, plan.layers[layer].qparams))
    return changed


MLP_WEIGHTS = {"turned": "w1", "straight": "w2", "bare": "w3"}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [None, 16, 32])
def test_the_file_computes_with_the_codes_of_the_plan(bits: int, block: int | None) -> None:
    model, feed = mlp(), feed_for(mlp())
    result = quantize(model, feed, Recipe(bits=(Precision(bits, FLOAT_BITS),), block_size=block))
    onnx.checker.check_model(result.model, full_check=True)
    assert Counter(op_types(result.model))["DequantizeLinear"] == 3
    assert "QuantizeLinear" not in op_types(result.model)
    expected = run(with_weights(model, result.plan, MLP_WEIGHTS), feed)["y"]
    np.testing.assert_allclose(run(result.model, feed, **UNOPTIMIZED)["y"], expected, rtol=1e-5, atol=1e-5)
    shapes = {name: params.qparams.scale.shape for name, params in result.plan.layers.items()}
    if block is None:
        assert shapes == {"turned": (64,), "straight": (48,), "bare": (12,)}
    else:  # the sums of 80 and of 48 end in a shorter block
        assert shapes == {
            "turned": (64, -(-80 // block)), "straight": (64 // block, 48), "bare": (-(-48 // block), 12)
        }  # fmt: skip


def test_four_bits_take_half_a_byte_and_keep_their_codes() -> None:
    model = mlp()
    result = quantize(model, feed_for(model), Recipe(bits=(W4,), block_size=32))
    stored = next(tensor for tensor in result.model.graph.initializer if tensor.name == "straight_weight_codes")
    assert stored.data_type == TensorProto.INT4
    assert len(stored.raw_data) == 64 * 48 // 2
    assert (numpy_helper.to_array(stored).astype(np.int8) == result.plan.layers["straight"].quantized).all()
    transposed = initializer(result.model, "turned_weight_codes").astype(np.int8)
    assert (transposed == result.plan.layers["turned"].quantized.T).all()


@pytest.mark.skipif(not NEWEST, reason="older runtimes dequantize first")
@pytest.mark.parametrize("bits", [W4, W8])
@pytest.mark.parametrize("block", [None, 32])
def test_the_newest_runtime_multiplies_with_the_codes_as_they_are(
    bits: Precision, block: int | None, tmp_path: Path
) -> None:
    feed = feed_for(mlp())
    result = quantize(mlp(), feed, Recipe(bits=(bits,), block_size=block))
    ops = Counter(optimized_ops(result.model, tmp_path))
    assert ops["MatMulNBits"] == 3
    assert "DequantizeLinear" not in ops
    plain, fused = run(result.model, feed, **UNOPTIMIZED)["y"], run(result.model, feed)["y"]
    # The fused product rounds its activations to eight bits.
    assert np.abs(fused - plain).max() < 0.03 * np.abs(plain).max()


def test_blocks_follow_weights_of_unequal_size_better_than_channels() -> None:
    weight = normal(64, 8) * np.repeat(np.float32([1, 0.05]), 32)[:, None]
    kind = QuantScheme(4, signed=True, symmetric=True)
    errors = []
    for block in (64, 32):
        qparams = blockwise_qparams(weight, kind, 0, block, "minmax")
        errors.append(np.square(dequantize(codes_of(weight, qparams), qparams) - weight)[32:].sum())
    assert errors[1] < 0.05 * errors[0]


def test_a_convolutional_model_gets_one_scale_a_channel() -> None:
    model, feed = conv_net(), feed_for(conv_net())
    result = quantize(model, feed, Recipe(bits=(W8,)))
    assert result.plan.layers["stem"].qparams.scale.shape == (8,)
    expected, found = run(model, feed)["y"], run(result.model, feed)["y"]
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("block", [None, 16])
def test_light_mixes_widths_within_a_size(block: int | None) -> None:
    model, feed = mlp(), feed_for(mlp(), 64)
    recipe = Recipe(Pipeline.LIGHT, bits=parse_bits("w4,w8"), compression=0.24, block_size=block)
    result = quantize(model, feed, recipe)
    assert {str(precision) for precision in result.plan.precisions.values()} == {"w4", "w8"}
    assert result.tuned is not None
    # Simulated with a byte a value and written as int4, which are other kernels; unoptimised, the loss is 2 % off.
    assert result.tuned.after == pytest.approx(held_out_loss(model, result.model, feed, ["y"]), rel=1e-3)
    stored = sum(len(tensor.raw_data) for tensor in result.model.graph.initializer)
    assert stored <= 0.24 * sum(len(tensor.raw_data) for tensor in model.graph.initializer)


@pytest.mark.parametrize("block", [None, 32])
def test_advanced_trains_layers_that_read_floats(block: int | None) -> None:
    # Inputs that lie in a small space leave weights the freedom to make up for each other's rounding.
    feed = {"x": normal(128, 6) @ normal(6, 80, seed=1)}
    recipe = Recipe(Pipeline.ADVANCED, bits=(W4,), block_size=block, steps=40, rounding=Rounding.NEAREST)
    result = quantize(mlp(), feed, recipe, workers=1)
    assert result.trained is not None
    assert result.trained.after < result.trained.before
    assert not result.plan.inputs
    assert {params.qparams.block for params in result.plan.layers.values()} == {block}


def test_edge_bits_are_those_of_weights() -> None:
    result = quantize(mlp(), feed_for(mlp()), Recipe(bits=(W4,), edge_bits=8))
    assert {name: str(precision) for name, precision in result.plan.precisions.items()} == {
        "turned": "w8", "straight": "w4", "bare": "w8"
    }  # fmt: skip


def test_a_product_of_two_computed_tensors_stays_float() -> None:
    result = quantize(transformer_block(), feed_for(transformer_block()), Recipe(bits=(W4,)))
    reasons = {node.name: node.reason for node in result.layers.float_nodes}
    assert set(reasons) == {"scores", "mix"}
    assert all("both operands are computed" in reason for reason in reasons.values())
    assert len(result.plan.layers) == 5


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"bits": parse_bits("8"), "block_size": 32}, ("--block-size", "--bits")),
        ({"bits": (W4,), "block_size": 24}, ("--block-size 24", 16)),
        ({"bits": (W4,), "block_size": 8}, ("--block-size 8", 16)),
        ({"bits": parse_bits("w4,w8a8"), "compression": 0.2, "pipeline": Pipeline.LIGHT}, ("--bits w4,w8a8",)),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict, facts: tuple[object, ...]) -> None:
    with refused(RecipeError, *facts):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"bits": parse_bits("w3"), "target": "tensorrt", "block_size": 16}, ("target tensorrt", 3, "--bits w3")),
        ({"bits": (W4,), "target": "rknn"}, ("target rknn", "float activations")),
        ({"bits": (W4,), "target": "ort-compat"}, ("target ort-compat", 4, "--bits w4")),
        ({"bits": (W8,), "target": "ort-compat", "block_size": 32}, ("--block-size", "opset 21", "ort-compat")),
        ({"bits": (W4,), "target": "tensorrt"}, ("target tensorrt", "blocks", "--block-size")),
        ({"bits": (W4,), "target": "openvino"}, ("target openvino", 4, "--bits w4")),
        ({"bits": (W8,), "target": "openvino", "block_size": 32}, ("target openvino", "--block-size")),
        ({"bits": (W8,), "edge_bits": 4, "target": "tensorrt"}, ("target tensorrt", "blocks", "--block-size")),
    ],
)
def test_a_target_says_what_it_does_not_take(settings: dict, facts: tuple[object, ...]) -> None:
    with refused(RecipeError, *facts):
        quantize(mlp(), feed_for(mlp()), Recipe(**settings))


def test_a_target_without_weight_only_convolutions_leaves_them_float() -> None:
    model = conv_net()
    result = quantize(model, feed_for(model), Recipe(bits=(W4,), target="tensorrt", block_size=16))
    assert list(result.plan.layers) == ["fc"]
    reasons = {node.reason for node in result.layers.float_nodes if node.op == "Conv"}
    assert reasons == {"target tensorrt quantizes weights alone of Gemm and MatMul only"}


@pytest.mark.parametrize("target", [name for name in NAMES if find_target(name).weight_only_bits])
@pytest.mark.parametrize("builder", [mlp, conv_net, transformer_block])
def test_our_own_output_passes_the_targets_check(builder: Callable[[], onnx.ModelProto], target: str) -> None:
    model, chosen = builder(), find_target(target)
    for bits, block in itertools.product(chosen.weight_only_bits, (None, 16)):
        if chosen.weight_only_blocks is (Blocks.NONE if block else Blocks.NEEDED) and (block or bits == 4):
            continue
        recipe = Recipe(bits=(Precision(bits, FLOAT_BITS),), target=target, block_size=block, ranges=RangeMethod.MINMAX)
        found = check_model(quantize(model, feed_for(model), recipe).model, chosen)
        # Convolutions that such a target leaves float are said to be float, and nothing else is.
        assert not matters([it for it in found if it.op in chosen.weight_only_ops or it.rule != "float-layer"]), found


@pytest.mark.parametrize("block", [None, 32])
@pytest.mark.parametrize("bits", ["w2", "w3", "w6"])
def test_widths_without_a_kernel_lie_in_planes_and_are_float_once_loaded(
    bits: str, block: int | None, tmp_path: Path
) -> None:
    model, feed = mlp(), feed_for(mlp())  # 80 and 48 values leave a last block of 16
    result = quantize(model, feed, Recipe(bits=bits, block_size=block))
    assert set(optimized_ops(result.model, tmp_path)) <= {"Gemm", "FusedGemm", "MatMul", "Relu", "Tanh"}
    for layer in read_quantized(result.model).layers:
        params = result.plan.layers[layer.name]
        assert layer.bits == f"{bits}a32"
        np.testing.assert_array_equal(layer.quantized, params.quantized)
        np.testing.assert_array_equal(layer.weight.scale, params.qparams.scale)
    for place, params in enumerate(result.plan.layers.values(), 1):
        change(model, f"w{place}", dequantize(params.quantized, params.qparams))
    np.testing.assert_allclose(run(result.model, feed)["y"], run(model, feed)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pipeline", [Pipeline.LIGHT, Pipeline.ADVANCED])
def test_the_integer_program_mixes_weights_alone(pipeline: Pipeline) -> None:
    # The first layer reads what hardly varies: three bits do for it, and the bytes go to the others.
    feed = {"x": normal(96, 3) @ normal(3, 80, seed=1) * 0.02}
    steps = {"steps": 2} if pipeline is Pipeline.ADVANCED else {}
    recipe = Recipe(pipeline, bits="w3,w4,w8", block_size=16, compression=0.23, **steps)
    result = quantize(mlp(), feed, recipe, workers=1)
    assert result.assigned is not None
    stored = sum(tensor.ByteSize() for tensor in result.model.graph.initializer)
    whole = sum(tensor.ByteSize() for tensor in mlp().graph.initializer)
    assert stored <= 0.24 * whole
    widths = {name: precision.weight for name, precision in result.plan.precisions.items()}
    assert len(set(widths.values())) > 1
    least = quantize(mlp(), feed, Recipe("light", bits="w3", block_size=16))
    assert held_out_loss(mlp(), result.model, feed, ()) < held_out_loss(mlp(), least.model, feed, ())


@pytest.mark.parametrize("bits", [W4, W8])
def test_weights_of_convolutions_are_float_once_the_model_is_loaded(bits: Precision, tmp_path: Path) -> None:
    model, feed = conv_net(), feed_for(conv_net())
    result = quantize(model, feed, Recipe(bits=(bits,)))
    # The Gemm has a form of its own, which the newest runtimes fuse.
    assert optimized_ops(result.model, tmp_path).count("DequantizeLinear") <= 1
    assert not [it.node for it in check_model(result.model, find_target("ort")) if it.rule == "weight-only-conv"]
    assert [(it.name, it.bits) for it in read_quantized(result.model).layers] == [
        (name, f"w{bits.weight}a32") for name in result.plan.layers
    ]
    for layer in (it for it in read_quantized(result.model).layers if it.op == "Conv"):
        assert np.array_equal(layer.quantized, result.plan.layers[layer.name].quantized)
        assert np.array_equal(layer.weight.scale, result.plan.layers[layer.name].qparams.scale)


def test_blocks_need_a_matrix() -> None:
    model = build("net (float[N,2,4,4] x) => (float[N,3,4,4] y) { [only] y = Conv (x, w) }", w=normal(3, 2, 1, 1))
    with refused(RecipeError, "--block-size", "Gemm", "MatMul"):
        quantize(model, feed_for(model), Recipe(bits=(W4,), block_size=32))
