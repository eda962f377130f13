"""Which channels are scaled before products of matrices: by held-out samples, and never for the worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxcalib.algorithms.calibration import calibrate
from onnxcalib.algorithms.rounding import Ranges, Rounding
from onnxcalib.algorithms.smoothing import SAMPLES, Judge, sound_sites, watch
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.data import Dataset, first, train_validation_split, why_not_parted
from onnxcalib.mixed_precision.request import candidate_precisions, quantized_only, uniform_precisions
from onnxcalib.model.layers import find_layers
from onnxcalib.model.smoothing import IntArray, Site, SiteKind, find_sites, smoothed
from onnxcalib.numerics.losses import TEMPERATURE
from onnxcalib.pipeline.job import Job
from onnxcalib.recipe import MAX_BITS, Precision, RangeMethod

HELD_OUT = 32


def find_smoothing(job: Job) -> dict[str, IntArray]:
    """The exponents by site; of all kinds of sites, or of the kind alone that loses least, or of none."""
    data, held_out = train_validation_split(job.data)
    sites = sound_sites(job.model, _sites(job), data)
    if not sites:
        return {}
    trials = _Trials(job, first(data, SAMPLES), first(held_out, HELD_OUT))
    seen = watch(job.model, sites, data, job.progress)
    judge = Judge(job.model, job.target, trials.precisions, job.recipe.weights.block_size)
    found = {
        site.name: best
        for site in sites
        if site.name in seen and (best := judge.best(site, seen[site.name])) is not None
    }
    return trials.least(found, {site.name: site.kind for site in sites}) if found else {}


def can_be_smoothed(job: Job) -> bool:
    """Whether there is a site, and samples to judge by; a branch of an If keeps no metadata that could tell of it."""
    return job.branch is None and why_not_parted(job.data) is None and bool(_sites(job))


def _sites(job: Job) -> list[Site]:
    """Those that touch nothing that is stored as integers beside layers."""
    stored = {constant.name for constant in job.constants}
    stored |= {layer.weight for layer in job.layers if layer.name in job.tied}
    return [site for site in find_sites(job.model, job.layers) if stored.isdisjoint(_touched(site))]


def _touched(site: Site) -> set[str]:
    return {*site.made_by, *(layer.weight for layer in site.readers)}


def lowest(job: Job) -> dict[str, Precision]:
    """Every layer at the lowest precision on offer, where outliers do the most harm."""
    if len(job.recipe.bits) == 1:
        return uniform_precisions(job.layers, job.points, job.recipe)
    choices = quantized_only(candidate_precisions(job.layers, job.recipe))
    return {name: each[0] if len(each) == 1 else min(job.recipe.quantized) for name, each in choices.items()}


class _Trials:
    """The held-out losses of the model rounded to nearest, with channels scaled or not."""

    def __init__(self, job: Job, data: Dataset, held_out: Dataset) -> None:
        self.job, self.data = job, data
        self.precisions = lowest(job)
        self.teacher = Teacher(job.model, held_out, job.float_loss, TEMPERATURE)

    def least(self, found: Mapping[str, IntArray], kinds: Mapping[str, SiteKind]) -> dict[str, IntArray]:
        """All of it if that is better than none; else the best of one kind alone, if that is."""
        without, every = self.loss({}), self.loss(found)
        if every < without:
            return dict(found)
        parts = [{name: each for name, each in found.items() if kinds[name] is kind} for kind in SiteKind]
        losses = [self.loss(part) if part and len(part) < len(found) else without for part in parts]
        best = losses.index(min(losses))
        return dict(parts[best]) if losses[best] < without else {}

    def loss(self, smoothing: Mapping[str, IntArray]) -> float:
        """Ranges by the least squared error, or as the recipe has them."""
        job = with_smoothing(self.job, smoothing)
        asked = job.recipe.ranges
        method = RangeMethod.MSE if asked is RangeMethod.AUTO else asked
        statistics = calibrate(job.model, job.points, self.data, job.progress)
        rounding = Rounding(job.model, job.layers, job.points, statistics, job.target, job.overrides)
        widths = {MAX_BITS} | {precision.activation for precision in self.precisions.values()}
        ranges = Ranges(dict.fromkeys(widths, method), method, job.recipe.weights.block_size)
        candidates = rounding.to_nearest({name: (each,) for name, each in self.precisions.items()}, ranges)
        return self.teacher.loss_of(job.simulate(candidates.stitch(self.precisions)))


def with_smoothing(job: Job, smoothing: Mapping[str, IntArray]) -> Job:
    """The job on the model with scaled channels."""
    model = smoothed(job.model, smoothing)
    names = {layer.name for layer in job.layers}
    layers = tuple(layer for layer in find_layers(model).layers if layer.name in names)
    return replace(job, model=model, layers=layers)
