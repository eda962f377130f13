"""Data for a branch: the right feeds, what the branch captures of them, read anew in every pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxcalib.data import Dataset, Feed, first, open_data
from onnxcalib.model.branches import Branch, find_branches
from onnxcalib.model.prepare import Model, prepare
from onnxcalib.model.shapes import input_specs
from onnxcalib.pipeline.branch_data import BranchData

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
main (float[N,2] x INPUT) => (float[N,2] y)
<float[2,2] w = {1.0, 2.0, 3.0, 4.0}, int64 one = {1}, float k = {10.0} CONSTANT>
{
    h = Exp (x)
    CONDITION
    y = If (c) <
        then_branch = a () => (float[N,2] p) { p = MatMul (h, w) },
        else_branch = b () => (float[N,2] q) { q0 = MatMul (x, w)  q = Add (q0, h) }
    >
}
"""
BY_MODE = {"INPUT": ", int64 mode", "CONDITION": "c = Equal (mode, one)"}
BY_INPUT = {"INPUT": ", bool c"}
BY_CONSTANT = {"CONSTANT": ", bool c = {1}"}
BY_VALUE = {"CONDITION": "s = ReduceMax <keepdims = 0> (x)  c = Less (s, k)"}
BY_SAMPLE = {"CONDITION": "s = ReduceMax <axes = [1], keepdims = 0> (x)  c = Less (s, k)"}
BY_SIZE = {"CONDITION": "n = Shape <end = 1> (x)  c = Equal (n, one)"}


def model_of(kind: dict[str, str]) -> Model:
    text = MODEL
    for place in ("INPUT", "CONSTANT", "CONDITION"):
        text = text.replace(place, kind.get(place, ""))
    proto = parser.parse_model(text)
    onnx.checker.check_model(proto)
    return prepare(proto, "test")


def rows(count: int) -> np.ndarray:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2) / 10


def branch_data(model: Model, given: object) -> tuple[BranchData, BranchData]:
    then, other = find_branches(model.proto)
    data = open_data(given, input_specs(model.proto))
    return BranchData(model, then, data), BranchData(model, other, data)


def test_feeds_go_to_the_branch_that_they_take() -> None:
    modes = np.array([1, 0, 1, 1, 2])
    then, other = branch_data(model_of(BY_MODE), {"x": rows(5), "mode": modes})
    assert (len(then), len(other)) == (3, 2)
    taken = list(then.batches(1))
    assert [set(feed) for feed in taken] == [{"h"}] * 3
    np.testing.assert_allclose(np.concatenate([feed["h"] for feed in taken]), np.exp(rows(5)[modes == 1]), rtol=1e-6)
    rest = list(other.batches(1))
    assert [set(feed) for feed in rest] == [{"x", "h"}] * 2
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in rest]), rows(5)[modes != 1])
    np.testing.assert_allclose(np.concatenate([feed["h"] for feed in rest]), np.exp(rows(5)[modes != 1]), rtol=1e-6)


def test_is_a_dataset_that_can_be_read_again() -> None:
    then, _ = branch_data(model_of(BY_MODE), {"x": rows(4), "mode": np.array([1, 0, 1, 1]), "labels": np.arange(4)})
    assert isinstance(then, Dataset)
    assert then.labels is None
    assert then.source == "python dict"
    once, again = list(then.batches(1)), list(then.batches(1))
    assert len(once) == len(again) == 3
    assert all(np.array_equal(left["h"], right["h"]) for left, right in zip(once, again, strict=True))
    assert len(first(then, 2)) == 2


def test_a_branch_never_taken_has_no_samples() -> None:
    then, other = branch_data(model_of(BY_MODE), {"x": rows(3), "mode": np.zeros(3, np.int64)})
    assert (len(then), len(other)) == (0, 3)
    assert list(then.batches(1)) == list(then.batches(8)) == []


def test_the_condition_may_be_an_input_or_a_constant() -> None:
    flags = np.array([True, False, False])
    then, other = branch_data(model_of(BY_INPUT), {"x": rows(3), "c": flags})
    assert (len(then), len(other)) == (1, 2)
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in other.batches(1)]), rows(3)[1:])
    then, other = branch_data(model_of(BY_CONSTANT), {"x": rows(3)})
    assert (len(then), len(other)) == (3, 0)


def test_no_session_where_inputs_hold_all() -> None:
    model = model_of(BY_INPUT)
    branch = Branch("If_y", "else_branch", "c", False, ("x",))
    data = BranchData(model, branch, open_data({"x": rows(3), "c": np.zeros(3, bool)}, input_specs(model.proto)))
    assert len(data) == 3
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in data.batches(1)]), rows(3))


def test_whole_feeds_are_counted_by_their_samples() -> None:
    given = [
        {"x": rows(4), "mode": np.array(1)},
        {"x": rows(3), "mode": np.array(0)},
        {"x": rows(2), "mode": np.array(1)},
    ]
    then, other = branch_data(model_of(BY_MODE), given)
    assert (len(then), len(other)) == (6, 3)
    assert [len(feed["h"]) for feed in then.batches(1)] == [4, 2]


def test_the_size_asked_for_is_given_where_all_samples_agree() -> None:
    then, other = branch_data(model_of(BY_VALUE), {"x": rows(5)})
    assert (len(then), len(other)) == (5, 0)
    assert [len(feed["h"]) for feed in then.batches(2)] == [2, 2, 1]


@pytest.mark.parametrize("kind", [BY_VALUE, BY_SAMPLE])
def test_samples_that_disagree_come_one_by_one(kind: dict[str, str]) -> None:
    x = rows(6)
    x[2] = 20.0
    then, other = branch_data(model_of(kind), {"x": x})
    assert (len(then), len(other)) == (5, 1)
    assert [len(feed["h"]) for feed in then.batches(4)] == [1] * 5
    np.testing.assert_array_equal([feed["x"] for feed in other.batches(4)], [x[2:3]])


@pytest.mark.parametrize("kind", [BY_SIZE, BY_SAMPLE])
def test_a_condition_that_only_single_samples_meet(kind: dict[str, str]) -> None:
    then, _ = branch_data(model_of(kind), {"x": rows(5)})
    assert len(then) == 5
    np.testing.assert_allclose(np.concatenate([feed["h"] for feed in then.batches(4)]), np.exp(rows(5)), rtol=1e-6)


class Counted:
    """Feeds that know how many of them were read."""

    labels = None
    source = "counted"

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 100

    def batches(self, size: int) -> Iterator[Feed]:
        for _ in range(0, 100, size):
            self.read += 1
            yield {"x": rows(size)}


def test_feeds_are_streamed() -> None:
    model, data = model_of(BY_CONSTANT), Counted()
    then = BranchData(model, find_branches(model.proto)[0], data)
    assert data.read == 100
    feeds = then.batches(1)
    next(feeds)
    next(feeds)
    assert data.read == 102
