#!/usr/bin/env python3
"""Measures onnxcalib on language models: accuracy, size, speed and kernels, beside onnxruntime's quantize_dynamic.

    python tools/text.py MODELS DATA minilm                          # a sentence encoder: Spearman, n = 1,500 and 1,379
    python tools/text.py MODELS DATA stories                         # a small Llama: perplexity, divergence, n = 64
    python tools/text.py MODELS DATA field                           # small encoders and recurrent models: dB on a feed
    python tools/text.py MODELS DATA minilm --recipe "bits=w4a8 pipeline=light"    # instead of the usual rows
    python tools/text.py MODELS DATA minilm --file other.onnx        # files that exist already instead

MODELS holds paraphrase_minilm_l3.onnx, stories15m.onnx, g2p_bert.onnx, lac_encoder.onnx, nsnet2.onnx and nakdimon.onnx,
DATA stsb_minilm_tokens.npz, stories_tokens.npz and feeds/NAME.npz. Latency is the processor time of one thread, the
fastest of interleaved runs, relative to the float file in the same run.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

import onnxcalib
from onnxcalib.analysis.speed import INTEGER_LAYERS
from onnxcalib.runtime.optimized import optimized

Feed = dict[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]
COUNTED = (
    *INTEGER_LAYERS,
    "QLinearAdd",
    "MatMul",
    "FusedMatMul",
    "Gemm",
    "QuantizeLinear",
    "DequantizeLinear",
)
LEAST_SECONDS = 6.0  # of interleaved runs for one feed
SENTENCES, STORIES = 256, 64  # to calibrate with
FIELD = ("g2p_bert", "lac_encoder", "nsnet2", "nakdimon")

USUAL = {
    "minilm": (
        "bits=w8a8", "bits=w8a8 pipeline=light", "bits=w4a8", "bits=w4a8 pipeline=light", "bits=w4",
        "bits=w4 pipeline=light",
    ),
    "stories": (
        "bits=w8", "bits=w4 block_size=32", "bits=w4 block_size=32 pipeline=light",
        "bits=w4 block_size=32 pipeline=advanced", "bits=w8a8", "bits=w8a8 pipeline=light",
        "bits=w4 block_size=16 overrides=logits/MatMul=w4 pipeline=light",
        "bits=w4,w8 block_size=32 compression=0.18 pipeline=light",
    ),
    "field": ("bits=w8a8",),
}  # fmt: skip


class Encoder:
    """Sentence embeddings whose cosine follows how alike people find two sentences."""

    name, shapes = "paraphrase_minilm_l3", ((8, 32), (1, 128))

    def __init__(self, data: Path) -> None:
        self.tokens = np.load(data / "stsb_minilm_tokens.npz")
        self.reference: dict[str, Floats] = {}
        self.words = np.concatenate([row[row != 0][1:-1] for row in self.tokens["train_a"]])

    def calibration(self) -> Feed:
        """Sentences of the training set, padded."""
        return _encoder_feed(self.tokens["train_a"][:SENTENCES])

    def feed(self, shape: tuple[int, int]) -> Feed:
        """Text without padding, for latency."""
        return _encoder_feed(np.resize(self.words, shape))

    def measure(self, session: ort.InferenceSession) -> str:
        """Spearman on both judged parts, and how far embeddings turn from the float model's, which comes first."""
        scores, turned = [], []
        for part in ("dev", "test"):
            left, right = (self._embedded(session, self.tokens[f"{part}_{side}"]) for side in "ab")
            scores.append(spearman(_cosines(left, right), self.tokens[f"{part}_score"]))
            reference = self.reference.setdefault(part, np.concatenate([left, right]))
            turned.append(1 - _cosines(np.concatenate([left, right]), reference).mean())
        return "Spearman dev {:.4f} test {:.4f} 1-cosine {:.5f}".format(*scores, np.mean(turned))

    def _embedded(self, session: ort.InferenceSession, ids: npt.NDArray[Any]) -> Floats:
        lengths = (ids != 0).sum(1)
        order = np.argsort(lengths, kind="stable")
        found = [None] * len(ids)
        for part in np.array_split(order, len(ids) // 32):
            rows = session.run(None, _encoder_feed(ids[part, : lengths[part].max()]))[-1]
            for place, row in zip(part, rows, strict=True):
                found[place] = row
        return np.asarray(found, np.float64)


def _cosines(left: Floats, right: Floats) -> Floats:
    return np.asarray((left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1))


def _encoder_feed(ids: npt.NDArray[Any]) -> Feed:
    return {"input_ids": ids.astype(np.int64), "attention_mask": (ids != 0).astype(np.int64)}


class Language:
    """The next token of stories."""

    name, shapes = "stories15m", ((2, 128), (1, 32))

    def __init__(self, data: Path) -> None:
        self.tokens = np.load(data / "stories_tokens.npz")
        self.reference: list[npt.NDArray[np.float32]] = []

    def calibration(self) -> Feed:
        """Stories that the model told."""
        return {"input_ids": self.tokens["calibration"][:STORIES].astype(np.int64)}

    def feed(self, shape: tuple[int, int]) -> Feed:
        """Stories for latency."""
        return {"input_ids": self.tokens["test"][: shape[0], : shape[1]].astype(np.int64)}

    def measure(self, session: ort.InferenceSession) -> str:
        """Perplexity, divergence from the float model, which comes first, and how often the likeliest token is its."""
        nats, divergence, same, count = 0.0, 0.0, 0, 0
        first = not self.reference
        for place, row in enumerate(self.tokens["test"][:64].astype(np.int64)):
            logits = session.run(None, {"input_ids": row[np.newaxis]})[0][0].astype(np.float64)
            log = logits - logits.max(-1, keepdims=True)
            log -= np.log(np.exp(log).sum(-1, keepdims=True))
            if first:
                self.reference.append(log.astype(np.float32))
            told = self.reference[place].astype(np.float64)
            nats -= log[np.arange(len(row) - 1), row[1:]].sum()
            divergence += (np.exp(told) * (told - log)).sum()
            same += (told.argmax(-1) == log.argmax(-1)).sum()
            count += len(row)
        perplexity = np.exp(nats / (count - len(self.reference)))
        return f"perplexity {perplexity:.4f} divergence {divergence / count:.5f} same {100 * same / count:.2f}%"


class Field:
    """A model on random numbers: how near its outputs are to those of the float model."""

    shapes = ((0, 0),)

    def __init__(self, data: Path, name: str) -> None:
        self.name = name
        with np.load(data / "feeds" / f"{name}.npz") as held:
            self.first = {key: held[key] for key in held.files}
        self.reference: list[npt.NDArray[Any]] = []

    def calibration(self) -> list[Feed]:
        """The feed and three scaled copies."""
        random = np.random.default_rng(0)
        return [self.first, *({key: _scaled(random, it) for key, it in self.first.items()} for _ in range(3))]

    def feed(self, _shape: tuple[int, int]) -> Feed:
        """The feed."""
        return self.first

    def measure(self, session: ort.InferenceSession) -> str:
        """The ratio of signal to noise of every float output."""
        outputs = [it.astype(np.float64) for it in session.run(None, self.first) if it.dtype.kind == "f"]
        self.reference = self.reference or outputs
        noise = [((a - b) ** 2).sum() for a, b in zip(self.reference, outputs, strict=True)]
        signal = [(it**2).sum() for it in self.reference]
        return "dB " + " ".join(
            "inf" if not n else f"{10 * np.log10(s / n):.1f}" for s, n in zip(signal, noise, strict=True)
        )


def _scaled(random: np.random.Generator, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.dtype.kind != "f" or values.size <= 4:
        return values
    return (values * (0.7 + 0.6 * random.random())).astype(values.dtype)


def spearman(found: Floats, wanted: npt.NDArray[Any]) -> float:
    """The correlation of ranks, those of equals averaged."""
    return float(np.corrcoef(_ranks(found), _ranks(wanted))[0, 1])


def _ranks(values: npt.NDArray[Any]) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse])


def opened(path: Path) -> ort.InferenceSession:
    """A session of one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def latencies(sessions: Mapping[str, ort.InferenceSession], feed: Feed) -> dict[str, float]:
    """The fastest of interleaved runs."""
    best = dict.fromkeys(sessions, np.inf)
    for session in sessions.values():
        session.run(None, feed)
    ends = time.perf_counter() + LEAST_SECONDS
    while time.perf_counter() < ends:
        for name, session in sessions.items():
            begun = time.thread_time()
            session.run(None, feed)
            best[name] = min(best[name], time.thread_time() - begun)
    return best


def kernels(path: Path) -> str:
    """How often the optimized graph has the ops that matter."""
    found = Counter(node.op_type for node in optimized(path).graph.node)
    return " ".join(f"{op} {found[op]}" for op in COUNTED if found[op])


def recipe_of(words: str) -> onnxcalib.Recipe:
    """A recipe as words: fields and their values."""
    given = dict(word.split("=", 1) for word in words.split())
    return onnxcalib.Recipe(**{name: _value(it) for name, it in given.items()})


def _value(word: str) -> Any:
    if word.isdigit():
        return int(word)
    return float(word) if word.replace(".", "", 1).isdigit() else word


def dynamic(model: Path, path: Path) -> None:
    """onnxruntime's one line."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(model, path, per_channel=True, weight_type=QuantType.QInt8)


def table(
    case: Encoder | Language | Field, models: Path, folder: Path, recipes: Sequence[str], files: Sequence[Path]
) -> None:
    """Makes the files, then measures them in one run and prints a line each."""
    model = models / f"{case.name}.onnx"
    rows = {"float": model, "onnxruntime dynamic": folder / f"{case.name}_dynamic.onnx"}
    if not rows["onnxruntime dynamic"].exists():
        dynamic(model, rows["onnxruntime dynamic"])
    rows |= {path.name: path for path in files}
    for words in recipes:
        rows[words] = folder / f"{case.name}_{words.replace(' ', '_').replace('/', '_')}.onnx"
        onnxcalib.quantize(model, case.calibration(), recipe_of(words), output=rows[words])
    sessions = {name: opened(path) for name, path in rows.items()}
    spent = {shape: latencies(sessions, case.feed(shape)) for shape in case.shapes}
    for name, path in rows.items():
        size = 100 * path.stat().st_size / model.stat().st_size
        ratios = " ".join(f"{a}x{b} {took[name] / took['float']:.2f}" for (a, b), took in spent.items())
        found = f"{case.measure(sessions[name])} bytes {size:5.2f}% latency {ratios} | {kernels(path)}"
        print(f"{case.name:20} {name:38} {found}", flush=True)


def main() -> None:
    """Reads the command line and runs what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("part", choices=USUAL)
    parser.add_argument(
        "--recipe", action="append", help="Fields of a recipe and their values, instead of the usual rows."
    )
    parser.add_argument("--file", action="append", type=Path, default=[], help="Files to measure, instead of recipes.")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / f"onnxcalib_text_{os.getuid()}")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    logging.getLogger().setLevel(logging.ERROR)
    recipes = given.recipe if given.recipe is not None else () if given.file else USUAL[given.part]
    cases = {"minilm": lambda: [Encoder(given.data)], "stories": lambda: [Language(given.data)],
             "field": lambda: [Field(given.data, name) for name in FIELD]}  # fmt: skip
    for case in cases[given.part]():
        table(case, given.models, given.work, recipes, given.file)


if __name__ == "__main__":
    main()
