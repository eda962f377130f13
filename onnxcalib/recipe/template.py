"""A recipe file to start from: every key, explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxcalib.recipe.keys import SECTIONS, Key
from onnxcalib.recipe.presets import preset_options
from onnxcalib.recipe.toml import to_toml

INTRODUCTION = """\
# A recipe for onnxcalib: onnxcalib quantize MODEL --recipe THIS_FILE
# A line such as '# seed = 0' shows a default; take the '#' away to change it. Options of the command line go on top.
"""


def template(preset: str | None = None) -> str:
    """Every key with a line that explains it, commented out unless the preset sets it."""
    options = preset_options(preset) if preset else {}
    text = INTRODUCTION + (f"# It began as the preset '{preset}'.\n" if preset else "")
    for section in SECTIONS:
        # A table's own line stays: without keys below it, it says nothing.
        text += f"\n# --- {section.title} ---\n" + (f"[{section.table}]\n" if section.table else "")
        text += "".join(_lines(name, key, options) for name, key in section.by_name.items())
    return text


def _lines(name: str, key: Key, options: Mapping[str, Any]) -> str:
    is_set = key.name in options
    note = "" if key.has_default or is_set else " Not set; for example:"
    value = to_toml(options[key.name] if is_set else key.shown)
    return f"# {key.help}{note}\n{'' if is_set else '# '}{name} = {value}\n"
