"""Makes a run directory smaller: first what no resume can use, and what one needs only where that is asked for."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onnxcalib.cache.folder import read_about
from onnxcalib.cache.lock import locked
from onnxcalib.cache.store import Entry, Store

WHEN = "%Y-%m-%d %H:%M:%S"
DAY = 24 * 60 * 60
BOUND = 8 * 2**30  # bytes that a finished run leaves of what it does not need


class Use(enum.IntEnum):
    """What a value is good for, in the order in which values are removed."""

    NONE = 0  # damaged
    OTHERS = 1  # of other models, data or versions
    PARTS = 2  # of stages that are finished
    RESUME = 3


@dataclass
class Pruned:
    """What was removed, and what is left."""

    removed: Counter[Use] = field(default_factory=Counter)
    freed: int = 0
    kept: int = 0
    left: int = 0  # bytes
    stages: set[str] = field(default_factory=set)  # that the next run computes again

    @property
    def count(self) -> int:
        """How many values were removed."""
        return self.removed.total()


def prune(
    folder: Path, keep: int | None = None, older_than: float | None = None, uses: Use = Use.RESUME, *, dry: bool = False
) -> Pruned:
    """Removes values in the order of their use, the oldest first, until no more than `keep` bytes are left.

    Without a size all go that no resume of the run can use. Only damaged values go before they are so many days old.
    """
    about = read_about(folder)
    with locked(folder / "lock"):
        return prune_values(folder, about["about"], keep, older_than, uses, dry=dry)


def prune_values(
    folder: Path, about: str, keep: int | None, older_than: float | None = None, uses: Use = Use.RESUME,
    *, dry: bool = False,
) -> Pruned:  # fmt: skip
    """The same for who holds the directory already."""
    entries = list(Store(folder / "values").entries())
    found = Pruned(kept=len(entries), left=sum(entry.bytes for entry in entries))
    born = time.time() - DAY * (older_than or 0.0)
    ranked = sorted(_ranked(entries, about), key=lambda pair: (pair[0], _when(pair[1])))
    for use, entry in ranked:
        unneeded = use <= Use.PARTS if keep is None else found.left > keep
        if use is not Use.NONE and (use > uses or not unneeded or (older_than is not None and _when(entry) > born)):
            continue
        if not dry:
            entry.path.unlink(missing_ok=True)
        found.removed[use] += 1
        found.freed += entry.bytes
        found.left -= entry.bytes
        found.kept -= 1
        if use is Use.RESUME and entry.header is not None:
            found.stages.add(_stage(entry.header))
    return found


def _ranked(entries: list[Entry], about: str) -> Iterator[tuple[Use, Entry]]:
    own = [entry.header for entry in entries if entry.header is not None and entry.header["about"] == about]
    finished = {header["stage"] for header in own if "part_of" not in header}
    for entry in entries:
        if entry.header is None:
            yield Use.NONE, entry
        elif entry.header["about"] != about:
            yield Use.OTHERS, entry
        elif "part_of" in entry.header and entry.header["part_of"] in finished:
            yield Use.PARTS, entry
        else:
            yield Use.RESUME, entry


def _stage(header: dict[str, str]) -> str:
    return header.get("part_of", header["stage"])


def _when(entry: Entry) -> float:
    """When a value was written; a time that cannot be read is that of the file."""
    try:
        return time.mktime(time.strptime((entry.header or {})["when"], WHEN))
    except (KeyError, ValueError, OverflowError):
        return entry.path.stat().st_mtime
