"""One precision for every layer, apart from the first and the last."""

from __future__ import annotations

from collections.abc import Sequence

from onnxcalib.model.layers import Layer
from onnxcalib.model.placement import Places
from onnxcalib.recipe import Precision


def fixed_precision(
    layers: Sequence[Layer], places: Places, precision: Precision, edge_bits: int | None
) -> dict[str, Precision]:
    """Every layer at the precision, the first and last at the edge bits where these are given."""
    chosen = dict.fromkeys((layer.name for layer in layers), precision)
    if edge_bits is not None:
        for layer in (layers[0], layers[-1]):
            chosen[layer.name] = precision.edge(edge_bits)
    return share_activation_bits(chosen, places)


def share_activation_bits(chosen: dict[str, Precision], places: Places) -> dict[str, Precision]:
    """Layers that read one tensor get the most bits that any of them asked for."""
    shared = dict(chosen)
    for tensor in places.tensors.values():
        bits = max((chosen[name].activation for name in tensor.layers), default=0)
        for name in tensor.layers:
            shared[name] = Precision(chosen[name].weight, bits)
    return shared
