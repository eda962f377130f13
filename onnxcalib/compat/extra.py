"""onnxruntime's extra_options: which ask for nothing here, which are honoured, and what to do about the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxcalib.errors import RecipeError, near
from onnxcalib.numerics.range_estimators import PERCENTILE
from onnxcalib.recipe import RangeMethod

LEAVE = "Leave it out"


@dataclass(frozen=True)
class Extra:
    """A key: values that ask for nothing more than we do, and what to do about any other."""

    fine: tuple[Any, ...]
    hint: str = LEAVE
    static_only: bool = True


# False, an empty list or None are what onnxruntime does without the key.
OFF = (False, None)
ANY = ()  # helps onnxruntime's own function, and changes nothing here
TARGETS = "give onnxcalib.quantize a `target` that has it; `onnxcalib targets` lists them"
EXTRAS: Mapping[str, Extra] = {
    "ActivationSymmetric": Extra(OFF, f"{LEAVE}, or {TARGETS}", static_only=False),
    "ActivationRestrictedAsymmetric": Extra(OFF, static_only=False),
    "WeightSymmetric": Extra((True, None), f"{LEAVE}: weights are symmetric", static_only=False),
    "EnableSubgraph": Extra((True, *OFF), static_only=False),  # branches of an If are quantized in any case
    "ForceQuantizeNoInputCheck": Extra(
        OFF, f"{LEAVE}; a get_qdq_config that sets it can be had from onnxcalib.compat instead", static_only=False
    ),
    "DefaultTensorType": Extra(ANY, static_only=False),  # types are inferred
    "MatMulConstBOnly": Extra((True, *OFF), static_only=False),
    "extra.Sigmoid.nnapi": Extra(OFF, static_only=False),
    "AddQDQPairToWeight": Extra(OFF, f"{LEAVE}: weights are stored quantized"),
    "OpTypesToExcludeOutputQuantization": Extra(([], (), None)),
    "DedicatedQDQPair": Extra(OFF),
    "QDQOpTypePerChannelSupportToAxis": Extra(({}, None), f"{LEAVE}: the axis is that of the output channels"),
    "CalibTensorRangeSymmetric": Extra(OFF, f"{LEAVE}, or {TARGETS}"),
    "CalibStridedMinMax": Extra(ANY),
    "CalibMaxIntermediateOutputs": Extra(ANY),
    "CalibMovingAverage": Extra((True, *OFF)),
    "CalibMovingAverageConstant": Extra((0.01, None), f"{LEAVE}: every batch counts alike"),
    "CalibPercentile": Extra((PERCENTILE, 99.999, None), f"{LEAVE}: it is {PERCENTILE}"),
    "SmoothQuant": Extra(OFF, f"{LEAVE}; Recipe(pipeline='light') of onnxcalib.quantize equalizes channels"),
    "SmoothQuantAlpha": Extra((0.5, None)),
    "SmoothQuantFolding": Extra((True, None)),
    "QuantizeBias": Extra((True, None), f"{LEAVE}: the target says how biases are stored"),
    "UseQDQContribOps": Extra(OFF),
    "MinimumRealRange": Extra((None,)),
    "TensorQuantOverrides": Extra(({}, None), "Give onnxcalib.quantize a Recipe with `overrides` or `exclude`"),
    "QDQKeepRemovableActivations": Extra(OFF),
    "QDQDisableWeightAdjustForInt32Bias": Extra(OFF),
    "BlockSize": Extra((0, None), "Give onnxcalib.quantize Recipe(bits='w4', block_size=32)"),
}


def check_extra(given: Mapping[str, Any] | None, *, static: bool) -> None:
    """Every key is known, and none asks for what the file will not have."""
    known = {name: extra for name, extra in EXTRAS.items() if static or not extra.static_only}
    for name, value in (given or {}).items():
        if name not in known:
            raise RecipeError(f"extra_options has an unknown key '{name}'.", near(str(name), known))
        fine = known[name].fine
        if fine is not ANY and value not in fine:
            raise RecipeError(f"extra_options['{name}'] = {value!r} cannot be honoured.", f"{known[name].hint}.")


def ranges_of(method: str, extra: Mapping[str, Any] | None) -> RangeMethod:
    """The estimator of a calibration method; min-max is onnxruntime's default and leaves the choice to us."""
    if method == "Distribution":
        raise RecipeError("calibrate_method=Distribution cannot be honoured.", "Give MinMax, Entropy or Percentile.")
    if method == "MinMax":
        return RangeMethod.AVERAGED if (extra or {}).get("CalibMovingAverage") else RangeMethod.AUTO
    return RangeMethod(method.lower())
