"""The loss of a whole quantized model: its float form against the written model, and its biases as parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from jobs import job_on, plan_of

from models import (
    Arrays,
    any_length,
    branches,
    build,
    conv1d,
    conv_net,
    conv_transpose,
    feed_for,
    grouped,
    normal,
    run,
    transformer_block,
    two_heads,
)
from onnxcalib.autodiff.gradients import Gradients, Loss
from onnxcalib.model.layers import Layer
from onnxcalib.model.model_loss import HINTED, Parameter, bias_name, distillation_loss, reference_name
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Engine
from onnxcalib.targets import Storage

SAMPLES = 12
AS_WRITTEN = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
AS_DEPLOYED = ort.GraphOptimizationLevel.ORT_ENABLE_ALL


def classifier(tail: str = "[soft] y = Softmax <axis=-1> (l)") -> onnx.ModelProto:
    text = f"""
    net (float[N,3,6,6] x) => (float[N,5] y) {{
        [stem] c = Conv <pads=[1,1,1,1]> (x, w1)
        [relu] r = Relu (c)
        [pool] p = GlobalAveragePool (r)
        [flat] f = Flatten (p)
        [fc] l = Gemm <transB=1> (f, w2, b2)
        {tail}
    }}"""
    return build(text, w1=normal(8, 3, 3, 3, scale=0.4), w2=normal(5, 8, scale=3.0), b2=normal(5))


def three_outputs() -> onnx.ModelProto:
    """Logits, values, and a number that no gradient is wanted for."""
    return two_heads("[best] k = ArgMax <axis=1, keepdims=0> (y)", ", int64[N] k")


BUILDERS = [conv_net, transformer_block, conv1d, grouped, conv_transpose, branches, classifier, three_outputs]


@dataclass(frozen=True)
class Whole:
    """A model written at a precision, with the loss of its float form."""

    job: Job
    plan: QuantPlan
    feed: Arrays

    @property
    def written(self) -> onnx.ModelProto:
        return self.write(self.plan)

    def write(self, plan: QuantPlan) -> onnx.ModelProto:
        return replace(self.job, target=replace(self.job.target.in_place, storage=Storage.INT8)).write(plan)

    @property
    def kinds(self) -> dict[str, OutputKind]:
        return find_output_kinds(self.job.model.proto)

    @property
    def reference(self) -> Arrays:
        """The float outputs, those of distributions softened."""
        outputs = run(self.job.model.proto, self.feed)
        return {
            name: outputs[name]
            if output_kind is OutputKind.VALUES
            else np.exp(logarithms(outputs[name], output_kind)).astype(np.float32)
            for name, output_kind in self.kinds.items()
        }

    def biases(self) -> Arrays:
        return {
            layer.name: value if (value := self.plan.layers[layer.name].bias) is not None else zeros(layer)
            for layer in self.job.layers
            if layer.op != "MatMul" or layer.bias is not None
        }

    def rounded_biases(self) -> Arrays:
        """The biases as a target with integer ones writes them."""
        biases = self.biases()
        for layer in self.job.layers:
            if self.job.target.integer_bias and layer.op in ("Conv", "Gemm"):
                step = self.plan.layers[layer.name].qparams.scale * self.plan.layer_input(layer.input).scale
                biases[layer.name] = (np.rint(biases[layer.name] / step) * step).astype(np.float32)
        return biases

    def loss(self, biases: Arrays, unit: float = 1.0) -> onnx.ModelProto:
        parameters = {
            bias_name(layer_named(self.job, name)): Parameter(value / np.float32(unit), np.float32(unit))
            for name, value in biases.items()
        }
        # A bias that the layer did not have must have a place in the file.
        layers = {
            name: replace(params, bias=biases.get(name, params.bias)) for name, params in self.plan.layers.items()
        }
        written = self.write(replace(self.plan, layers=layers))
        return distillation_loss(written, self.job.layers, self.plan, parameters, self.kinds, self.reference)

    def fed(self, biases: Arrays) -> Arrays:
        reference = {reference_name(name): value for name, value in self.reference.items()}
        return {**self.feed, **reference, **{bias_name(layer_named(self.job, name)): b for name, b in biases.items()}}

    def value(self, biases: Arrays) -> float:
        return Loss(self.loss(biases)).run(self.fed(biases))

    def by_hand(self, model: onnx.ModelProto, level: ort.GraphOptimizationLevel = AS_WRITTEN) -> float:
        """Cross-entropy with the softened float distribution, and the relative squared error of values."""
        outputs, total = run(model, self.feed, graph_optimization_level=level), 0.0
        for name, output_kind in self.kinds.items():
            reference = self.reference[name].astype(np.float64)
            if output_kind is OutputKind.VALUES:
                total += float(np.mean((outputs[name] - reference) ** 2) / np.mean(reference**2))
            else:
                total -= float((reference * logarithms(outputs[name], output_kind)).sum(axis=-1).mean())
        return total


def logarithms(output: np.ndarray, output_kind: OutputKind) -> np.ndarray:
    values = output.astype(np.float64)
    values = (np.log(np.maximum(values, 1e-300)) if output_kind is OutputKind.PROBABILITIES else values) / TEMPERATURE
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def zeros(layer: Layer) -> np.ndarray:
    return np.zeros(layer.channels, np.float32)


def layer_named(job: Job, name: str) -> Layer:
    return next(layer for layer in job.layers if layer.name == name)


def whole(model: onnx.ModelProto, bits: str = "w4a4", target: str = "ort") -> Whole:
    feed = feed_for(model, SAMPLES)
    job = job_on(model, feed, bits, target)
    return Whole(job, plan_of(job), feed)


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("bits", ["w4a4", "w8a8"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_the_float_form_is_the_written_model(builder: Callable[[], onnx.ModelProto], bits: str, target: str) -> None:
    case = whole(builder(), bits, target)
    by_hand = case.by_hand(case.written)
    assert by_hand > case.by_hand(case.job.model.proto)
    assert case.value({}) == pytest.approx(by_hand, rel=1e-4)
    assert case.value(case.rounded_biases()) == pytest.approx(by_hand, rel=1e-3)
    # A fused kernel rounds a code the other way now and then, and newer runtimes round biases by themselves.
    assert case.value({}) == pytest.approx(case.by_hand(case.written, AS_DEPLOYED), rel=0.05)


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("builder", [conv_net, transformer_block, conv_transpose, classifier])
def test_no_quantizer_is_left_and_every_one_has_a_form(builder: Callable[[], onnx.ModelProto], target: str) -> None:
    case = whole(builder(), "w4a4", target)
    written, loss = case.written, case.loss(case.biases())
    ops = [node.op_type for node in loss.graph.node]
    assert "QuantizeLinear" not in ops
    assert "DequantizeLinear" not in ops
    assert ops.count("FakeQuantize") == sum(node.op_type == "QuantizeLinear" for node in written.graph.node)
    assert [value.name for value in loss.graph.output] == ["loss"]


@pytest.mark.parametrize("builder", [conv_net, transformer_block, conv_transpose, classifier])
def test_biases_are_parameters(builder: Callable[[], onnx.ModelProto]) -> None:
    case = whole(builder(), "w8a8", "paper")
    biases, session = case.biases(), Loss(case.loss(case.biases()))
    at_start = session.run(case.fed(biases))
    for name in biases:
        moved = {**biases, name: biases[name] + normal(*biases[name].shape, scale=0.5)}
        layers = {each: replace(p, bias=moved.get(each, p.bias)) for each, p in case.plan.layers.items()}
        by_hand = case.by_hand(case.write(replace(case.plan, layers=layers)))
        found = session.run(case.fed(moved))
        assert abs(found - at_start) > 1e-5 * at_start, name
        assert found == pytest.approx(by_hand, rel=1e-3), name


def test_a_unit_only_scales_the_parameter() -> None:
    case = whole(conv_net(), "w4a4", "paper")
    biases = {name: value + np.float32(0.1) for name, value in case.biases().items()}
    plain, scaled = Loss(case.loss(biases)), Loss(case.loss(biases, 0.25))
    quarters = {name: value / np.float32(0.25) for name, value in biases.items()}
    assert scaled.run(case.fed(quarters)) == pytest.approx(plain.run(case.fed(biases)), rel=1e-6)


def test_outputs_add_up() -> None:
    case = whole(three_outputs(), "w4a4", "paper")
    assert case.kinds == {"y": OutputKind.LOGITS, "z": OutputKind.VALUES}
    each = []
    for name, output_kind in case.kinds.items():
        reference = {name: case.reference[name]}
        loss = distillation_loss(case.written, case.job.layers, case.plan, {}, {name: output_kind}, reference)
        each.append(Loss(loss).run({**case.feed, reference_name(name): reference[name]}))
        assert each[-1] > 1e-4
    assert case.value({}) == pytest.approx(sum(each), rel=1e-5)


def test_probabilities_of_nearly_nothing_do_no_harm() -> None:
    case = whole(classifier(), "w4a4", "paper")
    feed = {"x": 60 * case.feed["x"]}  # logits far apart: most probabilities underflow
    case = replace(case, feed=feed)
    assert run(case.job.model.proto, feed)["y"].min() < 1e-12
    gradients = gradients_of(case, case.biases())
    assert np.isfinite(gradients.run(case.fed({})))
    assert all(np.isfinite(value).all() for value in gradients.gradients.values())


def test_a_model_that_ends_in_logarithms() -> None:
    case = whole(classifier("[soft] y = LogSoftmax <axis=-1> (l)"))
    assert case.kinds == {"y": OutputKind.LOGITS}
    assert case.value({}) == pytest.approx(case.by_hand(case.written), rel=1e-3)


# Gradients.


def gradients_of(case: Whole, biases: Arrays) -> Gradients:
    named = {bias_name(layer_named(case.job, name)): value for name, value in biases.items()}
    return Gradients(case.loss(biases), named, Engine.AUTO)


@pytest.mark.parametrize("builder", [conv_net, transformer_block, conv_transpose, classifier, three_outputs])
def test_the_gradient_is_the_slope_where_grids_are_fine(builder: Callable[[], onnx.ModelProto]) -> None:
    case = whole(builder(), "w8a8", "paper")
    biases = case.biases()
    proto = case.loss(biases)
    for node in proto.graph.node:
        if node.op_type == "FakeQuantize":  # quantized values without end, thousands to a step
            for attribute in node.attribute:
                if attribute.name in ("low", "high"):
                    attribute.i = -(2**23) if attribute.name == "low" else 2**23
    scales = {node.input[1] for node in proto.graph.node if node.op_type == "FakeQuantize"}
    for tensor in proto.graph.initializer:
        if tensor.name in scales:
            value = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array((value / 2**12).astype(np.float32), tensor.name))
    named = {bias_name(layer_named(case.job, name)): value for name, value in biases.items()}
    gradients, data = Gradients(proto, named, Engine.AUTO), case.fed({})
    gradients.run(data)
    forward, rng = Loss(proto), np.random.default_rng(3)
    for name, value in named.items():
        slope = gradients.gradients[name].astype(np.float64)
        direction = slope / np.linalg.norm(slope) + 0.3 * rng.standard_normal(slope.shape) / np.sqrt(slope.size)
        step = 2e-2
        ahead, behind = (
            forward.run({**data, **named, name: (value + sign * step * direction).astype(np.float32)})
            for sign in (1, -1)
        )
        assert (ahead - behind) / (2 * step) == pytest.approx(float(np.sum(slope * direction)), rel=0.05), name


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("builder", [conv_net, transformer_block, classifier, three_outputs])
def test_a_step_against_the_gradient_lowers_the_loss(builder: Callable[[], onnx.ModelProto], target: str) -> None:
    case = whole(builder(), "w4a8", target)
    # Away from where training has nothing to do.
    biases = {name: value + normal(*value.shape, scale=0.3) for name, value in case.biases().items()}
    gradients, data = gradients_of(case, biases), case.fed({})
    before = gradients.run(data)
    assert before == pytest.approx(case.value(biases), rel=1e-4)
    size = np.sqrt(sum(float(np.sum(value**2)) for value in gradients.gradients.values()))
    assert size > 0
    for name, slope in gradients.gradients.items():
        gradients.parameters[name][...] -= np.float32(0.05 / size) * slope
    assert gradients.run(data) < before


def test_feeds_of_other_sizes_fit() -> None:
    feeds = [{"x": normal(2, length, 6)} for length in (4, 7)]
    job = job_on(any_length(), feeds, "w4a4", "paper")
    plan = plan_of(job)
    cases = [Whole(job, plan, feed) for feed in feeds]
    gradients = gradients_of(cases[0], cases[0].biases())
    assert gradients.run(cases[0].fed({})) == pytest.approx(cases[0].by_hand(cases[0].written), rel=1e-3)
    # Values are relative to the energy of the first feed.
    ratio = np.mean(cases[1].reference["y"] ** 2) / np.mean(cases[0].reference["y"] ** 2)
    assert gradients.run(cases[1].fed({})) == pytest.approx(cases[1].by_hand(cases[1].written) * ratio, rel=1e-3)


def test_an_output_that_is_one_number() -> None:
    text = """
    net (float[N,6] x) => (float y) {
        [one] c = Gemm (x, w1, b1)
        [mean] y = ReduceMean <keepdims=0> (c)
    }"""
    case = whole(build(text, w1=normal(6, 4), b1=normal(4)), "w3a4", "paper")
    gradients = gradients_of(case, case.biases())
    assert gradients.run(case.fed({})) == pytest.approx(case.by_hand(case.written), rel=1e-3)
    assert gradients.gradients["one:bias"].any()


def test_hints_add_their_mean_relative_error_as_often_as_asked() -> None:
    case = whole(conv_net(), "w4a8", "paper")
    names = [layer.input for layer in case.job.layers[1:]]
    floats = run(with_outputs(case.job.model.proto, names), case.feed)
    found = run(with_outputs(case.written, names), case.feed, graph_optimization_level=AS_WRITTEN)
    shares = [np.mean((found[name] - floats[name]) ** 2) / np.mean(floats[name] ** 2) for name in names]
    values = []
    for hints in ([], names):
        reference = {**case.reference, **{name: floats[name] for name in hints}}
        loss = distillation_loss(case.written, case.job.layers, case.plan, {}, case.kinds, reference, hints)
        share = {HINTED: np.float32(2.5)} if hints else {}
        fed = {**case.feed, **{reference_name(name): value for name, value in reference.items()}, **share}
        values.append(Loss(loss).run(fed))
    assert min(shares) > 1e-6
    assert values[1] - values[0] == pytest.approx(2.5 * np.mean(shares), rel=1e-3)
