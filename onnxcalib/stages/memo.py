"""What a long stage keeps of its work while it runs, so that nobody does it twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Memo(Protocol):
    """Parts of a stage's work, by what they were computed from."""

    @property
    def scratch(self) -> Path | None:
        """Where temporary files go; None: where the system puts them."""

    def found(self, parts: Sequence[Any]) -> list[Any | None]:
        """The kept value of each part, None where there is none."""

    def put(self, part: Any, value: Any) -> None:
        """Keeps the value of a part, in place of an earlier one; may be called by several threads."""


class Forgetful:
    """Keeps nothing."""

    scratch = None

    def found(self, parts: Sequence[Any]) -> list[Any | None]:
        """Nothing, for every part."""
        return [None] * len(parts)

    def put(self, part: Any, value: Any) -> None:
        """Lets go of it."""


FORGETFUL = Forgetful()
