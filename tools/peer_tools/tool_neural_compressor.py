"""Intel's neural compressor for ONNX: static quantization, min-max, per channel, as QDQ."""

from __future__ import annotations

from common import Asked, Feed, main
from onnx_neural_compressor import data_reader
from onnx_neural_compressor.quantization import QuantFormat, config
from onnx_neural_compressor.quantization import quantize as compress


class Reader(data_reader.CalibrationDataReader):  # type: ignore[misc]
    """The samples one by one, as often as they are asked for."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.rewind()

    def rewind(self) -> None:
        """Starts again."""
        self.feeds = self.asked.feeds()

    def get_next(self) -> Feed | None:
        """The next sample."""
        return next(self.feeds, None)


def quantize(asked: Asked) -> str | None:
    """All samples; by default it would take 100."""
    count = len(next(iter(asked.samples().values())))
    settings = config.StaticQuantConfig(
        calibration_data_reader=Reader(asked),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        calibration_sampling_size=count,
    )
    compress(str(asked.model), str(asked.output), settings)
    return None


if __name__ == "__main__":
    main("onnx-neural-compressor", quantize)
