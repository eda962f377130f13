"""The training loss of models of tokens: at every position that counts, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from jobs import job_on, plan_of
from text_models import embedding_model, padded_feed, token_model

from models import Arrays, run
from onnxcalib.autodiff.gradients import Gradients, Loss
from onnxcalib.data.padding import positions_that_count
from onnxcalib.model.model_loss import Parameter, bias_name, distillation_loss, model_reference
from onnxcalib.model.outputs import find_output_kinds
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.output_kind import LossKind, kinds_that_count
from onnxcalib.recipe import Engine
from onnxcalib.targets import Storage

HINT = "r"


class Case:
    """A quantized model of tokens, and its loss with the bias of its first layer as a parameter."""

    def __init__(self, model: onnx.ModelProto, kind: LossKind, *, hinted: bool = False) -> None:
        self.feed, self.hints = padded_feed(), [HINT] if hinted else []
        self.job = job_on(model, self.feed, "w4a4", "ort")
        plan = plan_of(self.job)
        written = replace(self.job, target=replace(self.job.target.in_place, storage=Storage.INT8)).write(plan)
        self.kinds = kinds_that_count(find_output_kinds(self.job.model.proto), kind)
        shown = list(dict.fromkeys([*self.kinds, *self.hints]))
        self.exact = run(with_outputs(self.job.model.proto, shown), self.feed)
        self.made = run(with_outputs(written, shown), self.feed)
        self.layer = next(layer for layer in self.job.layers if layer.bias is not None)
        self.bias = plan.layers[self.layer.name].bias
        parameters = {bias_name(self.layer): Parameter(self.bias, np.float32(1))}
        padded = [name for name, value in self.exact.items() if value.ndim == 3]
        self.proto = distillation_loss(
            written, self.job.layers, plan, parameters, self.kinds, self.exact, self.hints, padded
        )
        self.reference = model_reference(self.exact, self.kinds, padded, positions_that_count(self.feed))

    def fed(self, **more: np.ndarray) -> Arrays:
        return {**self.feed, **self.reference, bias_name(self.layer): self.bias, **more}


def log_softmax(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float64)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def test_cross_entropy_of_tokens_at_positions_that_count() -> None:
    case = Case(token_model(), LossKind.DISTILLATION)
    wanted, found = (log_softmax(each["y"])[case.feed["mask"] == 1] for each in (case.exact, case.made))
    expected = -(np.exp(wanted) * found).sum(axis=-1).mean()
    assert Loss(case.proto).run(case.fed()) == pytest.approx(expected, rel=1e-4)


def test_cosine_distance_of_embeddings() -> None:
    case = Case(embedding_model(), LossKind.DISTILLATION)
    wanted, found = case.exact["y"], case.made["y"]
    cosines = (wanted * found).sum(1) / np.linalg.norm(wanted, axis=1) / np.linalg.norm(found, axis=1)
    assert Loss(case.proto).run(case.fed()) == pytest.approx(1 - cosines.mean(), rel=1e-3)


def test_squared_error_of_positions_that_count() -> None:
    case = Case(token_model(), LossKind.MSE)
    errors = np.square(case.exact["y"] - case.made["y"])[case.feed["mask"] == 1]
    expected = errors.mean() / np.square(case.exact["y"]).mean()
    assert Loss(case.proto).run(case.fed()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("engine", [Engine.AUTO, Engine.STANDARD])
@pytest.mark.parametrize("kind", [LossKind.DISTILLATION, LossKind.MSE, LossKind.COSINE])
@pytest.mark.parametrize("build", [token_model, embedding_model])
def test_padding_moves_no_parameter(build: object, kind: LossKind, engine: Engine) -> None:
    """Other ids at padding change neither the loss nor its gradient, but those at positions that count do."""
    case = Case(build(), kind)  # type: ignore[operator]
    gradients = Gradients(case.proto, {bias_name(case.layer): case.bias}, engine)
    mask = case.feed["mask"] == 1
    other = {"padding": np.where(mask, case.feed["ids"], 5), "words": np.where(mask, 5, case.feed["ids"])}
    losses, slopes = {}, {}
    for name, ids in {"none": case.feed["ids"], **other}.items():
        losses[name] = gradients.run({name: value for name, value in case.fed(ids=ids).items() if ":bias" not in name})
        slopes[name] = gradients.gradients[bias_name(case.layer)].copy()
    np.testing.assert_allclose(slopes["padding"], slopes["none"], rtol=1e-4, atol=1e-6)
    assert not np.allclose(slopes["words"], slopes["none"], rtol=1e-2)
    assert np.abs(slopes["none"]).max() > 1e-4
