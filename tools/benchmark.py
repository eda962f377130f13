#!/usr/bin/env python3
"""Measures onnxcalib on real models and data: accuracy, size, speed and memory, the last two as ratios.

    python tools/benchmark.py ZOO plain     # 8 bit and w4a8 files, beside onnxruntime's quantize_static in the same run
    python tools/benchmark.py ZOO light-mobilenet_v2     # fixed bits, both roundings, and mixed precision
    python tools/benchmark.py ZOO light-resnet20         # the same; also light-resnet20_folded and light-resnet50
    python tools/benchmark.py ZOO light-resnet50 --row 'light 8' --row 'light w4a8'   # some of the rows
    python tools/benchmark.py ZOO methods-mobilenet_v2   # mixed precision at one size beside both baselines
    python tools/benchmark.py ZOO ablation-resnet20      # the advanced pipeline step by step, fixed and mixed precision
    python tools/benchmark.py ZOO ablation-mobilenet_v2 --steps 20   # fewer steps of training than by default
    python tools/benchmark.py ZOO advanced-resnet20      # further precisions beside AdaRound, few samples, both engines
    python tools/benchmark.py ZOO advanced-mobilenet_v2  # also with 1,000 images; advanced-resnet50 too
    python tools/benchmark.py ZOO step      # a training step in forward passes of the same layer
    python tools/benchmark.py ZOO parallel  # the cores that parallel AdaQuant keeps busy, if nothing else runs
    python tools/benchmark.py ZOO memory    # peak memory at 512 and at 2,048 samples, and of the advanced pipeline
    python tools/benchmark.py ZOO floor     # every bound on time and memory, what is measured; run again, it goes on
    python tools/benchmark.py ZOO floor --part plain --part g2p --again   # some parts of it, measured anew
    python tools/benchmark.py ZOO sensitivity   # cost of the sensitivity table in float passes
    python tools/benchmark.py ZOO solver    # the integer program of 500 layers at 49 precisions

ZOO holds mobilenet_v2_bn.onnx, cifar_resnet20_bn.onnx, cifar_resnet20_fused.onnx, imagenet_train512.npz,
imagenet_train488.npz, imagenet_val2000.npz (`jpeg` bytes, `offsets`, `y`), cifar10_train2k.npz and cifar10_test10k.npz
(`x`, `y`), and for its parts resnet50.onnx.
For `floor` also nudenet_320n.onnx, g2p_unrolled.onnx and feeds/g2p_unrolled.npz; what needs them is else left out.
Needs pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from floor import PARTS as FLOOR
from floor import floor
from solver_cost import solver
from step_cost import step
from zoo import Case, prepare

import onnxcalib
from onnxcalib import Pipeline, Recipe
from onnxcalib.model.read import read_prepared
from onnxcalib.recipe import Engine, LayerOptimizer, RangeMethod, Rounding, Training, TrainingOptions, parse_bits
from onnxcalib.targets import find_target

LIGHT = Pipeline.LIGHT
MIXED_SIZES = {"mobilenet_v2": 0.15, "resnet50": 0.14}  # of mixed precision trained, on ImageNet
UNSAFE = str.maketrans(" ,'", "___")  # in names of files


def report(case: Case, rows: dict[str, Path]) -> None:
    """Evaluates files in one run and prints a line each."""
    found = onnxcalib.evaluate(list(rows.values()), case.test, case.model)
    for name, row in zip(rows, found, strict=True):
        print(
            f"{case.name:16} {name:38} n {row.samples:6} top-1 {row.top1:6.2f} agree {row.agreement:6.2f} "
            f"distillation {row.distillation_loss:8.5f} bytes {row.bytes:9,} latency/float {row.latency_ratio:5.2f}",
            flush=True,
        )


def quantized(case: Case, folder: Path, name: str, recipe: Recipe) -> Path:
    """Quantizes, and says what the stages found."""
    path = folder / f"{case.name}_{name.translate(UNSAFE)}.onnx"
    result = onnxcalib.quantize(case.model, case.calibration, recipe, output=path)
    if result.assigned is not None:
        assigned = result.assigned
        print(f"{case.name:16} {name}: estimated {assigned.estimated_loss:.5f} measured {assigned.measured_loss:.5f}")
    if result.rounding is not None:
        found = result.rounding
        print(f"{case.name:16} {name}: second-order {found.before:.5f} to {found.after:.5f}, strength {found.strength}")
    if result.tuned is not None:
        print(f"{case.name:16} {name}: held-out loss {result.tuned.before:.5f} to {result.tuned.after:.5f}")
    return path


def static(case: Case, folder: Path) -> Path:
    """The file that onnxruntime's own quantizer writes: min-max, per channel."""
    from onnxruntime import quantization

    images = np.load(case.calibration)["input"]
    feeds = iter({"input": images[start : start + 1]} for start in range(len(images)))

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            return next(feeds, None)

    # Its own pre-processing would fold batch norm; here it gets the model with batch norm already folded.
    folded, path = folder / f"{case.name}_folded.onnx", folder / f"{case.name}_quantize_static.onnx"
    onnxcalib.write_model(read_prepared(case.model, find_target("ort")).proto, folded)
    quantization.quantize_static(str(folded), str(path), Reader(), per_channel=True)
    return path


def plain(cases: dict[str, Case], folder: Path) -> None:
    """The foundation's figures."""
    for case in (cases["mobilenet_v2"], cases["resnet20"]):
        rows = {"float": case.model, "quantize_static min-max": static(case, folder)}
        for bits in ("8", "w4a8"):
            rows[f"plain {bits}"] = quantized(case, folder, f"plain {bits}", Recipe(bits=parse_bits(bits)))
        report(case, rows)


def light(case: Case, folder: Path) -> None:
    """Both roundings at fixed precision, then mixed precision at one size, row by row."""
    recipes: dict[str, Recipe] = {}
    for bits in ("8", "w4a8", "w4a4", *(("w3a4",) if case.name.startswith("resnet20") else ())):
        recipe = Recipe(bits=parse_bits(bits), edge_bits=8)
        recipes |= {f"plain {bits}, edges 8": recipe, f"light {bits}, edges 8": replace(recipe, pipeline=LIGHT)}
        if bits != "8":  # else it rounds to nearest anyway
            nearest = replace(recipe, pipeline=LIGHT, rounding=Rounding.NEAREST)
            recipes[f"light nearest {bits}, edges 8"] = nearest
    for bits in ("w4a4,w8a8", "w4a8,w8a8"):
        recipes[f"light {bits} at 0.18"] = Recipe(LIGHT, bits=parse_bits(bits), compression=0.18)
    report(case, {"float": case.model})
    for label, recipe in recipes.items():
        if case.wants(label):
            report(case, {label: quantized(case, folder, label, recipe)})
    label = "light w4a4, edges 8, 1000 images"
    if case.name in MIXED_SIZES and case.wants(label):
        more = replace(case, calibration=folder / "imagenet_1000.npz")
        report(case, {label: quantized(more, folder, label, recipes["light w4a4, edges 8"])})


def methods(case: Case, folder: Path) -> None:
    """Mixed precision at one size by all three methods."""
    for bits in ("w4a4,w8a8", "w4a8,w8a8"):
        mixed(case, folder, bits, 0.18)


def mixed(case: Case, folder: Path, bits: str, compression: float) -> None:
    """One size, three methods; each also with batch-norm tuning."""
    from onnxcalib.mixed_precision.assignment import METHODS, solve
    from onnxcalib.mixed_precision.request import Request
    from onnxcalib.pipeline.job import start
    from onnxcalib.pipeline.stages import batch_norm_tuning, final_scales, sensitivities
    from onnxcalib.pipeline.sweep import candidates_of

    recipe = Recipe(LIGHT, bits=parse_bits(bits), compression=compression)
    job = _equal(start(case.model, case.calibration, recipe).jobs[0])
    candidates = candidates_of(job)
    table = sensitivities(job, candidates).table
    found = {method: solve(table, Request.of(table, recipe), method).choices for method in METHODS}
    rows = {}
    for method, choices in found.items():
        plan = candidates.stitch(choices)
        for label, final in {method: plan, f"{method} + BN": batch_norm_tuning(job, plan).plan}.items():
            path = folder / f"{case.name}_{bits.replace(',', '_')}_{label.replace(' ', '')}.onnx"
            onnxcalib.write_model(job.write(final_scales(job, final)), path)
            rows[f"{bits} at {compression}: {label}"] = path
    report(case, rows)


def ablation(case: Case, folder: Path) -> None:
    """Every step of the advanced pipeline on the record: at w4a4 with edges at 8 bits, then mixed at 0.15."""
    from onnxcalib.algorithms.reconstruction.layerwise import Trained
    from onnxcalib.mixed_precision.request import uniform_precisions
    from onnxcalib.pipeline import stages
    from onnxcalib.pipeline.job import start
    from onnxcalib.pipeline.ranges import rounded
    from onnxcalib.pipeline.rounding import rounded_and_tuned
    from onnxcalib.pipeline.sweep import candidates_of

    def record(name: str, job: Any, plan: Any) -> None:
        label = f"{','.join(map(str, job.recipe.bits))} {name}"
        path = folder / f"{case.name}_ablation_{label.translate(UNSAFE)}.onnx"
        onnxcalib.write_model(job.write(plan), path)
        report(case, {label: path})

    def record_settled(name: str, job: Any, plan: Any) -> Any:
        record(name, job, stages.final_scales(job, plan))
        return plan

    def rest(job: Any, plan: Any) -> None:
        nearest = record_settled("+ BN tuning", job, stages.batch_norm_tuning(job, plan).plan)
        record_settled("+ sequential AdaQuant alone", job, stages.sequential_training(job, nearest).plan)
        tuned = rounded_and_tuned(job, plan).best
        record_settled("+ second-order rounding, BN tuning", job, tuned.plan)
        trained = Trained(tuned.plan, tuned.plan, tuned.after, tuned.after, solved=True)
        plan, *_ = stages.better_of(job, trained, stages.end_to_end_training(job, trained))
        record("+ end-to-end AdaQuant", job, plan)

    report(case, {"float": case.model})
    fixed = Recipe(Pipeline.ADVANCED, bits=parse_bits("w4a4"), edge_bits=8, steps=case.steps)
    plain_job = start(case.model, case.calibration, fixed).jobs[0]
    for name, job in {"plain": plain_job, "+ equalization": _equal(plain_job)}.items():
        chosen = uniform_precisions(job.layers, job.points, job.recipe)
        single = {layer: (bits,) for layer, bits in chosen.items()}
        candidates = rounded(job, stages.statistics(job), single, final=False)
        plan = record_settled(name, job, candidates.stitch(chosen))
    record_settled("parallel AdaQuant alone", job, _in_parallel(case, job, candidates).stitch(chosen))
    rest(job, plan)
    recipe = Recipe(Pipeline.ADVANCED, bits=parse_bits("w4a4,w8a8"), compression=0.15, steps=case.steps)
    job = _equal(start(case.model, case.calibration, recipe).jobs[0])
    candidates = candidates_of(job)
    record_settled("IP", job, _assigned(job, candidates))
    plan = record_settled("parallel AdaQuant + IP", job, _assigned(job, _in_parallel(case, job, candidates)))
    rest(job, plan)


def parallel(cases: dict[str, Case], _folder: Path) -> None:
    """How many cores parallel AdaQuant keeps busy, on ranges that cost little to find."""
    from onnxcalib.pipeline.job import start
    from onnxcalib.pipeline.sweep import candidates_of

    for case in (cases["resnet20"], cases["mobilenet_v2"]):
        recipe = Recipe(Pipeline.ADVANCED, bits=parse_bits("w4a4"), ranges=RangeMethod.MINMAX, steps=case.steps)
        job = start(case.model, case.calibration, recipe).jobs[0]
        _in_parallel(case, job, candidates_of(job))


def _in_parallel(case: Case, job: Any, candidates: Any) -> Any:
    from onnxcalib.pipeline import stages

    began = time.process_time(), time.perf_counter()
    trained = stages.parallel_training(job, candidates)
    busy = (time.process_time() - began[0]) / (time.perf_counter() - began[1])
    print(f"{case.name:16} parallel AdaQuant kept {busy:.2f} of {os.cpu_count()} cores busy", flush=True)
    return trained


def _equal(job: Any) -> Any:
    from onnxcalib.pipeline import stages

    return stages.equalize(job, stages.equalization(job))


def _assigned(job: Any, candidates: Any) -> Any:
    from onnxcalib.pipeline import stages

    table = stages.sensitivities(job, candidates).table
    return candidates.stitch(stages.allocation(job, candidates, table).allocation.choices)


def advanced(case: Case, folder: Path) -> None:
    """The advanced pipeline at further precisions; on the small network also AdaRound, few samples, both engines."""
    start = Recipe(Pipeline.ADVANCED, steps=case.steps)
    recipes = {"w4a4": replace(start, bits=parse_bits("w4a4"), edge_bits=8)}
    size = MIXED_SIZES.get(case.name)
    if size is not None:
        recipes |= {bits: replace(start, bits=parse_bits(bits), edge_bits=8) for bits in ("8", "w4a8")}
        recipes[f"w4a4,w8a8 at {size}"] = replace(start, bits=parse_bits("w4a4,w8a8"), compression=size)
    else:
        recipes["w4a4 paper target"] = replace(recipes["w4a4"], target="paper")
        recipes["w4a4 paper's training"] = replace(recipes["w4a4"], training=TrainingOptions(Training.PAPER))
        recipes["w4a4 standard engine"] = replace(recipes["w4a4"], engine=Engine.STANDARD)
        for bits in ("w3a3", "w2a4"):
            recipes[bits] = replace(start, bits=parse_bits(bits), edge_bits=8)
            recipes[f"{bits} adaround"] = replace(recipes[bits], layer_optimizer=LayerOptimizer.ADAROUND)

    report(case, {"float": case.model})

    # Row by row: this takes hours, and what is printed is not lost.
    def measure(given: Case, label: str, recipe: Recipe) -> None:
        if case.wants(label):
            report(case, {label: quantized(given, folder, label, recipe)})

    for name, each in recipes.items():
        measure(case, f"advanced {name}", each)
    if size is not None:
        measure(replace(case, calibration=folder / "imagenet_1000.npz"), "advanced w4a4, 1000 images", recipes["w4a4"])
    else:
        images = np.load(case.calibration)["input"]
        for count in (64, 1):
            few = replace(case, calibration=folder / f"cifar_{count}.npz")
            np.savez(few.calibration, input=images[:count])
            rounded = Recipe(bits=parse_bits("w4a4"), edge_bits=8)
            measure(few, f"plain w4a4, {count} images", rounded)
            measure(few, f"advanced w4a4, {count} images", recipes["w4a4"])


def memory(cases: dict[str, Case], folder: Path) -> None:
    """Peak memory of two processes that differ only in the number of samples."""
    case = cases["mobilenet_v2"]
    images = np.load(case.calibration)["input"]
    np.savez(folder / "imagenet_2048.npz", input=np.concatenate([images] * 4))
    peaks = {}
    for samples, data in ((512, case.calibration), (2048, folder / "imagenet_2048.npz")):
        command = [sys.executable, __file__, "--peak", str(case.model), str(data)]
        peaks[samples] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak memory MB {peaks}, ratio {peaks[2048] / peaks[512]:.3f}")
    command = [sys.executable, __file__, "--peak", str(case.model), str(case.calibration), "advanced"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak memory MB, advanced, w4a4 and w8a8 mixed, 512 samples: {found}")


def peak(model: str, data: str, pipeline: str = "plain") -> None:
    """Prints this process's peak memory after a run; training steps are few, for they do not add to it."""
    recipe = Recipe()
    if pipeline == "advanced":
        recipe = Recipe(Pipeline.ADVANCED, bits=parse_bits("w4a4,w8a8"), compression=0.15, steps=10)
    onnxcalib.quantize(model, data, recipe)
    # getrusage would report the parent's peak where that is higher: it outlives exec, this does not.
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024)


def sensitivity(cases: dict[str, Case], _folder: Path) -> None:
    """What the sensitivity table costs."""
    from onnxcalib.pipeline.sweep import sensitivity as measure

    for case in (cases["mobilenet_v2"], cases["resnet20"]):
        found = measure(case.model, case.calibration, Recipe(LIGHT, parse_bits("w4a4,w8a8"), compression=1.0))
        each = found.float_passes / found.probes
        print(f"{case.name}: {found.probes} probes, {found.float_passes:.1f} float passes, {each:.3f} a probe")


def main() -> None:
    """Runs one part."""
    if sys.argv[1:2] == ["--peak"]:
        return peak(*sys.argv[2:5])
    parts = {"plain": plain, "memory": memory, "sensitivity": sensitivity, "step": step, "parallel": parallel}
    parts |= {"solver": solver}
    for name in ("resnet20", "resnet20_folded", "mobilenet_v2", "resnet50"):
        parts[f"light-{name}"] = lambda cases, folder, name=name: light(cases[name], folder)
    for name in ("resnet20", "mobilenet_v2", "resnet50"):
        parts[f"methods-{name}"] = lambda cases, folder, name=name: methods(cases[name], folder)
        parts[f"ablation-{name}"] = lambda cases, folder, name=name: ablation(cases[name], folder)
        parts[f"advanced-{name}"] = lambda cases, folder, name=name: advanced(cases[name], folder)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path)
    parser.add_argument("kind", metavar="part", choices=[*parts, "floor"])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / f"onnxcalib_benchmark_{os.getuid()}")
    parser.add_argument("--steps", type=int, help="Steps of training: ablation-*, advanced-*, parallel.")
    parser.add_argument("--row", action="append", default=[], help="Only rows with this text (light-*, advanced-*).")
    parser.add_argument("--part", action="append", choices=FLOOR, help="Only this part of floor; may be repeated.")
    parser.add_argument("--again", action="store_true", help="Measure parts of floor anew that are measured already.")
    given = parser.parse_args()
    if given.row and not given.kind.startswith(("advanced", "light")):
        parser.error(f"--row has no effect on {given.kind}")
    if given.steps is not None and not given.kind.startswith(("ablation", "advanced", "parallel")):
        parser.error(f"--steps has no effect on {given.kind}: nothing is trained there, or for a fixed time")
    if given.kind != "floor" and (given.part or given.again):
        parser.error(f"--part and --again have no effect on {given.kind}: they are of floor")
    given.work.mkdir(parents=True, exist_ok=True)
    if given.kind == "floor":
        sys.exit(floor(given.zoo, given.work, given.part or list(FLOOR), again=given.again))
    cases = prepare(given.zoo, given.work)
    asked = {"steps": given.steps, "rows": tuple(given.row)}
    return parts[given.kind]({name: replace(case, **asked) for name, case in cases.items()}, given.work)


if __name__ == "__main__":
    main()
