"""The light pipeline as a person runs it: quantize, sensitivity, allocate, curve."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import call, case_in, said_by
from said import names, one_error

import onnxcalib
from models import run
from onnxcalib.mixed_precision.table_files import load

MODELS = Path(onnxcalib.__file__).parents[1] / "models"
MIX = ("--pipeline", "light", "--bits", "w4a4,w8a8", "--ranges", "minmax")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its data."""
    return case_in(tmp_path_factory.mktemp("light"), 32)


@pytest.fixture(scope="module")
def table(folder: Path) -> Path:
    options = ("--bits", "w4a4,w4a8,w8a8", "--ranges", "minmax", "-o", folder / "table.csv")
    done = call("sensitivity", folder / "model.onnx", "-c", folder / "data.npz", *options)
    assert done.returncode == 0, done.stderr
    names(done.stdout, "distillation loss", "w4a4", "project", "5 layers", "32 samples")
    assert done.stderr == ""
    return folder / "table.csv"


def test_one_precision_on_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.load(MODELS / "fashion_calibration.npz")["image"][:48]
    np.savez(tmp_path / "few.npz", image=images[:32])
    small = tmp_path / "small.onnx"
    code, _, err = said_by(
        capsys, "quantize", MODELS / "fashion_mobilenet.onnx", "-c", tmp_path / "few.npz", "-o", small,
        "--pipeline", "light", "--bits", "w4a8", "--edge-bits", "8", "--ranges", "mse",
    )  # fmt: skip
    assert code == 0, err
    names(err, "30 layers", "28 at w4a8", "2 at w8a8", "mse", "ort", "batch-norm tuning")
    assert "integer program" not in err
    reference, guess = (
        run(path, {"image": images[32:]})["logits"] for path in (MODELS / "fashion_mobilenet.onnx", small)
    )
    assert (reference.argmax(axis=1) == guess.argmax(axis=1)).mean() >= 0.75
    assert small.stat().st_size < 0.3 * (MODELS / "fashion_mobilenet.onnx").stat().st_size


def test_mixed_precision_twice(folder: Path, tmp_path: Path) -> None:
    for name in ("one.onnx", "two.onnx"):
        done = call(
            "quantize", folder / "model.onnx", "-c", folder / "data.npz", "-o", tmp_path / name, *MIX,
            "--compression", "0.53", "--pin", "fc=w8a8",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        names(done.stderr, "integer program", "optimal", "batch-norm tuning", "at w4a4", "at w8a8")
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    onnx.checker.check_model(str(tmp_path / "one.onnx"))
    assert {path.name for path in tmp_path.glob("*.onnx")} == {"one.onnx", "two.onnx"}


def test_both_kinds_of_table_hold_the_same(
    folder: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--bits", "w4a4,w4a8,w8a8", "--ranges", "minmax", "-o", tmp_path / "table.json")
    assert said_by(capsys, "sensitivity", folder / "model.onnx", "-c", folder / "data.npz", *options)[0] == 0
    assert load(tmp_path / "table.json") == load(table)
    layers = json.loads((tmp_path / "table.json").read_text())["layers"]
    assert [row["layer"] for row in layers] == ["stem", "depth", "project", "head", "fc"]
    assert set(layers[0]["losses"]) == {"w4a4", "w4a8", "w8a8"}


def test_allocate_prints_the_assignment(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chosen.json"
    code, out, err = said_by(capsys, "allocate", table, "--compression", "0.53", "--pin", "f?=w8a8", "-o", path)
    assert (code, err) == (0, "")
    names(out, "integer program", "optimal", "of float")
    chosen = json.loads(path.read_text())
    assert list(chosen) == ["stem", "depth", "project", "head", "fc"]
    assert chosen["fc"] == "w8a8"
    assert dict(line.split() for line in out.splitlines() if line.split()[0] in chosen) == chosen
    loaded = load(table)
    sizes = {row.layer: {str(it): cost for it, cost in row.costs["size"].items()} for row in loaded.layers}
    total = loaded.fixed["size"] + sum(sizes[name][bits] for name, bits in chosen.items())
    assert total <= 0.53 * loaded.float_costs["size"]


def test_an_infeasible_request_names_the_least_value(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said_by(capsys, "allocate", table, "--compression", "0.1")
    assert code == 2
    one_error(err)
    (ratio,) = re.findall(r"compression ([\d.]+\d)", err)
    loaded = load(table)
    least = loaded.fixed["size"] + sum(min(row.costs["size"].values()) for row in loaded.layers)
    assert float(ratio) == pytest.approx(least / loaded.float_costs["size"], abs=1e-3)
    # What the sentence says can be typed back.
    assert said_by(capsys, "allocate", table, "--compression", ratio)[0] == 0


def test_a_limit_of_bops(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said_by(capsys, "allocate", table, "--limit", "bops=0.04")
    assert code == 0
    share = float(out.partition("bops ")[2].partition("(")[2].partition(" of float")[0])
    assert 0 < share <= 0.04


@pytest.mark.parametrize("method", ["greedy-accuracy", "greedy-compression"])
def test_a_greedy_rule(method: str, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said_by(capsys, "allocate", table, "--compression", "0.53", "--method", method)
    assert code == 0
    names(out, method, "not proven optimal")
    code, _, err = said_by(capsys, "allocate", table, "--max-loss", "1", "--method", method)
    assert code == 2
    one_error(err, f"--method {method}", "--max-loss")


def test_a_loss_budget_and_a_cost_of_ones_own(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "energy.csv"
    rows = [(row.layer, it, it.weight * it.activation) for row in load(table).layers for it in row.losses]
    costs.write_text("layer,precision,cost\n" + "".join(f"{name},{it},{cost}\n" for name, it, cost in rows))
    options = ("--max-loss", "100", "--minimise", "energy", "--cost", f"energy={costs}")
    code, out, _ = said_by(capsys, "allocate", table, *options)
    assert code == 0
    names(out, "energy 80")  # five layers of 4 x 4
    code, _, err = said_by(capsys, "allocate", table, "--limit", "energy=79", "--cost", f"energy={costs}")
    assert code == 2
    one_error(err, "energy", 79, 80)


def test_curve(folder: Path, tmp_path: Path) -> None:
    plot, path = tmp_path / "curve.png", tmp_path / "curve.csv"
    done = call(
        "curve", folder / "model.onnx", "-c", folder / "data.npz", "-o", path, "--plot", plot, "--points", "3",
        "--bits", "w4a4,w8a8", "--ranges", "minmax", "--measure",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["ratio", "method", "size", "estimated_loss", "measured_loss"]
    exact = {row["ratio"]: float(row["estimated_loss"]) for row in rows if row["method"] == "integer program"}
    assert len(exact) == 3
    assert {row["method"] for row in rows} == {"integer program", "greedy-accuracy", "greedy-compression"}
    for row in rows:
        assert float(row["estimated_loss"]) >= exact[row["ratio"]] - 1e-12
        assert float(row["size"]) <= float(row["ratio"]) * (1 + 1e-9)
        assert float(row["measured_loss"]) > 0
    assert plot.read_bytes().startswith(PNG)
    assert plot.stat().st_size > 5000
    assert "greedy-accuracy" in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"curve.png", "curve.csv"}


BAD_QUANTIZE = {
    "compression with plain": (["--compression", "0.2"], ("--compression", "plain", "--pipeline light")),
    "loss with plain": (["--loss", "mse"], ("--loss", "plain", "--pipeline light")),
    "reference with plain": (["--bn-reference", "float"], ("--bn-reference", "plain", "--pipeline light")),
    "compression at one precision": (["--pipeline", "light", "--compression", "0.2"], ("--compression", "--bits")),
    "no aim": ([*MIX], ("--compression", "--max-loss", "--limit")),
    "minimise alone": ([*MIX, "--compression", "0.53", "--minimise", "bops"], ("--minimise", "--max-loss")),
    "negative": ([*MIX, "--compression", "-1"], ("--compression -1.0",)),
    "no base": (["--pipeline", "light", "--bits", "w4a8,w8a4", "--compression", "0.53"], ("--bits", "w8a8")),
    "unknown loss": ([*MIX, "--compression", "0.53", "--loss", "kl"], ("'kl'", "--loss", "mse")),
    "unknown reference": (
        [*MIX, "--compression", "0.53", "--bn-reference", "x"], ("'x'", "--bn-reference", "batchnorm"),
    ),
    "labels": ([*MIX, "--compression", "0.53", "--loss", "cross-entropy"], ("--loss cross-entropy", "labels")),
    "infeasible": ([*MIX, "--compression", "0.1"], ("size", "compression")),
    "unknown limit": ([*MIX, "--limit", "bobs=0.5"], ("--limit 'bobs=0.5'", "bops")),
    "unknown pin": ([*MIX, "--compression", "0.6", "--pin", "stm=8"], ("--override 'stm=8'", "stem")),
    "loss too low": ([*MIX, "--max-loss", "1e-9"], ("--max-loss", "w8a8")),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_QUANTIZE)
def test_a_request_without_sense_is_one_sentence(
    case: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, facts = BAD_QUANTIZE[case]
    files = ("-c", folder / "data.npz", "-o", tmp_path / "small.onnx")
    code, out, err = said_by(capsys, "quantize", folder / "model.onnx", *files, *options)
    assert (code, out) == (2, "")
    one_error(err, *facts)
    # What was measured by then stays, for the command that is mended.
    assert {path.name for path in tmp_path.iterdir()} <= {"small.onnx.run"}


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ("", ("--compression", "--max-loss", "--limit")),
        ("--compression 0.53 --minimise bops", ("--minimise", "--max-loss")),
        ("--compression 0.53 --pin fcc=8", ("--override 'fcc=8'", "fc")),
        ("--compression 0.53 --pin fc=w3a3", ("'fc'", "w3a3", "w4a4", "w8a8")),
        ("--limit size", ("--limit 'size'", "NAME=VALUE")),
        ("--compression 0.53 --cost energy=none.csv", ("none.csv",)),
        ("--compression 0.53 --edge-bits 6", ("w6a6", "w4a4", "w8a8")),
    ],
)
def test_an_assignment_without_sense_is_one_sentence(
    options: str, facts: tuple[str, ...], table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said_by(capsys, "allocate", table, *options.split())
    assert (code, out) == (2, "")
    one_error(err, *facts)


def test_a_damaged_table_is_one_sentence(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = table.read_text().splitlines(keepends=True)
    path = tmp_path / "table.csv"
    bare = "".join(line for line in lines if not line.startswith("# float"))
    for text, fact in (("".join(lines[:-1])[:-9], path), ("hello\n", path), (bare, "--compression"), (None, path)):
        path.unlink(missing_ok=True) if text is None else path.write_text(text)
        code, _, err = said_by(capsys, "allocate", path, "--compression", "0.53")
        assert code == 2, text
        one_error(err, fact)


@pytest.mark.parametrize("command", ["sensitivity", "curve"])
def test_measuring_needs_a_list_of_bits(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("-c", folder / "data.npz", "-o", tmp_path / "out.csv")
    for options in ((), ("--bits", "w4a8")):
        code, _, err = said_by(capsys, command, folder / "model.onnx", *files, *options)
        assert code == 2
        one_error(err, "--bits", "w4a4,w8a8")
        assert "--compression" not in err
    assert list(tmp_path.iterdir()) == []


BAD_OUTPUTS = {
    "suffix of a table": ("sensitivity", ["-o", "table.txt"], 2, ("table.txt", ".json", ".csv")),
    "folder of a table": ("sensitivity", ["-o", "none/table.csv"], 6, ("none",)),
    "suffix of a curve": ("curve", ["-o", "curve.png"], 6, ("curve.png", ".csv")),
    "folder of a curve": ("curve", ["-o", "none/curve.csv"], 6, ("none",)),
    "suffix of a plot": ("curve", ["-o", "a.csv", "--plot", "a.pdf"], 6, ("a.pdf", ".png", ".svg")),
    "folder of a plot": ("curve", ["-o", "a.csv", "--plot", "none/a.svg"], 6, ("none",)),
    "folder of a model": ("quantize", ["-o", "none/a.onnx"], 6, ("none",)),
}


@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_an_output_that_cannot_be_is_refused_before_the_model_is_read(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, words, exit_code, (name, *facts) = BAD_OUTPUTS[case]
    options = [word if word.startswith("-") else tmp_path / word for word in words]
    bits = () if command == "quantize" else ("--bits", "w4a4,w8a8")
    code, _, err = said_by(capsys, command, tmp_path / "none.onnx", "-c", tmp_path / "none.npz", *options, *bits)
    assert code == exit_code, err
    one_error(err, tmp_path / name, *facts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["quantize", "sensitivity"])
def test_labels_beyond_the_classes_are_one_sentence(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = np.arange(32) % 6  # the model has five classes
    np.savez(tmp_path / "data.npz", **np.load(folder / "data.npz"), labels=labels)
    options = [*(MIX if command == "quantize" else MIX[2:]), "--loss", "cross-entropy"]
    options += ["--compression", "0.53"] if command == "quantize" else []
    files = ("-c", tmp_path / "data.npz", "-o", tmp_path / ("a.onnx" if command == "quantize" else "a.csv"))
    code, _, err = said_by(capsys, command, folder / "model.onnx", *files, *options)
    assert code == 4, err
    one_error(err, tmp_path / "data.npz", "label 5", "sample 5", "'y'", "5 classes")


@pytest.mark.parametrize(("bits", "edge"), [("w4a4,w4a8", "6"), ("w2a4,w4a4", "8")])
def test_a_table_with_edge_bits_outside_the_list(
    bits: str, edge: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, chosen = tmp_path / "table.csv", tmp_path / "chosen.json"
    files = ("-c", folder / "data.npz", "-o", path)
    options = ("--bits", bits, "--edge-bits", edge, "--ranges", "minmax")
    assert said_by(capsys, "sensitivity", folder / "model.onnx", *files, *options)[0] == 0
    code, _, err = said_by(capsys, "allocate", path, "--compression", "2", "--edge-bits", edge, "-o", chosen)
    assert code == 0, err
    assert {name: bits for name, bits in json.loads(chosen.read_text()).items() if bits == f"w{edge}a{edge}"} == {
        "stem": f"w{edge}a{edge}",
        "fc": f"w{edge}a{edge}",
    }
