"""Second-order rounding of every layer at every precision, before bits are assigned.

All layers read what the float network gives them, on the grid of each width: candidates of one layer fit to those of
any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxcalib.algorithms.drawn_rows import Reads
from onnxcalib.algorithms.float_rows import FloatRows
from onnxcalib.algorithms.layer_matrix import LayerMatrix
from onnxcalib.algorithms.second_order import RoundedLayer, Rounder
from onnxcalib.model.graph import GraphIndex
from onnxcalib.numerics.moments import Moments
from onnxcalib.numerics.quant_params import fake_quantize
from onnxcalib.plan import Candidates, QuantPlan
from onnxcalib.recipe import Precision

Key = tuple[str, Precision]  # a layer at a precision


@dataclass(frozen=True)
class CandidateRounder:
    """Rounds candidates by what a rounder has."""

    rounder: Rounder

    def round(self, candidates: Candidates) -> Candidates:
        """The same grids' kinds and bits; a layer that cannot be rounded so keeps what it has."""
        layers, checkpoint = self.rounder.layers, self.rounder.checkpoint
        keys = [(layer.name, precision) for layer in layers for precision in candidates.layers[layer.name]]
        cached: list[RoundedLayer | None] = checkpoint.found([(name, str(precision)) for name, precision in keys])
        found = {key: each for key, each in zip(keys, cached, strict=True) if each is not None}
        tied = [(name, it) for name, it in keys if candidates.layers[name][it].table is not None]
        found |= dict.fromkeys(tied, RoundedLayer(None))
        index = GraphIndex(self.rounder.model.proto.graph)
        with self.rounder.folder() as folder:
            floats = FloatRows(self.rounder.model, layers, self.rounder.data, folder)
            for tensor in dict.fromkeys(layer.input for layer in layers):
                matrices = [LayerMatrix.of(layer, index) for layer in layers if layer.input == tensor]
                todo = [(it, key) for it in matrices for key in keys if key[0] == it.layer.name and key not in found]
                moments = _moments(floats, candidates, tensor, todo)
                for matrix, key in todo:
                    name, precision = key
                    plan = _reading(candidates, tensor, precision.activation)
                    plan = replace(plan, layers={name: candidates.layers[name][precision]})
                    read = moments.get((matrix.reads, precision.activation))
                    found[key] = self.rounder.rounded(index, matrix, read, plan, 0.0)
                    checkpoint.put((name, str(precision)), found[key])
                    self.rounder.progress("second-order candidates", len(found), len(keys))
        chosen = {
            name: {precision: found[name, precision].params or start for precision, start in choices.items()}
            for name, choices in candidates.layers.items()
        }
        return replace(candidates, layers=chosen)


def _reading(candidates: Candidates, tensor: str, width: int) -> QuantPlan:
    """The grids on which layers read a tensor at so many bits; one that is found at run time moves with the values."""
    grids = candidates.inputs.get(tensor, {})
    inputs = {tensor: grids[width]} if width in grids else {}
    return QuantPlan(candidates.target, candidates.ranges, {}, {}, candidates.shared, inputs)


def _moments(
    floats: FloatRows, candidates: Candidates, tensor: str, todo: Sequence[tuple[LayerMatrix, Key]]
) -> dict[tuple[Reads, int], Moments]:
    """Of the rows that these layers read of a tensor, by what they read of it and the bits of its grid."""
    reads = {matrix.reads for matrix, _ in todo if matrix.skip_reason is None}
    widths = sorted({precision.activation for _, (_, precision) in todo})
    found = {(each, width): Moments(moves=False) for each in reads for width in widths}
    if not found:
        return {}
    grids = {width: _reading(candidates, tensor, width).grids_of(tensor) for width in widths}
    with contextlib.closing(floats.batches(tensor)) as batches:
        for _, rows in batches:
            for (each, width), moments in found.items():
                read = rows[each]
                for qparams in grids[width]:
                    read = fake_quantize(read, qparams)
                moments.update(rows[each], read)
    return found
