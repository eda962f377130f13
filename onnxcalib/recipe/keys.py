"""Every key of a recipe file: what it takes, what it means, and its default; the options' help says the same."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from onnxcalib.numerics.metrics import METRICS
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.recipe.choices import (
    BatchNormReference,
    Engine,
    LayerOptimizer,
    OnBroken,
    Pipeline,
    RangeMethod,
    Rounding,
    Training,
)
from onnxcalib.recipe.groups import GROUPS, MAIN
from onnxcalib.recipe.recipe import Recipe
from onnxcalib.targets import TARGETS


class Kind(enum.Enum):
    """What a key takes, in words for a message."""

    WORD = "a string"
    PATH = "a path"
    WORDS = "a list of strings"
    BITS = "a precision such as 'w4a8' or a list of such"
    INTEGER = "an integer"
    NUMBER = "a number"
    NUMBERS = "a number or a list of numbers"
    SIZE = "an integer, or a list of height and width"
    FLAG = "true or false"
    TABLE = "a table of strings, or a list of such as 'x=y'"


@dataclass(frozen=True)
class Key:
    """A key, and the value that stands for it: its default, or an example where it has none.

    It stands in a table if its section is one; there the main key of a group has the name of the group's field.
    """

    name: str
    kind: Kind
    says: str
    shown: Any
    has_default: bool = True

    @property
    def help(self) -> str:
        """The help of the command line's option."""
        if not self.has_default or self.shown is False or self.shown == ():
            return f"{self.says}."
        default = ",".join(map(str, self.shown)) if isinstance(self.shown, tuple) else self.shown
        return f"{self.says} (default {default})."


def _default(name: str, kind: Kind, says: str) -> Key:
    """A key with the recipe's own default."""
    return Key(name, kind, says, Recipe().get(MAIN.get(name, name)))


def _listed(words: Iterable[str]) -> str:
    return ", ".join(map(str, words))


def _example(name: str, kind: Kind, says: str, shown: Any) -> Key:
    return Key(name, kind, says, shown, has_default=False)


ACTIVATIONS = "static, of the data, dynamic, found at run time, or auto, as each tensor needs"
OVERRIDES = (
    "Fix layers by name, op or place: '*fc*=w8a8', 'op:Conv=w8' (weights alone), 'first=float', or a range method, "
    "static, dynamic, symmetric, asymmetric, per-tensor, per-channel, joined by +"
)


@dataclass(frozen=True)
class Section:
    """Keys that belong together; those of a table may stand in it or, as single options, above all tables."""

    title: str
    keys: tuple[Key, ...]
    table: str | None = None

    def named(self, key: Key) -> str:
        """What the key is called in the section's table."""
        return MAIN.get(key.name, key.name) if self.table == key.name else key.name

    @property
    def by_name(self) -> dict[str, Key]:
        """The keys by what they are called there."""
        return {self.named(key): key for key in self.keys}


IMAGES = "images"
# In the order of a file: a table ends where the next begins.
SECTIONS = (
    Section("What runs, and how fine", (
        _default("pipeline", Kind.WORD, f"Which stages run: {_listed(Pipeline)}"),
        Key("bits", Kind.BITS, "Bits: 8, w4a8, w4 for weights alone, or a list to mix: w4a4,w8a8,float", "8"),
        _example("edge_bits", Kind.INTEGER, "Bits of the first and the last layer", 8),
        _default("target", Kind.WORD, f"What the file is for: {_listed(TARGETS)}, or a TOML file"),
        _default("ranges", Kind.WORD, f"How ranges are found: {_listed(RangeMethod)}"),
        _default("include", Kind.WORDS, "Quantize only layers with such names (globs)"),
        _default("exclude", Kind.WORDS, "Leave layers with such names float (globs)"),
        _example("overrides", Kind.TABLE, OVERRIDES, {"*classifier*": "w8a8", "op:ConvTranspose": "float"}),
        _default("on_broken", Kind.WORD, f"What to do with layers that break an output: {_listed(OnBroken)}"),
        _default("seed", Kind.INTEGER, "For the order of the samples, and for training"),
    )),
    Section("The light and the advanced pipeline", (
        _default("loss", Kind.WORD, f"What tells a good model: {_listed(LossKind)}"),
        _default("metric", Kind.WORD, f"What labels are for: {_listed(METRICS)}, or MODULE:FUNCTION"),
        _default("bn_reference", Kind.WORD, f"Whose channel statistics count: {_listed(BatchNormReference)}"),
    )),
    Section("Files, seen from the folder in which the command runs", (
        _example("calibration", Kind.PATH, "npz, folder of arrays, images or .pb test sets", "calibration.npz"),
        _example("output", Kind.PATH, "The file to write", "small.onnx"),
        _example("run_dir", Kind.PATH, "Keeps what is finished, so that a run can go on (else OUTPUT.run)", "run"),
        _example("report", Kind.PATH, "Write a report: FILE.html, FILE.json and FILE_figures/", "small.html"),
        _example("test_data", Kind.PATH, "What the report measures on (else the calibration data)", "test.npz"),
    )),
    Section("Where it runs", (
        _example("scheduler", Kind.WORD, "Dask scheduler whose workers do the jobs: address or file", "tcp://host:8786"),
        _example("provider", Kind.WORD, "Where onnxruntime runs models: cuda, openvino, dml, ... (else cpu)", "cuda"),
        _example("memory", Kind.WORD, "What to keep to as far as possible, at the price of time: 500MB, 2GB", "2GB"),
    )),
    Section("Weights", (
        _default("rounding", Kind.WORD, f"Light and advanced: how weights are rounded: {_listed(Rounding)}"),
        _example("block_size", Kind.INTEGER, "Weights alone: so many share a scale in Gemm and MatMul", 32),
    ), "weights"),
    Section("Activations", (
        _default("activations", Kind.WORD, f"Ranges of activations: {ACTIVATIONS}"),
    ), "activations"),
    Section("Mixed precision: needs a list of bits, and at least one of max_drop, compression, max_loss and limits", (
        _example("max_drop", Kind.NUMBER, "The most that the metric may fall, on labelled samples held out", 1.0),
        _example("compression", Kind.NUMBER, "The most bytes, relative to the float file", 0.18),
        _example("max_loss", Kind.NUMBER, "The most loss, measured on the assembled model", 0.05),
        _example("limits", Kind.WORDS, "Further limits, such as bops=0.05", ("bops=0.05",)),
        _example("costs", Kind.WORDS, "Your own costs, from a CSV of layer,precision,cost", ("latency=latency.csv",)),
        _default("minimise", Kind.WORD, "The cost to make small under the most loss"),
    ), "mixed_precision"),
    Section("The advanced pipeline", (
        _default("training", Kind.WORD, f"Learning rates and iterations: {_listed(Training)}"),
        _default("engine", Kind.WORD, f"Who makes the gradients: {_listed(Engine)}"),
        _default("layer_optimizer", Kind.WORD, f"What trains the layers: {_listed(LayerOptimizer)}"),
        _default("steps", Kind.INTEGER, "Iterations a layer; sixteen times as many through the whole network"),
        _default("strict", Kind.FLAG, "Fail where an op has no gradient, instead of going on without it"),
        _example("workers", Kind.INTEGER, "Jobs done side by side on this machine (else one a core)", 2),
    ), "training"),
    Section("Calibration data that is a folder of images", (
        _example("resize", Kind.INTEGER, "Shorter side in pixels before the crop (else the crop * 256 / 224)", 256),
        _example("crop", Kind.SIZE, "Centre crop in pixels (else the model's input size)", 224),
        Key("mean", Kind.NUMBERS, "Mean to subtract, one number or one a channel", (0.485, 0.456, 0.406)),
        Key("std", Kind.NUMBERS, "Deviation to divide by, one number or one a channel", (0.229, 0.224, 0.225)),
        Key("pixel_scale", Kind.NUMBER, "Divide pixels by this first", 255.0),
        _example("layout", Kind.WORD, "Layout of the model's input, nchw or nhwc (else told from it)", "nchw"),
    ), IMAGES),
)  # fmt: skip
TABLES = {section.table: section for section in SECTIONS if section.table is not None}
assert GROUPS.keys() <= TABLES.keys(), "every group has a table"
IMAGE_KEYS = TABLES[IMAGES].keys
KEYS = {key.name: key for section in SECTIONS if section.table != IMAGES for key in section.keys}
