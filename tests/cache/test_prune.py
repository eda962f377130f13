"""What goes from a run directory, in which order, and that a resume is never made slower without a word."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import said_by
from said import names, one_error, refused

from models import feed_for, two_gemms
from onnxcalib import OutputError, Pipeline, Recipe, quantize
from onnxcalib.cache import run_directory
from onnxcalib.cache.lock import locked
from onnxcalib.cache.prune import DAY, Use, prune
from onnxcalib.cache.store import Store
from onnxcalib.progress import Event
from onnxcalib.recipe import RangeMethod, parse_bits

MIXED = Recipe(Pipeline.LIGHT, parse_bits("w4a4,w8a8"), compression=0.9, ranges=RangeMethod.MINMAX)


class Heard:
    """What a run tells."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.warned: list[str] = []

    def __call__(self, *_step: Any) -> None:
        pass

    def event(self, event: Event) -> None:
        if event.name == "stage_end" and not event.values["reused"]:
            self.computed.append(event.values["stage"])
        if event.name == "warning":
            self.warned.append(event.values["message"])


def run_in(folder: Path, seed: int = 0, recipe: Recipe = MIXED) -> Heard:
    heard, model = Heard(), two_gemms("Relu", 40)
    quantize(model, feed_for(model, 24, seed=seed), recipe, run_dir=folder, progress=heard, workers=1)
    return heard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run, one of other data before it, and a damaged value."""
    run_in(tmp_path / "run", seed=7)
    run_in(tmp_path / "run")
    (tmp_path / "run" / "values" / f"statistics-{'0' * 32}.npz").write_bytes(b"PK")
    return tmp_path / "run"


def values(folder: Path) -> int:
    return len(list((folder / "values").iterdir()))


def test_what_no_resume_needs_goes_and_a_resume_computes_nothing(folder: Path) -> None:
    before = values(folder)
    tried = prune(folder, dry=True)
    assert values(folder) == before
    found = prune(folder)
    assert found == tried
    assert found.removed[Use.NONE] == 1
    assert found.removed[Use.OTHERS] >= 5
    assert found.removed[Use.PARTS] >= 3  # of the sensitivity: both layers and the base
    assert found.removed[Use.RESUME] == 0
    assert values(folder) == found.kept == before - found.count
    assert found.left == sum(path.stat().st_size for path in (folder / "values").iterdir())
    assert run_in(folder).computed == []
    assert prune(folder).count == 0


def test_a_run_that_was_cut_off_keeps_the_parts_of_what_it_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Store.put

    def put_and_stop(self: Store, stage: str, *arguments: Any, **more: Any) -> None:
        put(self, stage, *arguments, **more)
        if stage == "sensitivity part":
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "put", put_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path / "run")
    assert prune(tmp_path / "run").count == 0


def test_a_size_removes_in_the_order_of_use_and_says_what_is_lost(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = sum(path.stat().st_size for path in (folder / "values").iterdir())
    some = prune(folder, keep=whole - 3)
    assert set(some.removed) <= {Use.NONE, Use.OTHERS}
    assert some.left <= whole - 3
    code, out, _ = said_by(capsys, "runs", "prune", folder, "--keep", "0.5KB")
    assert code == 0
    names(out, "resumed", "statistics", "again")
    assert sum(path.stat().st_size for path in (folder / "values").iterdir()) <= 512
    assert "statistics" in run_in(folder).computed


def test_only_what_is_old_goes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(prune(folder, older_than=2).removed) == {Use.NONE}
    code, out, _ = said_by(capsys, "runs", "prune", folder, "--older-than", "2", "--keep", "0B")
    assert code == 0
    names(out, "younger", "2 days")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3 * DAY)
    assert set(prune(folder, older_than=2).removed) == {Use.OTHERS, Use.PARTS}


def test_a_finished_run_leaves_no_more_than_the_bound_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "BOUND", 1)
    heard = run_in(folder)
    (warning,) = heard.warned
    names(warning, folder, "removed")
    assert heard.computed == []
    monkeypatch.undo()
    assert run_in(folder).computed == []
    again = run_in(folder, recipe=dataclasses.replace(MIXED, compression=0.8))
    assert again.computed[0] == "allocation"


def test_what_is_no_run_directory_or_in_use_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = values(folder)
    with locked(folder / "lock"), refused(OutputError, folder, os.getpid()):
        prune(folder)
    assert values(folder) == before
    code, _, err = said_by(capsys, "runs", "prune", folder / "none")
    assert code == OutputError.exit_code
    one_error(err, folder / "none")
    code, _, err = said_by(capsys, "runs", "prune", folder, "--keep", "much")
    assert code == 2
    names(err, "much", "2GB")
