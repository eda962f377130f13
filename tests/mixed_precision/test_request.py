"""Menus of layers, and wishes that are refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jobs import job_on
from said import refused

from models import build, conv_net, feed_for, normal
from onnxcalib.errors import RecipeError
from onnxcalib.mixed_precision.request import candidate_precisions, check_mixed
from onnxcalib.pipeline.job import Job


def job_of(model, bits: str = "w4a4,w8a8", **options) -> Job:
    return job_on(model, feed_for(model, 8), bits, **{"compression": 2.0, **options})


def shared_input():
    """Two layers read the model's input, and one their sum."""
    text = """
    net (float[N,6] x) => (float[N,4] y) {
        [left] a = Gemm (x, w1, c1)
        [right] b = Gemm (x, w2, c2)
        [sum] s = Add (a, b)
        [last] y = Gemm (s, w3, c3)
    }"""
    weights = {"w1": normal(6, 5), "w2": normal(6, 5, seed=1), "w3": normal(5, 4)}
    return build(text, **weights, c1=normal(5), c2=normal(5, seed=1), c3=normal(4))


def check(job: Job) -> None:
    check_mixed(job.recipe, job.layers)


def named(menus) -> dict[str, str]:
    return {name: " ".join(map(str, menu)) for name, menu in menus.items()}


def test_without_edges_every_layer_has_the_list() -> None:
    job = job_of(shared_input())
    assert named(candidate_precisions(job.layers, job.recipe)) == dict.fromkeys(("left", "right", "last"), "w4a4 w8a8")


@pytest.mark.parametrize(
    ("bits", "edge", "menus"),
    [
        ("w2a4,w4a4", 8, {"left": "w2a4 w4a4 w8a8", "right": "w2a4 w2a8 w4a4 w4a8", "last": "w2a4 w4a4 w8a8"}),
        ("w4a4,w8a8", 8, {"left": "w4a4 w8a8", "right": "w4a4 w4a8 w8a8", "last": "w4a4 w8a8"}),
    ],
)
def test_who_shares_the_input_of_an_edge_can_follow_its_bits(bits: str, edge: int, menus: dict[str, str]) -> None:
    job = job_of(shared_input(), bits, edge_bits=edge)
    assert named(candidate_precisions(job.layers, job.recipe)) == menus
    check(job)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"overrides": ("stm=8",)}, ("--override 'stm=8'", "stem")),
        ({"overrides": ("stem",)}, ("--override 'stem'", "NAME=VALUE")),
        ({"overrides": ("stem=w9a8",)}, ("--override 'stem=w9a8'", "w9a8")),
        ({"overrides": ("op:Cov=8",)}, ("--override 'op:Cov=8'", "Conv")),
        ({"overrides": ("stem=float+minmax",)}, ("--override 'stem=float+minmax'", "float")),
        ({"overrides": ("stem=asymmetric",)}, ("--override", "'stem'", "ort")),
        ({"limits": ("bobs=1",)}, ("--limit 'bobs=1'", "bops")),
        ({"limits": ("bops=few",)}, ("--limit 'bops=few'", "number")),
        ({"limits": ("bops=nan",)}, ("nan", "bops")),
        ({"limits": ("bops=-1",)}, ("bops", "negative")),
        ({"max_loss": 1.0, "minimise": "sise"}, ("'sise'", "size")),
        ({"costs": ("latency=none.csv",)}, ("none.csv",)),
    ],
)
def test_wishes_without_sense_are_refused(options: dict[str, object], facts: tuple[str, ...]) -> None:
    with refused(RecipeError, *facts):
        check(job_of(conv_net(), **options))


def test_a_cost_table_is_held_against_the_layers(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    job = job_of(conv_net(), costs=(f"latency={path}",), limits=("latency=12",))
    rows = [f"{layer.name},{bits},1" for layer in job.layers for bits in ("w4a4", "w8a8")]
    path.write_text("\n".join(["layer,precision,cost", *rows]))
    check(job)
    path.write_text("\n".join(["layer,precision,cost", *rows]).replace("head,w4a4", "hat,w4a4"))
    with refused(RecipeError, path, "line 8", "'hat'", "head"):
        check(job)


def test_pins_that_one_tensor_cannot_keep() -> None:
    with refused(RecipeError, "'left'", "w4a4", "'right'", "w8a8"):
        check(job_of(shared_input(), overrides=("left=4", "right=8")))


def test_multiplications_are_counted_on_a_sample_where_the_file_has_no_sizes() -> None:
    text = "net (float[N,C,H,W] x) => (float[N,D,H,W] y) { [only] y = Conv (x, w) }"
    model = build(text, w=normal(4, 3, 1, 1))
    job = job_on(model, {"x": np.ones((2, 3, 4, 4), np.float32)}, "w4a4,w8a8", limits=("bops=1",))
    check(job)
    assert [layer.macs for layer in job.layers] == [3 * 4 * 4 * 4]
