"""What the stages of a pipeline start from: a model, its layers, where quantizers go, and the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import onnx

from onnxcalib.data import Dataset, Preprocess, open_data
from onnxcalib.errors import ModelError, RecipeError
from onnxcalib.model.branches import Branch, branch_model, find_branches
from onnxcalib.model.io import opset_of, read_model
from onnxcalib.model.layers import FloatNode, Layer, LayerList, choose, find_layers
from onnxcalib.model.placement import Places, place
from onnxcalib.model.prepare import Model, prepare
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.shapes import input_specs
from onnxcalib.plan import QuantPlan
from onnxcalib.recipe import Recipe
from onnxcalib.runs.run import UNWATCHED, Run
from onnxcalib.stages.branch_data import BranchData
from onnxcalib.stages.calibrate import Progress
from onnxcalib.stages.layerwise import default_workers
from onnxcalib.stages.memo import Memo
from onnxcalib.stages.wishes import check_bits
from onnxcalib.targets import Target, find_target

Value = TypeVar("Value")


@dataclass(frozen=True)
class Job:
    """One graph to quantize."""

    model: Model
    layers: tuple[Layer, ...]
    places: Places
    target: Target
    data: Dataset
    recipe: Recipe
    progress: Progress
    branch: Branch | None = None  # the branch of an If that the graph is, None for the model itself
    workers: int = 1  # layers that are trained side by side
    run: Run = UNWATCHED  # where the values of stages are kept, and who hears of them

    def kept(self, stage: str, inputs: tuple[Any, ...], compute: Callable[[Memo], Value]) -> Value:
        """The value of a stage, from the run directory if it is there."""
        return self.run.kept(stage, self.recipe, inputs, compute)

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


def silent(_stage: str, _done: int, _total: int) -> None:
    """Progress that nobody watches."""


def read_prepared(
    model: str | Path | onnx.ModelProto, target: Target, weight_bits: Collection[int] = (), *, blocks: bool = False
) -> Model:
    """The model as stages see it, at an opset that the target reads and weights of these widths can have."""
    source = "the given model" if isinstance(model, onnx.ModelProto) else str(model)
    opsets = (target.least_opset(set(weight_bits), blocks=blocks), target.newest_opset)
    prepared = prepare(read_model(model), source, *opsets, target.newest_ir)
    if opset_of(prepared.proto) > target.opset_limit:
        raise ModelError(
            f"{source} needs opset {opset_of(prepared.proto)}, and target {target.name} reads {target.opset_limit} at "
            "most.",
            f"Export it with opset {target.newest_opset} or older.",
        )
    return prepared


def list_layers(model: Model) -> LayerList:
    """The layers of the model and of the branches of its Ifs."""
    return _merged(_graphs(model))


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
    asked = check_bits(recipe, target)
    blocks = recipe.block_size is not None
    prepared = read_prepared(model, target, {precision.weight for precision in asked}, blocks=blocks)
    graphs = _graphs(prepared)
    listed = _merged(graphs)
    if recipe.weight_only:
        listed = _fit_for_weights_alone(listed, target)
    if not listed.layers:
        kinds = sorted({f"{node.op} ({node.reason})" for node in listed.float_nodes})
        raise ModelError(
            f"{prepared.source} has no layer that can be quantized.",
            f"What stays float: {'; '.join(kinds)}." if kinds else "It has no Conv, Gemm or MatMul.",
        )
    chosen = {layer.name for layer in choose(listed, recipe.include, recipe.exclude)}
    if blocks and not any(layer.has_sums for layer in listed.layers if layer.name in chosen):
        raise RecipeError(
            f"--block-size has no effect: {prepared.source} has no Gemm or MatMul to quantize.", "Leave it out."
        )
    data = open_data(calibration, input_specs(prepared.proto), preprocess)
    jobs = []
    for graph in graphs:
        layers = tuple(layer for layer in graph.listed.layers if layer.name in chosen)
        fed = data if graph.branch is None else BranchData(prepared, graph.branch, data)
        if layers and len(fed):
            places = place(graph.model, layers, target)
            jobs.append(
                Job(
                    graph.model,
                    layers,
                    places,
                    target,
                    fed,
                    recipe,
                    progress,
                    graph.branch,
                    workers or default_workers(),
                )
            )
    if not jobs:
        raise ModelError(
            f"the calibration data never takes the branches of {prepared.source} that hold its layers.",
            "Give data that does.",
        )
    return Start(prepared, _without_untaken(listed, chosen, jobs), tuple(jobs))


@dataclass(frozen=True)
class _Graph:
    model: Model
    listed: LayerList
    branch: Branch | None


def _graphs(model: Model) -> list[_Graph]:
    graphs = [_Graph(model, find_layers(model), None)]
    for branch in find_branches(model.proto):
        # The model's own opset was raised already; its branches go along with it.
        inner = prepare(branch_model(model.proto, branch), f"{model.source} ({branch.node}, {branch.attribute})")
        graphs.append(_Graph(inner, find_layers(inner), branch))
    return graphs


def _merged(graphs: Sequence[_Graph]) -> LayerList:
    opened = {graph.branch.node for graph in graphs if graph.branch is not None}
    floats = [node for node in graphs[0].listed.float_nodes if node.inside not in opened]
    inner = [graph.listed for graph in graphs[1:]]
    return LayerList(
        (*graphs[0].listed.layers, *(layer for listed in inner for layer in listed.layers)),
        (*floats, *(node for listed in inner for node in listed.float_nodes)),
    )


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
