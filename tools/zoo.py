"""The models and the data of the folder that tools call ZOO, as benchmarks read them."""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


@dataclass(frozen=True)
class Case:
    """A model with its calibration and test data as npz files, how long it trains, and which rows are asked for."""

    name: str
    model: Path
    calibration: Path
    test: Path
    steps: int | None = None
    rows: tuple[str, ...] = ()  # parts of their names; none: all

    def wants(self, label: str) -> bool:
        """Whether a row is asked for."""
        return not self.rows or any(text in label for text in self.rows)


def normalized(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pixels as torchvision's models read them."""
    return np.ascontiguousarray(((images.astype(np.float32) / 255 - MEAN) / STD).transpose(0, 3, 1, 2))


def decoded(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images and labels of a file of JPEG bytes."""
    from PIL import Image

    data = np.load(path)
    stream, offsets = data["jpeg"].tobytes(), data["offsets"]
    images = [np.asarray(Image.open(io.BytesIO(stream[start:end]))) for start, end in itertools.pairwise(offsets)]
    return np.stack(images), data["y"]


def prepare(zoo: Path, folder: Path) -> dict[str, Case]:
    """Writes the preprocessed arrays once."""
    if not (folder / "cifar_test.npz").exists():
        images, more = (decoded(zoo / f"imagenet_train{count}.npz")[0] for count in (512, 488))
        np.savez(folder / "imagenet_calibration.npz", input=normalized(images))
        np.savez(folder / "imagenet_1000.npz", input=normalized(np.concatenate([images, more])))
        images, labels = decoded(zoo / "imagenet_val2000.npz")
        np.savez(folder / "imagenet_test.npz", input=normalized(images), labels=labels.astype(np.int64))
        train, test = np.load(zoo / "cifar10_train2k.npz"), np.load(zoo / "cifar10_test10k.npz")
        np.savez(folder / "cifar_calibration.npz", input=normalized(train["x"][:512]))
        np.savez(folder / "cifar_test.npz", input=normalized(test["x"]), labels=test["y"].astype(np.int64))
    models = {
        "mobilenet_v2": ("mobilenet_v2_bn.onnx", "imagenet"),
        "resnet20": ("cifar_resnet20_bn.onnx", "cifar"),
        "resnet20_folded": ("cifar_resnet20_fused.onnx", "cifar"),
        "resnet50": ("resnet50.onnx", "imagenet"),
    }
    return {
        name: Case(name, zoo / file, folder / f"{kind}_calibration.npz", folder / f"{kind}_test.npz")
        for name, (file, kind) in models.items()
    }
