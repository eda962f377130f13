"""NNCF's post-training quantization with fast bias correction, its default."""

from __future__ import annotations

import nncf
import onnx
from common import Asked, folded, main


def quantize(asked: Asked) -> str | None:
    """All samples one by one; it folds no batch norm itself."""
    model, feeds = onnx.load(folded(asked)), list(asked.feeds())
    onnx.save(nncf.quantize(model, nncf.Dataset(feeds), subset_size=len(feeds)), asked.output)
    return "batch norm folded by onnxruntime first"


if __name__ == "__main__":
    main("nncf", quantize)
