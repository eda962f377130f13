"""What the user asked for, and what does not go together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from onnxcalib.errors import RecipeError
from onnxcalib.numerics.losses import LossKind
from onnxcalib.recipe.choices import (
    BatchNormReference,
    Engine,
    LayerOptimizer,
    OnBroken,
    Pipeline,
    Precision,
    RangeMethod,
    Rounding,
    Training,
)

LEAST_BLOCK = 16
# What fields that are None stand for: only a pipeline that reads a field may have it set.
DEFAULTS: Mapping[str, Any] = {
    "loss": LossKind.DISTILLATION,
    "rounding": Rounding.AUTO,
    "bn_reference": BatchNormReference.FLOAT,
    "minimise": "size",
    "engine": Engine.AUTO,
    "layer_optimizer": LayerOptimizer.ADAQUANT,
    "training": Training.STANDARD,
    "steps": 100,
    "strict": False,
    "on_broken": OnBroken.FLOAT,
}


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
    on_broken: OnBroken | None = None  # not set: as float, but bits narrower than eight stay as asked
    seed: int = 0
    # Mixed precision:
    compression: float | None = None  # the most bytes, relative to the float file
    max_loss: float | None = None  # the most loss, measured on the assembled model
    limits: tuple[str, ...] = ()  # further limits: COST=VALUE
    costs: tuple[str, ...] = ()  # cost tables of the user's: NAME=FILE.csv
    minimise: str | None = None  # the cost to make small under max_loss
    pins: tuple[str, ...] = ()  # GLOB=w8a8
    loss: LossKind | None = None
    rounding: Rounding | None = None
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
        if self.seed < 0:
            raise RecipeError(f"--seed {self.seed} is negative.", "Give 0 or more.")
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

    def get(self, name: str) -> Any:
        """A field, or what stands for it where it is not set."""
        value = getattr(self, name)
        return DEFAULTS.get(name) if value is None else value

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
        self._refuse(
            (*MIXED, "loss", "rounding", "bn_reference"), "has no effect in the plain pipeline", "Add --pipeline light."
        )

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
RECIPE_FIELDS = frozenset(field.name for field in fields(Recipe))
