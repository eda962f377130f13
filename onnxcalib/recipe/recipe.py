"""What the user asked for, and what does not go together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from onnxcalib.errors import RecipeError
from onnxcalib.numerics.losses import LossKind
from onnxcalib.recipe.choices import (
    ENUMS,
    BatchNormReference,
    Engine,
    LayerOptimizer,
    OnBroken,
    Pipeline,
    Precision,
    RangeMethod,
    Rounding,
    Training,
    parse_bits,
    parse_choice,
)
from onnxcalib.recipe.overrides import parse_override

LEAST_BLOCK = 16
# What fields that are None stand for: only a pipeline that reads a field may have it set.
DEFAULTS: Mapping[str, Any] = {
    "loss": LossKind.DISTILLATION,
    "rounding": Rounding.AUTO,
    "bn_reference": BatchNormReference.FLOAT,
    "minimise": "size",
    "metric": "top1",
    "engine": Engine.AUTO,
    "layer_optimizer": LayerOptimizer.ADAQUANT,
    "training": Training.STANDARD,
    "steps": 100,
    "strict": False,
    "on_broken": OnBroken.FLOAT,
}


@dataclass(frozen=True)
class Recipe:
    """All that decides the result, apart from the model and the data.

    Words do for members: "light", "mse", "w4a4,w8a8"; limits, costs and overrides may be mappings. What does not
    go together is refused at once. Fields that are None stand for their defaults; `get` gives those.

    Attributes:
        pipeline: Which stages run: plain rounds to nearest, light adds allocation and tuning, advanced training.
        bits: One precision for all layers, or several to choose from: "w4a8", "w4" for weights alone, "w4a4,w8a8".
        edge_bits: Bits of the first and the last layer.
        block_size: Weights alone: so many share a scale along the sums of Gemm and MatMul.
        target: What the file is for: the name of a target, or a TOML file.
        ranges: How ranges are estimated; auto measures several estimators and takes the best.
        include: Globs; only layers with such names are quantized.
        exclude: Globs; layers with such names stay float.
        overrides: What single layers get, as "*classifier*=w8a8", "op:Conv=w8", "first=float" or "last=minmax".
        seed: For the order of the samples, and for training.
        compression: Mixed precision: the most bytes of all constants, relative to the float file.
        max_loss: Mixed precision: the most loss, measured on the assembled model.
        max_drop: Mixed precision: the most that the metric falls, in its own units, on labelled samples held out.
        metric: What labels are for: a metric's name, or "module:function"; top1 by default.
        limits: Mixed precision: further limits, as "bops=0.05".
        costs: Mixed precision: cost tables of your own, as "latency=latency.csv".
        minimise: Mixed precision: the cost to make small under `max_loss`; size by default.
        loss: Light and advanced: what tells a good model.
        rounding: Light and advanced: to nearest, to the second order, or what the held-out loss prefers.
        bn_reference: Light and advanced: whose channel statistics batch-norm tuning restores.
        on_broken: What happens where an output becomes noise: what causes it stays float, a warning, or an error.
        engine: Training: who makes the gradients.
        layer_optimizer: Training: AdaQuant or AdaRound.
        training: Training: learning rates and iterations.
        steps: Training: iterations a layer.
        strict: Training: whether to fail where an op has no gradient, instead of going on without it.
    """

    pipeline: Pipeline = Pipeline.PLAIN
    bits: tuple[Precision, ...] = (Precision(8, 8),)
    edge_bits: int | None = None
    block_size: int | None = None  # weights that share a scale, along the sums of Gemm and MatMul
    target: str = "ort"
    ranges: RangeMethod = RangeMethod.AUTO
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()  # PATTERN=w8a8 and such, or a mapping from pattern to value
    on_broken: OnBroken | None = None  # not set: as float, but bits narrower than eight stay as asked
    seed: int = 0
    # Mixed precision:
    compression: float | None = None  # the most bytes, relative to the float file
    max_loss: float | None = None  # the most loss, measured on the assembled model
    max_drop: float | None = None  # the most that the metric falls, in its own units, on labelled samples held out
    metric: str | None = None  # what labels are for: a metric's name, or MODULE:FUNCTION
    limits: tuple[str, ...] = ()  # further limits: COST=VALUE
    costs: tuple[str, ...] = ()  # cost tables of the user's: NAME=FILE.csv
    minimise: str | None = None  # the cost to make small under max_loss
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
        self._read_words()
        for text in self.overrides:
            parse_override(text)
        if not self.bits:
            raise RecipeError("no bits were asked for.", "Write 8, w4a8, or a list such as w4a4,w8a8.")
        if self.seed < 0:
            raise RecipeError(f"`seed={self.seed}` is negative.", "Give 0 or more.")
        if self.edge_bits is not None:
            Precision(self.edge_bits, self.edge_bits)
        self._check_weight_only()
        if self.pipeline is not Pipeline.ADVANCED:
            self._refuse(ADVANCED, f"has no effect in the {self.pipeline} pipeline", "Add `pipeline='advanced'`.")
        elif self.steps is not None and self.steps < 1:
            raise RecipeError(f"`steps={self.steps}` is not a number of steps.", "Give 1 or more.")
        if self.pipeline is Pipeline.PLAIN:
            self._check_plain()
        elif len(self.bits) == 1:
            self._refuse(MIXED, "has no effect at one precision", "Give `bits` a list such as w4a4,w8a8.")
        else:
            self._check_mixed()
        if self.metric is not None and self.max_drop is None and self.loss is not LossKind.METRIC:
            raise RecipeError("`metric` has no effect without `max_drop` or `loss='metric'`.", "Give one of them.")

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

    def _read_words(self) -> None:
        """Takes "light" for Pipeline.LIGHT, "w4a4,w8a8" for precisions, and a mapping or one pattern for a tuple."""
        read: dict[str, Any] = {
            name: parse_choice(name, value) for name in ENUMS if type(value := getattr(self, name)) is str
        }
        if not isinstance(self.bits, tuple) or any(isinstance(each, str) for each in self.bits):
            listed = (self.bits,) if isinstance(self.bits, str | Precision) else self.bits
            read["bits"] = parse_bits(",".join(map(str, listed))) if listed else ()
        for name in ("include", "exclude", "limits", "costs", "overrides"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                read[name] = tuple(f"{key}={each}" for key, each in value.items())
            elif not isinstance(value, tuple):
                read[name] = (value,) if isinstance(value, str) else tuple(value)
        for name, value in read.items():
            object.__setattr__(self, name, value)

    def _check_weight_only(self) -> None:
        if len({precision.weight_only for precision in self.bits}) > 1:
            listed = ",".join(map(str, self.bits))
            raise RecipeError(
                f"`bits={listed!r}` mixes layers that read float activations with layers that read quantized ones.",
                "Give either all of them activation bits, or none.",
            )
        if self.block_size is None:
            return
        if not self.weight_only:
            raise RecipeError("`block_size` has no effect where activations are quantized.", "Give `bits` w4 or w8.")
        if self.block_size < LEAST_BLOCK or self.block_size & (self.block_size - 1):
            raise RecipeError(
                f"`block_size={self.block_size}` is not a power of two from {LEAST_BLOCK} on, which runtimes ask for.",
                "Give 32, 64 or 128.",
            )

    def _check_plain(self) -> None:
        if len(self.bits) > 1:
            listed = ",".join(map(str, self.bits))
            raise RecipeError(
                f"`bits={listed!r}` asks for mixed precision, which the plain pipeline does not assign.",
                "Give one precision, or `pipeline='light'`.",
            )
        others = ("loss", "rounding", "bn_reference", "metric")
        self._refuse((*MIXED, *others), "has no effect in the plain pipeline", "Add `pipeline='light'`.")

    def _check_mixed(self) -> None:
        if self.base not in self.bits:
            raise RecipeError(
                f"`bits` has no precision that is highest in both weights and activations ({self.base}).", "Add it."
            )
        if self.compression is None and self.max_loss is None and self.max_drop is None and not self.limits:
            hint = "Give `max_drop`, `compression`, `max_loss` or `limits`."
            raise RecipeError("a list of bits needs to know what to aim for.", hint)
        if self.max_drop is not None and self.max_loss is not None:
            raise RecipeError("`max_drop` and `max_loss` both say what may be lost.", "Give one of them.")
        for name in ("compression", "max_loss", "max_drop"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RecipeError(f"`{name}={value}` is not a positive number.", "Mend it.")
        if self.minimise is not None and self.max_loss is None:
            raise RecipeError("`minimise` has no effect without `max_loss`.", "Give `max_loss`.")

    def _refuse(self, names: Iterable[str], why: str, hint: str) -> None:
        for name in names:
            if getattr(self, name) not in (None, ()):
                raise RecipeError(f"`{name}` {why}.", hint)


MIXED = ("compression", "max_loss", "max_drop", "limits", "costs", "minimise")
ADVANCED = ("engine", "layer_optimizer", "training", "steps", "strict")
RECIPE_FIELDS = frozenset(field.name for field in fields(Recipe))
