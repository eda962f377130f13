"""Calibration and evaluation data: npz files, folders of arrays or images, ONNX test sets, Python feeds."""

from __future__ import annotations

from onnxcalib.data.mixing import MixedPairs, can_be_mixed
from onnxcalib.data.opening import open_data
from onnxcalib.data.parts import first, split
from onnxcalib.data.preprocess import Preprocess
from onnxcalib.data.spec import Dataset, Feed, InputSpec

__all__ = ["Dataset", "Feed", "InputSpec", "MixedPairs", "Preprocess", "can_be_mixed", "first", "open_data", "split"]
