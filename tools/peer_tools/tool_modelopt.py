"""NVIDIA Model Optimizer's ONNX API: int8, calibrated by max."""

from __future__ import annotations

from common import Asked, folded, main
from modelopt.onnx.quantization import quantize as optimize


def quantize(asked: Asked) -> str | None:
    """METHOD is the calibration; the rest stays float32, weights are stored as integers, neither by default."""
    optimize(
        str(folded(asked)),
        quantize_mode="int8",
        calibration_data=asked.samples(),
        calibration_method=asked.method,
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        dq_only=True,
        output_path=str(asked.output),
    )
    return "batch norm folded by onnxruntime first"


if __name__ == "__main__":
    main("nvidia-modelopt", quantize)
