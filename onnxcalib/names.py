"""Names are data: whatever a model or a path holds, it is shown harmlessly and comes back as it was."""

from __future__ import annotations

import re

# What spreadsheets take for a formula, behind any marks of ours.
FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
MARK = "'"
LONGEST = 600  # characters of a message


def printable(text: str) -> str:
    """One line without anything that a terminal obeys, or cannot show: such characters as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def in_brief(text: str) -> str:
    """The beginning and the end of a text that is too long for a message."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


def as_cell(name: str) -> str:
    """A name in a CSV file, which no spreadsheet takes for a formula."""
    return MARK + name if FORMULA.match(name) else name


def from_cell(cell: str) -> str:
    """The name that a cell holds, ours or one that was typed as it is."""
    return cell[1:] if cell.startswith(MARK) and FORMULA.match(cell) else cell
