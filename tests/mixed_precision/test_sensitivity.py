"""Sensitivity: each probe against a whole model with that layer changed, what runs again, and the costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import by_hand
import numpy as np
import onnx
import pytest
from by_hand import divergence, log_softmax
from jobs import job_on
from said import refused

from models import (
    Arrays,
    branches,
    build,
    conv1d,
    conv_net,
    feed_for,
    grouped,
    normal,
    run,
    transformer_block,
    two_heads,
)
from onnxcalib.data import open_data
from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision import probes as probes_room
from onnxcalib.mixed_precision.sensitivity import Measured, probed_on
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.model.io import constant_bytes
from onnxcalib.model.layers import Layer
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs, typed
from onnxcalib.model.subgraph import Cutter, with_outputs
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.pipeline.job import Job
from onnxcalib.pipeline.stages import sensitivities
from onnxcalib.pipeline.sweep import candidates_of
from onnxcalib.plan import Candidates, QuantPlan
from onnxcalib.recipe import Precision
from onnxcalib.runtime import following as following_room
from onnxcalib.runtime.session import LARGEST_BATCH, Session, Tensors
from onnxcalib.targets import Storage, find_target

SAMPLES = 40


def shown_inside() -> onnx.ModelProto:
    """A model output in the middle: the first layer's result is shown and read on; a Sigmoid inside a layer."""
    text = """
    net (float[N,3,6,6] x) => (float[N,4,6,6] r, float[N,2,6,6] y) {
        [one] c = Conv <pads=[1,1,1,1]> (x, w1, b1)
        [relu] r = Relu (c)
        [two] d = Conv (r, w2, b2)
        [gate] g = Sigmoid (d)
        [three] y = Conv (g, w3, b3)
    }"""
    return build(
        text, w1=normal(4, 3, 3, 3, scale=0.3), b1=normal(4), w2=normal(6, 4, 1, 1), b2=normal(6),
        w3=normal(2, 6, 1, 1), b3=normal(2),
    )  # fmt: skip


def job_for(model: onnx.ModelProto, bits: str, target: str, data: Arrays, loss: LossKind | None = None) -> Job:
    return job_on(model, data, bits, target, compression=2.0, loss=loss)


def measured(job: Job) -> tuple[Candidates, Measured]:
    candidates = candidates_of(job)
    return candidates, sensitivities(job, candidates)


def at_base(job: Job, candidates: Candidates) -> QuantPlan:
    return candidates.stitch({layer.name: job.recipe.base for layer in job.layers})


def changed_alone(job: Job, candidates: Candidates, layer: Layer, choice: Precision) -> onnx.ModelProto:
    """The whole model at the base precision but for one layer.

    A copy of the tensor is made for the layer, so that others which read it keep seeing the base precision.
    """
    own = f"{layer.input}_of_{layer.name}"
    proto = onnx.ModelProto()
    proto.CopyFrom(job.model.proto)
    place, node = next((i, node) for i, node in enumerate(proto.graph.node) if node.name == layer.name)
    node.input[0] = own
    proto.graph.node.insert(place, onnx.helper.make_node("Identity", [layer.input], [own], f"{own}_copy"))
    plan = at_base(job, candidates)
    qparams = candidates.inputs[layer.input].get(choice.activation) or candidates.shared[layer.input]
    readers = [other.input for other in job.layers if other is not layer]
    inputs = {name: value for name, value in plan.inputs.items() if name in readers or name in plan.shared}
    plan = replace(
        plan,
        layers={**plan.layers, layer.name: candidates.layers[layer.name][choice]},
        inputs={**inputs, own: qparams},
    )
    layers = [replace(layer, input=own) if other is layer else other for other in job.layers]
    return write_qdq(replace(job.model, proto=proto), layers, plan, job.target)


def scaled_to(hard: dict, soft: dict) -> dict:
    """The softened increases on the scale of the loss itself."""
    return {key: value * sum(hard.values()) / sum(soft.values()) for key, value in soft.items()}


# A probe runs the layer and what follows as models of their own. Where the whole model fuses the layer into one integer
# kernel, that kernel scales its sums in one float32 product instead of two, so that a value halfway between two
# may fall to the other one: at 40 samples a single flip moves the loss by up to some 2e-4 of it.
CLOSE = {"ort": 1e-3, "paper": 1e-5}
CASES = [
    (conv_net, ("y",), "w4a4,w4a8,w8a8"),
    (two_heads, ("y",), "w4a4,w8a8"),
    (shown_inside, (), "w3a4,w8a8"),
    (conv1d, (), "w4a4,w8a8"),
    (grouped, (), "w4a5,w6a6"),
    (branches, (), "w4a4,w8a8"),
    (transformer_block, (), "w4a4,w8a8"),
    (conv_net, ("y",), "w4a5,w6a6"),
]


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize(("builder", "logits", "bits"), CASES, ids=[f"{case[0].__name__}-{case[2]}" for case in CASES])
def test_a_probe_is_a_model_with_one_layer_changed(builder, logits: tuple[str, ...], bits: str, target: str) -> None:
    model = builder()
    data = feed_for(model, SAMPLES)
    job = job_for(model, bits, target, data)
    candidates, found = measured(job)
    table, reference = found.table, run(model, data)
    base = by_hand.loss(reference, run(job.write(at_base(job, candidates)), data), logits)
    assert table.base_loss == pytest.approx(base, rel=CLOSE[target])
    assert table.base_loss > 0
    assert (table.base, table.samples, table.loss) == (job.recipe.base, SAMPLES, "distillation")
    assert found.probes == len(job.layers) * (len(job.recipe.bits) - 1)
    plain = run(job.write(at_base(job, candidates)), data)
    hard, soft = {}, {}
    for layer, row in zip(job.layers, table.layers, strict=True):
        assert (row.layer, row.tensor) == (layer.name, layer.input)
        assert row.losses[table.base] == 0.0
        for choice in set(job.recipe.bits) - {table.base}:
            outputs = run(changed_alone(job, candidates, layer, choice), data)
            for increases, temperature in ((hard, 1.0), (soft, TEMPERATURE)):
                one, other = (by_hand.loss(reference, made, logits, temperature) for made in (outputs, plain))
                increases[row.layer, choice] = one - other
    for (name, choice), expected in scaled_to(hard, soft).items():
        row = next(row for row in table.layers if row.layer == name)
        assert row.losses[choice] == pytest.approx(expected, rel=2 * CLOSE[target], abs=2e-7), (name, choice)


def test_an_unshared_tensor_may_as_well_be_stitched() -> None:
    model = conv_net()
    data = feed_for(model, SAMPLES)
    job = job_for(model, "w3a4,w8a8", "ort", data)
    candidates, found = measured(job)
    reference, low = run(model, data)["y"], Precision(3, 4)
    base = {layer.name: job.recipe.base for layer in job.layers}
    plain = run(job.write(candidates.stitch(base)), data)["y"]
    hard, soft = {}, {}
    for row in found.table.layers:
        output = run(job.write(candidates.stitch({**base, row.layer: low})), data)["y"]
        for increases, heat in ((hard, 1.0), (soft, TEMPERATURE)):
            increases[row.layer] = divergence(reference / heat, output / heat) - divergence(
                reference / heat, plain / heat
            )
    expected = scaled_to(hard, soft)
    for row in found.table.layers:
        assert row.losses[low] == pytest.approx(expected[row.layer], rel=2 * CLOSE["ort"], abs=2e-7)
        assert row.losses[low] > 0


@pytest.mark.parametrize("samples", [SAMPLES, 70])
def test_labels_are_judged_by_cross_entropy(samples: int) -> None:
    model = two_heads()
    data, labels = feed_for(model, samples), np.random.default_rng(3).integers(0, 5, samples)
    job = job_for(model, "w4a4,w8a8", "ort", data | {"labels": labels}, LossKind.CROSS_ENTROPY)
    candidates, found = measured(job)

    def cross_entropy(written: onnx.ModelProto) -> float:
        return float(-log_softmax(run(written, data)["y"])[np.arange(samples), labels].mean())

    base = cross_entropy(job.write(at_base(job, candidates)))
    assert found.table.loss == "cross-entropy"
    assert found.table.base_loss == pytest.approx(base, rel=1e-6)
    for layer, row in zip(job.layers, found.table.layers, strict=True):
        whole = cross_entropy(changed_alone(job, candidates, layer, Precision(4, 4)))
        assert row.losses[Precision(4, 4)] == pytest.approx(whole - base, rel=1e-3, abs=1e-6)
    # The values do not count, so the layer that makes them loses nothing.
    assert found.table.layers[2].losses[Precision(4, 4)] == 0.0
    assert found.table.layers[1].losses[Precision(4, 4)] != 0.0


def test_mse_reads_logits_as_values() -> None:
    model = two_heads()
    data = feed_for(model, SAMPLES)
    job = job_for(model, "w4a4,w8a8", "ort", data, LossKind.MSE)
    candidates, found = measured(job)
    outputs = run(job.write(at_base(job, candidates)), data)
    assert found.table.base_loss == pytest.approx(by_hand.loss(run(model, data), outputs, ()), rel=1e-3)


@pytest.mark.parametrize(("builder", "labels", "fact"), [(conv_net, None, "'labels'"), (conv1d, 1, "classifier")])
def test_cross_entropy_without_labels_or_classes_is_refused(builder, labels: int | None, fact: str) -> None:
    model = builder()
    data = feed_for(model, 8) | ({} if labels is None else {"labels": np.zeros(8, np.int64)})
    with refused(RecipeError, "--loss cross-entropy", fact):
        measured(job_for(model, "w4a4,w8a8", "ort", data, LossKind.CROSS_ENTROPY))


class Counted(Session):
    """A session that counts its runs."""

    made: list[Counted]

    def __init__(self, model: onnx.ModelProto, source: str = "the model", **options: Any) -> None:
        super().__init__(model, source, **options)
        self.runs, self.nodes = 0, len(model.graph.node)
        self.made.append(self)

    def run(self, feed: Tensors) -> Tensors:
        self.runs += 1
        return super().run(feed)


def test_sessions_are_reused_and_the_base_model_runs_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net()
    job = job_for(model, "w4a4,w4a8,w8a8", "ort", feed_for(model, 120))
    candidates = candidates_of(job)
    Counted.made = []
    for room in (probes_room, following_room):
        monkeypatch.setattr(room, "Session", Counted)
    table = sensitivities(job, candidates).table
    batches = -(-120 // LARGEST_BATCH)
    # Five layers: one session a layer and choice, and one for what follows the layer, but nothing follows the last.
    base, teacher, *probes = Counted.made
    assert table.samples == 120
    assert len(probes) == 5 * 2 + 4
    assert teacher.runs == batches
    assert base.runs == batches
    assert sorted(session.runs for session in probes) == [batches] * 10 + [2 * batches] * 4


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("builder", [conv_net, two_heads, shown_inside, transformer_block, branches])
def test_borders_change_no_bit(monkeypatch: pytest.MonkeyPatch, builder, target: str) -> None:
    model, found = builder(), []
    job = job_for(model, "w4a5,w8a8", target, feed_for(model, SAMPLES))
    candidates = candidates_of(job)
    for least in (1, 99):
        monkeypatch.setattr(probes_room, "BETWEEN", least)
        found.append(sensitivities(job, candidates).table)
    assert found[0] == found[1]


def test_only_what_depends_on_a_layer_runs_again() -> None:
    model = conv_net()
    data = feed_for(model, 8)
    job = job_for(model, "w4a4,w8a8", "ort", data)
    base = typed(
        write_qdq(job.model, job.layers, at_base(job, candidates_of(job)), replace(job.target, storage=Storage.INT8))
    )
    sizes = []
    for layer in job.layers[:-1]:
        rest, fed = Cutter(base).after(layer.activated)
        assert rest is not None
        sizes.append(len(rest.graph.node))
        captured = run(with_outputs(base, ["y", *dict.fromkeys([layer.activated, *fed])]), data)
        again = run(rest, {name: captured[name] for name in (layer.activated, *fed)})
        np.testing.assert_allclose(again["y"], captured["y"], rtol=1e-6, atol=1e-6)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    assert sizes[0] < len(base.graph.node)
    assert Cutter(base).after(job.layers[-1].activated) == (None, ())


def random_assignment(table: SensitivityTable, rng: np.random.Generator) -> dict[str, Precision]:
    """Layers of one group share their activation bits."""
    menus = {row.layer: sorted(row.losses) for row in table.layers}
    chosen = {}
    for group in table.groups():
        common = set.intersection(*({choice.activation for choice in menus[name]} for name in group))
        bits = rng.choice(sorted(common))
        for name in group:
            chosen[name] = menus[name][rng.choice([i for i, it in enumerate(menus[name]) if it.activation == bits])]
    return chosen


@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("builder", [conv_net, transformer_block, branches])
def test_the_size_is_that_of_the_written_constants(builder, target: str) -> None:
    model = builder()
    job = job_for(model, "w2a4,w4a4,w4a8,w8a8", target, feed_for(model, 8))
    candidates, found = measured(job)
    table, rng = found.table, np.random.default_rng(0)
    assert table.float_costs["size"] == constant_bytes(job.model.proto)
    for trial in range(8):
        choices = random_assignment(table, rng) if trial else dict.fromkeys(candidates.layers, table.base)
        said = table.fixed["size"] + sum(row.costs["size"][choices[row.layer]] for row in table.layers)
        written = constant_bytes(job.write(candidates.stitch(choices)))
        # The most that can be: equal constants are stored once, and tuning may give layers without a bias one.
        biases = sum(12 * layer.channels for layer in job.layers if layer.bias is None and layer.op != "MatMul")
        assert 0 <= said - written <= biases + 64 * (1 + len(job.layers))


def test_costs_by_hand() -> None:
    text = """
    net (float[N,2,4,4] x) => (float[N,3] y, float[N,5,4,4] z) {
        [one] a = Conv <pads=[1,1,1,1]> (x, w1)
        [two] z = Conv (x, w2)
        [relu] r = Relu (a)
        [pool] p = GlobalAveragePool (r)
        [flat] f = Flatten (p)
        [fc] y = Gemm (f, w3)
    }"""
    model = build(text, w1=normal(6, 2, 3, 3), w2=normal(5, 2, 1, 1), w3=normal(6, 3))
    job = job_for(model, "w3a5,w4a8,w8a8", "paper", feed_for(model, 10))
    table = measured(job)[1].table
    low, high = Precision(3, 5), Precision(8, 8)
    one, two, fc = table.layers
    assert table.cost_names() == ("size", "bops", "activation")
    # Places times weights times bits.
    assert one.costs["bops"] == {low: 16 * 108 * 15, Precision(4, 8): 16 * 108 * 32, high: 16 * 108 * 64}
    assert two.costs["bops"][low] == 16 * 10 * 15
    assert fc.costs["bops"][high] == 18 * 64
    assert table.float_costs["bops"] == (16 * 108 + 16 * 10 + 18) * 1024
    # A tensor that two layers read is held once, and counts at the first of them.
    assert one.costs["activation"] == {low: 32 * 5 / 8, Precision(4, 8): 32, high: 32}
    assert two.costs["activation"] == {low: 0, Precision(4, 8): 0, high: 0}
    assert fc.costs["activation"] == {low: 6 * 5 / 8, Precision(4, 8): 6, high: 6}
    assert table.float_costs["activation"] == 4 * (32 + 6)
    # Planes of whole bytes: 108, 10 and 18 quantized values take 14, 2 and 3 bytes a bit; eight bits are plain bytes.
    # The packed quantized values, and the constants that unpack them.
    assert [row.costs["size"][low] for row in table.layers] == [42 + 40, 6 + 40, 9 + 24]
    assert [row.costs["size"][high] for row in table.layers] == [108, 10, 18]
    assert table.float_costs["size"] == 4 * (108 + 10 + 18)
    assert {name: table.fixed[name] for name in ("bops", "activation")} == {"bops": 0, "activation": 0}


def test_groups_share_a_tensor() -> None:
    model = transformer_block()
    job = job_for(model, "w4a4,w8a8", "ort", feed_for(model, 8))
    table = measured(job)[1].table
    assert table.groups() == (("query", "key", "value"), ("up",), ("down",))
    tensors = {row.layer: row.tensor for row in table.layers}
    assert all(tensors[name] == tensors[group[0]] for group in table.groups() for name in group)
    assert tensors == {layer.name: layer.input for layer in job.layers}


def test_the_edges_may_also_take_the_edge_bits() -> None:
    model = conv_net()
    job = job_on(model, feed_for(model, 16), "w4a4,w6a6", edge_bits=8, compression=2.0)
    found = measured(job)[1]
    menus = [sorted(map(str, row.losses)) for row in found.table.layers]
    assert menus == [["w4a4", "w6a6", "w8a8"], *[["w4a4", "w6a6"]] * 3, ["w4a4", "w6a6", "w8a8"]]
    assert found.probes == 7
    # Eight bits at the edges are better than six.
    assert sum(row.losses[Precision(8, 8)] for row in (found.table.layers[0], found.table.layers[-1])) < 0


def test_the_runs_of_all_layers_together_grow_with_their_number_and_not_its_square() -> None:
    model = conv_net()
    data = open_data(feed_for(model, 200), input_specs(model))
    prepared = read_prepared(model, find_target("ort"))
    samples = {layers: len(probed_on(prepared, data, layers)) for layers in (1, 64, 128, 256, 512)}
    assert samples == {1: 128, 64: 128, 128: 64, 256: 32, 512: 16}
    assert len(probed_on(prepared, data, 10_000)) == 16
    few = open_data(feed_for(model, 8), input_specs(model))
    assert len(probed_on(prepared, few, 10_000)) == 8
