"""The loss of one layer: its forward against a run of the layer with values moved onto grids, units, AdaRound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
import pytest
from single_layers import LAYERS, Single, channels, input_qparams, single, start_of

from models import Arrays
from onnxcalib.autodiff.gradients import Gradients, Loss
from onnxcalib.model import layer_loss as part
from onnxcalib.model.layer_loss import LayerLoss, layer_loss, starts, step_bounds
from onnxcalib.model.loss_writer import Quantizer, scale_of
from onnxcalib.numerics.quant_params import QuantParams, QuantScheme, fake_quantize, make_qparams
from onnxcalib.plan import LayerParams
from onnxcalib.recipe import Engine
from onnxcalib.targets import find_target

ORT, PAPER = replace(find_target("ort"), shifted_bits=()), find_target("paper")
TARGETS = {
    "symmetric": ORT,
    "asymmetric": PAPER,
    "symmetric_whole": replace(ORT, per_channel=False),
    "asymmetric_whole": replace(PAPER, per_channel=False),
    "unsigned_symmetric": replace(ORT, signed_weights=False),
    "signed_inputs": replace(ORT, signed_activations=True, symmetric_activations=True),
}


def quantizer(qparams: QuantParams, kind: QuantScheme, *, trained: bool) -> Quantizer:
    """A quantizer that starts at a grid."""
    low, high = qparams.range
    if kind.symmetric:
        return Quantizer(kind, qparams.axis, -high, high, trained)
    return Quantizer(kind, qparams.axis, low, high - low, trained)


def loss_for(
    case: Single, target: str = "symmetric", *, trained: bool = True, adaround: bool = False, reads: bool = True
) -> tuple[LayerLoss, LayerParams, QuantParams | None]:
    """The loss at w3a4, with the layer rounded to nearest and the grid of its input."""
    chosen = TARGETS[target]
    start, qparams = start_of(case, chosen, 3), input_qparams(case, chosen, 4) if reads else None
    weights = quantizer(start.qparams, chosen.weight_scheme(3), trained=trained and not adaround)
    inputs = quantizer(qparams, chosen.activation_scheme(4), trained=trained) if qparams is not None else None
    return LayerLoss(case.weight, weights, inputs, case.bias, {}, case.energy, adaround), start, qparams


def proto_of(case: Single, loss: LayerLoss) -> onnx.ModelProto:
    return layer_loss(case.model, case.layer, loss, case.shapes)


def feed_of(case: Single, chosen: slice = slice(None), **numbers: float) -> Arrays:
    feed = {case.layer.input: case.inputs[chosen], part.TARGET: case.targets[chosen]}
    return feed | {name: np.float32(value) for name, value in numbers.items()}


def value_of(case: Single, loss: LayerLoss, values: Mapping[str, np.ndarray] = {}, **numbers: float) -> float:
    return Loss(proto_of(case, loss)).run({**feed_of(case, **numbers), **starts(loss), **values})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_start_is_the_layer_rounded_to_nearest(name: str, target: str) -> None:
    case = single(name)
    loss, start, qparams = loss_for(case, target)
    by_hand = case.error(start, qparams, range(len(case.inputs)))
    assert by_hand > 1e-4
    assert value_of(case, loss) == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("target", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("name", ["conv_relu", "matmul_clip"])
def test_inputs_that_come_quantized_are_read_as_they_are(name: str, target: str) -> None:
    case = single(name)
    loss, start, _ = loss_for(case, target, reads=False)
    assert value_of(case, loss) == pytest.approx(case.error(start, None, range(len(case.inputs))), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("conv_relu", {"weight", "bias", "weight_range", "input_range", "input_low"}),
        ("matmul_bare", {"weight", "weight_range", "input_range", "input_low"}),
    ],
)
def test_what_is_trained(name: str, wanted: set[str]) -> None:
    case = single(name)
    loss = loss_for(case)[0]
    assert starts(loss).keys() == wanted
    assert starts(loss_for(case, "asymmetric")[0]).keys() == wanted | {"weight_low"}
    assert starts(loss_for(case, "signed_inputs")[0]).keys() == wanted - {"input_low"}
    assert starts(loss_for(case, trained=False)[0]).keys() == wanted & {"weight", "bias"}
    data = {case.layer.input, part.TARGET}
    assert {value.name for value in proto_of(case, loss).graph.input} == wanted | data


@pytest.mark.parametrize("target", ["symmetric", "asymmetric"])
def test_ranges_that_stay_give_the_same_loss(target: str) -> None:
    case = single("conv_relu")
    fixed = loss_for(case, target, trained=False)[0]
    assert value_of(case, fixed) == pytest.approx(value_of(case, loss_for(case, target)[0]), rel=1e-6)


def units_for(case: Single, loss: LayerLoss) -> dict[str, np.ndarray | float]:
    """A unit for everything: by channel for the weight, a number for others."""
    rng = np.random.default_rng(1)
    shape = [1] * case.weight.ndim
    shape[case.layer.channel_axis] = case.weight.shape[case.layer.channel_axis]
    units = {name: rng.uniform(0.1, 3, np.shape(value)).astype(np.float32) for name, value in starts(loss).items()}
    return units | {part.WEIGHT: rng.uniform(0.1, 3, shape).astype(np.float32), part.BIAS: 0.37}


@pytest.mark.parametrize("target", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("name", ["conv_relu", "depthwise_clip", "gemm_relu", "matmul_clip", "up_relu"])
def test_units_do_not_change_the_loss(name: str, target: str) -> None:
    case = single(name)
    plain = loss_for(case, target)[0]
    scaled = replace(plain, units=units_for(case, plain))
    assert value_of(case, scaled) == pytest.approx(value_of(case, plain), rel=1e-4)
    for each, value in starts(scaled).items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value * scaled.units[each], starts(plain)[each], rtol=1e-6)


@pytest.mark.parametrize("target", ["symmetric", "asymmetric"])
def test_other_parameters_in_units_give_the_forward_of_their_real_values(target: str) -> None:
    case = single("conv_relu")
    loss = loss_for(case, target)[0]
    scaled = replace(loss, units=units_for(case, loss))
    rng = np.random.default_rng(2)
    real = {
        name: (value * rng.uniform(0.8, 1.2, value.shape)).astype(np.float32) for name, value in starts(loss).items()
    }
    relative = {name: (value / scaled.units[name]).astype(np.float32) for name, value in real.items()}
    kinds = TARGETS[target].weight_scheme(3), TARGETS[target].activation_scheme(4)
    # On a grid of the trained range, as it will be written.
    weight = moved(real["weight"], real["weight_range"], real.get("weight_low"), kinds[0], loss.weights.axis)
    read = moved(case.inputs, real["input_range"], real.get("input_low"), kinds[1], None)
    gap = case.output(weight, real["bias"], read).astype(np.float64) - case.targets
    wanted = float(np.mean(gap**2)) / case.energy
    assert abs(wanted / value_of(case, loss) - 1) > 0.01
    assert value_of(case, loss, real) == pytest.approx(wanted, rel=1e-4)
    assert value_of(case, scaled, relative) == pytest.approx(wanted, rel=1e-4)


def moved(
    values: np.ndarray, range_: np.ndarray, low: np.ndarray | None, kind: QuantScheme, axis: int | None
) -> np.ndarray:
    low, high = (-range_, range_) if low is None else (low, low + range_)
    return fake_quantize(values, make_qparams(low, high, kind, axis))


def test_the_loss_is_relative_to_the_energy() -> None:
    case = single("conv_relu")
    loss = loss_for(case)[0]
    assert value_of(case, replace(loss, energy=4 * case.energy)) == pytest.approx(value_of(case, loss) / 4, rel=1e-6)
    assert np.isfinite(value_of(case, replace(loss, energy=0.0)))


@pytest.mark.parametrize("name", ["conv_relu", "gemm_turned", "matmul_clip"])
def test_batches_do_not_change_the_loss(name: str) -> None:
    case = single(name, 15)
    loss = loss_for(case)[0]
    session = Loss(proto_of(case, loss))
    whole = session.run({**feed_of(case), **starts(loss)})
    sizes, total, done = (1, 6, 2, 6), 0.0, 0
    for size in sizes:
        total += size * session.run({**feed_of(case, slice(done, done + size)), **starts(loss)})
        done += size
    assert done == 15
    assert total / done == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", ["conv_relu", "up_relu", "matmul_clip", "gemm_turned"])
def test_a_step_along_the_bias_lowers_the_loss_as_its_gradient_says(name: str) -> None:
    case = single(name)
    loss = loss_for(case, "asymmetric")[0]
    gradients, feed = Gradients(proto_of(case, loss), starts(loss), Engine.AUTO), feed_of(case)
    before = gradients.run(feed)
    assert before == pytest.approx(value_of(case, loss), rel=1e-5)
    # A lowest value that cuts nothing off has no say.
    assert all(value.any() for name, value in gradients.gradients.items() if name != part.WEIGHT_LOW)
    # No quantizer lies between the bias and the loss.
    slope = gradients.gradients["bias"].copy()
    gradients.parameters["bias"] -= np.float32(1e-2) * slope
    fall = before - gradients.run(feed)
    assert fall == pytest.approx(1e-2 * float(np.sum(slope**2)), rel=0.1)


# AdaRound.

FREE = {part.STRENGTH: 0.0, part.SHARPNESS: 2.0}


def decided(rounding: np.ndarray) -> np.ndarray:
    return np.where(rounding >= 0, np.float32(30), np.float32(-30))


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "signed_inputs"])
@pytest.mark.parametrize("name", ["conv_relu", "up_groups", "gemm_turned", "matmul_clip"])
def test_decided_roundings_are_hard_ones(name: str, target: str) -> None:
    case = single(name)
    loss, start, qparams = loss_for(case, target, adaround=True)
    assert "weight" not in starts(loss)
    nearest = decided(starts(loss)["rounding"])
    by_hand = case.error(start, qparams, range(len(case.inputs)))
    assert value_of(case, loss, {"rounding": nearest}, **FREE) == pytest.approx(by_hand, rel=1e-5)
    # The other neighbour of every third weight.
    other = nearest * np.where(np.arange(nearest.size).reshape(nearest.shape) % 3, 1, -1).astype(np.float32)
    scale, zero = (channels(value, start) for value in (start.qparams.scale, start.qparams.zero_point))
    quantized = np.clip(np.floor(case.weight / scale) + (other > 0) + zero, start.qparams.low, start.qparams.high)
    assert (quantized != start.quantized).mean() > 0.1
    by_hand = case.error(
        replace(start, quantized=quantized.astype(start.quantized.dtype)), qparams, range(len(case.inputs))
    )
    assert value_of(case, loss, {"rounding": other}, **FREE) == pytest.approx(by_hand, rel=1e-5)


def test_roundings_start_where_the_weight_is() -> None:
    case = single("conv_relu")
    loss, start, _ = loss_for(case, adaround=True)
    share = np.clip(1.2 / (1 + np.exp(-starts(loss)["rounding"].astype(np.float64))) - 0.1, 0, 1)
    steps = case.weight / start.qparams.scale.reshape(-1, 1, 1, 1)
    np.testing.assert_allclose(share, np.clip(steps - np.floor(steps), 0.01, 0.99), atol=1e-5)


def test_the_regulariser_is_zero_once_all_is_decided() -> None:
    case = single("conv_relu")
    loss = loss_for(case, adaround=True)[0]
    open_ones = starts(loss)["rounding"]
    for values, sharpness in ((open_ones, 2.0), (open_ones, 20.0), (np.zeros_like(open_ones), 2.0)):
        plain = value_of(case, loss, {"rounding": values}, strength=0.0, sharpness=sharpness)
        pushed = value_of(case, loss, {"rounding": values}, strength=0.5, sharpness=sharpness)
        share = np.clip(1.2 / (1 + np.exp(-values.astype(np.float64))) - 0.1, 0, 1)
        wanted = 0.5 * np.mean(1 - np.abs(2 * share - 1) ** sharpness)
        assert wanted > 0.1
        assert pushed - plain == pytest.approx(wanted, rel=1e-3)
    # One still open is enough for a push.
    done = decided(open_ones)
    free, pushed = (value_of(case, loss, {"rounding": done}, strength=s, sharpness=2.0) for s in (0.0, 0.5))
    assert pushed == free
    done.flat[3] = 0.0
    free, pushed = (value_of(case, loss, {"rounding": done}, strength=s, sharpness=2.0) for s in (0.0, 0.5))
    assert pushed - free == pytest.approx(0.5 / done.size, rel=1e-2)


@pytest.mark.parametrize("target", ["symmetric", "asymmetric", "unsigned_symmetric"])
def test_code_bounds_are_those_of_the_grid(target: str) -> None:
    case = single("conv_relu")
    loss, start, _ = loss_for(case, target)
    low, high = step_bounds(loss.weights, loss.weight.shape)
    np.testing.assert_array_equal(low.reshape(-1), start.qparams.low - start.qparams.zero_point)
    np.testing.assert_array_equal(high.reshape(-1), start.qparams.high - start.qparams.zero_point)
    np.testing.assert_allclose(scale_of(loss.weights), start.qparams.scale, rtol=1e-6)
