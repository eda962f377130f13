"""Calibration and evaluation data: npz files, folders of arrays or images, ONNX test sets, Python feeds."""

from __future__ import annotations

from onnxcalib.data.check import are_classes
from onnxcalib.data.containers import Transform, transformed
from onnxcalib.data.opening import data_files, open_data
from onnxcalib.data.preprocess import Preprocess
from onnxcalib.data.spec import Dataset, Feed, InputSpec
from onnxcalib.data.split import (
    FEWEST,
    first,
    place_of,
    shuffled,
    split,
    strata,
    train_validation_split,
    why_not_parted,
)

__all__ = [
    "FEWEST",
    "Dataset",
    "Feed",
    "InputSpec",
    "Preprocess",
    "Transform",
    "are_classes",
    "data_files",
    "first",
    "open_data",
    "place_of",
    "shuffled",
    "split",
    "strata",
    "train_validation_split",
    "transformed",
    "why_not_parted",
]
