"""The words and numbers that a recipe is made of."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnxcalib.errors import RecipeError
from onnxcalib.numerics.output_kind import LossKind

MIN_BITS, MAX_BITS = 2, 8
FLOAT_BITS = 32  # of what is not quantized


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


class Activations(enum.StrEnum):
    """Where the ranges of activations come from; auto takes what the held-out loss asks for, tensor by tensor."""

    STATIC = "static"  # the calibration data
    DYNAMIC = "dynamic"  # the values themselves, at run time
    AUTO = "auto"


class Rounding(enum.StrEnum):
    """How weights are rounded once their bits are assigned; auto takes what the held-out loss prefers."""

    AUTO = "auto"
    NEAREST = "nearest"
    SECOND_ORDER = "second-order"  # each weight makes good the errors of those before it


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


class OnBroken(enum.StrEnum):
    """What happens where quantization leaves an output as much noise as signal."""

    FLOAT = "float"  # the few tensors or layers that cause it stay float
    KEEP = "keep"  # a warning
    ERROR = "error"


@dataclass(frozen=True, order=True)
class Precision:
    """Bits of a layer's weight and of the activation that it reads."""

    weight: int
    activation: int

    def __post_init__(self) -> None:
        if self.is_float:
            return
        for what, bits in (("weight", self.weight), ("activation", self.activation)):
            if not MIN_BITS <= bits <= MAX_BITS and not (what == "activation" and bits == FLOAT_BITS):
                raise RecipeError(f"{bits} {what} bits are out of range.", f"Choose {MIN_BITS} to {MAX_BITS}.")

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Reads "w4a8", "8" for w8a8, "w4" for weights alone, or "float"."""
        if text.strip().lower() == "float":
            return cls(FLOAT_BITS, FLOAT_BITS)
        match = re.fullmatch(r"w([0-9]{1,4})(?:a([0-9]{1,4}))?|([0-9]{1,4})", text.strip().lower())
        if match is None:
            raise RecipeError(f"'{text}' is not a precision.", "Write 8, w4a8, w4, or a list such as w4a4,w8a8,float.")
        weight, activation, both = match.groups()
        found = cls(int(weight or both), int(activation or both or FLOAT_BITS))
        if found.is_float:
            raise RecipeError(f"'{text}' is not a precision.", "Write float for a layer that is not quantized.")
        return found

    @property
    def is_float(self) -> bool:
        """Whether nothing of the layer is quantized."""
        return self.weight == self.activation == FLOAT_BITS

    @property
    def weight_only(self) -> bool:
        """Whether the activation alone stays float."""
        return self.activation == FLOAT_BITS and not self.is_float

    def edge(self, bits: int) -> Precision:
        """That of an edge layer beside layers of this precision."""
        return Precision(bits, FLOAT_BITS if self.weight_only else bits)

    def __str__(self) -> str:
        if self.is_float:
            return "float"
        return f"w{self.weight}" if self.weight_only else f"w{self.weight}a{self.activation}"


def parse_bits(text: str) -> tuple[Precision, ...]:
    """Reads a comma-separated list of precisions; each may stand once."""
    choices = tuple(Precision.parse(part) for part in text.split(","))
    if len(set(choices)) != len(choices):
        raise RecipeError(f"`bits={text!r}` names a precision twice.", "Name each once.")
    return choices


ENUMS: Mapping[str, type[enum.StrEnum]] = {
    "pipeline": Pipeline,
    "ranges": RangeMethod,
    "activations": Activations,  # as a word for the whole group
    "mode": Activations,
    "loss": LossKind,
    "rounding": Rounding,
    "bn_reference": BatchNormReference,
    "engine": Engine,
    "layer_optimizer": LayerOptimizer,
    "training": Training,  # as a word for the whole group
    "schedule": Training,
    "on_broken": OnBroken,
}


def parse_choice(option: str, value: str) -> enum.StrEnum:
    """The member of the option's enum that the text names."""
    kind = ENUMS[option]
    try:
        return kind(value)
    except ValueError as error:
        *others, last = kind
        hint = f"Choose {', '.join(others)} or {last}."
        raise RecipeError(f"'{value}' is not a choice for `{option}`.", hint) from error


def parse_pair(option: str, text: str) -> tuple[str, str]:
    """Reads NAME=VALUE."""
    # A pattern may hold an equals sign, and so may a path.
    name, equals, value = text.partition("=") if option == "costs" else text.rpartition("=")
    if not equals or not name or not value:
        raise RecipeError(f"`{option}={text!r}` is not of the form NAME=VALUE.", "Mend it.")
    return name, value
