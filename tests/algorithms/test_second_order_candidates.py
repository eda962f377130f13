"""Second-order rounding of candidates: what a plan of that precision gets, and less error than nearest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from jobs import correlated_data, job_on

from models import conv_net, run, transformer_block, two_gemms
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.quant_params import dequantize
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.stages import second_order_candidates, second_order_rounding
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import Candidates, QuantPlan
from onnxcalib.recipe import Precision

BITS = "w2a4,w4a4,w4a8,w8a8"


def both(model: onnx.ModelProto, bits: str = BITS) -> tuple[Job, Candidates, Candidates]:
    job = job_on(model, correlated_data(model, 48), bits, compression=1.0)
    nearest = candidates_of(job)
    return job, nearest, second_order_candidates(job, nearest)


def plan_at(candidates: Candidates, job: Job, precision: Precision) -> QuantPlan:
    return candidates.stitch({layer.name: precision for layer in job.layers})


@pytest.mark.parametrize("builder", [conv_net, lambda: two_gemms("Relu", 40)])
def test_the_first_layer_is_rounded_as_in_a_plan_of_that_precision(builder: object) -> None:
    """Nothing is quantized before it, so both networks feed it alike."""
    assert callable(builder)
    job, nearest, found = both(builder())
    name = job.layers[0].name
    for precision in job.recipe.bits:
        wanted = second_order_rounding(job, plan_at(nearest, job, precision), 0.0).plan.layers[name]
        own = found.layers[name][precision]
        np.testing.assert_array_equal(own.quantized, wanted.quantized)
        np.testing.assert_allclose(own.qparams.scale, wanted.qparams.scale, rtol=1e-6)
        if own.bias is not None and wanted.bias is not None:
            np.testing.assert_allclose(own.bias, wanted.bias, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", [conv_net(), transformer_block(), two_gemms("Relu", 40)])
def test_each_layer_alone_comes_nearer_to_its_float_outputs_than_to_nearest(model: onnx.ModelProto) -> None:
    """On the samples that it was rounded for, all else float."""
    job, nearest, found = both(model, "w2a8,w8a8")
    data = {name: np.concatenate([feed[name] for feed in job.data.batches(8)]) for name in _inputs(job)}
    exact = run(with_outputs(job.model.proto, [layer.summed for layer in job.layers]), data)
    gains = []
    for layer in job.layers:
        errors = [_error(job, each, layer.name, layer.summed, data, exact) for each in (nearest, found)]
        gains.append(errors[1] / errors[0])
    assert max(gains) < 1.05
    assert np.mean(gains) < 0.8


def _inputs(job: Job) -> list[str]:
    return [value.name for value in job.model.proto.graph.input]


def _error(
    job: Job, candidates: Candidates, name: str, output: str, data: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> float:
    """Of one layer's outputs, with its own weights of two bits in the float model."""
    layer, index = next(it for it in job.layers if it.name == name), GraphIndex(job.model.proto.graph)
    params = candidates.layers[name][Precision(2, 8)]
    changed = onnx.ModelProto()
    changed.CopyFrom(job.model.proto)
    values = {layer.weight: dequantize(params.quantized, params.qparams)}
    if layer.bias and params.bias is not None:
        values[layer.bias] = params.bias
    for tensor in changed.graph.initializer:
        if tensor.name in values:
            assert index.value(tensor.name).shape == values[tensor.name].shape
            tensor.CopyFrom(onnx.numpy_helper.from_array(values[tensor.name].astype(np.float32), tensor.name))
    got = run(with_outputs(changed, [output]), data)[output]
    off = (got - exact[output]).astype(np.float64)
    return float((off**2).mean())


def test_grids_of_tensors_and_precisions_stay() -> None:
    job, nearest, found = both(conv_net())
    assert replace(found, layers={}) == replace(nearest, layers={})
    assert {name: set(choices) for name, choices in found.layers.items()} == {
        name: set(choices) for name, choices in nearest.layers.items()
    }
    changed = [
        (found.layers[layer.name][it].quantized != nearest.layers[layer.name][it].quantized).any()
        for layer in job.layers
        for it in job.recipe.bits
        if it.weight == 2
    ]
    assert all(changed)
