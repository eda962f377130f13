"""What each target's file looks like, and that it computes what the plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from said import refused

from models import BUILDERS, UNOPTIMIZED, Arrays, build, conv_net, feed_for, normal, op_types, optimized_ops, run
from onnxcalib import Precision, RangeMethod, Recipe, Result, quantize
from onnxcalib.analysis.evaluate import evaluate
from onnxcalib.checks.check import check_model
from onnxcalib.errors import ModelError
from onnxcalib.model.io import constant_bytes
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.read import read_prepared
from onnxcalib.model.storage import stored_bytes
from onnxcalib.pipeline.job import Job, start
from onnxcalib.pipeline.stages import statistics, uniform_plan
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Pipeline, parse_bits
from onnxcalib.targets import NAMES, Storage, find_target

CASTS_INT4 = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 20)


def planned(model: onnx.ModelProto, target: str, bits: str) -> tuple[Job, QuantPlan]:
    recipe = Recipe(bits=(Precision.parse(bits),), target=target, ranges=RangeMethod.MINMAX)
    job = start(model, feed_for(model), recipe).jobs[0]
    return job, uniform_plan(job, statistics(job))


def quantized(model: onnx.ModelProto, target: str, bits: str = "w8a8", **options: object) -> Result:
    recipe = Recipe(bits=parse_bits(bits), target=target, ranges=RangeMethod.MINMAX, **options)
    return quantize(model, feed_for(model), recipe)


def constants(model: onnx.ModelProto) -> Arrays:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def narrowest(target: str) -> str:
    chosen = find_target(target)
    return f"w{min(chosen.weight_bits)}a{min(chosen.activation_bits)}"


@pytest.mark.parametrize("target", [name for name in NAMES if name != "qonnx"])
@pytest.mark.parametrize("builder", ["conv_net", "branches", "conv_transpose", "transformer_block"])
def test_the_file_computes_what_the_simulation_does(builder: str, target: str) -> None:
    model = BUILDERS[builder]()
    job, plan = planned(model, target, narrowest(target))
    feed = feed_for(model, 3, seed=5)
    reference = run(job.simulate(plan), feed, **UNOPTIMIZED)
    for name, value in run(job.write(plan), feed, **UNOPTIMIZED).items():
        assert np.array_equal(value, reference[name])


class Quant(OpRun):
    """QONNX's Quant as its specification has it: scale, shift, clamp, round, and back."""

    op_domain = "qonnx.custom_op.general"

    def _run(self, x, scale, zero, bits, signed=1, narrow=1, rounding_mode="ROUND"):  # type: ignore[no-untyped-def]
        assert rounding_mode == "ROUND"
        low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
        low, high = (low + 1, high) if narrow and signed else (low, high - 1) if narrow else (low, high)
        integers = np.round(np.clip(x / scale + zero, np.float32(low), np.float32(high)))
        return (((integers - zero) * scale).astype(np.float32),)


@pytest.mark.parametrize("bits", ["w8a8", "w3a4", "w5a6", "w2a7"])
@pytest.mark.parametrize("builder", ["conv_net", "branches", "transformer_block"])
def test_quant_nodes_agree_with_the_simulation_to_the_last_bit(builder: str, bits: str) -> None:
    model = BUILDERS[builder]()
    job, plan = planned(model, "qonnx", bits)
    file, feed = job.write(plan), feed_for(model, 2, seed=3)
    assert not {"QuantizeLinear", "DequantizeLinear", "BitShift"} & set(op_types(file))
    assert op_types(file).count("Quant") == len(plan.layers) + len(plan.shared) + len(plan.inputs)
    simulated = job.simulate(plan)
    for each in (file, simulated):
        each.opset_import[0].version = 21  # the reference knows no older DequantizeLinear
    reference = ReferenceEvaluator(simulated).run(None, feed)
    found = ReferenceEvaluator(file, new_ops=[Quant]).run(None, feed)
    for value, wanted in zip(found, reference, strict=True):
        assert np.array_equal(value, wanted)
        assert np.ptp(value) > 0


def test_quant_nodes_have_widths_signs_and_no_zero_points() -> None:
    job, plan = planned(conv_net(), "qonnx", "w3a4")
    file = job.write(plan)
    stored, quants = constants(file), [node for node in file.graph.node if node.op_type == "Quant"]
    assert {float(stored[node.input[3]]) for node in quants} == {3.0, 4.0, 8.0}
    assert not any(stored[node.input[2]].any() for node in quants)
    signed = {node.name: onnx.helper.get_node_attr_value(node, "signed") for node in quants}
    # After a Relu or Clip at zero nothing is negative, and all quantized values go to what is positive.
    assert signed["r2_input_quantized"] == 0
    assert signed["x_input_quantized"] == 1
    assert stored[next(node for node in quants if node.name == "stem_weight").input[1]].shape == (8, 1, 1, 1)
    assert "Relu" in op_types(file)


def test_vitis_has_powers_of_two_and_one_scale_a_tensor() -> None:
    file = quantized(conv_net(), "vitis").model
    stored = constants(file)
    scales = [stored[node.input[1]] for node in file.graph.node if "Linear" in node.op_type]
    assert all(scale.ndim == 0 and np.frexp(scale)[0] == 0.5 for scale in scales)
    assert {value.dtype.name for name, value in stored.items() if name.endswith("_bias_codes")} == {"int8"}
    assert [dim.dim_value for dim in file.graph.input[0].type.tensor_type.shape.dim] == [1, 3, 8, 8]


def test_batch_norm_tuning_keeps_what_vitis_demands() -> None:
    result = quantized(conv_net(), "vitis", pipeline=Pipeline.LIGHT)
    assert check_model(result.model, find_target("vitis")) == []


@pytest.mark.parametrize(("target", "bits"), [("vitis", "w8a8"), ("qonnx", "w4a4"), ("tensorrt", "w8a8")])
def test_training_keeps_what_the_target_demands(target: str, bits: str) -> None:
    result = quantized(BUILDERS["conv1d"](), target, bits, pipeline=Pipeline.ADVANCED, steps=8)
    assert check_model(result.model, find_target(target)) == []
    assert result.end_to_end is not None


def test_tensorrt_quantizes_the_shortcut_and_not_the_layer_that_takes_the_add_in() -> None:
    file = quantized(conv_net(), "tensorrt").model
    (add,) = [node for node in file.graph.node if node.name == "sum"]
    assert list(add.input) == ["r1_dequantized", "b3"]
    assert not any(node.op_type == "DequantizeLinear" for node in file.graph.node if "bias" in node.name)
    assert "Clip" not in [node.op_type for node in file.graph.node if node.name.endswith("clipped")]


def test_the_shortcut_of_two_layers_is_the_earlier_one() -> None:
    text = """net (float[1,3,4,4] x) => (float[1,2,4,4] y) {
        [one] a = Conv (x, w)
        [two] b = Conv (x, w)
        [add] y = Add (b, a)
    }"""
    file = quantized(build(text, w=normal(2, 3, 1, 1)), "tensorrt").model
    (add,) = [node for node in file.graph.node if node.name == "add"]
    assert list(add.input) == ["b", "a_dequantized"]


def test_rknn_clips_floats_before_the_quantizer() -> None:
    file = quantized(conv_net(), "rknn", "w4a4").model
    makers = {name: node for node in file.graph.node for name in node.output}
    for node in file.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in makers:
            assert makers[node.input[0]].op_type == "QuantizeLinear"
    assert makers[makers["x_input_quantized"].input[0]].op_type == "Clip"
    assert file.opset_import[0].version <= 19


def test_qnn_has_channels_in_convolutions_only_and_shares_no_codes() -> None:
    file = quantized(conv_net(), "qnn").model
    stored = constants(file)
    sizes = {node.name: stored[node.input[1]].size for node in file.graph.node if node.name.endswith("_weight")}
    assert sizes == {"stem_weight": 8, "depth_weight": 8, "project_weight": 8, "head_weight": 16, "fc_weight": 1}
    integers = [node.input[0] for node in file.graph.node if node.input[0].endswith("codes")]
    assert len(integers) == len(set(integers)) == 10


def test_a_file_with_a_fixed_batch_is_evaluated_beside_others(tmp_path: Path) -> None:
    model, paths = conv_net(), [tmp_path / "float.onnx", tmp_path / "qnn.onnx"]
    onnx.save(model, paths[0])
    quantized(model, "qnn").save(paths[1])
    rows = evaluate(paths, feed_for(model, 5), paths[0])
    assert [row.samples for row in rows] == [5, 5]


def test_a_model_beyond_the_opset_of_a_target_is_refused() -> None:
    text = "net (float[1,3,4,4] x) => (float[1,2,4,4] y) { a = Conv (x, w)  y = Gelu (a) }"
    model = build(text, opset=20, ir=9, w=normal(2, 3, 1, 1))
    with refused(ModelError, "opset 20", "ort-compat", 18):
        quantized(model, "ort-compat")
    assert quantized(model, "ort").model.opset_import[0].version == 20


def test_old_runtimes_get_an_ir_version_that_they_read() -> None:
    model = conv_net()
    model.ir_version = 10
    assert quantized(model, "ort-compat").model.ir_version == 9
    assert quantized(model, "ort").model.ir_version == 10


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("storage", Storage)
def test_every_storage_holds_the_same_codes_in_the_bytes_it_states(storage: Storage, bits: int) -> None:
    model = build(
        "net (float[N,3,9,9] x) => (float[N,7,7,7] y) { y = Conv (x, w, b) }", w=normal(7, 3, 3, 3), b=normal(7)
    )
    # Others than planes hold symmetric grids alone, as those of openvino.
    name = "ort" if storage is Storage.BIT_PLANES else "openvino"
    job, plan = planned(model, name, f"w{bits}a8")
    target = replace(find_target("ort"), shifted_bits=job.target.shifted_bits)
    four = storage in (Storage.INT4, Storage.INT4_CAST) and bits == 4
    prepared = read_prepared(model, replace(job.target, storage=storage), {bits})
    assert prepared.proto.opset_import[0].version == (21 if four else 13)
    file = write_qdq(prepared, job.layers, plan, replace(target, storage=storage))
    plain = write_qdq(prepared, job.layers, plan, target.simulated)
    saved = 7 * 27 - stored_bytes((7, 3, 3, 3), bits, storage)
    if storage is Storage.BIT_PLANES and bits < 8:
        assert constant_bytes(plain) - saved <= constant_bytes(file) <= constant_bytes(plain) - saved + 100
        assert stored_bytes((7, 3, 3, 3), bits, storage) - bits * 24 <= 40
    else:
        spared = 4 if storage is Storage.INT4 and four else 0  # the zero points are int4 as well: 7 bytes become 4
        assert constant_bytes(file) == constant_bytes(plain) - saved - min(spared, 3)
    if storage is Storage.INT4_CAST and four and not CASTS_INT4:
        return
    feed = feed_for(model, 2)
    assert np.array_equal(run(file, feed)["y"], run(plain, feed)["y"]) or four
    assert np.array_equal(run(file, feed, **UNOPTIMIZED)["y"], run(plain, feed, **UNOPTIMIZED)["y"])


def test_int4_codes_are_exact_for_odd_sizes() -> None:
    model = build("net (float[1,3] x) => (float[1,5] y) { y = MatMul (x, w) }", w=normal(3, 5))
    job, plan = planned(model, "qnn", "w4a8")
    file = job.write(plan)
    (tensor,) = [tensor for tensor in file.graph.initializer if tensor.name.endswith("codes")]
    assert (tensor.data_type, len(tensor.raw_data)) == (TensorProto.INT4, 8)
    (params,) = plan.layers.values()
    assert np.array_equal(numpy_helper.to_array(tensor).astype(np.int8), params.quantized)


@pytest.mark.skipif(not CASTS_INT4, reason="this onnxruntime has no Cast from int4")
def test_int4_with_a_cast_runs_in_integer_kernels(tmp_path: Path) -> None:
    file = quantized(conv_net(), "openvino", "w4a8").model
    assert file.opset_import[0].version == 21
    # The other two end in an Add and in a pool that OpenVINO takes as they are.
    assert optimized_ops(file, tmp_path).count("QLinearConv") == 2


def test_a_mixed_request_counts_what_the_target_stores() -> None:
    text = """net (float[N,8,6,6] x) => (float[N,16,6,6] y) {
        a = Conv <pads=[1,1,1,1]> (x, w1, b)
        r = Relu (a)
        c = Conv <pads=[1,1,1,1]> (r, w2, b)
        s = Relu (c)
        y = Conv <pads=[1,1,1,1]> (s, w3, b)
    }"""
    weights = {
        "w1": normal(16, 8, 3, 3),
        "w2": normal(16, 16, 3, 3),
        "w3": normal(16, 16, 3, 3, seed=1),
        "b": normal(16),
    }
    model = build(text, **weights)
    whole = constant_bytes(model)
    for target in ("openvino", "qnn", "ort"):
        four, eight = (constant_bytes(quantized(model, target, bits).model) for bits in ("w4a8", "w8a8"))
        assert four < 0.7 * eight
        ratio = (four + eight) / 2 / whole
        result = quantized(model, target, "w4a8,w8a8", pipeline=Pipeline.LIGHT, compression=ratio)
        widths = {precision.weight for precision in result.plan.precisions.values()}
        assert widths == {4, 8}, target
        assert constant_bytes(result.model) <= ratio * whole, target
