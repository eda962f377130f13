"""Run directories that lie: links are not followed, and what no run wrote is computed again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import said_by
from said import one_error, refused

from models import feed_for, two_gemms
from onnxcalib import OutputError, Recipe, quantize
from onnxcalib.cache.codec import checksum
from onnxcalib.cache.store import _write
from onnxcalib.recipe import RangeMethod

QUICK = Recipe(ranges=RangeMethod.MINMAX)
MODEL = two_gemms()
DATA = feed_for(MODEL, 8)


def quantized(folder: Path) -> bytes:
    return quantize(MODEL, DATA, QUICK, run_dir=folder).model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", ["lock", "values", "scratch", "run.json"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_what_a_link_points_to_is_not_touched(link: Callable[[Path, Path], None], name: str, tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    folder.mkdir()
    if name in ("lock", "run.json"):
        precious.write_text("precious")
    else:
        precious.mkdir()
        (precious / ".x.part").write_text("precious")
        link = os.symlink  # folders have no other links
    link(precious, folder / name)
    with refused(OutputError, name):
        quantized(folder)
    kept = precious if precious.is_file() else precious / ".x.part"
    assert kept.read_text() == "precious"


def test_a_value_behind_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    folder, precious = tmp_path / "run", tmp_path / "precious"
    whole = quantized(folder)
    precious.write_text("precious")
    for value in (folder / "values").iterdir():
        value.unlink()
        value.symlink_to(precious)
    with pytest.warns(UserWarning, match="damaged"):
        assert quantized(folder) == whole
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("name", ["lock", "run.json"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with refused(OutputError, name):
        quantized(tmp_path)


def rewritten(path: Path, change: Callable[[dict[str, Any], Any], Any]) -> None:
    """The value with another header or tree, and a good checksum."""
    with np.load(path) as file:
        arrays = [file[f"a{number}"] for number in range(len(file.files) - 3)]
        header, tree = (json.loads(file[name].tobytes()) for name in ("header", "tree"))
    header_text, tree_text = json.dumps(header), json.dumps(change(header, tree))
    header_text = json.dumps(header)
    texts = {"header": header_text, "tree": tree_text, "checksum": checksum(header_text + tree_text, arrays)}
    parts = {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}
    _write(path, parts | {f"a{number}": array for number, array in enumerate(arrays)})


def deep(_header: dict[str, Any], _tree: Any) -> Any:
    value: Any = 0
    for _ in range(200):
        value = {"tuple": [value]}
    return {"Statistics": {"tensors": value}}


def of_no_stage(header: dict[str, Any], tree: Any) -> Any:
    header.pop("when")
    return tree


LIES: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "an unknown class": lambda _header, _tree: {"os.system": {"command": "true"}},
    "no value": lambda _header, _tree: {"one": 1, "two": 2},
    "another field": lambda _header, tree: {kind: {**fields, "more": 1} for kind, fields in tree.items()},
    "no fields": lambda _header, tree: {kind: {} for kind in tree},
    "fields of another kind": lambda _header, tree: {kind: dict.fromkeys(fields, "x") for kind, fields in tree.items()},
    "an array that is not there": lambda _header, _tree: {"array": 99},
    "deep": deep,
    "no date": of_no_stage,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_value_with_a_good_checksum_may_still_be_no_value(
    lie: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = quantized(tmp_path)
    for value in (tmp_path / "values").iterdir():
        rewritten(value, LIES[lie])
    shown = said_by(capsys, "runs", "show", tmp_path)
    assert shown[0] == 0, shown[2]
    with pytest.warns(UserWarning, match="damaged"):
        assert quantized(tmp_path) == whole


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", '{"format": "onnxcalib run 1"}', "\xff"])
def test_a_damaged_description_is_told(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("latin1"))
    code, _, err = said_by(capsys, "runs", "show", tmp_path)
    assert code == 6
    one_error(err, tmp_path / "run.json")
    with refused(OutputError, tmp_path / "run.json"):
        quantized(tmp_path)


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="null"):
        quantized(tmp_path / "a\0b")
