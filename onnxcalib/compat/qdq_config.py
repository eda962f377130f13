"""get_qdq_config with onnxruntime's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.compat.kinds import CalibrationMethod, QuantFormat, QuantType, StaticQuantConfig
from onnxcalib.errors import RecipeError, near
from onnxcalib.model.io import read_model

CALIBRATION = {
    "symmetric": "CalibTensorRangeSymmetric",
    "moving_average": "CalibMovingAverage",
    "averaging_constant": "CalibMovingAverageConstant",
    "max_intermediate_outputs": "CalibMaxIntermediateOutputs",
    "percentile": "CalibPercentile",
}


def get_qdq_config(  # noqa: PLR0913, PLR0917 - onnxruntime's arguments
    model_input: str | Path | onnx.ModelProto,
    calibration_data_reader: Any,
    calibrate_method: Any = CalibrationMethod.MinMax,
    calibrate_args: Mapping[str, Any] | None = None,
    activation_type: Any = QuantType.QUInt8,
    weight_type: Any = QuantType.QInt8,
    activation_symmetric: bool = False,
    weight_symmetric: bool | None = None,
    per_channel: bool = False,
    reduce_range: bool = False,
    keep_removable_activations: bool = False,
    min_real_range: float | None = None,
    tensor_quant_overrides: Mapping[str, Any] | None = None,
    calibration_providers: Sequence[Any] | None = None,
    op_types_to_quantize: Iterable[str] | None = None,
    nodes_to_exclude: Iterable[str] | Callable[[onnx.ModelProto, onnx.NodeProto], bool] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> StaticQuantConfig:
    """A configuration for `quantize` that quantizes all there is to quantize.

    Args:
        model_input: The float model, as a path or in memory.
        calibration_data_reader: An object with `get_next()`, or any data that `onnxcalib.quantize` takes.
        calibrate_method: See `quantize_static`.
        calibrate_args: More of the calibration: onnxruntime's names, which come to `extra_options`.
        activation_type: See `quantize_static`.
        weight_type: See `quantize_static`.
        activation_symmetric: Comes to `ActivationSymmetric`.
        weight_symmetric: Comes to `WeightSymmetric`.
        per_channel: See `quantize_static`.
        reduce_range: See `quantize_static`.
        keep_removable_activations: Comes to `QDQKeepRemovableActivations`.
        min_real_range: Comes to `MinimumRealRange`.
        tensor_quant_overrides: Comes to `TensorQuantOverrides`.
        calibration_providers: See `quantize_static`.
        op_types_to_quantize: Ops whose layers are quantized; all by default.
        nodes_to_exclude: Names of nodes that stay float, or a function of the model and a node that says so.
        extra_options: See `quantize_static`; they go over those that other arguments come to.

    Returns:
        The configuration; what cannot be honoured is told when `quantize` is called with it.
    """
    unknown = [name for name in calibrate_args or {} if name not in CALIBRATION]
    if unknown:
        raise RecipeError(f"calibrate_args has an unknown key '{unknown[0]}'.", near(str(unknown[0]), CALIBRATION))
    options = {
        "ActivationSymmetric": activation_symmetric,
        "WeightSymmetric": weight_symmetric,
        "QDQKeepRemovableActivations": keep_removable_activations,
        "MinimumRealRange": min_real_range,
        "TensorQuantOverrides": dict(tensor_quant_overrides or {}),
        **{CALIBRATION[name]: value for name, value in (calibrate_args or {}).items()},
        **(extra_options or {}),
    }
    return StaticQuantConfig(
        calibration_data_reader,
        calibrate_method,
        QuantFormat.QDQ,
        activation_type,
        weight_type,
        op_types_to_quantize,
        nodes_to_exclude=_named(model_input, nodes_to_exclude),
        per_channel=per_channel,
        reduce_range=reduce_range,
        calibration_providers=calibration_providers,
        extra_options=options,
    )


def _named(
    model: str | Path | onnx.ModelProto,
    nodes: Iterable[str] | Callable[[onnx.ModelProto, onnx.NodeProto], bool] | None,
) -> list[str]:
    if not callable(nodes):
        return list(nodes or ())
    proto = model if isinstance(model, onnx.ModelProto) else read_model(model)
    return [node.name for node in proto.graph.node if nodes(proto, node)]
