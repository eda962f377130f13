"""Real models and data, where ONNXCALIB_ZOO names a folder with them (and ONNXCALIB_MODELS one with more models)."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from models import optimized_ops
from onnxcalib import Pipeline, Precision, Recipe, evaluate, inspect, quantize
from onnxcalib.data import InputSpec
from onnxcalib.model.read import read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.targets import find_target

ZOO = Path(os.environ.get("ONNXCALIB_ZOO", "no-such-folder"))
MORE = Path(os.environ.get("ONNXCALIB_MODELS", "no-such-folder"))
MODELS = sorted([*ZOO.glob("*.onnx"), *MORE.glob("*.onnx")])
MEAN, STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])

pytestmark = [pytest.mark.zoo, pytest.mark.skipif(not MODELS, reason="ONNXCALIB_ZOO names no folder with models")]


def feed_of(spec: InputSpec, samples: int) -> np.ndarray:
    """Data of the right shape: images for four axes, tokens for integers, a sampling rate for a lone integer."""
    random = np.random.default_rng(0)
    if spec.dtype.kind == "i":
        return np.full(samples, 16000) if not spec.shape else random.integers(0, 2, (samples, 16)).astype(spec.dtype)
    free = {2: (samples, 512), 3: (samples, 2, 1, 128), 4: (samples, 3, 64, 128)}[spec.rank]
    shape = free if spec.rank == 3 else (samples, *(size or free[i + 1] for i, size in enumerate(spec.shape[1:])))
    data = random.normal(size=shape).astype(np.float32)
    return data[:, None] if "state" in spec.name and spec.rank == 2 else data


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_model_is_inspected_quantized_and_runs(path: Path, tmp_path: Path) -> None:
    assert inspect(path).layers
    specs = input_specs(read_prepared(path, find_target("ort")).proto)
    feeds = {spec.name: feed_of(spec, 4) for spec in specs}
    if "state" in feeds:  # a recurrent state is a whole tensor of each sample, so the sound is one too
        feeds["input"] = feeds["input"][:, None]
    result = quantize(path, feeds, output=tmp_path / "small.onnx")
    (row,) = evaluate([tmp_path / "small.onnx"], feeds, path)
    assert result.plan.layers
    assert row.sqnr_db is not None
    assert row.sqnr_db > 8
    assert row.bytes < path.stat().st_size


def cifar(samples: int, start: int = 0) -> dict[str, np.ndarray]:
    data = np.load(ZOO / "cifar10_train2k.npz")
    images = data["x"][start : start + samples].astype(np.float32) / 255
    return {"input": np.ascontiguousarray(((images - MEAN) / STD).transpose(0, 3, 1, 2))}


@pytest.mark.skipif(not (ZOO / "cifar10_train2k.npz").exists(), reason="ONNXCALIB_ZOO has no CIFAR-10")
@pytest.mark.parametrize("name", ["cifar_resnet20_bn", "cifar_resnet20_fused"])
def test_resnet20_keeps_its_predictions(name: str, tmp_path: Path) -> None:
    path, mixup_scores = ZOO / f"{name}.onnx", cifar(1000, 1000)
    quantize(path, cifar(256), output=tmp_path / "w8a8.onnx")
    light = Recipe(Pipeline.LIGHT, bits=(Precision(4, 4),), edge_bits=8)
    quantize(path, cifar(256), light, output=tmp_path / "w4a4.onnx")
    w8a8, w4a4 = evaluate([tmp_path / "w8a8.onnx", tmp_path / "w4a4.onnx"], mixup_scores, path)
    assert w8a8.agreement is not None
    assert w8a8.agreement > 98.5
    assert w4a4.agreement is not None
    assert w4a4.agreement > 93


@pytest.mark.skipif(not (ZOO / "mobilenet_v2_bn.onnx").exists(), reason="ONNXCALIB_ZOO has no MobileNet-V2")
def test_mobilenet_has_no_float_conv_left(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(size=(4, 3, 224, 224)).astype(np.float32)
    sizes = {}
    for bits in (8, 4):
        path = tmp_path / f"w{bits}.onnx"
        quantize(ZOO / "mobilenet_v2_bn.onnx", {"input": images}, Recipe(bits=(Precision(bits, 8),)), output=path)
        ops = Counter(optimized_ops(path, tmp_path))
        assert ops["QLinearConv"] == 52
        assert ops["QGemm"] == 1
        assert not {"Conv", "FusedConv", "Gemm"} & set(ops)
        sizes[bits] = path.stat().st_size
    assert sizes[4] <= 0.58 * sizes[8]
