"""Which mixup samples, made of the calibration samples, assembled models are judged on."""

from __future__ import annotations

from onnxcalib.algorithms.teacher import Loss
from onnxcalib.data import Dataset, can_be_mixed
from onnxcalib.numerics.metric import Metric
from onnxcalib.numerics.output_kind import LossKind

SAMPLES = 128
PLACES = (1, 3, 5)  # how far apart the two of a pair stand


def mixup_places(data: Dataset, kind: Loss) -> tuple[int | None, ...]:
    """By set of samples, how far apart the two of a pair stand.

    None: samples as they are, if they have no mixture, or if labels are compared.
    """
    if isinstance(kind, Metric) or kind is LossKind.CROSS_ENTROPY or not can_be_mixed(data):
        return (None,)
    return PLACES
