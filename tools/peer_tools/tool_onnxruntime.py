"""onnxruntime.quantization, batch norm folded first: static (min-max) and dynamic."""

from __future__ import annotations

from pathlib import Path

import onnx
from common import Asked, Feed, edge_weights, folded, main
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """The samples one by one."""

    def __init__(self, asked: Asked) -> None:
        self.feeds = asked.feeds()

    def get_next(self) -> Feed | None:
        """The next sample."""
        return next(self.feeds, None)


def static(asked: Asked, prepared: Path) -> None:
    """Min-max ranges, a weight scale for each channel."""
    narrow = asked.weight_bits < 8
    extra = {}
    if narrow:
        wide = [{"quant_type": QuantType.QInt8, "axis": 0, "symmetric": True}]
        extra["TensorQuantOverrides"] = dict.fromkeys(edge_weights(onnx.load(prepared)), wide)
    quantize_static(
        prepared,
        asked.output,
        Reader(asked),
        per_channel=True,
        activation_type=QuantType.QUInt8,  # its default, int8, is slower on x86
        weight_type=QuantType.QInt4 if narrow else QuantType.QInt8,
        extra_options=extra,
    )


def quantize(asked: Asked) -> str | None:
    """METHOD is static or dynamic."""
    prepared = folded(asked)
    if asked.method == "static":
        static(asked, prepared)
        return None
    quantize_dynamic(prepared, asked.output, per_channel=True, weight_type=QuantType.QInt8)
    return "ranges of activations at run time"


if __name__ == "__main__":
    main("onnxruntime", quantize)
