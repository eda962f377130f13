"""Activations whose ranges are found at run time: what is written, what onnxruntime computes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jobs import correlated_data
from onnxruntime.quantization import QuantType, quantize_dynamic
from said import refused

from models import UNOPTIMIZED, build, conv_net, feed_for, mlp, normal, op_types, optimized_ops, run, transformer_block
from onnxcalib import Pipeline, Recipe, Result, quantize
from onnxcalib.analysis.diagnose import diagnose_file
from onnxcalib.checks.check import check_model, matters
from onnxcalib.errors import RecipeError
from onnxcalib.model.qdq import write_plain
from onnxcalib.model.quantized import bytes_by_kind, read_quantized
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.dynamic import dynamic_qparams
from onnxcalib.numerics.quant_params import dequantize, fake_quantize
from onnxcalib.numerics.quant_params import quantize as codes_of
from onnxcalib.pipeline.job import start
from onnxcalib.targets import NAMES, Dynamic, find_target

FUSED = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
values = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=st.floats(-1e4, 1e4, width=32))


def dynamic(model: onnx.ModelProto, bits: str = "8", **options: object) -> Result:
    return quantize(model, feed_for(model, 32), Recipe(bits=bits, activations="dynamic", **options))


def product_of_integers(read: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What MatMulInteger and its scales make of floats, by ONNX's definition of DynamicQuantizeLinear."""
    low, high = min(read.min(), np.float32(0)), max(read.max(), np.float32(0))
    step = np.float32((high - low) / np.float32(255))
    zero = np.clip(np.rint(-low / step), 0, 255)
    codes = np.clip(np.rint(read / step) + zero, 0, 255)
    sums = (codes - zero).astype(np.int64) @ weight.astype(np.int64)
    return sums.astype(np.float32) * (step * scale)


def test_the_file_computes_integers_as_the_definition_says() -> None:
    model = mlp()
    result, feed = dynamic(model), feed_for(model, 8, seed=3)
    params = result.plan.layers
    first = product_of_integers(feed["x"], params["turned"].quantized.T, params["turned"].qparams.scale)
    second_read = np.maximum(first + params["turned"].bias, 0)
    second = product_of_integers(second_read, params["straight"].quantized, params["straight"].qparams.scale)
    third_read = np.tanh(second + params["straight"].bias)
    wanted = product_of_integers(third_read, params["bare"].quantized, params["bare"].qparams.scale)
    np.testing.assert_allclose(run(result.model, feed, **UNOPTIMIZED)["y"], wanted, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(run(result.model, feed)["y"], wanted, rtol=2e-5, atol=2e-5)


@given(values)
@example(np.array([1.46e-43, 0], np.float32))
def test_grids_are_those_of_the_runtime_to_the_last_bit(given_values: np.ndarray) -> None:
    node = onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero"])
    kinds = {"x": np.float32, "codes": np.uint8, "scale": np.float32, "zero": np.uint8}
    infos = {
        name: onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None)
        for name, kind in kinds.items()
    }
    graph = onnx.helper.make_graph([node], "g", [infos["x"]], [infos[name] for name in ("codes", "scale", "zero")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    found, qparams = run(model, {"x": given_values}), dynamic_qparams(given_values)
    if found["scale"] == 0:
        np.testing.assert_array_equal(fake_quantize(given_values, qparams), np.zeros_like(given_values))
        return
    assert found["scale"] == qparams.scale
    assert found["zero"] == qparams.zero_point
    np.testing.assert_array_equal(found["codes"], codes_of(given_values, qparams))


@pytest.mark.parametrize("bits", ["8", "w4a8", "w3a8"])
@pytest.mark.parametrize("build_model", [mlp, transformer_block])
def test_every_layer_runs_in_an_integer_kernel_with_its_bias(build_model: object, bits: str, tmp_path: Path) -> None:
    model = build_model()
    result = dynamic(model, bits)
    ops = optimized_ops(result.model, tmp_path)
    layers = [node for node in model.graph.node if node.op_type in ("Gemm", "MatMul")]
    products = sum(node.name in ("scores", "mix") for node in layers)
    assert sum(ops.count(op) for op in FUSED) == len(layers) - products
    # Residuals and the product of attention stay; no bias is left over.
    assert ops.count("Add") == sum(node.name in ("skip", "out") for node in model.graph.node)
    assert {str(precision) for precision in result.plan.precisions.values()} == {bits if "w" in bits else "w8a8"}


def test_what_is_simulated_is_what_is_written() -> None:
    model = transformer_block()
    job = start(model, feed_for(model, 32), Recipe(bits="w4a8", activations="dynamic")).jobs[0]
    plan = dynamic(model, "w4a8").plan
    feed = feed_for(model, 4, seed=5)
    for name, value in run(job.write(plan), feed).items():
        np.testing.assert_array_equal(value, run(job.simulate(plan), feed)[name])


def test_layers_that_read_one_tensor_share_one_quantizer() -> None:
    ops = op_types(dynamic(transformer_block()).model)
    assert (ops.count("DynamicQuantizeLinear"), ops.count("MatMulInteger")) == (3, 5)


def test_single_layers_are_dynamic_or_static_as_overrides_say() -> None:
    model = transformer_block()
    some = quantize(model, feed_for(model, 32), Recipe(overrides={"down": "dynamic"}))
    assert some.plan.dynamic == ("u",)
    assert "x" in {**some.plan.shared, **some.plan.inputs}
    assert op_types(some.model).count("MatMulInteger") == 1
    most = dynamic(model, overrides={"down": "static"})
    assert set(most.plan.dynamic) == {"x", "h"}
    assert set(most.plan.inputs) == {"u"}


def test_convolutions_keep_static_ranges_beside_a_dynamic_gemm(tmp_path: Path) -> None:
    result = dynamic(conv_net())
    ops = optimized_ops(result.model, tmp_path)
    assert result.plan.dynamic == ("f",)
    assert ops.count("QLinearConv") == 4
    assert sum(ops.count(op) for op in FUSED) == 1
    assert {layer.name: layer.dynamic for layer in read_quantized(result.model).layers}["fc"]


def test_readers_of_files_know_the_form() -> None:
    model = mlp()
    result = dynamic(model, "w4a8")
    file = read_quantized(result.model)
    told = {layer.name: (layer.op, layer.told) for layer in file.layers}
    assert told == {
        "turned": ("Gemm", "w4a8 dynamic"), "straight": ("Gemm", "w4a8 dynamic"), "bare": ("MatMul", "w4a8 dynamic"),
    }  # fmt: skip
    for layer in file.layers:
        params = result.plan.layers[layer.name]
        wanted = dequantize(params.quantized, params.qparams)
        wanted = wanted.T if layer.name == "turned" else wanted
        np.testing.assert_array_equal(dequantize(layer.quantized, layer.weight), wanted)
    assert not file.floats
    kinds = bytes_by_kind(result.model)
    assert kinds["quantized weights"] >= sum(layer.stored for layer in file.layers) > 0
    assert kinds["float constants"] == 4 * (64 + 48)  # the biases


def test_what_a_layer_loses_is_found_by_its_name() -> None:
    model = mlp()
    _, found = diagnose_file(read_quantized(dynamic(model).model), model, feed_for(model, 16, seed=2))
    assert [each.layer for each in found.layers] == ["turned", "straight", "bare"]
    assert all(25 < each.alone_db < 70 for each in found.layers)


def test_check_takes_dynamic_files_where_the_target_does() -> None:
    written = dynamic(mlp(), "w4a8").model
    assert not matters(check_model(written, find_target("ort")))
    assert matters(check_model(written, find_target("tensorrt")))


def test_files_of_the_runtimes_own_tool_are_read(tmp_path: Path) -> None:
    model = transformer_block()
    onnx.save(model, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "theirs.onnx", per_channel=True, weight_type=QuantType.QInt8)
    theirs = onnx.load(tmp_path / "theirs.onnx")
    file = read_quantized(theirs)
    assert {layer.name: layer.told for layer in file.layers} == dict.fromkeys(
        ("query", "key", "value", "up", "down"), "w8a8 dynamic"
    )
    assert {node.name for node in file.floats} == {"scores", "mix"}
    feed = feed_for(model, 4)
    np.testing.assert_allclose(run(file.proto, feed)["y"], run(theirs, feed)["y"], rtol=1e-4, atol=1e-4)
    assert not matters(check_model(theirs, find_target("ort")))


def test_second_order_rounding_reads_what_the_layer_reads() -> None:
    model = mlp()
    data = correlated_data(model, 256)
    made = quantize(model, data, Recipe(bits="w3a8", activations="dynamic", pipeline="light", rounding="second-order"))
    plain = quantize(model, data, Recipe(bits="w3a8", activations="dynamic"))
    wanted = run(model, data)["y"]
    errors = [float(np.square(run(each.model, data)["y"] - wanted).mean()) for each in (made, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_training_goes_on_from_dynamic_layers() -> None:
    model = mlp()
    data = correlated_data(model, 64)
    recipe = Recipe(bits="w2a8", activations="dynamic", pipeline="advanced", steps=20)
    trained = quantize(model, data, recipe)
    plain = quantize(model, data, Recipe(bits="w2a8", activations="dynamic"))
    wanted = run(model, data)["y"]
    errors = [float(np.square(run(each.model, data)["y"] - wanted).mean()) for each in (trained, plain)]
    assert errors[0] < 0.7 * errors[1]
    assert set(trained.plan.dynamic) == {"x", "r", "t"}


def test_bits_are_mixed_under_dynamic_ranges() -> None:
    model = mlp()
    recipe = Recipe(bits="w4a8,w8a8", activations="dynamic", pipeline=Pipeline.LIGHT, compression=0.21)
    result = quantize(model, feed_for(model, 32), recipe)
    assert {str(precision) for precision in result.plan.precisions.values()} == {"w4a8", "w8a8"}
    assert len(result.plan.dynamic) == 3


def test_a_run_directory_tells_dynamic_from_static(tmp_path: Path) -> None:
    model = mlp()
    data = feed_for(model, 32)
    made = [
        quantize(model, data, Recipe(activations=kind), run_dir=tmp_path / "run").model
        for kind in ("static", "dynamic", "dynamic", "static")
    ]
    assert made[0] == made[3]
    assert made[1] == made[2] == dynamic(model).model != made[0]


def test_inner_tensors_of_the_plain_form_are_those_of_the_file() -> None:
    """Training and second-order rounding run the network as quantizers and float layers."""
    model = mlp()
    job = start(model, feed_for(model, 32), Recipe(activations="dynamic")).jobs[0]
    plan = dynamic(model).plan
    plain = write_plain(job.model, job.layers, plan, job.target)
    feed = feed_for(model, 4, seed=5)
    found = run(with_outputs(plain, ["r", "t", "y"]), feed)
    wanted = run(with_outputs(job.write(plan), ["r", "t", "y"]), feed)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"bits": "w4"}, ("--activations", "float")),
        ({"bits": "w8a4"}, ("--activations", "w8a4", "w8a8")),
        ({"edge_bits": 4}, ("--activations", "--edge-bits")),
        ({"activations": "auto"}, ("--activations", "plain")),
        ({"target": "vitis"}, ("--activations", "vitis")),
        ({"activations": "static", "overrides": {"bare": "static"}}, ("bare", "static")),
        ({"activations": "static", "overrides": {"bare": "dynamic"}, "target": "openvino"}, ("bare", "openvino")),
        ({"activations": "static", "overrides": {"bare": "w8a4+dynamic"}}, ("bare", "w8a4")),
        ({"overrides": {"bare": "w8a4"}}, ("bare", "w8a4")),
    ],
)
def test_what_has_no_effect_or_no_form_is_refused(options: dict[str, object], facts: tuple[str, ...]) -> None:
    with refused(RecipeError, *facts):
        quantize(mlp(), feed_for(mlp()), Recipe(**{"activations": "dynamic", **options}))


def test_a_convolution_is_refused_by_name() -> None:
    with refused(RecipeError, "head", "Conv"):
        quantize(conv_net(), feed_for(conv_net()), Recipe(overrides={"head": "dynamic"}))
    with refused(RecipeError, "--activations"):
        quantize(conv_net(), feed_for(conv_net()), Recipe(activations="dynamic", exclude=("fc",)))


def test_what_layers_read_together_cannot_be_both() -> None:
    model = transformer_block()
    with refused(RecipeError, "query", "key", "static", "dynamic"):
        quantize(model, feed_for(model), Recipe(overrides={"query": "dynamic", "key": "static"}))


@pytest.mark.parametrize("name", NAMES)
def test_every_target_has_a_form_or_refuses(name: str) -> None:
    has_form = find_target(name).dynamic is not Dynamic.NONE
    assert has_form == (name in ("ort", "ort-compat"))


def gated(positions: int = 6) -> onnx.ModelProto:
    """A pair of products around a gate that is loud in one channel, at the first position."""
    text = """
    net (float[N,T,16] x) => (float[N,T,16] y) {
        [up] u = MatMul (x, w1)
        [act] t = Tanh (u)
        [gate] g = Mul (t, loud)
        [down] d = MatMul (g, w2)
        [last] y = Add (d, x)
    }"""
    loud = np.ones((1, positions, 32), np.float32)
    loud[0, 0, 5] = 400.0
    return build(text, w1=normal(16, 32, scale=0.25), w2=normal(32, 16, scale=0.25), loud=loud)


def auto(model: onnx.ModelProto, data: object, **options: object) -> Result:
    return quantize(model, data, Recipe(activations="auto", pipeline="light", **options))


def test_auto_leaves_float_what_no_single_grid_fits() -> None:
    """Every sample has the outlier, so that a range found at run time would be as wide."""
    model, data = gated(), {"x": normal(64, 6, 16)}
    found, static = auto(model, data), quantize(model, data, Recipe(pipeline="light"))
    assert found.ranges is not None
    assert found.ranges.floats == ("g",)
    assert found.ranges.after < 0.4 * found.ranges.before
    assert {name: str(precision) for name, precision in found.plan.precisions.items()} == {"up": "w8a8", "down": "w8"}
    wanted = run(model, data)["y"]
    errors = [float(np.square(run(each.model, data)["y"] - wanted).mean()) for each in (found, static)]
    assert errors[0] < 0.4 * errors[1]


def levelled() -> onnx.ModelProto:
    """What is computed of a sample does not depend on how loud it is."""
    text = """
    net (float[N,T,40] x) => (float[N,T,12] y) {
        [up] u = MatMul (x, w1)
        [abs] a = Abs (x)
        [most] m = ReduceMax <axes=[1,2]> (a)
        [level] l = Div (u, m)
        [head] y = MatMul (l, w2)
    }"""
    return build(text, w1=normal(40, 32, scale=0.2), w2=normal(32, 12))


def test_auto_finds_ranges_at_run_time_where_samples_differ() -> None:
    # Of different lengths: those of one length would be batched, and share a range.
    data = [{"x": normal(1, 2 + seed % 3, 40, seed=seed) * (300 if seed % 4 == 0 else 1)} for seed in range(64)]
    found = auto(levelled(), data, overrides={"head": "static"})
    assert found.ranges is not None
    assert (found.plan.dynamic, found.ranges.floats) == (("x",), ())
    assert found.ranges.after < 0.2 * found.ranges.before


def test_auto_keeps_static_ranges_that_fit() -> None:
    model = mlp()
    found = auto(model, feed_for(model, 64))
    assert found.ranges is not None
    assert not found.ranges.floats
    assert len(found.plan.inputs) + len(found.plan.dynamic) == 3


def test_auto_goes_with_mixed_bits_and_resumes(tmp_path: Path) -> None:
    model, data = gated(), {"x": normal(64, 6, 16)}
    mixed = {"bits": "w4a8,w8a8", "compression": 0.6}
    found = [
        quantize(model, data, Recipe(activations="auto", pipeline="light", **mixed), run_dir=tmp_path / "run")
        for _ in range(2)
    ]
    assert found[0].ranges == found[1].ranges
    assert found[0].ranges is not None
    assert found[0].ranges.floats == ("g",)
    assert found[0].model == found[1].model
