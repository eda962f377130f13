"""Sensitivity tables: exact round trips through files, and what is said of damaged ones."""

from __future__ import annotations

import errno
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from said import refused

from onnxcalib.errors import OutputError, RecipeError
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable, check
from onnxcalib.mixed_precision.table_files import load, save, with_costs
from onnxcalib.recipe import Precision

BASE, W4A8 = Precision(8, 8), Precision(4, 8)


def example() -> SensitivityTable:
    layers = tuple(
        LayerChoices(name, tensor, {BASE: 0.0, W4A8: loss}, {"size": {BASE: size, W4A8: size / 2}})
        for name, tensor, loss, size in [("conv1", "x", 0.1, 800.0), ("conv2", "y", -1e-9, 1600.0)]
    )
    return SensitivityTable(BASE, "kl", 0.25, 64, {"size": 12.0}, {"size": 9600.0}, layers)


names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
cost_names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8) | st.just("my cost: a, b")
numbers = st.floats(allow_nan=False, allow_infinity=False)
amounts = st.floats(0, allow_infinity=False)
precisions = st.builds(Precision, st.integers(2, 8), st.integers(2, 8))


@st.composite
def tables(draw: st.DrawFn) -> SensitivityTable:
    costs = draw(st.lists(cost_names, max_size=3, unique=True))
    layers = []
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        menu = {BASE, *draw(st.lists(precisions, max_size=4))}
        per_cost = {cost: {it: draw(amounts) for it in menu} for cost in costs}
        layers.append(LayerChoices(name, draw(names), {it: draw(numbers) for it in menu}, per_cost))
    return SensitivityTable(
        base=BASE,
        loss=draw(st.sampled_from(["kl", "cross-entropy", "mse"])),
        base_loss=draw(numbers),
        samples=draw(st.integers(0, 10**6)),
        fixed={cost: draw(amounts) for cost in costs},
        float_costs={cost: draw(amounts) for cost in costs[:1]},
        layers=tuple(layers),
    )


@settings(max_examples=100, deadline=None)
@given(tables(), st.sampled_from([".json", ".csv"]))
def test_round_trip_is_exact(table: SensitivityTable, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"table{suffix}")
        save(table, path)
        assert load(path) == table
        assert [it.name for it in Path(folder).iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_numpy_numbers_become_plain(tmp_path: Path, suffix: str) -> None:
    table = replace(example(), base_loss=np.float32(0.1), samples=np.int64(3), fixed={"size": np.float64(1.5)})
    save(table, tmp_path / f"t{suffix}")
    again = load(tmp_path / f"t{suffix}")
    assert (again.base_loss, again.samples, again.fixed) == (float(np.float32(0.1)), 3, {"size": 1.5})


def test_csv_looks_as_documented(tmp_path: Path) -> None:
    save(example(), tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().splitlines() == [
        "# onnxcalib sensitivity table 1",
        "# base: w8a8",
        "# loss: kl",
        "# base_loss: 0.25",
        "# samples: 64",
        "# fixed size: 12.0",
        "# float size: 9600.0",
        "layer,tensor,precision,loss,cost:size",
        "conv1,x,w8a8,0.0,800.0",
        "conv1,x,w4a8,0.1,400.0",
        "conv2,y,w8a8,0.0,1600.0",
        "conv2,y,w4a8,-1e-09,800.0",
    ]


def test_a_spreadsheet_may_rewrite_the_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    save(example(), path)
    lines = path.read_text().splitlines()
    padded = [f"{line},,,," if line.startswith("#") else line for line in lines]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*padded, ""]).encode())
    assert load(path) == example()


def test_groups_are_the_readers_of_one_tensor() -> None:
    layers = [replace(example().layers[0], layer=name, tensor=tensor) for name, tensor in ["ax", "by", "cx"]]
    assert replace(example(), layers=tuple(layers)).groups() == (("a", "c"), ("b",))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OutputError, match="disk full"):
        save(example(), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("act", [lambda path: save(example(), path), load])
def test_other_suffixes_are_refused(act, tmp_path: Path) -> None:
    with refused(RecipeError, tmp_path / "table.txt", ".json", ".csv"):
        act(tmp_path / "table.txt")


def test_a_missing_file(tmp_path: Path) -> None:
    with refused(RecipeError, tmp_path / "none.json"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("# onnxcalib sensitivity table 1\n", "", ("line 1",)),
        ("# base: w8a8\n", "", ("line 1", "base")),
        ("base: w8a8", "base: x8", ("line 2", "'x8'")),
        ("base: w8a8", "base: w9a8", ("line 2", "9 weight bits")),
        ("base_loss: 0.25", "base_loss: low", ("line 4", "base_loss", "'low'")),
        ("samples: 64", "samples: 6.4", ("line 5", "samples", "'6.4'")),
        ("fixed size: 12.0", "fixed size: inf", ("line 6", "fixed size", "'inf'")),
        ("# fixed size", "# fixt size", ("line 6", "'fixt size'")),
        ("# samples: 64", "# loss: kl", ("line 5", "'loss'")),
        ("layer,tensor", "layer,tensr", ("line 8", "'tensor'")),
        ("cost:size\n", "costsize\n", ("line 8", "'costsize'")),
        ("loss,cost:size", "loss,loss", ("line 8", "'loss'")),
        ("x,w4a8,0.1,400.0", "x,w4a8,0.1", ("line 10", 4, 5)),
        ("x,w4a8,0.1", "x,w4b8,0.1", ("line 10", "'w4b8'")),
        ("x,w4a8,0.1", "x,w4a8,nan", ("line 10", "loss", "'nan'")),
        ("0.1,400.0", "0.1,many", ("line 10", "size", "'many'")),
        ("x,w4a8", "x,w8a8", ("line 10", "'conv1'", "w8a8")),
        ("conv1,x,w4a8", "conv1,z,w4a8", ("line 10", "'conv1'", "'z'", "'x'")),
        ("conv1,x,w4a8", 'conv1,"x"x,w4a8', ("line 10", "CSV")),
        ("conv2,y,w8a8,0.0,1600.0\n", "", ("'conv2'", "w8a8")),
        ("0.1,400.0", "0.1,-400.0", ("'conv1'", "w4a8", "size", -400)),
    ],
)
def test_a_damaged_csv_names_file_line_and_fault(old: str, new: str, facts: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    save(example(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with refused(RecipeError, path, *facts):
        load(path)


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (lambda data: data.pop("format"), ("format",)),
        (lambda data: data.pop("base"), ("'base'",)),
        (lambda data: data.update(samples=True), ("'samples'", True)),
        (lambda data: data.update(base_loss=None), ("base_loss", None)),
        (lambda data: data.update(base_loss=10**400), ("base_loss",)),
        (lambda data: data.update(fixed=[1]), ("'fixed'",)),
        (lambda data: data.update(layers=[3]), ("layers[0]", 3)),
        (lambda data: data.update(layers=[]), ("layers",)),
        (lambda data: data["layers"][1].pop("tensor"), ("layers[1]", "conv2", "'tensor'")),
        (lambda data: data["layers"][1]["losses"].update({"8": 1.0}), ("layers[1]", "conv2", "losses", "w8a8")),
        (lambda data: data["layers"][1]["losses"].update({"x": 1.0}), ("'x'",)),
        (lambda data: data["layers"][1]["losses"].update({"w4a8": "low"}), ("losses.w4a8", "'low'")),
        (lambda data: data["layers"][1]["costs"]["size"].pop("w4a8"), ("'conv2'", "w4a8", "size")),
        (lambda data: data["layers"][1].update(costs={}), ("'conv2'", "'size'")),
        (lambda data: data["layers"][1].update(layer="conv1"), ("'conv1'",)),
    ],
)
def test_a_damaged_json_names_file_place_and_fault(damage, facts: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save(example(), path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with refused(RecipeError, path, *facts):
        load(path)


@pytest.mark.parametrize(("content", "facts"), [(b'{\n"base": }', ("line 2", "JSON")), (b"[]", ("[]",))])
def test_a_foreign_json(content: bytes, facts: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with refused(RecipeError, path, *facts):
        load(path)


@pytest.mark.parametrize("name", ["table.json", "table.csv"])
def test_bytes_that_are_no_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"# a\n\xff\xfe")
    with refused(RecipeError, tmp_path / name, "line 2", "UTF-8"):
        load(tmp_path / name)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_must_be_finite(loss: float) -> None:
    row = replace(example().layers[0], losses={BASE: 0.0, W4A8: loss})
    with refused(RecipeError, "'conv1'", "w4a8", loss):
        check(replace(example(), layers=(row,)))


def test_a_layer_needs_choices() -> None:
    with refused(RecipeError, "'conv1'"):
        check(replace(example(), layers=(replace(example().layers[0], losses={}),)))


@pytest.mark.parametrize("change", [{"base_loss": math.nan}, {"loss": "a\nb"}, {"fixed": {"size": math.inf}}])
def test_the_scalars_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(RecipeError):
        check(replace(example(), **change))  # type: ignore[arg-type]


USER = "layer,precision,cost\nconv1,8,4.5\nconv1,w4a8,2\nconv2,w8a8,3\nconv2,w4a8,1e-3\n"


def test_a_users_cost_table_is_added(tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    path.write_text(f"# milliseconds on the device\n{USER}\n")
    table = with_costs(example(), "latency", path)
    assert table.cost_names() == ("size", "latency")
    assert table.layers[0].costs["latency"] == {BASE: 4.5, W4A8: 2.0}
    assert table.layers[1].costs["latency"] == {BASE: 3.0, W4A8: 0.001}
    assert example().cost_names() == ("size",)


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("conv1,w4a8,2", "conv3,w4a8,2", ("line 3", "'conv3'", "conv1")),
        ("conv1,w4a8,2", "conv1,w4a4,2", ("line 3", "w4a4", "'conv1'", "w4a8")),
        ("conv1,w4a8,2", "conv1,w8a8,2", ("line 3", "'conv1'", "w8a8")),
        ("conv1,w4a8,2", "conv1,w4a8,fast", ("line 3", "'fast'")),
        ("conv1,w4a8,2", "conv1,w4a8,nan", ("line 3", "'nan'")),
        ("conv1,w4a8,2", "conv1,w4a8,-2", ("line 3", -2)),
        ("conv1,w4a8,2", "conv1,w4a8", ("line 3", 2, 3)),
        ("conv1,w4a8,2\n", "", ("conv1", "w4a8")),
        ("precision,cost", "precision,costs", ("line 1", "'cost'")),
    ],
)
def test_a_users_cost_table_is_checked(old: str, new: str, facts: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "latency.csv"
    assert old in USER
    path.write_text(USER.replace(old, new, 1))
    with refused(RecipeError, path, *facts):
        with_costs(example(), "latency", path)


def test_a_cost_name_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "size.csv").write_text(USER)
    with refused(RecipeError, "'size'"):
        with_costs(example(), "size", tmp_path / "size.csv")
