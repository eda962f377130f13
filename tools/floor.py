"""Every bound on time and memory, with what is measured: the benchmark's part `floor`.

    python tools/benchmark.py ZOO floor [--part plain --part chains] [--again] [--work FOLDER]

Prints a line for each bound and all of them as a Markdown table, which FOLDER/floor.md gets too. Every measurement has
a process of its own and is kept in FOLDER/floor.json: the same command again goes on from there, and `--again` measures
anew. Times beside each other are medians of runs that take turns. A float pass and what is counted in it are CPU
seconds of all threads. What of a bound is no number is here: a part of the cores is busy from `BUSY` on, time is linear
if a layer or a sample more costs at most `LINEAR` as much among the most as among the fewest, and memory is flat if it
grows by at most `FLAT`: as much as figures move from run to run. ResNet-50 trains with 1,000 images and one step.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import floor_cost
import numpy as np
import onnx
import scaling
from floor_lines import Kept, Line, MissingError, Row, medians, table
from large_model import make_encoder
from own_process import FailedError, measured
from zoo import decoded, prepare

from onnxcalib.files import replacing
from onnxcalib.model.read import list_layers, read_prepared
from onnxcalib.targets import find_target

TOOLS = Path(__file__).resolve().parent
DEMO = TOOLS.parent / "models"
TIMES = 3  # runs of what is beside each other
BUSY, LINEAR, FLAT = 0.8, 1.25, 1.1
YOLO, EDGE = "nudenet_320n", 320
STATIC, LIGHT, REPORT, MIXED = "quantize_static", "light", "light, report", "light w4a8,w8a8"
CHAINS = ("plain", "light", "report")
RATIOS = {"local": ("two local workers", 1.7), "dask": ("two Dask workers", 1.6)}


@dataclass(frozen=True)
class Bench:
    """Where models come from, where files and measurements go, and the part that measures."""

    zoo: Path
    work: Path
    kept: Kept
    part: str

    def given(self, name: str, data: str = "") -> tuple[Path, Path]:
        """A model of ZOO with its calibration data, which is made once; or with other data of the same kind."""
        if name in (YOLO, "g2p_unrolled"):
            model = self._there(f"{name}.onnx")
            return model, self._images(model) if name == YOLO else self._there(f"feeds/{name}.npz")
        try:
            case = prepare(self.zoo, self.work)[name]
        except FileNotFoundError as error:
            raise MissingError(f"{error.filename} is missing") from error
        return self._there(case.model.name), case.calibration.with_name(data) if data else case.calibration

    def _there(self, name: str) -> Path:
        if not (self.zoo / name).exists():
            raise MissingError(f"{self.zoo / name} is missing")
        return self.zoo / name

    def _images(self, model: Path) -> Path:
        """Images of ImageNet as the detector reads them: 0 to 1, of its size."""
        path = self.work / f"{YOLO}_images.npz"
        if not path.exists():
            from PIL import Image

            images, _ = decoded(self._there("imagenet_train512.npz"))
            resized = (np.asarray(Image.fromarray(image).resize((EDGE, EDGE))) for image in images)
            arrays = np.stack([image.transpose(2, 0, 1).astype(np.float32) / 255 for image in resized])
            named: dict[str, Any] = {onnx.load(model, load_external_data=False).graph.input[0].name: arrays}
            with replacing(path) as unfinished, unfinished.open("wb") as file:
                np.savez(file, **named)
        return path

    def measured(self, name: str, measure: Callable[[], Row]) -> Row:
        """A measurement of the part."""
        return self.kept.measured(f"{self.part}: {name}", measure)

    def beside(self, name: str, times: Mapping[str, int]) -> dict[str, dict[str, float]]:
        """Medians of ways to quantize one model, each so many times, in turn."""
        model, data = self.given(name)
        rows: dict[str, list[Row]] = {kind: [] for kind in times}
        for number, kind in itertools.product(range(max(times.values())), times):
            if number < times[kind]:
                run = partial(floor_cost.measured, kind, model, data)
                rows[kind].append(self.measured(f"{name}, {kind}, run {number + 1}", run))
        return {kind: medians(found) for kind, found in rows.items()}

    def line(self, what: str, figure: float, bound: float, unit: str, note: str = "", at_least: bool = False) -> Line:
        """A line of the part."""
        return Line(self.part, what, figure, bound, unit, note, at_least)


Lines = Iterator[Line]
Unit = Callable[[Bench], Lines]  # what is left out together where something is missing


def _plain(name: str, bench: Bench) -> Lines:
    """Wall time and memory of plain beside those of quantize_static."""
    rows = bench.beside(name, {STATIC: TIMES, "plain": TIMES})
    theirs, own = rows[STATIC], rows["plain"]
    for what, key, unit, bound in (("wall time", "seconds", "s", 1.5), ("peak memory", "MB", "MB", 1.0)):
        note = f"{own[key]:,.1f} {unit} beside {theirs[key]:,.1f}"
        yield bench.line(f"{name}, plain: {what} of {STATIC}'s", own[key] / theirs[key], bound, "x", note)


def _passes(name: str, bench: Bench) -> Lines:
    """All that light does at eight bits in float passes."""
    yield _in_passes(bench, name, LIGHT, bench.beside(name, {"float": TIMES, LIGHT: TIMES}), 12)


def _mixed(name: str, bench: Bench) -> Lines:
    """All that light does with two precisions in float passes; a run takes long."""
    model, _ = bench.given(name)
    layers = len(list_layers(read_prepared(model, find_target("ort"))).layers)
    rows = bench.beside(name, {"float": TIMES, MIXED: 1})
    yield _in_passes(bench, f"{name}, {layers} layers", MIXED, rows, 12 + 0.3 * layers)


def _in_passes(bench: Bench, name: str, kind: str, rows: Mapping[str, Mapping[str, float]], bound: float) -> Line:
    own, floats = rows[kind], rows["float"]
    note = (
        f"CPU {own['cpu']:.1f} s beside {floats['cpu']:.1f}; wall {own['seconds']:.1f} s beside {floats['seconds']:.1f}"
    )
    return bench.line(f"{name}, {kind}: float passes", own["cpu"] / floats["cpu"], bound, "passes", note)


def _report(name: str, bench: Bench) -> Lines:
    """What a report adds to light."""
    rows = bench.beside(name, {LIGHT: TIMES, REPORT: TIMES})
    without, reported = rows[LIGHT], rows[REPORT]
    for what, key in (("wall time", "seconds"), ("CPU time", "cpu")):
        note = f"{reported[key]:.1f} s beside {without[key]:.1f}"
        more = 100 * (reported[key] / without[key] - 1)
        yield bench.line(f"{name}, --report adds to the {what} of light", more, 30, "%", note)


def _advanced(name: str, words: Sequence[str], steps: int, bench: Bench) -> Lines:
    """How much of training is arithmetic, and how many cores it keeps busy."""
    model, data = bench.given(name)
    told: tuple[str | Path, ...] = (model, data, *words, "--steps", str(steps), "--json")
    row = bench.measured(
        f"{name}, {' '.join(words)}, {steps} steps",
        lambda: measured(TOOLS / "training_cost.py", *told, shown=True),
    )
    what = f"{name}, advanced {words[1]}"
    note = f"{steps} steps, {row['seconds']:.0f} s"
    more = (
        ""
        if row["share"] == row["usual_share"]
        else f"; at the default of 100, if each takes as long; here {row['share']:.1f} %"
    )
    yield bench.line(f"{what}: in kernels of gradient graphs", row["usual_share"], 40, "%", note + more, at_least=True)
    yield bench.line(f"{what}: cores busy", row["busy"], BUSY * row["cores"], "cores", note, at_least=True)


def _chain(kind: str, bench: Bench) -> Lines:
    """How time and memory grow with layers and with samples."""
    by_layers = [(layers, scaling.FEW_SAMPLES) for layers in scaling.LAYERS]
    by_samples = [(scaling.FEW_LAYERS, samples) for samples in scaling.SAMPLES]
    rows = {size: _of_chain(bench, kind, *size) for size in (*by_layers, *by_samples)}
    few, many = _of_chain(bench, scaling.RUN, *by_layers[0]), _of_chain(bench, scaling.RUN, *by_layers[-1])
    model = many["MB"] - few["MB"]  # what the graph and its weights take more
    for place, (each, sizes) in enumerate({"layer": by_layers, "sample": by_samples}.items()):
        costs = [1000 * rows[size]["cpu"] / size[place] for size in sizes]
        peaks = [rows[size]["MB"] for size in sizes]
        own = model if each == "layer" else 0.0
        span = f"{sizes[0][place]} to {sizes[-1][place]:,} {each}s"
        note = f"CPU ms a {each}: {', '.join(f'{cost:.1f}' for cost in costs)}"
        yield bench.line(f"{kind}, {span}: time of a {each}", costs[-1] / costs[0], LINEAR, "x", note)
        note = f"MB: {', '.join(f'{peak:.0f}' for peak in peaks)}; {own:.0f} of them the model's"
        yield bench.line(f"{kind}, {span}: peak memory", (peaks[-1] - own) / peaks[0], FLAT, "x", note)


def _of_chain(bench: Bench, kind: str, layers: int, samples: int) -> dict[str, float]:
    name = f"{kind}, {layers} layers, {samples} samples, run"
    run = partial(scaling.measured, kind, layers, samples, bench.work)
    return medians([bench.measured(f"{name} {number}", run) for number in range(1, TIMES + 1)])


def _trained_memory(name: str, bench: Bench) -> Lines:
    """The peak of the advanced pipeline."""
    model, data = bench.given(name, "imagenet_1000.npz")
    yield _peak(bench, f"{name}, advanced w4a4, 1,000 images", "advanced w4a4, 1 step", model, data)


def _encoder_memory(bench: Bench) -> Lines:
    """The peak of light with a report on a text encoder."""
    folder = bench.work / "encoder"
    given = folder / "large.onnx", folder / "data.npz"
    if not given[1].exists():  # the last that is written
        make_encoder(folder)
    yield _peak(bench, "encoder of BERT-base's size, light with a report", REPORT, *given)


def _peak(bench: Bench, what: str, kind: str, model: Path, data: Path) -> Line:
    row = bench.measured(what, partial(floor_cost.measured, kind, model, data))
    note = f"{row['seconds']:.0f} s, CPU {row['cpu']:.0f} s"
    return bench.line(f"{what}: peak memory", row["MB"] / 2**10, 4, "GB", note)


def _unrolled(name: str, bench: Bench) -> Lines:
    """A graph of many small layers."""
    for kind in ("plain", LIGHT):
        row = bench.beside(name, {kind: TIMES})[kind]
        yield bench.line(f"{name}, {kind}: wall time", row["seconds"], 60, "s", f"CPU {row['cpu']:.1f} s")


def _workers(kind: str, bench: Bench) -> Lines:
    """What a second worker brings on the quick-start model."""
    if kind == "dask" and importlib.util.find_spec("distributed") is None:
        raise MissingError("distributed is not installed")
    given = (DEMO / "fashion_mobilenet.onnx", DEMO / "fashion_calibration.npz")
    told = ("--steps", "150", "--repeats", str(TIMES), "--where", kind, "--measure-only", "--json")
    row = bench.measured(kind, lambda: measured(TOOLS / "cluster.py", *given, *told, shown=True))
    what, bound = RATIOS[kind]
    note = f"{row['one']:.1f} s beside {row['two']:.1f}, ratios {row['least']:.2f} to {row['most']:.2f}"
    yield bench.line(f"{what} beside one", row["ratio"], bound, "x", note, at_least=True)


W4A4, TWO = ("--bits", "w4a4", "--edge-bits", "8"), ("--bits", "w4a4,w8a8", "--compression", "0.18")
IMAGENET: tuple[str, ...] = ("mobilenet_v2", "resnet50")
PARTS: dict[str, list[Unit]] = {
    "plain": [partial(_plain, name) for name in (*IMAGENET, YOLO)],
    "light": [partial(_passes, name) for name in IMAGENET],
    "report": [partial(_report, "mobilenet_v2")],
    "mixed": [partial(_mixed, name) for name in IMAGENET],
    "advanced": [
        partial(_advanced, name, words, steps)
        for name, steps in (("resnet20", 100), ("mobilenet_v2", 10))
        for words in (W4A4, TWO)
    ],
    "chains": [partial(_chain, kind) for kind in CHAINS],
    "memory": [partial(_trained_memory, "resnet50"), _encoder_memory],
    "g2p": [partial(_unrolled, "g2p_unrolled")],
    "workers": [partial(_workers, kind) for kind in RATIOS],
}


def floor(zoo: Path, work: Path, parts: Sequence[str], *, again: bool = False) -> int:
    """Measures what is not measured yet, and prints it all; 1 if a measurement failed."""
    kept, lines, said = Kept(work / "floor.json"), list[Line](), list[str]()
    if again:
        kept.forget(parts)
    failed = False
    for part in dict.fromkeys(parts):
        for unit in PARTS[part]:
            try:
                for line in unit(Bench(zoo, work, kept, part)):
                    print(line, flush=True)
                    lines.append(line)
            except (MissingError, FailedError) as error:
                failed |= isinstance(error, FailedError)
                said.append(f"{part}: {error}; {'failed' if isinstance(error, FailedError) else 'left out'}.")
                print(said[-1], flush=True)
    whole = "\n".join([table(lines), kept.circumstances(), *said, ""])
    (work / "floor.md").write_text(whole, encoding="utf-8")
    print(f"\n{whole}", end="", flush=True)
    return int(failed)
