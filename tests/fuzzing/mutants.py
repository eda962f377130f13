"""Damaged files of every kind that onnxcalib reads, and what must hold when it reads them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from numpy.random import Generator

from fuzzing.graphs import Case, random_graph
from fuzzing.judge import BrokenPromiseError, Verdict, float_outputs
from fuzzing.mutations import damaged_bytes, damaged_model, damaged_text
from models import BUILDERS, feed_for, session_of, two_gemms
from onnxcalib.api import OnnxcalibError, Pipeline, Precision, RangeMethod, Recipe, inspect, quantize, read_settings
from onnxcalib.cache.show import show
from onnxcalib.mixed_precision.table_files import load, with_costs
from onnxcalib.recipe.template import template
from onnxcalib.targets import find_target

QUICK = Recipe(ranges=RangeMethod.MINMAX)
BASES = 200  # graphs that are damaged
TARGET_FILE = Path(find_target.__code__.co_filename).parent / "ort.toml"


def judge_mutant(seed: int, folder: Path) -> Verdict:
    """Reads the mutant of a seed, with its files in a folder; raises whatever is no clean end."""
    rng = np.random.default_rng([16, seed])
    kinds = [_model] * 12 + [_npz] * 2 + [_npy, _recipe, _recipe, _target, _table, _run_directory]
    kind = kinds[int(rng.integers(len(kinds)))]
    try:
        kind(rng, folder)
    except OnnxcalibError as error:
        if not error.message.rstrip("'\"").endswith((".", "!", "?")):
            raise BrokenPromiseError(f"a refusal without a sentence: {error.message!r}") from error
        return Verdict("refused", f"{kind.__name__}: {error.message}")
    return Verdict("written", kind.__name__)


@cache
def _base(number: int) -> Case:
    """A graph to damage: one of those that tests use, or a random one that is valid."""
    if number < len(BUILDERS):
        model = list(BUILDERS.values())[number]()
        return Case(model, feed_for(model, 6), noisy=False, half=False)
    while float_outputs(case := random_graph(number)) is None:
        number += BASES
    return case


def _model(rng: Generator, folder: Path) -> None:
    case, path, output = _base(int(rng.integers(BASES))), folder / "model.onnx", folder / "quantized.onnx"
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    if rng.random() < 0.35:
        other = _base(int(rng.integers(BASES))).model.SerializeToString()
        path.write_bytes(damaged_bytes(model.SerializeToString(), other, rng))
    else:
        path.write_bytes(damaged_model(model, rng))
    recipe = QUICK if rng.random() < 0.9 else Recipe(pipeline=Pipeline.LIGHT, ranges=RangeMethod.MINMAX)
    try:
        inspect(path)
        quantize(path, case.feed, recipe, output=output, workers=1)
    except OnnxcalibError:
        if output.exists():
            raise BrokenPromiseError("a refusal that leaves a file") from None
        raise
    written = onnx.load(output)
    if all(value.type.tensor_type.HasField("shape") for value in written.graph.output):
        onnx.checker.check_model(written)
    session_of(output)


@cache
def _two_gemms() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = two_gemms()
    return model, feed_for(model, 12)


def _npz(rng: Generator, folder: Path) -> None:
    model, feed = _two_gemms()
    path, saved = folder / "data.npz", dict(feed)
    if rng.random() < 0.5:
        _damage_arrays(saved, rng)
    (np.savez if rng.random() < 0.6 else np.savez_compressed)(path, **saved)
    if rng.random() < 0.7:
        path.write_bytes(damaged_bytes(path.read_bytes(), b"PK\x03\x04\x93NUMPY", rng))
    quantize(model, path, QUICK, output=folder / "out.onnx")


def _damage_arrays(saved: dict[str, np.ndarray], rng: Generator) -> None:
    """Other shapes, types, names and values."""
    (name, value), kind = next(iter(saved.items())), int(rng.integers(9))
    other = {
        0: value[:, :-1], 1: value[..., None], 2: value.astype("U4"), 3: np.array([{}]), 4: value[:0],
        5: value.astype(np.complex64), 6: np.where(rng.random(value.shape) < 0.1, np.nan, value).astype(value.dtype),
        7: np.float32(1), 8: value.astype(">f8"),
    }[kind]  # fmt: skip
    saved[name] = np.asarray(other)
    if rng.random() < 0.2:
        saved["labels" if rng.random() < 0.5 else "../x"] = np.arange(int(rng.integers(14)))


def _npy(rng: Generator, folder: Path) -> None:
    model, feed = _two_gemms()
    data = folder / "data"
    data.mkdir()
    for number, row in enumerate(feed["x"]):
        np.save(data / f"{number}.npy", row)
    path = data / f"{int(rng.integers(len(feed['x'])))}.npy"
    content = path.read_bytes()
    if rng.random() < 0.5:
        head = damaged_text(content[10:128].decode("latin1"), rng).encode("latin1", "replace")
        path.write_bytes(content[:8] + (len(head) % 65536).to_bytes(2, "little") + head + content[128:])
    else:
        path.write_bytes(damaged_bytes(content, b"\x93NUMPY", rng))
    quantize(model, data, QUICK, output=folder / "out.onnx")


@cache
def _recipe_text() -> str:
    return template("best") + "resize = 5\npixel_scale = 0.5\nmean = 0.5\nstd = 0.25\ncrop = [3, 4]\n"


def _recipe(rng: Generator, folder: Path) -> None:
    text, path = _recipe_text(), folder / "recipe.toml"
    if rng.random() < 0.5:
        text = "\n".join(
            line.removeprefix("# ") if " = " in line and rng.random() < 0.2 else line for line in text.splitlines()
        )
    if rng.random() < 0.3:
        path.write_bytes(damaged_bytes(text.encode(), b'[["""=', rng))
    else:
        path.write_text(damaged_text(text, rng), encoding="utf-8")
    read_settings(path)


def _target(rng: Generator, folder: Path) -> None:
    text, path = TARGET_FILE.read_text(encoding="utf-8").replace('"ort"', '"mine"'), folder / "mine.toml"
    path.write_text(damaged_text(text, rng), encoding="utf-8")
    find_target(str(path))


TABLE = """# onnxcalib sensitivity table 1
# base: w8a8
# loss: distillation
# base_loss: 0.001
# samples: 8
# float size: 400.0
# fixed size: 10.0
layer,tensor,precision,loss,cost:size
one,x,w4a8,0.1,50
one,x,w8a8,0.0,100
two,t,w4a8,0.2,20
two,t,w8a8,0.0,40
"""
COSTS = "layer,precision,cost\none,w4a8,1\none,w8a8,2\ntwo,w4a8,3\ntwo,w8a8,4.5\n"


def _table(rng: Generator, folder: Path) -> None:
    path, costs = folder / "table.csv", folder / "costs.csv"
    path.write_text(TABLE, encoding="utf-8")
    costs.write_text(COSTS, encoding="utf-8")
    victim = path if rng.random() < 0.6 else costs
    text = victim.read_text(encoding="utf-8")
    if rng.random() < 0.4:
        victim.write_bytes(damaged_bytes(text.encode(), b'","\r\n', rng))
    else:
        victim.write_text(damaged_text(text, rng), encoding="utf-8")
    with_costs(load(path), "mine", costs)


@cache
def _finished_run(kind: int) -> tuple[Recipe, Path, bytes]:
    """A run directory of a finished run, and what it wrote."""
    model, feed = _two_gemms()
    where = Path(tempfile.mkdtemp(prefix="onnxcalib-fuzz-"))
    mixed = Recipe(
        pipeline=Pipeline.LIGHT, ranges=RangeMethod.MINMAX, bits=(Precision(4, 8), Precision(8, 8)), compression=4.0
    )
    recipe = mixed if kind else QUICK
    quantize(model, feed, recipe, output=where / "out.onnx", run_dir=where / "run")
    return recipe, where / "run", (where / "out.onnx").read_bytes()


def _run_directory(rng: Generator, folder: Path) -> None:
    model, feed = _two_gemms()
    recipe, run, expected = _finished_run(int(rng.random() < 0.3))
    copy = folder / "run"
    shutil.copytree(run, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    victim = files[int(rng.integers(len(files)))]
    content = victim.read_bytes()
    kind = rng.random()
    if kind < 0.1:
        victim.unlink()
        victim.mkdir()
    elif kind < 0.4 and victim.suffix != ".npz":
        victim.write_text(damaged_text(content.decode(errors="replace"), rng), encoding="utf-8")
    else:
        victim.write_bytes(damaged_bytes(content, files[0].read_bytes(), rng))
    with contextlib.suppress(OnnxcalibError):
        show(copy, ("ranges",))
    quantize(model, feed, recipe, output=folder / "out.onnx", run_dir=copy)
    if (folder / "out.onnx").read_bytes() != expected:
        raise BrokenPromiseError("a damaged run directory changes the file")
