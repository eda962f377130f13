"""What the user asked for: frozen dataclasses, read from and written to TOML."""

from __future__ import annotations

import enum
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from onnxcalib.errors import RecipeError, near
from onnxcalib.numerics.loss import LossKind

MIN_BITS, MAX_BITS = 2, 8
FLOAT_BITS = 32  # of an activation that is not quantized
LEAST_BLOCK = 16


class Pipeline(enum.StrEnum):
    """Which stages run: light adds allocation and batch-norm tuning to plain rounding, advanced adds training."""

    PLAIN = "plain"
    LIGHT = "light"
    ADVANCED = "advanced"


class RangeMethod(enum.StrEnum):
    """How a quantization range is estimated from statistics; auto measures the others and takes the best."""

    AUTO = "auto"
    MINMAX = "minmax"
    AVERAGED = "averaged"
    PERCENTILE = "percentile"
    MSE = "mse"
    ENTROPY = "entropy"


class BatchNormReference(enum.StrEnum):
    """Whose channel statistics batch-norm tuning restores."""

    FLOAT = "float"  # the float model's, on the same samples
    BATCHNORM = "batchnorm"  # the folded batch norm's gamma and beta; the float model's where there was none


class Engine(enum.StrEnum):
    """Who makes the gradients: ONNX Runtime training, or standard ops on any runtime."""

    AUTO = "auto"
    TRAINING = "training"
    STANDARD = "standard"


class LayerOptimizer(enum.StrEnum):
    """What moves the weights: AdaQuant as far as it helps, AdaRound at most to the other neighbour."""

    ADAQUANT = "adaquant"
    ADAROUND = "adaround"


class Training(enum.StrEnum):
    """How long and how fast a layer is trained."""

    STANDARD = "standard"
    PAPER = "paper"  # the paper's learning rates and iterations


@dataclass(frozen=True, order=True)
class Precision:
    """Bits of a layer's weight and of the activation that it reads."""

    weight: int
    activation: int

    def __post_init__(self) -> None:
        for what, bits in (("weight", self.weight), ("activation", self.activation)):
            if not MIN_BITS <= bits <= MAX_BITS and not (what == "activation" and bits == FLOAT_BITS):
                raise RecipeError(f"{bits} {what} bits are out of range.", f"Choose {MIN_BITS} to {MAX_BITS}.")

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Reads "w4a8", "8" for w8a8, or "w4" for weights alone."""
        match = re.fullmatch(r"w(\d+)(?:a(\d+))?|(\d+)", text.strip().lower())
        if match is None:
            raise RecipeError(f"'{text}' is not a precision.", "Write 8, w4a8, w4, or a list such as w4a4,w8a8.")
        weight, activation, both = match.groups()
        return cls(int(weight or both), int(activation or both or FLOAT_BITS))

    @property
    def weight_only(self) -> bool:
        """Whether the activation stays float."""
        return self.activation == FLOAT_BITS

    def edge(self, bits: int) -> Precision:
        """That of an edge layer beside layers of this precision."""
        return Precision(bits, FLOAT_BITS if self.weight_only else bits)

    def __str__(self) -> str:
        return f"w{self.weight}" if self.weight_only else f"w{self.weight}a{self.activation}"


def parse_bits(text: str) -> tuple[Precision, ...]:
    """Reads a comma-separated list of precisions; each may stand once."""
    choices = tuple(Precision.parse(part) for part in text.split(","))
    if len(set(choices)) != len(choices):
        raise RecipeError(f"--bits {text} names a precision twice.", "Name each once.")
    return choices


@dataclass(frozen=True)
class Recipe:
    """All that decides the result, apart from the model and the data."""

    pipeline: Pipeline = Pipeline.PLAIN
    bits: tuple[Precision, ...] = (Precision(8, 8),)
    edge_bits: int | None = None
    block_size: int | None = None  # weights that share a scale, along the sums of Gemm and MatMul
    target: str = "ort"
    ranges: RangeMethod = RangeMethod.AUTO
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    seed: int = 0
    # Mixed precision:
    compression: float | None = None  # the most bytes, relative to the float file
    max_loss: float | None = None  # the most loss, measured on the assembled model
    limits: tuple[str, ...] = ()  # further limits: COST=VALUE
    costs: tuple[str, ...] = ()  # cost tables of the user's: NAME=FILE.csv
    minimise: str | None = None  # the cost to make small under max_loss
    pins: tuple[str, ...] = ()  # GLOB=w8a8
    loss: LossKind | None = None
    bn_reference: BatchNormReference | None = None
    # The advanced pipeline:
    engine: Engine | None = None
    layer_optimizer: LayerOptimizer | None = None
    training: Training | None = None
    steps: int | None = None  # of training, a layer
    strict: bool | None = None  # fail where something has no gradient, instead of going on without it

    def __post_init__(self) -> None:
        if not self.bits:
            raise RecipeError("no bits were asked for.", "Write 8, w4a8, or a list such as w4a4,w8a8.")
        if self.edge_bits is not None:
            Precision(self.edge_bits, self.edge_bits)
        self._check_weight_only()
        if self.pipeline is not Pipeline.ADVANCED:
            self._refuse(ADVANCED, f"has no effect in the {self.pipeline} pipeline", "Add --pipeline advanced.")
        elif self.steps is not None and self.steps < 1:
            raise RecipeError(f"--steps {self.steps} is not a number of steps.", "Give 1 or more.")
        if self.pipeline is Pipeline.PLAIN:
            self._check_plain()
        elif len(self.bits) == 1:
            self._refuse(MIXED, "has no effect at one precision", "Give --bits a list such as w4a4,w8a8.")
        else:
            self._check_mixed()

    @property
    def base(self) -> Precision:
        """The precision that every other is compared with: the highest."""
        return Precision(max(bits.weight for bits in self.bits), max(bits.activation for bits in self.bits))

    @property
    def weight_only(self) -> bool:
        """Whether activations stay float."""
        return self.bits[0].weight_only

    def _check_weight_only(self) -> None:
        if len({precision.weight_only for precision in self.bits}) > 1:
            listed = ",".join(map(str, self.bits))
            raise RecipeError(
                f"--bits {listed} mixes layers that read float activations with layers that read quantized ones.",
                "Give either all of them activation bits, or none.",
            )
        if self.block_size is None:
            return
        if not self.weight_only:
            raise RecipeError("--block-size has no effect where activations are quantized.", "Give --bits w4 or w8.")
        if self.block_size < LEAST_BLOCK or self.block_size & (self.block_size - 1):
            raise RecipeError(
                f"--block-size {self.block_size} is not a power of two from {LEAST_BLOCK} on, which runtimes ask for.",
                "Give 32, 64 or 128.",
            )
        if self.pipeline is Pipeline.ADVANCED:
            raise RecipeError("--block-size cannot be trained by the advanced pipeline.", "Use --pipeline light.")

    def _check_plain(self) -> None:
        if len(self.bits) > 1:
            listed = ",".join(map(str, self.bits))
            raise RecipeError(
                f"--bits {listed} asks for mixed precision, which the plain pipeline does not assign.",
                "Give one precision, or --pipeline light.",
            )
        self._refuse((*MIXED, "loss", "bn_reference"), "has no effect in the plain pipeline", "Add --pipeline light.")

    def _check_mixed(self) -> None:
        if self.base not in self.bits:
            raise RecipeError(
                f"--bits has no precision that is highest in both weights and activations ({self.base}).", "Add it."
            )
        if self.compression is None and self.max_loss is None and not self.limits:
            raise RecipeError(
                "a list of bits needs to know what to aim for.", "Give --compression, --max-loss or --limit."
            )
        for name in ("compression", "max_loss"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RecipeError(f"--{name.replace('_', '-')} {value} is not a positive number.", "Mend it.")
        if self.minimise is not None and self.max_loss is None:
            raise RecipeError("--minimise has no effect without --max-loss.", "Give --max-loss.")

    def _refuse(self, names: Iterable[str], why: str, hint: str) -> None:
        for name in names:
            if getattr(self, name) not in (None, ()):
                raise RecipeError(f"--{OPTION_NAMES.get(name, name.replace('_', '-'))} {why}.", hint)


MIXED = ("compression", "max_loss", "limits", "costs", "minimise", "pins")
ADVANCED = ("engine", "layer_optimizer", "training", "steps", "strict")
OPTION_NAMES = {"limits": "limit", "costs": "cost", "pins": "pin"}


def read_recipe(path: str | Path) -> Recipe:
    """Reads a TOML recipe; unknown keys and wrong types are errors."""
    return Recipe(**read_options(path))


def read_options(path: str | Path) -> dict[str, Any]:
    """The options that a TOML recipe sets, checked one by one, so that others can go on top."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}.", "Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}.", "Mend that line.") from error
    known = {f.name for f in fields(Recipe)}
    for key in table:
        if key not in known:
            raise RecipeError(f"recipe {path} has an unknown key '{key}'.", near(key, sorted(known)))
    return {key: _from_toml(str(path), key, value) for key, value in table.items()}


def write_recipe(recipe: Recipe) -> str:
    """The recipe as TOML text; reading it gives the same recipe."""
    lines = [f"{f.name} = {_to_toml(getattr(recipe, f.name))}" for f in fields(recipe) if _is_set(recipe, f.name)]
    return "\n".join(lines) + "\n"


def _is_set(recipe: Recipe, name: str) -> bool:
    return getattr(recipe, name) is not None


_KINDS: Mapping[str, tuple[type[Any], str]] = {
    "pipeline": (str, "a string"),
    "target": (str, "a string"),
    "ranges": (str, "a string"),
    "edge_bits": (int, "an integer"),
    "block_size": (int, "an integer"),
    "seed": (int, "an integer"),
    "include": (list, "a list of strings"),
    "exclude": (list, "a list of strings"),
    "bits": (list, "a list of strings"),
    "compression": (float, "a number"),
    "max_loss": (float, "a number"),
    "limits": (list, "a list of strings"),
    "costs": (list, "a list of strings"),
    "minimise": (str, "a string"),
    "pins": (list, "a list of strings"),
    "loss": (str, "a string"),
    "bn_reference": (str, "a string"),
    "engine": (str, "a string"),
    "layer_optimizer": (str, "a string"),
    "training": (str, "a string"),
    "steps": (int, "an integer"),
    "strict": (bool, "true or false"),
}
_ENUMS: Mapping[str, type[enum.StrEnum]] = {
    "pipeline": Pipeline,
    "ranges": RangeMethod,
    "loss": LossKind,
    "bn_reference": BatchNormReference,
    "engine": Engine,
    "layer_optimizer": LayerOptimizer,
    "training": Training,
}


def _from_toml(path: str, key: str, value: Any) -> Any:
    kind, words = _KINDS[key]
    if kind is float and type(value) is int:
        value = float(value)
    if key == "bits" and isinstance(value, str | int) and not isinstance(value, bool):
        return parse_bits(str(value))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecipeError(f"recipe {path}: '{key}' must be {words}, not {value!r}.", "Mend that line.")
    if kind is list and not all(isinstance(item, str) for item in value):
        raise RecipeError(f"recipe {path}: '{key}' must be {words}.", "Mend that line.")
    if key == "bits":
        return parse_bits(",".join(value))
    return parse_choice(key, value) if key in _ENUMS else tuple(value) if kind is list else value


def parse_choice(option: str, value: str) -> enum.StrEnum:
    """The member of the option's enum that the text names."""
    kind = _ENUMS[option]
    try:
        return kind(value)
    except ValueError as error:
        what = option.replace("_", "-")
        raise RecipeError(f"'{value}' is not a choice for --{what}.", f"Choose {_or(kind)}.") from error


def parse_pair(option: str, text: str) -> tuple[str, str]:
    """Reads NAME=VALUE."""
    # A pattern may hold an equals sign, and so may a path.
    name, equals, value = text.partition("=") if option == "cost" else text.rpartition("=")
    if not equals or not name or not value:
        raise RecipeError(f"--{option} '{text}' is not of the form NAME=VALUE.", "Mend it.")
    return name, value


def _or(words: Iterable[str]) -> str:
    *head, last = (str(word) for word in words)
    return f"{', '.join(head)} or {last}" if head else last


def _to_toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_to_toml(item) for item in value) + "]"
    if isinstance(value, str | Precision):
        # TOML's strings are JSON's, but for one character that TOML wants escaped.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)
