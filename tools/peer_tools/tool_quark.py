"""AMD Quark's ONNX API at 8 bits: min-max ranges, weights per channel; alone, with AdaRound or with AdaQuant."""

from __future__ import annotations

from common import Asked, Feed, main
from onnxruntime.quantization import CalibrationDataReader
from quark.onnx import AdaQuantConfig, AdaRoundConfig, ModelQuantizer, QConfig
from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, QLayerConfig, QuantGranularity, UInt8Spec

ALGORITHMS = {"adaround": AdaRoundConfig, "adaquant": AdaQuantConfig}
BATCH = 32


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """The samples one by one, as often as they are asked for."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.rewind()

    def rewind(self) -> None:
        """Starts again."""
        self.feeds = self.asked.feeds()

    reset_iter = rewind

    def get_next(self) -> Feed | None:
        """The next sample."""
        return next(self.feeds, None)


def quantize(asked: Asked) -> str | None:
    """METHOD is plain, adaround or adaquant."""
    weight = Int8Spec(calibration_method=CalibMethod.MinMax, quant_granularity=QuantGranularity.Channel)
    layers = QLayerConfig(activation=UInt8Spec(calibration_method=CalibMethod.MinMax), weight=weight)
    algorithms = []
    if asked.method in ALGORITHMS:
        algorithms = [ALGORITHMS[asked.method](batch_size=BATCH, num_iterations=asked.steps)]
    config = QConfig(layers, algo_config=algorithms)
    ModelQuantizer(config).quantize_model(str(asked.model), str(asked.output), Reader(asked))
    return f"{asked.steps} iterations a layer" if algorithms else None


if __name__ == "__main__":
    main("amd-quark", quantize)
