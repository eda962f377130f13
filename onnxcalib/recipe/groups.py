"""The groups that a recipe's fields come in; a field that is None stands for its default."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from onnxcalib.errors import RecipeError, near
from onnxcalib.recipe.choices import ENUMS, Activations, Engine, LayerOptimizer, Rounding, Training, parse_choice

LEAST_BLOCK = 16


@dataclass(frozen=True)
class WeightOptions:
    """How weights are quantized.

    Attributes:
        rounding: Light and advanced: to nearest, to the second order, or what the held-out loss prefers.
        block_size: Weights alone: so many share a scale along the sums of Gemm and MatMul.
    """

    rounding: Rounding | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        read_words(self)
        if self.block_size is not None and (self.block_size < LEAST_BLOCK or self.block_size & (self.block_size - 1)):
            raise RecipeError(
                f"`block_size={self.block_size}` is not a power of two from {LEAST_BLOCK} on, which runtimes ask for.",
                "Give 32, 64 or 128.",
            )


@dataclass(frozen=True)
class ActivationOptions:
    """How activations are quantized.

    Attributes:
        mode: Whether their ranges are static, of the calibration data, dynamic, found at run time, or as each tensor
            needs it (auto).
    """

    mode: Activations = Activations.STATIC

    def __post_init__(self) -> None:
        read_words(self)


@dataclass(frozen=True)
class MixedPrecisionOptions:
    """What bits are assigned for, where the recipe has several precisions to choose from.

    Attributes:
        compression: The most bytes of all constants, relative to the float file.
        max_loss: The most loss, measured on the assembled model.
        max_drop: The most that the metric falls, in its own units, on labelled samples held out.
        limits: Further limits, as "bops=0.05", or a mapping.
        costs: Cost tables of your own, as "latency=latency.csv", or a mapping.
        minimise: The cost to make small under `max_loss`; size by default.
    """

    compression: float | None = None
    max_loss: float | None = None
    max_drop: float | None = None
    limits: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    minimise: str | None = None

    def __post_init__(self) -> None:
        read_words(self, lists=("limits", "costs"))
        for name in ("compression", "max_loss", "max_drop"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RecipeError(f"`{name}={value}` is not a positive number.", "Mend it.")
        if self.max_drop is not None and self.max_loss is not None:
            raise RecipeError("`max_drop` and `max_loss` both say what may be lost.", "Give one of them.")


@dataclass(frozen=True)
class TrainingOptions:
    """How the advanced pipeline trains.

    Attributes:
        schedule: Learning rates and iterations.
        engine: Who makes the gradients.
        layer_optimizer: AdaQuant or AdaRound.
        steps: Iterations a layer; sixteen times as many through the whole network.
        strict: Whether to fail where an op has no gradient, instead of going on without it.
    """

    schedule: Training | None = None
    engine: Engine | None = None
    layer_optimizer: LayerOptimizer | None = None
    steps: int | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        read_words(self)


Group: TypeAlias = WeightOptions | ActivationOptions | MixedPrecisionOptions | TrainingOptions
GROUPS: Mapping[str, type[Group]] = {
    "weights": WeightOptions,
    "activations": ActivationOptions,
    "mixed_precision": MixedPrecisionOptions,
    "training": TrainingOptions,
}
MAIN = {"activations": "mode", "training": "schedule"}  # the field that a group given as a word means
GROUP_OF = {field.name: group for group, kind in GROUPS.items() for field in fields(kind)}
KEY_OF = {field: group for group, field in MAIN.items()}  # such a field has the group's name among single options


def gather(given: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, Group]:
    """The groups by name: as given, as a word for the main field, and with fields that were given alone on top."""
    for name in alone.keys() - GROUP_OF.keys():
        raise TypeError(f"Recipe has no field '{name}'. {near(name, sorted(GROUP_OF))}")
    return {group: _gathered(group, given[group], alone) for group in GROUPS}


def _gathered(group: str, given: Any, alone: Mapping[str, Any]) -> Group:
    kind = GROUPS[group]
    if isinstance(given, str) and group in MAIN:
        options: dict[str, Any] = {MAIN[group]: parse_choice(group, given)}
        found = kind(**options)
    elif given is None or isinstance(given, kind):
        found = given or kind()
    else:
        raise RecipeError(f"`{group}={given!r}` is no {kind.__name__}.", f"Give {kind.__name__}(...).")
    own = {name: value for name, value in alone.items() if GROUP_OF[name] == group}
    return replace(found, **own)


def read_words(record: Any, lists: Iterable[str] = ()) -> None:
    """Takes words for members of enums, and a mapping or one pattern for a tuple."""
    for name in vars(record).keys() & ENUMS.keys():
        if type(value := getattr(record, name)) is str:
            object.__setattr__(record, name, parse_choice(name, value))
    for name in lists:
        object.__setattr__(record, name, _as_tuple(getattr(record, name)))


def _as_tuple(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(f"{key}={each}" for key, each in value.items())
    return (value,) if isinstance(value, str) else tuple(value)
