"""Float among the bits that the integer program assigns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import said_by
from said import refused

from models import conv_net, feed_for, initializer, run, transformer_block
from onnxcalib.api import allocate, read_table, sensitivity, write_table
from onnxcalib.errors import RecipeError
from onnxcalib.model.io import constant_bytes
from onnxcalib.model.read import read_prepared
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.recipe import Precision, Recipe, parse_bits
from onnxcalib.targets import find_target

FLOAT = Precision.parse("float")


def test_a_precision_called_float_is_read_and_told() -> None:
    assert str(FLOAT) == "float"
    assert Precision.parse(str(FLOAT)) == FLOAT
    assert max(parse_bits("w8a8,float,w2")) == FLOAT


@pytest.mark.parametrize("bits", ["float", "w32a32", "w4a8,w8,float", "w32"])
def test_float_alone_and_other_wide_bits_are_refused(bits: str) -> None:
    with refused(RecipeError):
        Recipe("light", bits, compression=0.5)


@pytest.mark.parametrize("bits", ["w4,w8,float", "w4a8,w8a8,float"])
@pytest.mark.parametrize("pipeline", ["light", "advanced"])
def test_some_layers_stay_as_they_are_and_the_limit_holds(bits: str, pipeline: str) -> None:
    model, most = conv_net(), 0.75
    more = {"steps": 2} if pipeline == "advanced" else {}
    result = quantize(model, feed_for(model, 32), Recipe(pipeline, bits, compression=most, **more))
    assert result.assigned is not None
    floats = {name for name, choice in result.assigned.allocation.choices.items() if choice == FLOAT}
    assert 0 < len(floats) < len(result.assigned.allocation.choices)
    assert floats == set(result.assigned.allocation.choices) - {layer.name for layer in result.layers.layers}
    assert floats <= {node.name for node in result.layers.float_nodes}
    prepared = read_prepared(model, find_target("ort"))
    weights = {node.name: node.input[1] for node in prepared.proto.graph.node if node.name in floats}
    written = {node.name: node.input[1] for node in result.model.graph.node if node.name in floats}
    for name in floats:
        kept = initializer(result.model, written[name])
        # Equalization may have scaled channels by powers of two; nothing else touches a float weight.
        assert kept.dtype == np.float32
        assert kept.size == initializer(prepared.proto, weights[name]).size
    assert constant_bytes(result.model) <= most * constant_bytes(prepared.proto)
    onnx.checker.check_model(result.model, full_check=True)


def test_with_room_for_all_of_it_nothing_is_quantized() -> None:
    model, data = conv_net(), feed_for(conv_net(), 24)
    result = quantize(model, data, Recipe("light", "w2a2,float", compression=1.5))
    wanted, found = run(model, data), run(result.model, data)
    assert all(np.allclose(found[name], wanted[name], rtol=1e-4, atol=1e-5) for name in wanted)
    assert not result.layers.layers


def test_layers_that_read_one_tensor_are_float_together() -> None:
    model = transformer_block()
    result = quantize(model, feed_for(model, 16), Recipe("light", "w4a8,w8a8,float", compression=1.1))
    assert result.assigned is not None
    choices = result.assigned.allocation.choices
    assert result.table is not None
    for group in result.table.groups():
        assert len({choices[name].activation for name in group}) == 1


@pytest.mark.parametrize("bits", ["w4,w8,float", "w4a4,w8a8,float", "w4,w8"])
def test_bits_are_assigned_from_a_file_that_has_it(
    bits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = conv_net(), tmp_path / "table.csv"
    table = sensitivity(model, feed_for(model, 16), bits)
    write_table(table, path)
    assert read_table(path) == table
    assert table.base == max(parse_bits(bits))
    found = allocate(path, compression=0.7)
    assert found.costs["size"] <= 0.7 * table.float_costs["size"]
    edges = allocate(path, compression=0.9, edge_bits=8).choices
    assert {edges[table.layers[place].layer].weight for place in (0, -1)} == {8}
    code, _, error = said_by(capsys, "allocate", path, "--compression", "0.7")
    assert code == 0, error
