"""Second-order rounding of every layer at every precision, where only weights are quantized.

All layers read what the float network gives them: candidates of one layer fit to those of any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from onnxcalib.algorithms.drawn_rows import BATCH, DrawnRows
from onnxcalib.algorithms.layer_matrix import LayerMatrix
from onnxcalib.algorithms.second_order import Reading, RoundedLayer, Rounder
from onnxcalib.data.padding import positions_that_count
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.subgraph import upstream
from onnxcalib.plan import Candidates, LayerParams, QuantPlan
from onnxcalib.recipe import Precision
from onnxcalib.runtime.session import Session

# Of the moments that are gathered at a time; where they take more, the network is run again.
MOMENT_BYTES = 2**30


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
        plan = candidates.stitch({name: max(choices) for name, choices in candidates.layers.items()})
        missing = {name for name, precision in keys if (name, precision) not in found}
        matrices = [LayerMatrix.of(layer, index) for layer in layers if layer.name in missing]
        for some in _chunks(matrices):
            readings = self._readings(plan, some)
            for matrix in some:
                name, reading = matrix.layer.name, readings[matrix.layer.input]
                todo = ((it, start) for it, start in candidates.layers[name].items() if (name, it) not in found)
                for precision, start in todo:
                    own = replace(plan, layers={name: start})
                    rounded = self.rounder.rounded(index, matrix, reading.moments.get(matrix.reads), own, 0.0)
                    found[name, precision] = rounded
                    checkpoint.put((name, str(precision)), rounded)
                    self.rounder.progress("second-order candidates", len(found), len(keys))

        def best(name: str, precision: Precision, start: LayerParams) -> LayerParams:
            return found[name, precision].params or start

        chosen = {
            name: {precision: best(name, precision, start) for precision, start in choices.items()}
            for name, choices in candidates.layers.items()
        }
        return replace(candidates, layers=chosen)

    def _readings(self, plan: QuantPlan, matrices: Sequence[LayerMatrix]) -> dict[str, Reading]:
        """The moments of what these layers read in the float network."""
        tensors = list(dict.fromkeys(matrix.layer.input for matrix in matrices))
        data = self.rounder.data
        readers = {tensor: [it for it in matrices if it.layer.input == tensor] for tensor in tensors}
        readings = {
            tensor: Reading(plan, DrawnRows.of(tensor, readers[tensor], len(data)), moves=False) for tensor in tensors
        }
        given = {value.name for value in self.rounder.model.proto.graph.input}
        made = [tensor for tensor in tensors if tensor not in given]
        part, reads = upstream(self.rounder.model.proto, made)
        session = Session(part) if made else None
        for feed in data.batches(BATCH):
            found = {**feed, **(session.run({name: feed[name] for name in reads}) if session is not None else {})}
            for tensor, reading in readings.items():
                reading.update(found[tensor], positions_that_count(feed))
        return readings


def _chunks(matrices: Sequence[LayerMatrix]) -> Iterator[list[LayerMatrix]]:
    """Layers in order whose moments fit into memory together."""
    chunk: list[LayerMatrix] = []
    held: dict[str, int] = {}
    for matrix in matrices:
        size = 16 * matrix.columns**2 * matrix.layer.groups
        if chunk and matrix.layer.input not in held and sum(held.values()) + size > MOMENT_BYTES:
            yield chunk
            chunk, held = [], {}
        chunk.append(matrix)
        held[matrix.layer.input] = size
    if chunk:
        yield chunk
