"""Blocks of small graphs: every layer in one, cut where all that depends on a layer passes through one tensor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from jobs import job_on, plan_of

from models import any_length, branches, build, conv_net, feed_for, normal, run, transformer_block, two_heads
from onnxcalib.model.blocks import Block, find_blocks
from onnxcalib.model.qdq import write_plain
from onnxcalib.pipeline.job import Job


def weights(count: int, channels: int = 4) -> dict[str, np.ndarray]:
    return {f"w{place}": normal(channels, channels, 1, 1, seed=place, scale=0.5) for place in range(count)}


def net(body: str, layers: int, outputs: str = "float[N,4,5,5] y") -> onnx.ModelProto:
    return build(f"net (float[N,4,5,5] x) => ({outputs}) {{ {body} }}", **weights(layers))


def chain(count: int) -> onnx.ModelProto:
    tensors = ["x", *(f"t{place}" for place in range(count - 1)), "y"]
    body = " ".join(f"[l{place}] {tensors[place + 1]} = Conv ({tensors[place]}, w{place})" for place in range(count))
    return net(body, count)


RESIDUALS = """[l0] a = Conv (x, w0) [r0] b = Relu (a)
    [l1] c = Conv (b, w1) [r1] d = Relu (c) [l2] e = Conv (d, w2) [sum] f = Add (b, e) [r2] g = Relu (f)
    [l3] h = Conv (g, w3) [l4] i = Conv (g, w4) [sum2] j = Add (h, i) [l5] y = Conv (j, w5)"""
# Expand, depthwise and project without a residual, then with one.
INVERTED = """[l0] a = Conv (x, w0) [r0] b = Clip (a) [l1] c = Conv (b, w1) [r1] d = Clip (c) [l2] e = Conv (d, w2)
    [l3] f = Conv (e, w3) [r2] g = Clip (f) [l4] h = Conv (g, w4) [r3] i = Clip (h) [l5] j = Conv (i, w5)
    [sum] k = Add (e, j) [l6] y = Conv (k, w6)"""
OUTPUTS = """[l0] a = Conv (x, w0) [r0] b = Relu (a) [l1] z = Conv (b, w1) [l2] c = Conv (b, w2) [r1] d = Relu (c)
    [l3] e = Conv (d, w3) [sum] f = Add (b, e) [l4] y = Conv (f, w4)"""
TWO = "float[N,4,5,5] y, float[N,4,5,5] z"

Found = list[tuple[list[str], tuple[str, ...], tuple[str, ...]]]


def found_in(model: onnx.ModelProto) -> Found:
    job = job_on(model, feed_for(model), "w4a4", "paper")
    return [([layer.name for layer in it.layers], it.reads, it.makes) for it in find_blocks(job.model, job.layers)]


NETS: dict[str, tuple[onnx.ModelProto, Found]] = {
    "residual blocks": (
        net(RESIDUALS, 6),
        [(["l0"], ("x",), ("b",)), (["l1", "l2"], ("b",), ("g",)), (["l3", "l4"], ("g",), ("j",)),
         (["l5"], ("j",), ("y",))],
    ),
    "inverted bottlenecks": (
        net(INVERTED, 7),
        [(["l0", "l1", "l2"], ("x",), ("e",)), (["l3", "l4", "l5"], ("e",), ("k",)), (["l6"], ("k",), ("y",))],
    ),
    "a chain": (
        chain(7),
        [(["l0", "l1", "l2"], ("x",), ("t2",)), (["l3", "l4", "l5"], ("t2",), ("t5",)), (["l6"], ("t5",), ("y",))],
    ),
    "two outputs": (
        net(OUTPUTS, 5, TWO),
        [(["l0"], ("x",), ("b",)), (["l1", "l2", "l3"], ("b",), ("z", "f")), (["l4"], ("f",), ("y",))],
    ),
    "one layer": (chain(1), [(["l0"], ("x",), ("y",))]),
}  # fmt: skip


@pytest.mark.parametrize(("model", "blocks"), NETS.values(), ids=NETS)
def test_blocks_of_small_graphs(model: onnx.ModelProto, blocks: Found) -> None:
    assert found_in(model) == blocks


def test_what_no_layer_changes_keeps_no_blocks_together() -> None:
    """A mask that every block reads is computed in each."""
    body = """[m] m = Sigmoid (w) [l0] a = Conv (x, w0) [x0] b = Mul (a, m)
        [l1] c = Conv (b, w1) [x1] d = Mul (c, m) [l2] e = Conv (d, w2) [sum] f = Add (b, e)
        [l3] g = Conv (f, w3) [x2] y = Mul (g, m)"""
    model = build(f"net (float[N,4,5,5] x, float[N,4,1,1] w) => (float[N,4,5,5] y) {{ {body} }}", **weights(4))
    found = [(layers, set(reads), makes) for layers, reads, makes in found_in(model)]
    assert found == [(["l0"], {"x", "w"}, ("b",)), (["l1", "l2"], {"b", "w"}, ("f",)), (["l3"], {"f", "w"}, ("y",))]


def through(blocks: list[Block], feed: dict[str, np.ndarray], job: Job | None = None) -> dict[str, np.ndarray]:
    """All tensors between blocks, one block after the other; quantized where there is a job."""
    known = dict(feed)
    for block in blocks:
        model = block.model.proto
        if job is not None:
            model = write_plain(block.model, block.layers, block.part_of(plan_of(job)), job.target)
        known |= run(model, {name: known[name] for name in block.reads})
    return known


BUILDERS = [conv_net, transformer_block, branches, two_heads, any_length]


@pytest.mark.parametrize("builder", BUILDERS)
def test_blocks_one_after_the_other_are_the_model(builder: Callable[[], onnx.ModelProto]) -> None:
    job = job_on(builder(), feed_for(builder(), 8), "w4a4", "ort")
    blocks = find_blocks(job.model, job.layers)
    assert [layer.name for block in blocks for layer in block.layers] == [layer.name for layer in job.layers]
    feed = next(iter(job.data.batches(8)))
    for whole, found in (
        (run(job.model.proto, feed), through(blocks, feed)),
        (run(write_plain(job.model, job.layers, plan_of(job), job.target), feed), through(blocks, feed, job)),
    ):
        for name, value in whole.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4)
