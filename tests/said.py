"""Messages, held to the facts that they must name: rewording breaks no test, and a fact that is dropped does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from onnxcalib.cli.wording import as_typed


def names(text: object, *facts: object) -> None:
    """Every fact stands in the text, as a word or words of its own."""
    missing = [fact for fact in map(str, facts) if not re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", str(text))]
    assert not missing, f"{missing} in: {text}"


def one_error(text: str, *facts: object) -> None:
    """What a command printed is one line of an error that names the facts."""
    assert text.startswith("Error: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    names(text, *facts)


@contextlib.contextmanager
def refused(kind: type[Exception], *facts: object) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """What is done inside ends in an error of that kind, one line that names the facts."""
    with pytest.raises(kind) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    names(as_typed(str(caught.value)), *facts)  # parameters as the options that they are
