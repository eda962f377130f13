"""A run directory on disk: what it is for, its lock and its values."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxcalib.cache.lock import locked
from onnxcalib.cache.store import Store
from onnxcalib.errors import OutputError
from onnxcalib.files import read_text, replacing
from onnxcalib.progress import Event, Listener

FORMAT = "onnxcalib run 1"
ABOUT = "run.json"
# What makes the values of an earlier run useless to another, in the words of a warning.
DIFFERENCES = {
    "model_digest": "another model",
    "data_digest": "other calibration data",
    "target_digest": "another target",
    "version": "another version of onnxcalib",
    "code": "other code of onnxcalib",
    "runtime": "another runtime",
}


def check_run_directory(folder: Path) -> dict[str, Path]:
    """Fails now rather than at the first stage when a folder cannot be a run directory; says what it writes there."""
    if "\0" in str(folder):
        raise OutputError(f"the name of run directory {folder} holds a null character.", "Name another `run_dir`.")
    _before(folder)
    if not folder.parent.is_dir():
        raise OutputError(
            f"the folder of run directory {folder} does not exist.", "Create it, or name another `run_dir`."
        )
    return {f"{name} of the run directory,": folder / name for name in (ABOUT, "lock", "values", "scratch")}


@contextlib.contextmanager
def opened(folder: Path, about: Mapping[str, Any], listener: Listener, classes: Mapping[str, type]) -> Iterator[Store]:
    """The values of a run directory, made if there is none yet, for one process at a time."""
    before = _before(folder)
    try:
        for path in (folder, folder / "values"):
            path.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"run directory {folder} cannot be made: {error.strerror}.", "Name another `run_dir`."
        ) from error
    with locked(folder / "lock"):
        if before is not None:
            differing = dict.fromkeys(words for name, words in DIFFERENCES.items() if before.get(name) != about[name])
            if differing:
                message = f"{folder} was made by {' and '.join(differing)}: what is in it is kept, but not reused."
                listener(Event("warning", {"message": message}))
        write_about(folder, about)
        # Only now is it a run directory for sure, where these names are its own.
        _clear(folder)
        try:
            (folder / "scratch").mkdir()
        except OSError as error:
            raise OutputError(f"{folder / 'scratch'} cannot be made: {error.strerror}.", "Move it away.") from error
        try:
            yield Store(folder / "values", classes)
        finally:
            _clear(folder)


def read_about(folder: Path) -> dict[str, Any]:
    """What a run directory says of itself."""
    about = _before(folder)
    if about is None:
        raise OutputError(f"there is no run directory {folder}.", "Check the path.")
    return about


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Says what the directory is for."""
    with replacing(folder / ABOUT) as temporary:
        temporary.write_text(json.dumps({"format": FORMAT, **about}, indent=1) + "\n", encoding="utf-8")


def _before(folder: Path) -> dict[str, Any] | None:
    """What an earlier run wrote; None where there was none."""
    try:
        if not folder.exists():
            return None
        if not folder.is_dir():
            raise OutputError(f"run directory {folder} is a file.", "Name a folder as `run_dir`.")
        for name in ("values", "scratch"):
            if (folder / name).is_symlink():  # what it points to is not ours to write to, let alone to clear
                raise OutputError(f"{folder / name} is a link.", "Name another folder as `run_dir`, or remove it.")
        if not (folder / ABOUT).exists() and not (folder / ABOUT).is_symlink():
            _check_bare(folder)
            return None
        about = json.loads(read_text(folder / ABOUT))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(folder, error) from error
    known = isinstance(about, dict) and about.get("format") == FORMAT
    if not known or not all(isinstance(about.get(name), str) for name in ("about", "recipe")):
        raise _unreadable(folder)
    return dict(about)


def _unreadable(folder: Path, error: Exception | None = None) -> OutputError:
    why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is damaged, or of another program"
    return OutputError(f"{folder / ABOUT} {why}.", "Name another folder as `run_dir`, or move it away.")


def _check_bare(folder: Path) -> None:
    """It is empty, or all that a run which was killed at once leaves behind; else it is something else."""
    names = {path.name for path in folder.iterdir() if not path.match(f".{ABOUT}.*.part")}
    if not names <= {"values", "lock"} or any((folder / "values").glob("*")):
        raise OutputError(
            f"{folder} is not a run directory: it holds files, but no {ABOUT}.", "Name a new folder as `run_dir`."
        )


def _clear(folder: Path) -> None:
    """Removes what a killed run left half done: only temporary names of its own."""
    for path in (*folder.glob(f".{ABOUT}.*.part"), *(folder / "values").glob(".*.part")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "scratch", ignore_errors=True)
