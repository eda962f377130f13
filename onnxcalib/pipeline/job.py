"""What the stages of a pipeline start from: a model, its layers, where quantizers go, and the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.cache.codec import digest
from onnxcalib.cache.run_directory import RunDirectory
from onnxcalib.data import Dataset, Preprocess, open_data, shuffled
from onnxcalib.errors import ModelError, RecipeError
from onnxcalib.mixed_precision.request import check_bits
from onnxcalib.model.branches import Branch
from onnxcalib.model.layers import FloatNode, Layer, LayerList, choose
from onnxcalib.model.placement import InsertionPoints, find_insertion_points
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.read import Graph, graphs_of, merged, read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.pipeline.branch_data import BranchData
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import Listener, Progress, ignore, silent
from onnxcalib.recipe import Recipe
from onnxcalib.runtime.threads import default_workers
from onnxcalib.targets import Target, find_target


@dataclass(frozen=True)
class Run:
    """Who hears of the stages of one graph, and where their values are cached; without a directory, nowhere."""

    listener: Listener = ignore
    directory: RunDirectory | None = None
    origin: Callable[[], str] = str  # names the model, the data, the target and the software

    def changed_by(self, value: Any) -> Run:
        """The run of a model that was changed by what a stage found."""
        return replace(self, origin=lambda: digest(self.origin(), value))


@dataclass(frozen=True)
class Job:
    """One graph to quantize."""

    model: Model
    layers: tuple[Layer, ...]
    points: InsertionPoints
    target: Target
    data: Dataset
    recipe: Recipe
    progress: Progress
    branch: Branch | None = None  # the branch of an If that the graph is, None for the model itself
    workers: int = 1  # layers that are trained side by side
    run: Run = Run()  # where the values of stages are cached, and who hears of them

    def write(self, plan: QuantPlan) -> onnx.ModelProto:
        """The quantized graph of a plan, as the target wants it."""
        return write_qdq(self.model, self.layers, plan, self.target)

    def simulate(self, plan: QuantPlan) -> onnx.ModelProto:
        """The same graph in a form that onnxruntime computes to the last bit."""
        return write_qdq(self.model, self.layers, plan, self.target.simulated)


@dataclass(frozen=True)
class Start:
    """A model with its jobs: one for its own graph, if that has layers, and one for each branch of an If."""

    model: Model
    listed: LayerList
    jobs: tuple[Job, ...]
    data: Dataset  # in the order in which it was given


def start(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
    workers: int | None = None,
) -> Start:
    """Reads the model and the data, and finds what there is to quantize."""
    target = find_target(recipe.target)
    if recipe.weight_only:
        target = target.weight_only
    asked, blocks = check_bits(recipe, target), recipe.block_size is not None
    prepared = read_prepared(model, target, {precision.weight for precision in asked}, blocks=blocks)
    graphs = graphs_of(prepared)
    listed = merged(graphs)
    if recipe.weight_only:
        listed = _fit_for_weights_alone(listed, target)
    chosen = _chosen(listed, recipe, prepared.source)
    given = open_data(calibration, input_specs(prepared.proto), preprocess)
    # Samples are often sorted by class: any part of them should be like the whole.
    data = shuffled(given, recipe.seed)
    jobs = []
    for graph in graphs:
        layers = tuple(layer for layer in graph.listed.layers if layer.name in chosen)
        fed = _fed(prepared, graph, data) if layers else data
        if layers and len(fed):
            points = find_insertion_points(graph.model, layers, target)
            many = workers or default_workers()
            jobs.append(Job(graph.model, layers, points, target, fed, recipe, progress, graph.branch, many))
    if not jobs:
        raise ModelError(
            f"the calibration data never takes the branches of {prepared.source} that hold its layers.",
            "Give data that does.",
        )
    return Start(prepared, _without_untaken(listed, chosen, jobs), tuple(jobs), given)


def _chosen(listed: LayerList, recipe: Recipe, source: str) -> set[str]:
    """The layers to quantize, of which there must be some."""
    if not listed.layers:
        kinds = sorted({f"{node.op} ({node.reason})" for node in listed.float_nodes})
        raise ModelError(
            f"{source} has no layer that can be quantized.",
            f"What stays float: {'; '.join(kinds)}." if kinds else "It has no Conv, Gemm or MatMul.",
        )
    chosen = choose(listed, recipe.include, recipe.exclude)
    if recipe.block_size is not None and not any(layer.has_sums for layer in chosen):
        raise RecipeError(f"--block-size has no effect: {source} has no Gemm or MatMul to quantize.", "Leave it out.")
    return {layer.name for layer in chosen}


def _fed(model: Model, graph: Graph, data: Dataset) -> Dataset:
    return data if graph.branch is None else BranchData(model, graph.branch, data)


def _fit_for_weights_alone(listed: LayerList, target: Target) -> LayerList:
    """Layers whose op the target does not take with a float input stay float, and say so."""
    reason = f"target {target.name} quantizes weights alone of {' and '.join(target.weight_only_ops)} only"
    others = [layer for layer in listed.layers if layer.op not in target.weight_only_ops]
    return _left_float(listed, others, reason)


def _left_float(listed: LayerList, layers: Sequence[Layer], reason: str) -> LayerList:
    floats = tuple(FloatNode(layer.name, layer.op, reason) for layer in layers)
    kept = tuple(layer for layer in listed.layers if all(layer is not other for other in layers))
    return replace(listed, layers=kept, float_nodes=(*listed.float_nodes, *floats))


def _without_untaken(listed: LayerList, chosen: set[str], jobs: Sequence[Job]) -> LayerList:
    """Layers of branches that the data never takes stay float, and say so."""
    taken = {layer.name for job in jobs for layer in job.layers}
    untaken = [layer for layer in listed.layers if layer.name in chosen and layer.name not in taken]
    return _left_float(listed, untaken, "its branch is never taken on the calibration data")
