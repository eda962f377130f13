"""What the stages of a pipeline start from: a model, its layers, where quantizers go, and the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.algorithms.batchnorm import FloatStatistics
from onnxcalib.algorithms.constants import store
from onnxcalib.algorithms.float_rows import FloatRows
from onnxcalib.algorithms.sizes import with_measured_macs
from onnxcalib.algorithms.teacher import Loss, Teacher, check_loss
from onnxcalib.algorithms.tied import Tied, tied_layers
from onnxcalib.cache.codec import digest
from onnxcalib.cache.run_directory import RunDirectory
from onnxcalib.data import Dataset, Preprocess, open_data, shuffled, split
from onnxcalib.errors import ModelError, RecipeError
from onnxcalib.executors.workers import Workers
from onnxcalib.mixed_precision.request import check_bits, check_overrides, naming_layers
from onnxcalib.model.branches import Branch
from onnxcalib.model.float_nodes import FloatNode
from onnxcalib.model.large_constants import large_constants
from onnxcalib.model.layers import Layer, LayerList, Product, choose, takes
from onnxcalib.model.placement import InsertionPoints, find_insertion_points
from onnxcalib.model.prepare import Model
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.read import Graph, graphs_of, merged, read_prepared
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.metric import Metric, MetricFunction
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.pipeline.branch_data import BranchData
from onnxcalib.pipeline.dynamic import check_dynamic, dynamic_tensors
from onnxcalib.pipeline.products import chosen_products, told_float, without_products
from onnxcalib.plan import LeftFloat, QuantPlan, StoredConstant
from onnxcalib.progress import Listener, Progress, ignore, silent
from onnxcalib.recipe import MAX_BITS, Activations, Recipe
from onnxcalib.recipe.metrics import find_metric
from onnxcalib.recipe.overrides import Override, by_layer
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
    workers: Workers = field(default_factory=Workers)  # where independent jobs run
    constants: tuple[StoredConstant, ...] = ()  # what else will be stored as int8; the model has its values already
    run: Run = Run()  # where the values of stages are cached, and who hears of them
    overrides: Mapping[str, Override] = field(default_factory=dict)  # by layer
    metric: Metric | None = None  # what the user judges by, where the recipe asks for it
    products: tuple[Product, ...] = ()  # of attention, whose operands are quantized
    proof: Dataset | None = None  # labelled samples that no stage sees, to prove what was promised
    tied: Mapping[str, Tied] = field(default_factory=dict)  # by layer that shares a table
    float_statistics: FloatStatistics | None = None  # of channels, while several plans are tuned
    quick_teacher: Teacher | None = None  # on few held-out samples, while several plans are tuned
    float_rows: FloatRows | None = None  # what layers read in the float network, while several roundings share it

    @property
    def loss(self) -> Loss:
        """What tells a good model."""
        kind: LossKind = self.recipe.get("loss")
        if kind is not LossKind.METRIC:
            return kind
        assert self.metric is not None
        return self.metric

    @property
    def float_loss(self) -> LossKind:
        """What compares with the float model where labels are not to judge: for ranges, and for all that trains."""
        kind: LossKind = self.recipe.get("loss")
        return LossKind.DISTILLATION if kind in (LossKind.METRIC, LossKind.CROSS_ENTROPY) else kind

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
    asked: Recipe  # as the user gave it; those of jobs name layers where that has patterns
    data: Dataset  # in the order in which it was given
    constants: tuple[StoredConstant, ...] = ()  # of all its graphs


def start(
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe,
    preprocess: Preprocess | None = None,
    progress: Progress = silent,
    workers: Workers | None = None,
    metric: MetricFunction | None = None,
) -> Start:
    """Reads the model and the data, and finds what there is to quantize."""
    judge = _metric(recipe, metric)
    whole_target = find_target(recipe.target)
    target = whole_target.weight_only if recipe.weight_only else whole_target
    asked, blocks = check_bits(recipe, target), recipe.weights.block_size is not None
    prepared = read_prepared(model, target, {precision.weight for precision in asked}, blocks=blocks)
    graphs = graphs_of(prepared)
    listed = merged(graphs)
    if recipe.weight_only:
        listed = _fit_for_weights_alone(listed, target)
    if not listed.layers and _asks_for_no_layer(recipe):
        return _constants_alone(prepared, listed, target, calibration, preprocess, recipe, progress)
    layered, floats = without_products(recipe, listed)
    chosen, named = _chosen(listed, layered, prepared)
    _check_dynamic(listed, chosen, named, target)
    given = open_data(calibration, input_specs(prepared.proto), preprocess)
    graphs[0] = _measured(graphs[0], recipe, given)
    # Samples are often sorted by class: any part of them should be like the whole.
    data, proof = shuffled(given, recipe.seed), None
    if judge is not None:
        check_loss(judge, {}, prepared, data)
    if recipe.mixed_precision.max_drop is not None:
        data, proof = split(data, len(data) // 2)
    jobs: list[Job] = []
    whole, constants, multiplied = prepared, [], set[str]()
    own_workers = workers or Workers()
    left_out = {layer.name for layer in listed.layers} - chosen

    def wanted(name: str) -> bool:
        return name not in left_out and takes(recipe.include, recipe.exclude, name)

    for graph in graphs:
        layers = tuple(layer for layer in graph.listed.layers if layer.name in chosen)
        fed = _fed(prepared, graph, data) if layers else data
        if graph.branch is not None and not (layers and len(fed)):
            continue
        rounded, found = store(graph.model, layers, target, fed, wanted, recipe.highest.weight)
        constants += found
        whole = rounded if graph.branch is None else whole
        if layers and len(fed):
            own = by_layer(named.overrides, [layer.name for layer in layers])
            check_overrides(own, layers, target)
            products = chosen_products(graph.listed.products, target, wanted, floats, recipe.activations.mode)
            multiplied |= {product.name for product in products}
            points = insertion_points(graph.model, layers, target, own, products, recipe.activations.mode)
            job = Job(rounded, layers, points, target, fed, named, progress, graph.branch, own_workers, tuple(found))
            tied = _tied(job, own) if recipe.weight_only else {}
            jobs.append(replace(job, overrides=own, metric=judge, proof=proof, products=products, tied=tied))
    if not jobs:
        raise ModelError(
            f"the calibration data never takes the branches of {prepared.source} that hold its layers.",
            "Give data that does.",
        )
    listed = told_float(_without_untaken(listed, chosen, jobs), multiplied, target, recipe.activations.mode)
    return Start(whole, listed, tuple(jobs), recipe, given, tuple(constants))


def _tied(job: Job, overrides: Mapping[str, Override]) -> dict[str, Tied]:
    """Layers that take the codes of a table, but for those whose grid the user fixes."""
    grids = {name: replace(override, precision=None) for name, override in overrides.items()}
    free = [layer for layer in job.layers if grids.get(layer.name, Override()) == Override()]
    return tied_layers(job.model, free, job.constants)


def _measured(graph: Graph, recipe: Recipe, data: Dataset) -> Graph:
    """The graph with what its layers multiply on a sample, where the file does not tell and it may be a cost."""
    if len(recipe.bits) == 1 or all(layer.macs is not None for layer in graph.listed.layers):
        return graph
    return replace(graph, listed=with_measured_macs(graph.model, graph.listed, data))


def _asks_for_no_layer(recipe: Recipe) -> bool:
    """Whether nothing in a recipe would be without effect on a model that has no layers, but constants to store."""
    if len(recipe.bits) > 1 or recipe.highest.weight < MAX_BITS:
        return False
    return recipe == Recipe(bits=recipe.bits, target=recipe.target, ranges=recipe.ranges, seed=recipe.seed)


def _constants_alone(
    model: Model,
    listed: LayerList,
    target: Target,
    calibration: Any,
    preprocess: Preprocess | None,
    recipe: Recipe,
    progress: Progress,
) -> Start:
    """A model of recurrent cells, embeddings and the like: large constants are stored as integers."""
    given = open_data(calibration, input_specs(model.proto), preprocess)
    data = shuffled(given, recipe.seed)
    rounded, found = store(model, (), target, data, lambda _: True)
    if not found:
        raise no_layers(listed, model.source)
    job = Job(rounded, (), InsertionPoints({}), target, data, recipe, progress, constants=tuple(found))
    return Start(rounded, listed, (job,), recipe, given, tuple(found))


def no_layers(listed: LayerList, source: str, more: str = "") -> ModelError:
    """What to say of a model without layers."""
    kinds = sorted({f"{node.op} ({node.reason})" for node in listed.float_nodes})
    return ModelError(
        f"{source} has no layer that can be quantized.",
        (f"What stays float: {'; '.join(kinds)}." if kinds else "It has no Conv, Gemm or MatMul.") + more,
    )


def _metric(recipe: Recipe, own: MetricFunction | None) -> Metric | None:
    """What the user judges by; None where the recipe does not ask for it."""
    if recipe.mixed_precision.max_drop is None and recipe.loss is not LossKind.METRIC:
        if own is not None:
            raise RecipeError("a metric has no effect without `max_drop` or `loss='metric'`.", "Give one of them.")
        return None
    if own is not None and recipe.metric is not None:
        raise RecipeError(f"there are two metrics: {recipe.metric}, and a function.", "Give one of them.")
    return find_metric(own or recipe.get("metric"))


def insertion_points(
    model: Model,
    layers: Sequence[Layer],
    target: Target,
    overrides: Mapping[str, Override],
    products: Sequence[Product] = (),
    activations: Activations = Activations.STATIC,
) -> InsertionPoints:
    """Where quantizers go: not at what a layer reads whose weight alone is to be quantized."""
    alone = {name for name, each in overrides.items() if each.precision is not None and each.precision.weight_only}
    floats = {layer.input for layer in layers if layer.name in alone}
    dynamic = [name for name in dynamic_tensors(layers, overrides, activations, target) if name not in floats]
    static = [layer for layer in layers if layer.input not in dynamic]
    points = find_insertion_points(model, static, target, products)
    floats |= set(dynamic)
    kept = {
        name: tensor
        for name, tensor in points.tensors.items()
        if name not in floats and tensor.same_qparams_as not in floats
    }
    return InsertionPoints(kept, tuple(dynamic))


def _chosen(listed: LayerList, recipe: Recipe, model: Model) -> tuple[set[str], Recipe]:
    """The layers to quantize, of which there must be some, and the recipe with overrides that name layers."""
    source = model.source
    if not listed.layers:
        weighty = any(constant.is_weight for constant in large_constants(model.proto.graph))
        raise no_layers(listed, source, " The plain pipeline at eight bits can store its weights." if weighty else "")
    readers = {use.node.name for constant in large_constants(model.proto.graph) for use in constant.uses}
    others = {*readers, *(product.name for product in listed.products)}
    chosen = choose(listed, recipe.include, recipe.exclude, others)
    if recipe.weights.block_size is not None and not any(layer.has_sums for layer in chosen):
        raise RecipeError(f"`block_size` has no effect: {source} has no Gemm or MatMul to quantize.", "Leave it out.")
    named = naming_layers(recipe, chosen)
    found = by_layer(named.overrides, [layer.name for layer in chosen])
    kept = {layer.name for layer in chosen if layer.name not in found or not found[layer.name].is_float}
    if not kept:
        raise RecipeError("every layer is left float by `overrides`.", "Leave some to be quantized.")
    return kept, named


def _check_dynamic(listed: LayerList, chosen: set[str], named: Recipe, target: Target) -> None:
    layers = [layer for layer in listed.layers if layer.name in chosen]
    check_dynamic(layers, by_layer(named.overrides, [layer.name for layer in layers]), named.activations.mode, target)


def _fed(model: Model, graph: Graph, data: Dataset) -> Dataset:
    return data if graph.branch is None else BranchData(model, graph.branch, data)


def _fit_for_weights_alone(listed: LayerList, target: Target) -> LayerList:
    """Layers whose op the target does not take with a float input stay float, and say so."""
    reason = f"target {target.name} quantizes weights alone of {' and '.join(target.weight_only_ops)} only"
    others = [layer for layer in listed.layers if layer.op not in target.weight_only_ops]
    return kept_float(listed, others, reason)


def left_float(found: LayerList, left: LeftFloat) -> LayerList:
    """The list in which layers stay float that would break an output."""
    reason = f"eight bits of it break the output '{min(left.before, key=left.before.__getitem__)}'"
    return kept_float(found, [layer for layer in found.layers if layer.name in left.layers], reason)


def kept_float(listed: LayerList, layers: Sequence[Layer], reason: str) -> LayerList:
    """The list with these layers among what stays float, and why."""
    floats = tuple(FloatNode(layer.name, layer.op, reason) for layer in layers)
    kept = tuple(layer for layer in listed.layers if all(layer is not other for other in layers))
    return replace(listed, layers=kept, float_nodes=(*listed.float_nodes, *floats))


def _without_untaken(listed: LayerList, chosen: set[str], jobs: Sequence[Job]) -> LayerList:
    """Layers of branches that the data never takes stay float, and say so."""
    taken = {layer.name for job in jobs for layer in job.layers}
    untaken = [layer for layer in listed.layers if layer.name in chosen and layer.name not in taken]
    return kept_float(listed, untaken, "its branch is never taken on the calibration data")
