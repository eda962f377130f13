"""What is fixed for single layers, at one precision and among several, and what the file then holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from said import refused

from models import conv_net, feed_for, run
from onnxcalib.errors import RecipeError
from onnxcalib.model.quantized import QuantizedLayer, read_quantized
from onnxcalib.pipeline.pipelines import quantize
from onnxcalib.recipe import Pipeline, RangeMethod, Recipe, parse_bits, read_recipe
from onnxcalib.recipe.overrides import Override, expanded, parse_override

OPS = {"stem": "Conv", "block.1": "Conv", "block.2": "ConvTranspose", "fc": "Gemm"}


def layers(**options: Any) -> dict[str, QuantizedLayer]:
    """The layers of the file that a recipe leads to, which runs."""
    model = conv_net()
    settings = {"ranges": RangeMethod.MINMAX, **options}
    result = quantize(model, feed_for(model, 16), Recipe(**settings))
    onnx.checker.check_model(result.model)
    assert np.isfinite(run(result.model, feed_for(model, 2))["y"]).all()
    return {layer.name: layer for layer in read_quantized(result.model).layers}


def test_precisions_at_one_precision() -> None:
    found = layers(bits=parse_bits("w4a4"), overrides={"first": "w8a8", "project": "w2a8", "op:Gemm": "w3"})
    assert {name: layer.bits for name, layer in found.items()} == {
        "stem": "w8a8", "depth": "w4a4", "project": "w2a8", "head": "w4a4", "fc": "w3a32",
    }  # fmt: skip


def test_float_leaves_a_layer_out() -> None:
    assert set(layers(overrides=("head=float", "last=float"))) == {"stem", "depth", "project"}
    with refused(RecipeError, "--override"):
        layers(overrides=("*=float",))


def test_one_layer_by_another_range_method() -> None:
    """By minmax a grid spans every value; by mse it is shorter, and only that of the layer named."""
    bits = parse_bits("w7a8")  # at few bits zero points move as well
    plain, mixed = layers(bits=bits), layers(bits=bits, overrides=("project=mse",))
    changed = [name for name in plain if not np.array_equal(plain[name].weight.scale, mixed[name].weight.scale)]
    assert changed == ["project"]
    assert (mixed["project"].weight.scale <= plain["project"].weight.scale).all()


def test_per_tensor_weights() -> None:
    found = layers(overrides=("op:Conv=per-tensor", "depth=per-channel"))
    assert {name: layer.weight.axis is None for name, layer in found.items()} == {
        "stem": True, "depth": False, "project": True, "head": True, "fc": False,
    }  # fmt: skip


@pytest.mark.parametrize("pipeline", ["plain", "light"])
@pytest.mark.parametrize("target", ["paper", "ort"])
def test_symmetric_weights_on_a_target_that_takes_others(target: str, pipeline: str) -> None:
    options = {"target": target, "bits": parse_bits("w4a8"), "pipeline": pipeline}
    plain, found = layers(**options), layers(**options, overrides=("head=symmetric",))
    assert len(np.unique(plain["head"].weight.zero_point)) > 1
    assert len(np.unique(found["head"].weight.zero_point)) == 1
    assert len(np.unique(found["stem"].weight.zero_point)) > 1


def test_mixed_precision_takes_a_precision_that_is_not_on_the_list() -> None:
    options = {"pipeline": Pipeline.LIGHT, "bits": parse_bits("w4a4,w8a8"), "compression": 0.9}
    found = layers(**options, overrides=("project=w6a5", "fc=float"))
    assert found["project"].bits == "w6a5"
    assert "fc" not in found


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("first", ["stem"]),
        ("last", ["fc"]),
        ("op:Conv*", ["stem", "block.1", "block.2"]),
        ("op:Conv", ["stem", "block.1"]),
        ("block.?", ["block.1", "block.2"]),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    assert [parse_override(text)[0] for text in expanded([f"{pattern}=w8a8"], OPS)] == names


def test_later_overrides_win_where_both_say_something() -> None:
    later, earlier = (parse_override(f"a={value}")[1] for value in ("w4a8+asymmetric", "w8a8+minmax+symmetric"))
    found = later.over(earlier)
    assert (str(found.precision), found.ranges, found.symmetric) == ("w4a8", RangeMethod.MINMAX, False)
    assert Override().over(earlier) == earlier


def test_a_table_a_list_and_the_old_name_in_toml(tmp_path: Path) -> None:
    for text in ('overrides = ["first=w8a8"]', '[overrides]\nfirst = "w8a8"', 'pins = ["first=w8a8"]'):
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        assert read_recipe(path) == Recipe(overrides={"first": "w8a8"})
