"""quantize_static and quantize_dynamic with onnxruntime's arguments."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.compat.extra import check_extra, ranges_of
from onnxcalib.compat.kinds import CalibrationMethod, QuantFormat, QuantType, word_of
from onnxcalib.compat.nodes import Nodes
from onnxcalib.errors import DataError, RecipeError
from onnxcalib.model.io import write_model
from onnxcalib.model.layers import takes
from onnxcalib.pipeline import pipelines
from onnxcalib.pipeline.result import Result
from onnxcalib.recipe import FLOAT_BITS, ActivationOptions, Activations, Precision, RangeMethod, Recipe
from onnxcalib.targets import find_target

BITS = {QuantType.QInt8: 8, QuantType.QUInt8: 8, QuantType.QInt4: 4, QuantType.QUInt4: 4}
PRODUCTS, DYNAMIC = ("MatMul", "Gemm"), Activations.DYNAMIC
CPU = "CPUExecutionProvider"


def quantize_static(  # noqa: PLR0913, PLR0917 - onnxruntime's arguments
    model_input: str | Path | onnx.ModelProto,
    model_output: str | Path,
    calibration_data_reader: Any = None,
    quant_format: Any = QuantFormat.QDQ,
    op_types_to_quantize: Iterable[str] | None = None,
    per_channel: bool = False,  # noqa: ARG001 - scales are per channel where the target takes that
    reduce_range: bool = False,
    activation_type: Any = QuantType.QInt8,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: Iterable[str] | None = None,
    nodes_to_exclude: Iterable[str] | None = None,
    use_external_data_format: bool = False,
    calibrate_method: Any = CalibrationMethod.MinMax,
    calibration_providers: Sequence[Any] | None = None,
    extra_options: Mapping[str, Any] | None = None,
    calibration_cache_path: str | Path | None = None,
) -> Result:
    """Quantizes weights and activations with calibration data, for onnxruntime's CPU kernels.

    Args:
        model_input: The float model, as a path or in memory; it need not be pre-processed.
        model_output: The file to write.
        calibration_data_reader: An object with `get_next()`, or any data that `onnxcalib.quantize` takes.
        quant_format: QDQ; QOperator is refused.
        op_types_to_quantize: Ops whose layers are quantized; ops between layers follow them. All by default.
        per_channel: Either value: weights have one scale a channel.
        reduce_range: Whether weights have 7 bits instead of 8.
        activation_type: An 8- or 4-bit type; the target decides the sign, onnxruntime's CPU kernels want unsigned.
        weight_type: An 8- or 4-bit type; weights are signed.
        nodes_to_quantize: Names of layers; only these are quantized.
        nodes_to_exclude: Names of nodes that stay float.
        use_external_data_format: Whether weights go into a file beside the model's, named MODEL.data.
        calibrate_method: MinMax, the default, leaves the choice to onnxcalib, which measures min-max among others and
            takes the best; Percentile and Entropy are taken as they are.
        calibration_providers: None or the CPU's.
        extra_options: onnxruntime's keys; one that asks for what the file will not have is refused, as is an unknown.
        calibration_cache_path: None; the `run_dir` of `onnxcalib.quantize` keeps more than ranges.

    Returns:
        The quantized model, and how it came to be.
    """
    if word_of(QuantFormat, "quant_format", quant_format) is not QuantFormat.QDQ:
        raise RecipeError("quant_format=QOperator cannot be honoured.", "Leave it out: onnxcalib writes QDQ.")
    check_extra(extra_options, static=True)
    method = word_of(CalibrationMethod, "calibrate_method", calibrate_method).name
    ranges = ranges_of(method, extra_options)
    if any(provider != CPU for provider in calibration_providers or ()):
        raise RecipeError(f"calibration_providers={calibration_providers} cannot be honoured.", "Leave it out.")
    if calibration_cache_path is not None:
        hint = "Leave it out, or give onnxcalib.quantize a `run_dir`, which keeps all that is finished."
        raise RecipeError("calibration_cache_path cannot be honoured.", hint)
    if calibration_data_reader is None:
        raise DataError("calibration_data_reader is missing.", "Give calibration data.")
    weight = _bits("weight_type", weight_type, reduced=reduce_range)
    bits = Precision(weight, _bits("activation_type", activation_type))
    nodes = Nodes(model_input, find_target("ort"))
    recipe = Recipe(
        bits=(bits,), ranges=ranges, include=nodes.included(op_types_to_quantize, nodes_to_quantize),
        exclude=nodes.excluded(nodes_to_exclude),
    )  # fmt: skip
    result = pipelines.quantize(model_input, calibration_data_reader, recipe, output=model_output)
    return _beside(result, model_output) if use_external_data_format else result


def quantize_dynamic(  # noqa: PLR0913, PLR0917 - onnxruntime's arguments
    model_input: str | Path | onnx.ModelProto,
    model_output: str | Path,
    op_types_to_quantize: Iterable[str] | None = None,
    per_channel: bool = False,  # noqa: ARG001 - scales are per channel where the target takes that
    reduce_range: bool = False,
    weight_type: Any = QuantType.QInt8,
    nodes_to_quantize: Iterable[str] | None = None,
    nodes_to_exclude: Iterable[str] | None = None,
    use_external_data_format: bool = False,
    extra_options: Mapping[str, Any] | None = None,
) -> Result:
    """Quantizes without data: what a MatMul or Gemm reads gets its range while the model runs.

    Their products are of integers. Weights of convolutions, LSTMs and tables are stored as integers and computed with
    in float, where onnxruntime's own function multiplies integers in a Conv as well, more slowly than floats.

    Args:
        model_input: The float model, as a path or in memory.
        model_output: The file to write.
        op_types_to_quantize: Ops whose layers are quantized; all by default.
        per_channel: Either value: weights have one scale a channel.
        reduce_range: Whether weights have 7 bits instead of 8.
        weight_type: An 8- or 4-bit type; weights are signed.
        nodes_to_quantize: Names of layers; only these are quantized.
        nodes_to_exclude: Names of nodes that stay float.
        use_external_data_format: Whether weights go into a file beside the model's, named MODEL.data.
        extra_options: onnxruntime's keys; one that asks for what the file will not have is refused, as is an unknown.

    Returns:
        The quantized model, and how it came to be.
    """
    check_extra(extra_options, static=False)
    nodes = Nodes(model_input, find_target("ort").weight_only)
    include = nodes.included(op_types_to_quantize, nodes_to_quantize)
    exclude = nodes.excluded(nodes_to_exclude)
    # Estimators that compare outputs would need data; this one looks at weights only.
    bits = _bits("weight_type", weight_type, reduced=reduce_range)
    recipe = Recipe(bits=(Precision(bits, FLOAT_BITS),), ranges=RangeMethod.MSE, include=include, exclude=exclude)
    chosen = [name for name in nodes.layers if takes(include, exclude, name)]
    others = [name for name in chosen if nodes.layers[name] not in PRODUCTS]
    if others != chosen:
        alone = tuple(f"{glob.escape(name)}=w{bits}" for name in others)
        recipe = replace(recipe, bits=(Precision(bits, 8),), activations=ActivationOptions(DYNAMIC), overrides=alone)
    result = pipelines.quantize_without_data(model_input, recipe, model_output)
    return _beside(result, model_output) if use_external_data_format else result


def quantize(model_input: str | Path | onnx.ModelProto, model_output: str | Path, quant_config: Any) -> Result:
    """Quantizes as a configuration says.

    Args:
        model_input: The float model, as a path or in memory.
        model_output: The file to write.
        quant_config: A StaticQuantConfig or a DynamicQuantConfig, of this module or of onnxruntime.
    """
    names = {"weight_type", "op_types_to_quantize", "nodes_to_quantize", "nodes_to_exclude", "per_channel",
             "reduce_range", "use_external_data_format", "extra_options"}  # fmt: skip
    static = hasattr(quant_config, "calibration_data_reader")
    if static:
        names |= {"calibration_data_reader", "calibrate_method", "quant_format", "activation_type"}
    missing = sorted(name for name in names if not hasattr(quant_config, name))
    if missing:
        kind = type(quant_config).__name__
        raise RecipeError(f"quant_config is a {kind} without {', '.join(missing)}.", "Give a StaticQuantConfig.")
    given = {name: getattr(quant_config, name) for name in names}
    if static:
        given["calibration_providers"] = getattr(quant_config, "calibration_providers", None)
        return quantize_static(model_input, model_output, **given)
    return quantize_dynamic(model_input, model_output, **given)


def _bits(argument: str, given: Any, *, reduced: bool = False) -> int:
    kind = word_of(QuantType, argument, given)
    if kind not in BITS:
        raise RecipeError(f"{argument}={kind.name} cannot be honoured.", "Give an 8-bit or 4-bit integer type.")
    return BITS[kind] - (1 if reduced and BITS[kind] == 8 else 0)


def _beside(result: Result, output: str | Path) -> Result:
    """The same file, its weights in one beside it."""
    write_model(result.model, output, limit=0)
    return result
