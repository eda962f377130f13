"""Data that is not there, for what is done without any."""

from __future__ import annotations

import numpy as np

from onnxcalib.data.samples import Numbers, SampleDataset
from onnxcalib.data.spec import Array, Dataset
from onnxcalib.errors import DataError

NO_DATA = "no data"


def no_data() -> SampleDataset:
    """A dataset that nobody can read."""
    return SampleDataset(NO_DATA, None, {"": _NoRows()}, frozenset(), None, np.arange(1))


def is_absent(data: Dataset) -> bool:
    """Whether it is such a dataset."""
    return data.source == NO_DATA


class _NoRows:
    count = 1

    def read(self, samples: Numbers) -> Array:  # noqa: ARG002 - there are none
        raise DataError("This model cannot be quantized without data.", "Give data to onnxcalib.quantize.")

    def where(self, index: int) -> str:  # noqa: ARG002 - there are none
        return NO_DATA
