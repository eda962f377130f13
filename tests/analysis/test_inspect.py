"""What inspect lists of transformers and recurrent models, with sizes out of a sample."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by

from models import build, normal, transformer_block
from onnxcalib import Recipe, inspect
from onnxcalib.model.float_nodes import FUSED_ATTENTION
from onnxcalib.pipeline.job import start


def with_free_length() -> onnx.ModelProto:
    """Attention over a sequence of any length."""
    model = transformer_block()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_param = "T"
    return model


SAMPLES = {"x": np.random.default_rng(0).normal(size=(8, 7, 6)).astype(np.float32)}


def test_a_sample_tells_the_length_of_a_sequence() -> None:
    assert {layer.macs for layer in inspect(with_free_length()).layers} == {None}
    listed = inspect(with_free_length(), SAMPLES)
    macs = {layer.name: layer.macs for layer in listed.layers}
    assert (macs["query"], macs["up"], macs["down"]) == (7 * 6 * 6, 7 * 6 * 12, 7 * 12 * 6)
    assert [product.macs for product in listed.products] == [7 * 7 * 6, 7 * 7 * 6]


def test_mixed_precision_counts_operations_of_sequences() -> None:
    bits = {"bits": "w4a8,w8a8", "pipeline": "light", "limits": ["bops=0.2"]}
    (job,) = start(with_free_length(), SAMPLES, Recipe(**bits)).jobs
    assert all(layer.macs for layer in job.layers)


def test_recurrent_ops_and_tables_tell_their_size() -> None:
    text = """net (int64[N,T] ids) => (float[T,1,N,4] y) {
        [embed] e = Gather (table, ids)
        [turn] t = Transpose <perm=[1,0,2]> (e)
        [gates] y = GRU <hidden_size=4> (t, w, r)
    }"""
    weights = {"w": normal(1, 12, 512), "r": normal(1, 12, 4)}
    listed = inspect(build(text, table=normal(16, 512), **weights), {"ids": np.zeros((2, 5), np.int64)})
    found = {node.name: (node.parameters, node.macs) for node in listed.float_nodes}
    assert found == {"embed": (16 * 512, 0), "gates": (12 * 516, 5 * 12 * 516)}


@pytest.mark.parametrize(
    ("op", "words"),
    [("MultiHeadAttention", FUSED_ATTENTION), ("QuickGelu", "between layers"), ("Unheard", "com.microsoft")],
)
def test_ops_of_runtimes_are_named(op: str, words: str) -> None:
    model = build(
        "net (float[N,4] x) => (float[N,4] y) { [first] a = MatMul (x, w) [second] y = Relu (a) }", w=normal(4, 4)
    )
    node = model.graph.node[1]
    node.op_type, node.domain = op, "com.microsoft"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    (found,) = inspect(model).float_nodes
    assert (found.name, found.op) == ("second", op)
    assert words in found.reason


def test_the_command_shows_products_and_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(with_free_length(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **SAMPLES)
    code, out, _ = said_by(capsys, "inspect", tmp_path / "model.onnx", "-c", tmp_path / "data.npz")
    assert code == 0
    assert "Products of attention" in out
    assert f"{3 * 7 * 36 + 2 * 7 * 72 + 2 * 7 * 7 * 6:,} MACs" in out
    listed = json.loads(said_by(capsys, "inspect", tmp_path / "model.onnx", "--json")[1])
    assert [product["role"] for product in listed["products"]] == ["scores", "values"]
