"""Layer names short enough for an axis."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from onnxcalib.names import printable

LONGEST = 26
MOST = 34  # labels that fit side by side along an axis


def unread(text: str) -> str:
    """A text that matplotlib draws as it is: no formula between dollars, nothing that breaks a line or an SVG."""
    return printable(text).replace("$", r"\$")


def short(name: str) -> str:
    """The telling part of an exported name: /blocks/blocks.0/conv/conv.1/Conv is blocks.0/conv.1."""
    parts = [part for part in printable(name).split("/") if part]
    if len(parts) > 1 and re.fullmatch(r"(Conv|ConvTranspose|Gemm|MatMul)(_\d+)?", parts[-1]):
        parts = parts[:-1]
    telling = [
        part
        for part, after in zip(parts, [*parts[1:], ""], strict=True)
        if not after.startswith((f"{part}.", f"{part}_"))
    ]
    text = "/".join(telling)
    while len(text) > LONGEST and len(telling) > 1:
        telling = telling[1:]
        text = "…/" + "/".join(telling)
    return unread(text if len(text) <= LONGEST else f"…{text[1 - LONGEST :]}")


def label_layers(axes: Any, names: Sequence[str]) -> None:
    """Names below an axis of layers; only some of them where there are many."""
    step = -(-len(names) // MOST)
    shown = range(0, len(names), step)
    axes.set_xticks(list(shown), [short(names[place]) for place in shown], rotation=90, fontsize=7)
    axes.set_xlim(-0.75, len(names) - 0.25)
