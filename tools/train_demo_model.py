"""Train the small demo network of the quick start on Fashion-MNIST and export it to ONNX.

The network is a MobileNet-V2 in small: inverted residual blocks, depthwise 3x3 convolutions, BatchNorm, ReLU6.
The script needs PyTorch, which onnxcalib itself does not, so run it in a throw-away environment:

    pip install torch==2.13.0 onnx numpy
    python tools/train_demo_model.py --data fashion_mnist.npz --out models

The data file holds uint8 images ``x_train`` and ``x_test`` [*, 28, 28] with labels ``y_train`` and ``y_test``.
It writes three files into the output folder:

    fashion_mobilenet.onnx     image [N, 1, 28, 28] float32 -> logits [N, 10], BatchNormalization nodes kept
    fashion_calibration.npz    image: 512 preprocessed training images, without labels
    fashion_test.npz           image, labels: the first 2,000 test images, preprocessed

Training sees the training images only. The epoch count is fixed and the last epoch is taken,
so nothing is chosen on the test images. All seeds are fixed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 20240
PIXEL_MEAN = 0.286
PIXEL_STD = 0.353
CLASS_COUNT = 10
CALIBRATION_COUNT = 512
TEST_COUNT = 2000
BATCH_SIZE = 128
MAX_SHIFT = 2
PEAK_LEARNING_RATE = 0.2
WEIGHT_DECAY = 5e-4
LABEL_SMOOTHING = 0.05
OPSET = 13

STEM_CHANNELS = 12
HEAD_CHANNELS = 192


@dataclass(frozen=True)
class BlockShape:
    """Widths and stride of one inverted residual block."""

    hidden: int
    out: int
    stride: int


# Narrow while the images are large, wide once they are small: training on a CPU stays affordable.
BLOCKS = (
    BlockShape(hidden=24, out=24, stride=2),
    BlockShape(hidden=48, out=24, stride=1),
    BlockShape(hidden=48, out=24, stride=1),
    BlockShape(hidden=72, out=64, stride=2),
    BlockShape(hidden=128, out=64, stride=1),
    BlockShape(hidden=128, out=64, stride=1),
    BlockShape(hidden=160, out=96, stride=2),
    BlockShape(hidden=256, out=96, stride=1),
    BlockShape(hidden=256, out=96, stride=1),
)


@dataclass(frozen=True)
class Dataset:
    """Preprocessed images [*, 1, 28, 28] float32 and labels int64."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def conv_bn(channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution without bias, followed by the BatchNorm that supplies the bias."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(channels_out)]


class InvertedResidual(nn.Module):  # type: ignore[misc]
    """Expand with 1x1, filter with depthwise 3x3, project with a linear 1x1; add the input where shapes match."""

    def __init__(self, channels_in: int, shape: BlockShape) -> None:
        super().__init__()
        self.has_residual = shape.stride == 1 and channels_in == shape.out
        self.layers = nn.Sequential(
            *conv_bn(channels_in, shape.hidden, kernel=1),
            nn.ReLU6(),
            *conv_bn(shape.hidden, shape.hidden, kernel=3, stride=shape.stride, groups=shape.hidden),
            nn.ReLU6(),
            *conv_bn(shape.hidden, shape.out, kernel=1),
        )

    def forward(self, features: Tensor) -> Tensor:
        projected = self.layers(features)
        return features + projected if self.has_residual else projected


class FashionMobileNet(nn.Module):  # type: ignore[misc]
    """Stem, inverted residual blocks, 1x1 head, global average pool and one linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(1, STEM_CHANNELS, kernel=3), nn.ReLU6())
        blocks: list[nn.Module] = []
        channels = STEM_CHANNELS
        for shape in BLOCKS:
            blocks.append(InvertedResidual(channels, shape))
            channels = shape.out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(*conv_bn(channels, HEAD_CHANNELS, kernel=1), nn.ReLU6())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(HEAD_CHANNELS, CLASS_COUNT)

    def forward(self, image: Tensor) -> Tensor:
        features = self.head(self.blocks(self.stem(image)))
        return self.classifier(torch.flatten(self.pool(features), 1))


def preprocess(pixels: np.ndarray) -> np.ndarray:
    """uint8 [*, 28, 28] to normalised float32 [*, 1, 28, 28]."""
    scaled = pixels[:, None].astype(np.float32) / np.float32(255)
    return (scaled - np.float32(PIXEL_MEAN)) / np.float32(PIXEL_STD)


def load_dataset(path: Path) -> Dataset:
    """Read and preprocess the four arrays of the data file."""
    with np.load(path) as arrays:
        return Dataset(
            train_images=preprocess(arrays["x_train"]),
            train_labels=arrays["y_train"].astype(np.int64),
            test_images=preprocess(arrays["x_test"]),
            test_labels=arrays["y_test"].astype(np.int64),
        )


def augment(images: Tensor) -> Tensor:
    """Flip each image left-right with probability one half and shift it by up to MAX_SHIFT pixels."""
    count, size = images.shape[0], images.shape[-1]
    is_flipped = torch.rand(count, 1, 1, 1) < 0.5
    flipped = torch.where(is_flipped, images.flip(-1), images)
    # The border is black before normalisation, so it must be padded with the normalised value of black.
    padded = functional.pad(flipped, (MAX_SHIFT,) * 4, value=-PIXEL_MEAN / PIXEL_STD)
    windows = padded[:, 0].unfold(1, size, 1).unfold(2, size, 1)
    rows, columns = torch.randint(0, 2 * MAX_SHIFT + 1, (2, count))
    return windows[torch.arange(count), rows, columns].unsqueeze(1)


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """SGD with a one-cycle learning rate; the last epoch is the result."""
    steps_per_epoch = len(images) // BATCH_SIZE
    optimizer = torch.optim.SGD(
        model.parameters(), lr=PEAK_LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LEARNING_RATE, total_steps=epochs * steps_per_epoch, pct_start=0.2
    )
    model.train()
    for epoch in range(epochs):
        start = time.perf_counter()
        loss_sum = 0.0
        # Dropping the incomplete last batch keeps the BatchNorm statistics of every step comparable.
        for batch in torch.randperm(len(images))[: steps_per_epoch * BATCH_SIZE].split(BATCH_SIZE):
            inputs = augment(images[batch]).contiguous(memory_format=torch.channels_last)
            loss = functional.cross_entropy(model(inputs), labels[batch], label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.item()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}/{epochs}: mean loss {loss_sum / steps_per_epoch:.4f}, {seconds:.0f} s", flush=True)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images whose largest logit is that of the true class."""
    model.eval()
    with torch.no_grad():
        predictions = torch.cat([model(batch).argmax(1) for batch in images.split(500)])
    return float((predictions == labels).float().mean())


def export_onnx(model: nn.Module, path: Path) -> None:
    """Write the eval-mode network with its BatchNorm nodes and a dynamic batch axis."""
    model.eval().to(memory_format=torch.contiguous_format)
    # PRESERVE, unlike EVAL, leaves BatchNorm unfused; the model is in eval mode, so the nodes are inference nodes.
    torch.onnx.export(
        model,
        (torch.zeros(2, 1, 28, 28),),
        str(path),
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "N"}, "logits": {0: "N"}},
        opset_version=OPSET,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        dynamo=False,
    )
    onnx.checker.check_model(onnx.load(path), full_check=True)


def write_samples(data: Dataset, folder: Path) -> None:
    """Write the calibration images (from the training set, no labels) and the labelled test images."""
    chosen = np.random.default_rng(SEED).choice(len(data.train_images), CALIBRATION_COUNT, replace=False)
    np.savez_compressed(folder / "fashion_calibration.npz", image=data.train_images[chosen])
    np.savez_compressed(
        folder / "fashion_test.npz", image=data.test_images[:TEST_COUNT], labels=data.test_labels[:TEST_COUNT]
    )


def make_deterministic(threads: int) -> None:
    """Fix torch's seed and the thread count; the order of floating-point sums depends on the latter."""
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory before writing it, so filling it first would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_num_threads(threads)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the Fashion-MNIST demo network and export it to ONNX.")
    parser.add_argument("--data", type=Path, required=True, help="npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--out", type=Path, default=Path("models"), help="output folder (default: models)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: 10)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    make_deterministic(arguments.threads)
    data = load_dataset(arguments.data)
    model = FashionMobileNet().to(memory_format=torch.channels_last)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    print(f"seed {SEED}, {parameter_count} parameters", flush=True)

    start = time.perf_counter()
    train(model, torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels), arguments.epochs)
    print(f"training took {time.perf_counter() - start:.0f} s")

    arguments.out.mkdir(parents=True, exist_ok=True)
    export_onnx(model, arguments.out / "fashion_mobilenet.onnx")
    write_samples(data, arguments.out)
    test_images, test_labels = torch.from_numpy(data.test_images), torch.from_numpy(data.test_labels)
    print(f"accuracy on all {len(test_labels)} test images: {accuracy(model, test_images, test_labels):.4f}")
    saved = accuracy(model, test_images[:TEST_COUNT], test_labels[:TEST_COUNT])
    print(f"accuracy on the first {TEST_COUNT} test images: {saved:.4f}")


if __name__ == "__main__":
    main()
