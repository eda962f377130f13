"""The order of the calibration data in a run: one for all stages, named by the seed, whatever holds the samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from models import build, conv_net, feed_for, normal
from onnxcalib import Pipeline, Preprocess, RangeMethod, Recipe, quantize, write_report
from onnxcalib.analysis.diagnose import diagnose_file
from onnxcalib.data import Dataset, first, open_data, train_validation_split
from onnxcalib.model.quantized import read_quantized
from onnxcalib.model.shapes import input_specs
from onnxcalib.pipeline.job import start
from onnxcalib.progress import Event
from onnxcalib.recipe import parse_bits
from onnxcalib.reports.data import data_hash

COUNT, CLASSES = 48, 4
SORTED = np.arange(COUNT) // (COUNT // CLASSES)
LIGHT = Recipe(Pipeline.LIGHT, parse_bits("w4a4,w8a8"), compression=0.6, ranges=RangeMethod.MINMAX)


def pixels() -> np.ndarray:
    """Images sorted by class, the class being the brightness of the first pixel."""
    found = np.random.default_rng(0).integers(0, 255, (COUNT, 8, 8, 3), np.uint8)
    found[:, 0, 0, 0] = SORTED
    return found


def sorted_by_class(kind: str, folder: Path) -> tuple[Any, Preprocess | None]:
    images = pixels()
    arrays = {"x": images.transpose(0, 3, 1, 2).astype(np.float32), "labels": SORTED}
    if kind == "arrays":
        return arrays, None
    if kind == "npz":
        np.savez(folder / "data.npz", **arrays)
        return folder / "data.npz", None
    for at, image in enumerate(images):
        (folder / f"{SORTED[at]}").mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{SORTED[at]}" / f"{at}.png")
    return folder, Preprocess(resize=8, mean=(0.0,), std=(1.0,), scale=1.0)


def classes(data: Dataset) -> list[int]:
    return [int(sample[0, 0, 0]) for feed in data.batches(5) for sample in feed["x"]]


@pytest.mark.parametrize("kind", ["arrays", "npz", "images"])
def test_every_part_of_data_sorted_by_class_has_all_classes(kind: str, tmp_path: Path) -> None:
    given, preprocess = sorted_by_class(kind, tmp_path)
    data = start(conv_net(), given, Recipe(), preprocess).jobs[0].data
    for part in (first(data, 16), *train_validation_split(data)):
        assert set(classes(part)) == set(range(CLASSES))
        assert part.labels.tolist() == classes(part)
    assert classes(data) != classes(start(conv_net(), given, Recipe(seed=1), preprocess).jobs[0].data)


def test_the_same_file_whatever_holds_the_samples(tmp_path: Path) -> None:
    made = set()
    for kind in ("arrays", "npz", "images"):
        folder = tmp_path / kind
        folder.mkdir()
        given, preprocess = sorted_by_class(kind, folder)
        made.add(quantize(conv_net(), given, LIGHT, preprocess=preprocess).model.SerializeToString(deterministic=True))
    assert len(made) == 1


class Heard:
    """A progress that keeps the warnings, and the stages that were computed."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.computed: list[str] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        assert 0 < done <= total, stage

    def event(self, event: Event) -> None:
        if event.name == "warning":
            self.warnings.append(event.values["message"])
        if event.name == "stage_end" and not event.values["reused"]:
            self.computed.append(event.values["stage"])


IF = """
net (float[N,6] x, int64 mode) => (float[N,4] y) {
    c = Equal (mode, one)
    h = Relu (x)
    y = If (c) <
        then_branch = then_body () => (float[N,4] t) { t = MatMul (h, v) },
        else_branch = else_body () => (float[N,4] e) { e = MatMul (x, v) }
    >
}"""


def branches() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model whose layers lie in branches only, and data that takes either."""
    model = build(IF, 17, one=np.int64(1), v=normal(6, 4))
    return model, {"x": normal(64, 6), "mode": np.arange(64) % 2}


def plain_net() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    return conv_net(), feed_for(conv_net(), 24)


@pytest.mark.parametrize("make", [plain_net, branches])
def test_another_seed_is_no_other_data_but_reuses_nothing(make: Any, tmp_path: Path) -> None:
    (model, data), recipe = make(), Recipe(Pipeline.LIGHT, parse_bits("w4a8"))

    def run(given: dict[str, np.ndarray], seed: int) -> Heard:
        heard, asked = Heard(), replace(recipe, seed=seed)
        found = quantize(model, given, asked, run_dir=tmp_path, progress=heard)
        assert found.model == quantize(model, given, asked).model
        return heard

    whole = run(data, 0).computed
    other = run(data, 1)
    # Samples decide how many strengths of second-order rounding are tried.
    assert (other.warnings, set(other.computed)) == ([], set(whole))
    for seed in (0, 1):
        assert run(data, seed).computed == []
    transposed = run({name: array[::-1] for name, array in data.items()}, 1)
    assert set(transposed.computed) == set(whole)
    assert len(transposed.warnings) == 1
    assert "other calibration data" in transposed.warnings[0]


def test_branches_get_the_samples_in_the_same_order() -> None:
    model, data = branches()
    data["x"] = np.repeat(np.arange(64, dtype=np.float32)[:, None], 6, axis=1)
    jobs = start(model, data, Recipe(seed=3)).jobs
    alone = start(model, data | {"mode": np.ones(64, np.int64)}, Recipe(seed=3)).jobs[0].data
    order = [int(feed["h"][0, 0]) for feed in alone.batches(1)]
    assert sorted(order) == list(range(64)) != order
    for job, wanted in zip(jobs, (1, 0), strict=True):
        found = [int(next(iter(feed.values()))[0, 0]) for feed in job.data.batches(1)]
        assert found == [number for number in order if number % 2 == wanted]


def sorted_zeros_first(count: int = 256) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model that is exact on zeros, and data whose first half is nothing else."""
    text = "net (float[N,6] x) => (float[N,4] y) { [one] h = Gemm (x, w)  r = Relu (h)  [two] y = Gemm (r, v) }"
    samples = normal(count, 6)
    samples[: count // 2] = 0
    return build(text, w=normal(6, 8), v=normal(8, 4)), {"x": samples}


def test_the_report_looks_at_samples_of_all_kinds_and_names_the_data_as_it_was_given(tmp_path: Path) -> None:
    model, data = sorted_zeros_first()
    onnx.save(model, tmp_path / "model.onnx")
    found = {}
    for seed in (0, 1):
        result = quantize(tmp_path / "model.onnx", data, Recipe(bits=parse_bits("w4a4"), seed=seed))
        found[seed] = write_report(result, tmp_path / "model.onnx", data, tmp_path / "report.html")
        assert found[seed]["loss"]["samples"] < 256
        assert found[seed]["loss"]["whole"] > 0
        assert any(row["input"] is not None for row in found[seed]["histograms"])
    assert found[0]["loss"] != found[1]["loss"]
    hashes = {report["repeat"]["sha256"]["calibration"] for report in found.values()}
    assert hashes == {data_hash(open_data(data, input_specs(model)))}


def test_the_diagnosis_of_a_file_looks_at_samples_of_all_kinds(tmp_path: Path) -> None:
    model, data = sorted_zeros_first()
    onnx.save(model, tmp_path / "model.onnx")
    made = quantize(model, data, Recipe(bits=parse_bits("w4a4"))).model
    _, found = diagnose_file(read_quantized(made), tmp_path / "model.onnx", data)
    assert found.samples < 256
    assert found.loss > 0
