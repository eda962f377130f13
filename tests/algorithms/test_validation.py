"""Held-out samples judge in several forms where they are images, and as they are where they are not."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from jobs import plan_of
from tuning import job_for

from models import build, feed_for, normal, two_gemms
from onnxcalib.algorithms.reconstruction.end_to_end import NetworkTuned
from onnxcalib.algorithms.teacher import Teacher
from onnxcalib.algorithms.validation import FORMS, Validation
from onnxcalib.data import open_data
from onnxcalib.data.augmentation import augmented
from onnxcalib.model.shapes import input_specs
from onnxcalib.numerics.output_kind import LossKind
from onnxcalib.plan import QuantPlan


def _image_net() -> onnx.ModelProto:
    text = """net (float[N,3,16,16] x) => (float[N,5] y) {
        [conv] c = Conv <strides=[2,2]> (x, w)
        [relu] r = Relu (c)
        [flat] f = Flatten (r)
        [head] y = Gemm (f, v)
    }"""
    return build(text, w=normal(4, 3, 3, 3), v=normal(196, 5))


def with_coarse_head(plan: QuantPlan) -> QuantPlan:
    name = list(plan.layers)[-1]
    params = plan.layers[name]
    coarse = dataclasses.replace(params, quantized=np.zeros_like(params.quantized))
    return dataclasses.replace(plan, layers={**plan.layers, name: coarse})


@pytest.mark.parametrize("samples", [16, 11])
@pytest.mark.parametrize("images", [True, False])
def test_the_loss_is_the_mean_over_forms(images: bool, samples: int) -> None:
    """Also where the last batch is smaller than the others."""
    job = job_for(_image_net() if images else two_gemms())
    held_out = open_data(feed_for(job.model.proto, samples), input_specs(job.model.proto))
    quantized = job.simulate(plan_of(job))
    alone = [
        Teacher(job.model, augmented(held_out, form, 3), LossKind.DISTILLATION, 4.0).loss_of(quantized)
        for form in range(FORMS)
    ]
    assert (len(set(alone)) > 1) == images
    coarse = job.simulate(with_coarse_head(plan_of(job)))
    found = Validation(job.model, held_out, LossKind.DISTILLATION, 4.0, 3).compare(quantized, coarse)
    assert found.before == pytest.approx(np.mean(alone), rel=1e-9)
    assert found.after > found.before
    assert 0 < found.chance < found.after


def test_what_is_worse_by_less_than_chance_goes_is_kept() -> None:
    job = job_for(two_gemms())
    tuned = NetworkTuned(plan_of(job), before=1.0, after=1.05, doubt=0.1)
    assert tuned.kept
    assert not dataclasses.replace(tuned, doubt=0.01).kept
    assert not NetworkTuned(tuned.plan, 1.0, 1.0).kept, "where nothing changed"
