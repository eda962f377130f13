"""The greedy baselines: what they do, and that the integer program is never worse."""

from __future__ import annotations

from allocation_tables import (
    BASE,
    GAP,
    W4A4,
    W4A8,
    W8A4,
    assert_sound,
    assignments,
    cost_of,
    pinned,
    realistic,
    small_table,
    two_layers,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxcalib.mixed_precision.allocate import (
    Limit,
    greedy_accuracy,
    greedy_compression,
    least_reachable,
    minimise_loss,
)
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.recipe import Precision


@settings(max_examples=100, deadline=None)
@given(pinned(), st.data())
def test_greedy_keeps_limit_pins_and_shared_bits(
    case: tuple[SensitivityTable, dict[str, Precision]], data: st.DataObject
) -> None:
    table, pins = case
    mark = data.draw(st.sampled_from([cost_of(table, "size", it) for it in assignments(table, pins)]))
    limit = Limit("size", mark)
    best = minimise_loss(table, [limit], pins)
    for greedy in (greedy_accuracy, greedy_compression):
        got = greedy(table, limit, pins)
        assert_sound(table, [limit], pins, got)
        assert not got.optimal
        assert best.estimated_loss <= got.estimated_loss / (1 - GAP)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(20, 60), st.booleans(), st.floats(0.1, 0.24))
def test_never_worse_than_greedy_at_the_same_size(seed: int, layers: int, shared: bool, ratio: float) -> None:
    table = realistic(seed, layers, [BASE, Precision(6, 6), W4A8, W4A4, Precision(2, 4)], shared)
    least = least_reachable(table, "size")
    limit = Limit("size", max(ratio * table.float_costs["size"], least))
    best = minimise_loss(table, [limit])
    assert_sound(table, [limit], {}, best)
    for greedy in (greedy_accuracy, greedy_compression):
        other = greedy(table, limit)
        assert_sound(table, [limit], {}, other)
        assert best.estimated_loss <= other.estimated_loss / (1 - GAP)


def test_greedy_accuracy_lowers_the_most_robust_first() -> None:
    got = greedy_accuracy(two_layers(), Limit("size", 12500))
    assert got.choices == {"conv": BASE, "gemm": W4A8}
    assert got.method == "greedy-accuracy"


def test_greedy_compression_raises_the_smallest_first() -> None:
    menu = {BASE: (0.0, 80), W4A8: (0.5, 40)}
    table = small_table({"big": ("x", {BASE: (0.0, 800), W4A8: (9.0, 400)}), "small": ("y", menu)})
    got = greedy_compression(table, Limit("size", 500))
    assert got.choices == {"big": W4A8, "small": BASE}
    assert got.method == "greedy-compression"


def test_a_group_moves_its_activation_bits_together() -> None:
    menu = {BASE: (0.0, 8.0), W8A4: (0.1, 4.0)}
    table = small_table({"q": ("x", menu), "k": ("x", menu)})
    for solve in (lambda limit: minimise_loss(table, [limit]), lambda limit: greedy_accuracy(table, limit)):
        assert solve(Limit("size", 12)).choices == {"q": W8A4, "k": W8A4}
    assert greedy_compression(table, Limit("size", 12)).choices == {"q": W8A4, "k": W8A4}
    assert greedy_compression(table, Limit("size", 16)).choices == {"q": BASE, "k": BASE}
