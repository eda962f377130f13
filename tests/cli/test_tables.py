"""Tables as a terminal shows them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from said import names

from onnxcalib.cli.tables import allocation_table, sensitivity_table
from onnxcalib.mixed_precision.allocate import Allocation
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable
from onnxcalib.recipe import Precision

W8A8, W4A4 = Precision(8, 8), Precision(4, 4)
ALLOCATION = Allocation({"a": W8A8}, 0.0, {}, optimal=True, gap=0.0, method="integer program")
SENSITIVITY = SensitivityTable(
    W8A8, "distillation", 0.0, 1, {}, {}, (LayerChoices("a", "x", {W8A8: 0.0, W4A4: 0.25}, {}),)
)


def lines(table: Table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=60).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("table", "fact", "rows"),
    [
        (allocation_table(ALLOCATION), "integer program", [["layer", "precision"], ["a", "w8a8"]]),
        (sensitivity_table(SENSITIVITY), "distillation loss", [["layer", "w4a4"], ["a", "0.250000"]]),
    ],
)
def test_a_title_is_one_line_above_a_narrow_table(table: Table, fact: str, rows: list[list[str]]) -> None:
    title, *shown = lines(table)
    names(title, fact)
    assert [line.split() for line in shown] == rows
