"""What the user asked for, and what does not go together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from onnxcalib.errors import RecipeError
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.recipe.choices import (
    MAX_BITS,
    Activations,
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
)
from onnxcalib.recipe.groups import (
    GROUP_OF,
    GROUPS,
    KEY_OF,
    ActivationOptions,
    MixedPrecisionOptions,
    TrainingOptions,
    WeightOptions,
    gather,
    read_words,
)
from onnxcalib.recipe.overrides import parse_override

# What fields that are None stand for: only a pipeline that reads a field may have it set.
DEFAULTS: Mapping[str, Any] = {
    "loss": LossKind.DISTILLATION,
    "rounding": Rounding.AUTO,
    "bn_reference": BatchNormReference.FLOAT,
    "minimise": "size",
    "metric": "top1",
    "engine": Engine.AUTO,
    "layer_optimizer": LayerOptimizer.ADAQUANT,
    "schedule": Training.STANDARD,
    "steps": 100,
    "strict": False,
    "on_broken": OnBroken.FLOAT,
}
Bits: TypeAlias = str | Precision | Iterable[str | Precision]
Words: TypeAlias = str | Iterable[str]


@dataclass(frozen=True, init=False)
class Recipe:
    """All that decides the result, apart from the model and the data.

    Words do for members: "light", "mse", "w4a4,w8a8"; overrides may be a mapping. What does not go together is
    refused at once. Fields that are None stand for their defaults; `get` gives those.

    The fields of groups may also be given alone, and go on top: `Recipe("advanced", steps=40)` is
    `Recipe("advanced", training=TrainingOptions(steps=40))`, and `recipe.steps` is `recipe.training.steps`.

    Attributes:
        pipeline: Which stages run: plain rounds to nearest, light adds allocation and tuning, advanced training.
        bits: One precision for all layers, or several to choose from: "w4a8", "w4" (weights alone), "w4a4,w8a8,float".
        edge_bits: Bits of the first and the last layer.
        target: What the file is for: the name of a target, or a TOML file.
        ranges: How ranges are estimated; auto measures several estimators and takes the best.
        include: Globs; only layers with such names are quantized.
        exclude: Globs; layers with such names stay float.
        overrides: What single layers get, as "*classifier*=w8a8", "op:Conv=w8", "first=float" or "last=minmax".
        on_broken: What happens where an output becomes noise: what causes it stays float, a warning, or an error.
        seed: For the order of the samples, and for training.
        loss: Light and advanced: what tells a good model.
        metric: What labels are for: a metric's name, or "module:function"; top1 by default.
        bn_reference: Light and advanced: whose channel statistics batch-norm tuning restores.
        weights: How weights are rounded, and how many share a scale.
        activations: Where their ranges come from; a word is its mode.
        mixed_precision: What bits are assigned for, where there are several to choose from.
        training: How the advanced pipeline trains; a word is its schedule.
    """

    pipeline: Pipeline
    bits: tuple[Precision, ...]
    edge_bits: int | None
    target: str
    ranges: RangeMethod
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    overrides: tuple[str, ...]
    on_broken: OnBroken | None  # not set: as float, but bits narrower than eight stay as asked
    seed: int
    loss: LossKind | None
    metric: str | None
    bn_reference: BatchNormReference | None
    weights: WeightOptions
    activations: ActivationOptions
    mixed_precision: MixedPrecisionOptions
    training: TrainingOptions

    def __init__(  # noqa: PLR0913 - the fields, each with its type, and those of groups
        self,
        pipeline: Pipeline | str = Pipeline.PLAIN,
        bits: Bits = "w8a8",
        edge_bits: int | None = None,
        *,
        target: str = "ort",
        ranges: RangeMethod | str = RangeMethod.AUTO,
        include: Words = (),
        exclude: Words = (),
        overrides: Mapping[str, Precision | str] | Words = (),
        on_broken: OnBroken | str | None = None,
        seed: int = 0,
        loss: LossKind | str | None = None,
        metric: str | None = None,
        bn_reference: BatchNormReference | str | None = None,
        weights: WeightOptions | None = None,
        activations: ActivationOptions | Activations | str | None = None,
        mixed_precision: MixedPrecisionOptions | None = None,
        training: TrainingOptions | Training | str | None = None,
        **alone: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _ARGUMENTS}
        for name, value in (given | gather(given, alone)).items():
            object.__setattr__(self, name, value)
        read_words(self, lists=("include", "exclude", "overrides"))
        object.__setattr__(self, "bits", _precisions(bits))
        self._check()

    def _check(self) -> None:
        for text in self.overrides:
            parse_override(text)
        if not self.quantized:
            raise RecipeError("no bits were asked for.", "Write 8, w4a8, or a list such as w4a4,w8a8,float.")
        if self.seed < 0:
            raise RecipeError(f"`seed={self.seed}` is negative.", "Give 0 or more.")
        if self.edge_bits is not None:
            Precision(self.edge_bits, self.edge_bits)
        self._check_weight_only()
        self._check_dynamic()
        if self.pipeline is not Pipeline.ADVANCED:
            self._refuse(ADVANCED, f"has no effect in the {self.pipeline} pipeline", "Add `pipeline='advanced'`.")
        elif self.training.steps is not None and self.training.steps < 1:
            raise RecipeError(f"`steps={self.training.steps}` is not a number of steps.", "Give 1 or more.")
        if self.pipeline is Pipeline.PLAIN:
            self._check_plain()
        elif len(self.bits) == 1:
            self._refuse(MIXED, "has no effect at one precision", "Give `bits` a list such as w4a4,w8a8.")
        else:
            self._check_mixed()
        judged = self.mixed_precision.max_drop is not None or self.loss is LossKind.METRIC
        if self.metric is not None and not judged:
            raise RecipeError("`metric` has no effect without `max_drop` or `loss='metric'`.", "Give one of them.")

    if not TYPE_CHECKING:  # who checks types reads groups

        def __getattr__(self, name: str) -> Any:
            """A field of a group."""
            if name not in GROUP_OF:
                raise AttributeError(f"'Recipe' object has no attribute '{name}'")
            return getattr(getattr(self, GROUP_OF[name]), name)

    @property
    def base(self) -> Precision:
        """The precision that every other is compared with: float where that is on offer, else the highest."""
        return next((bits for bits in self.bits if bits.is_float), self.highest)

    @property
    def highest(self) -> Precision:
        """The highest precision of what is quantized."""
        offered = self.quantized
        return Precision(max(bits.weight for bits in offered), max(bits.activation for bits in offered))

    @property
    def quantized(self) -> tuple[Precision, ...]:
        """What is on offer beside float."""
        return tuple(bits for bits in self.bits if not bits.is_float)

    @property
    def weight_only(self) -> bool:
        """Whether activations stay float."""
        return self.quantized[0].weight_only

    def get(self, name: str) -> Any:
        """A field of the recipe or of a group, or what stands for it where it is not set."""
        value = getattr(self, name)
        return DEFAULTS.get(name) if value is None else value

    def options(self) -> dict[str, Any]:
        """All fields as single options: those of groups by their own names, main ones by the group's."""
        return {KEY_OF.get(name, name): getattr(self, name) for name in _NAMES}

    def _check_weight_only(self) -> None:
        if len({precision.weight_only for precision in self.quantized}) > 1:
            listed = ",".join(map(str, self.bits))
            raise RecipeError(
                f"`bits={listed!r}` mixes layers that read float activations with layers that read quantized ones.",
                "Give either all of them activation bits, or none.",
            )
        if self.weights.block_size is not None and not self.weight_only:
            raise RecipeError("`block_size` has no effect where activations are quantized.", "Give `bits` w4 or w8.")

    def _check_dynamic(self) -> None:
        mode = self.activations.mode
        if mode is Activations.STATIC:
            asked = {parse_override(text)[1].dynamic: text for text in self.overrides}
            if False in asked and True not in asked:
                hint = "Leave `static` out, or give `activations='dynamic'`."
                raise RecipeError(f"`overrides={asked[False]!r}` has no effect where ranges are static anyway.", hint)
            return
        words = f"`activations={mode.value!r}`"
        if self.weight_only:
            raise RecipeError(f"{words} has no effect where activations stay float.", "Give `bits` 8 or w4a8.")
        narrow = [each for each in self.quantized if each.activation != MAX_BITS]
        if narrow:
            hint = f"Give `bits` such as w{narrow[0].weight}a8."
            raise RecipeError(f"{words} takes eight bits for activations, not {narrow[0]}.", hint)
        if self.edge_bits not in (None, MAX_BITS):
            raise RecipeError(f"{words} takes eight bits for activations, and `edge_bits` fewer.", "Leave one out.")
        if mode is Activations.AUTO and self.pipeline is Pipeline.PLAIN:
            raise RecipeError(f"{words} has no effect in the plain pipeline.", "Add `pipeline='light'`.")

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
        if self.highest not in self.bits:
            raise RecipeError(
                f"`bits` has no precision that is highest in both weights and activations ({self.highest}).", "Add it."
            )
        wanted = self.mixed_precision
        if wanted.compression is None and wanted.max_loss is None and wanted.max_drop is None and not wanted.limits:
            hint = "Give `max_drop`, `compression`, `max_loss` or `limits`."
            raise RecipeError("a list of bits needs to know what to aim for.", hint)
        if wanted.minimise is not None and wanted.max_loss is None:
            raise RecipeError("`minimise` has no effect without `max_loss`.", "Give `max_loss`.")

    def _refuse(self, names: Iterable[str], why: str, hint: str) -> None:
        for name in names:
            if getattr(self, name) not in (None, ()):
                raise RecipeError(f"`{KEY_OF.get(name, name)}` {why}.", hint)


def _precisions(bits: Bits) -> tuple[Precision, ...]:
    listed = (bits,) if isinstance(bits, str | Precision) else tuple(bits)
    return parse_bits(",".join(map(str, listed))) if listed else ()


MIXED = tuple(field.name for field in fields(MixedPrecisionOptions))
ADVANCED = tuple(field.name for field in fields(TrainingOptions))
_ARGUMENTS = frozenset(field.name for field in fields(Recipe))
_NAMES = (*(field.name for field in fields(Recipe) if field.name not in GROUPS), *GROUP_OF)
RECIPE_FIELDS = frozenset(_NAMES)  # what stages declare
RECIPE_KEYS = frozenset(KEY_OF.get(name, name) for name in _NAMES)  # what files and options set
