"""The calls of onnxruntime.quantization, answered by onnxcalib: change the import, and the file is ours.

An argument at onnxruntime's default asks for nothing and leaves the choice to onnxcalib. Any other is honoured, or an
error that names it and says what to do; so is an unknown key of `extra_options`. onnxruntime's own enums, readers and
configurations are taken as well as those of this module.
"""

from __future__ import annotations

from onnxcalib.compat.kinds import (
    CalibrationDataReader,
    CalibrationMethod,
    DynamicQuantConfig,
    QuantFormat,
    QuantType,
    StaticQuantConfig,
)
from onnxcalib.compat.qdq_config import get_qdq_config
from onnxcalib.compat.quantizing import quantize, quantize_dynamic, quantize_static

__all__ = [
    "CalibrationDataReader",
    "CalibrationMethod",
    "DynamicQuantConfig",
    "QuantFormat",
    "QuantType",
    "StaticQuantConfig",
    "get_qdq_config",
    "quantize",
    "quantize_dynamic",
    "quantize_static",
]
