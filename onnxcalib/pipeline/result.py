"""What comes out of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import onnx

from onnxcalib.algorithms.activation_ranges import ChosenRanges
from onnxcalib.algorithms.batchnorm import Tuned
from onnxcalib.algorithms.broken import OutputNoise
from onnxcalib.algorithms.reconstruction.end_to_end import NetworkTuned
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.algorithms.second_order import ChosenRounding
from onnxcalib.files import Inputs, check_outputs
from onnxcalib.mixed_precision.assignment import Assigned
from onnxcalib.mixed_precision.table import SensitivityTable
from onnxcalib.model.external import LARGE_MODEL
from onnxcalib.model.files import model_outputs
from onnxcalib.model.io import PROTOBUF_LIMIT, write_model
from onnxcalib.model.layers import LayerList
from onnxcalib.numerics.metric import Drop
from onnxcalib.numerics.output_kind import Kinds, LossKind, loss_in_words
from onnxcalib.plan import LeftFloat, QuantPlan
from onnxcalib.recipe import Recipe


@dataclass(frozen=True)
class AccuracyBudget:
    """What a metric fell by on samples that nothing else saw, and how that was come by."""

    metric: str
    most: float  # that it was allowed to fall
    proof: Drop
    looks: int  # how often those samples were asked, this one included
    sizes: tuple[tuple[float, float], ...]  # what was tried: bytes relative to float, and the drop while searching


@dataclass(frozen=True)
class Outcome:
    """The plan of one graph, and how it came to be."""

    plan: QuantPlan
    left: LeftFloat | None = None  # for outputs that were broken
    ranges: ChosenRanges | None = None  # tensors that are not static, where that was to be found out
    table: SensitivityTable | None = None
    assigned: Assigned | None = None
    rounding: ChosenRounding | None = None
    tuned: Tuned | None = None
    trained: Trained | None = None
    end_to_end: NetworkTuned | None = None
    biases: NetworkTuned | None = None
    budget: AccuracyBudget | None = None
    noise: OutputNoise | None = None  # of the outputs at last, on a few calibration samples


@dataclass(frozen=True, kw_only=True)
class Result(Outcome):
    """A quantized model, and how it came to be; its plan is that of all its graphs."""

    model: onnx.ModelProto
    layers: LayerList
    recipe: Recipe
    output: Path | None = None  # the file that it was written to
    reads: Inputs = ()  # the files that it was made from
    output_kinds: Kinds = field(default_factory=dict)  # what the float outputs mean
    mask: str | None = None  # the input that tells padding, which does not count
    names_files: bool = False  # a large file has its weights beside it

    @property
    def judged_by(self) -> str:
        """What told a good model, in words."""
        kind: LossKind = self.recipe.get("loss")
        words = "drop of the metric" if kind is LossKind.METRIC else loss_in_words(self.output_kinds, kind)
        return f"{words}; padding by '{self.mask}' does not count" if self.mask is not None else words

    def save(self, path: str | Path) -> None:
        """Writes the model file, under a temporary name first, but never in place of what it was made from."""
        check_outputs(model_outputs("output", Path(path)), self.reads)
        write_model(self.model, path, LARGE_MODEL if self.names_files else PROTOBUF_LIMIT)
