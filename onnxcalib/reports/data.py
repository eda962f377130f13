"""The numbers of a report, as JSON holds them: what was asked, what came out, and what every layer does to it."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxcalib.analysis.evaluate import Evaluation
from onnxcalib.analysis.histograms import LayerHistograms, RangeHistogram
from onnxcalib.analysis.layer_rows import ReportData, finite
from onnxcalib.data import Dataset
from onnxcalib.mixed_precision.allocate import proof
from onnxcalib.mixed_precision.curve import curve, ratios_between
from onnxcalib.mixed_precision.request import Request, naming_layers
from onnxcalib.mixed_precision.table_files import as_dict
from onnxcalib.model.io import file_bytes, load
from onnxcalib.model.quantized import bytes_by_kind
from onnxcalib.pipeline.result import AccuracyBudget, Result
from onnxcalib.recipe import Recipe, write_recipe
from onnxcalib.runtime.installed import find_runtime, version_of

FORMAT = "onnxcalib report 1"
PACKAGES = ("onnx", "numpy", "onnx-graphsurgeon", "highspy", "matplotlib")
POINTS = 24


def float_rows(result: Result) -> list[ReportData]:
    """What stays float, and why; layers that were left out at the user's wish too."""
    left_out = [layer for layer in result.layers.layers if layer.name not in result.plan.layers]
    return [
        *({"node": node.name, "op": node.op, "reason": node.reason} for node in result.layers.float_nodes),
        *({"node": each.name, "op": each.op, "reason": "left out by --exclude or --include"} for each in left_out),
        *_float_inputs(result),
    ]


def _float_inputs(result: Result) -> list[ReportData]:
    """Tensors that would break an output, by the layers that read them, or by their own names where none does."""
    left = result.left
    if not left:
        return []
    name, before = min(left.before.items(), key=lambda item: item[1])
    why = f"eight bits of it break the output '{name}' ({before:.1f} dB; {left.after[name]:.1f} dB as it is)"
    layers = [layer for layer in result.layers.layers if layer.name in left.inputs]
    read = {layer.input for layer in layers}
    return [
        *({"node": each.name, "op": each.op, "reason": f"its input is float: {why}"} for each in layers),
        *({"node": each, "op": "tensor", "reason": why} for each in left.tensors if each not in read),
    ]


def constant_rows(result: Result) -> list[ReportData]:
    """Constants beside layers that lie in the file as integers."""
    return [it.told for it in result.plan.constants.values()]


def outcome(rows: Sequence[Evaluation], source: str, own: bool, budget: AccuracyBudget | None = None) -> ReportData:
    """Float and quantized, measured on the same samples; own: those that calibrated the model."""
    before, after = (evaluation(row) for row in rows)
    for each in (before, after):  # relative to the time that is shown beside it
        each["latency_ratio"] = each["latency_ms"] / before["latency_ms"]
    proven = None if budget is None else _proven(budget)
    return {"data": source, "calibrated_on_it": own, "float": before, "quantized": after, "budget": proven}


def _proven(budget: AccuracyBudget) -> ReportData:
    """What an accuracy budget came to on samples held out."""
    drop = budget.proof
    found = {"metric": budget.metric, "most": budget.most, "drop": drop.value, "before": drop.before}
    return {**found, "after": drop.after, "samples": drop.samples, "chance": drop.chance_above(budget.most)}


def evaluation(row: Evaluation) -> ReportData:
    """JSON has no infinity."""
    return {key: finite(value) for key, value in dataclasses.asdict(row).items()}


def stage_rows(result: Result) -> list[ReportData]:
    """Held-out losses before and after each step of tuning and training."""
    steps = (
        ("activation ranges", result.ranges),
        ("second-order rounding", result.rounding),
        ("batch-norm tuning", result.tuned),
        (f"sequential {result.recipe.get('layer_optimizer')}", result.trained),
        ("end-to-end AdaQuant", result.end_to_end),
        ("bias tuning", result.biases),
    )
    return [
        {"stage": name, "before": step.before, "after": step.after, "kept": _is_kept(step)}
        for name, step in steps
        if step is not None
    ]


def _is_kept(step: Any) -> bool:
    """Whether a step is; end-to-end training also where it is worse by no more than chance."""
    return bool(getattr(step, "kept", step.after < step.before))


def mixed_precision_data(result: Result) -> ReportData:
    """The sensitivity table, the compression-loss curve, and the point that was chosen."""
    if result.table is None or result.assigned is None:
        return {"sensitivity": None, "curve": [], "chosen": None}
    table, found = result.table, result.assigned
    quantized = [layer for layer in result.layers.layers if layer.name in result.plan.layers]
    overrides = Request.of(table, naming_layers(result.recipe, quantized)).overrides
    points = [
        {
            "ratio": point.ratio,
            "method": point.method,
            "size": point.size,
            "loss": point.estimated_loss,
            "bits": {name: str(precision) for name, precision in point.allocation.choices.items()},
        }
        for point in curve(table, ratios_between(table, POINTS, overrides), overrides)
    ]
    chosen = {
        "size": found.allocation.costs["size"] / table.float_costs["size"],
        "estimated_loss": found.estimated_loss,
        "measured_loss": found.measured_loss,
        "proof": proof(found.allocation.optimal, found.allocation.gap),
        "gap": found.allocation.gap,
        "method": found.allocation.method,
    }
    return {"sensitivity": as_dict(table), "curve": points, "chosen": chosen}


def histogram_rows(found: Sequence[LayerHistograms]) -> list[ReportData]:
    """Histograms as lists."""

    def plain(histogram: RangeHistogram | None) -> ReportData | None:
        if histogram is None:
            return None
        return {**dataclasses.asdict(histogram), "counts": histogram.counts.tolist(), "clipped": histogram.clipped}

    return [{"layer": each.layer, "weight": plain(each.weight), "input": plain(each.input)} for each in found]


def byte_rows(path: Path) -> ReportData:
    """Bytes of the file by kind; the graph is what is left: nodes, names, subgraphs."""
    kinds = bytes_by_kind(load(path))
    return {**kinds, "graph": file_bytes(path) - sum(kinds.values())}


def asked(recipe: Recipe) -> str:
    """What a person asked for, in a line."""
    told, default, chosen = ("pipeline", "bits", "target"), Recipe().options(), []
    for name, value in recipe.options().items():
        if name in told or value != default[name]:
            words = " and ".join(map(str, value)) if isinstance(value, tuple) else value
            chosen.append(f"{name.replace('_', ' ')} {words}")
    return ", ".join(chosen)


def repeat(recipe: Recipe, model: Path, output: Path, calibration: Dataset, shown: str) -> ReportData:
    """All that another person needs to make the same file."""
    from onnxcalib import __version__

    runtime = find_runtime()
    words = ["onnxcalib", "quantize", shown, "-c", calibration.source, "--recipe", "recipe.toml", "-o", output.name]
    return {
        "recipe": write_recipe(recipe),
        "command": shlex.join(words),
        "versions": {
            "onnxcalib": __version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            next(iter(runtime.packages), "onnxruntime"): runtime.version,
            **{name: version_of(name) for name in PACKAGES},
        },
        "sha256": {"model": sha256(model), "calibration": data_hash(calibration), "output": sha256(output)},
        "model": model.name,
        "calibration": calibration.source,
        "samples": len(calibration),
        "output": output.name,
    }


def sha256(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_hash(data: Dataset) -> str:
    """The hash of the samples as the model gets them, whatever kind of file they lie in."""
    digest = hashlib.sha256()
    for feed in data.batches(1):
        for name, value in sorted(feed.items()):
            digest.update(f"{name} {value.dtype} {value.shape} ".encode())
            digest.update(value.tobytes())
    return digest.hexdigest()
