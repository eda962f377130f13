"""AIMET: batch norm folded by AIMET, ranges by tf-enhanced, weights per channel, with or without AdaRound."""

from __future__ import annotations

from pathlib import Path

import aimet_onnx
import onnx
from aimet_onnx.batch_norm_fold import fold_all_batch_norms_to_weight
from common import Asked, edge_weights, main

CONFIG = Path(aimet_onnx.__file__).parent / "common" / "quantsim_config" / "default_config_per_channel.json"
BATCH = 32


def quantize(asked: Asked) -> str | None:
    """METHOD is plain or adaround; weights are stored as integers, which is not its default."""
    model = onnx.load(asked.model)
    fold_all_batch_norms_to_weight(model)
    edges = edge_weights(model)
    sim = aimet_onnx.QuantizationSimModel(
        model,
        param_type=f"int{asked.weight_bits}",
        activation_type="int8",
        quant_scheme="tf_enhanced",
        config_file=str(CONFIG),
    )
    for name in edges:
        sim.qc_quantize_op_dict[name].set_bitwidth(8)
    feeds = list(asked.feeds(BATCH))
    note = ""
    if asked.method == "adaround":
        aimet_onnx.apply_adaround(sim, feeds, asked.steps)
        note = f"{asked.steps} iterations a layer; its documentation advises 10,000 and more"
    sim.compute_encodings(feeds)
    onnx.save(sim.to_onnx_qdq(prequantize_constants=True), asked.output)
    return note


if __name__ == "__main__":
    main("aimet-onnx", quantize)
