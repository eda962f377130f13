"""One block on its way from its start to something better: all its weights, scales and biases at once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.algorithms.reconstruction.activations import DiskActivations
from onnxcalib.algorithms.reconstruction.adaquant import parts
from onnxcalib.algorithms.reconstruction.end_to_end import (
    MICRO_BATCH_BYTES,
    NetworkTraining,
    NetworkTuner,
    Schedule,
    plainest,
)
from onnxcalib.autodiff.adam import Adam
from onnxcalib.autodiff.gradients import Loss
from onnxcalib.autodiff.micro_batches import GROUPS, MicroBatchGradients
from onnxcalib.model.block_loss import narrow_activations, with_dropping
from onnxcalib.model.blocks import Block
from onnxcalib.model.model_loss import Parameter, distillation_loss, model_reference
from onnxcalib.model.qdq import write_qdq
from onnxcalib.model.shapes import with_input_shapes
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.numerics.positions import Counts, counts_for
from onnxcalib.plan import QuantPlan
from onnxcalib.runtime.session import Session, Tensors

Known = Mapping[str, DiskActivations]

SOME = 16  # samples at a time, where nothing trains


@dataclass(frozen=True)
class BlockSchedule(Schedule):
    """How a block is trained."""

    batch: int = 16
    checks: int = 5
    drops: bool = True  # half of all activations are left unquantized while training, other ones in each step


BLOCK_STEPS = 2  # for each step of a layer that is asked for
# Sequential training's rates. Quick-start model at w4a4: they left .0025 and .0029 with other draws, a third of
# those of weights and scales .0032. ResNet-20 at w2a4: .078, and .104 without dropping.
BLOCKS = BlockSchedule("block-wise AdaQuant", steps=200, bias=1e-3, weight=3e-2, scale=3e-3)


def block_schedule(steps: int | None) -> BlockSchedule:
    """Training of a block for as long as fits to how long layers are trained."""
    return BLOCKS if steps is None else replace(BLOCKS, steps=BLOCK_STEPS * steps)


@dataclass(frozen=True)
class BlockTensors:
    """What a block reads in both networks, and what it makes in the float one."""

    inputs: Known  # of the quantized network
    floats: Known
    targets: Known
    types: Mapping[str, np.dtype[Any]]  # of the model's inputs; small whole numbers lie among the floats unharmed
    mask: DiskActivations | None = None  # tells padding

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return next(iter(self.targets.values())).samples


class BlockTraining(NetworkTraining):
    """Trains as through the whole network, but for where samples and targets come from."""

    def __init__(
        self, tuner: NetworkTuner, schedule: BlockSchedule, block: Block, plan: QuantPlan, tensors: BlockTensors
    ) -> None:
        shapes = {name: tensors.inputs[name].shape or () for name in block.reads}
        shaped = replace(block.model, proto=with_input_shapes(block.model.proto, shapes))
        self.block, self.tensors, self.how = block, tensors, schedule
        self.tuner = replace(tuner, model=shaped, layers=block.layers, schedule=schedule)
        self.start, self.hints = block.part_of(plan), []
        self.most = {name: self._most_scale(name, qparams) for name, qparams in self.start.inputs.items()}
        self.learned, self.held_out = parts(tensors.samples)
        self.batch = min(schedule.batch, len(self.learned))
        self.micro_batch = self._micro_batch_size()
        self.micro_batches = -(-self.batch // self.micro_batch)
        parameters, rates = self._parameters(self._read(tensors.floats, self.learned[:SOME]))
        self.units = {name: parameter.unit for name, parameter in parameters.items()}
        starts = {name: parameter.start for name, parameter in parameters.items()}
        written = write_qdq(shaped, block.layers, self._plan_of(starts), plainest(tuner.target))
        self.kinds = dict.fromkeys(block.makes, OutputKind.VALUES)
        loss = self._loss(written, parameters)
        self.forward = Loss(loss, threads=1)
        shapes = self._narrow_shapes(written, loss) if schedule.drops else {}
        self.dropping = with_dropping(loss, shapes)
        self.gradients = MicroBatchGradients(self.dropping.model, starts, tuner.engine, tuner.workers)
        self.adam = Adam(self.gradients.parameters, rates)
        self.feeds = self._drawn(np.random.default_rng([tuner.seed, zlib.crc32(block.name.encode())]))

    def judge(self) -> float:
        """The error on the held-out samples, all activations quantized."""
        total = 0.0
        for start in range(0, len(self.held_out), SOME):
            chosen = self.held_out[start : start + SOME]
            feed = {**self._read(self.tensors.inputs, chosen), **self._reference(chosen)}
            total += len(chosen) * self.forward.run({**feed, **self.gradients.parameters})
        return total / len(self.held_out)

    def _micro_batch_size(self) -> int:
        """How many samples go through the block at a time."""
        names = list(dict.fromkeys(layer.activated for layer in self.block.layers))
        made = Session(with_outputs(self.tuner.model.proto, names)).run(self._read(self.tensors.floats, [0]))
        size = sum(value.nbytes for value in made.values())
        return int(np.clip(MICRO_BATCH_BYTES // max(size, 1), 1, max(self.batch // GROUPS, 1)))

    def _loss(self, written: onnx.ModelProto, parameters: Mapping[str, Parameter]) -> onnx.ModelProto:
        """The error of the block's outputs, relative to their energies."""
        targets, some = self.tensors.targets, self.learned[:SOME]
        counts = self._positions(some)
        makes = self.block.makes
        self.padded = [name for name in makes if counts_for(targets[name].read(some), counts) is not None]
        # Of these the loss wants ranks and energies.
        like = {name: np.full([1] * len(targets[name].shape or ()), targets[name].energy ** 0.5) for name in makes}
        layers, kinds = self.block.layers, self.kinds
        return distillation_loss(written, layers, self.start, parameters, kinds, like, padded=self.padded)

    def _narrow_shapes(self, written: onnx.ModelProto, loss: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
        """The shapes of a sample's narrow activations whose rows are those of samples."""
        names = narrow_activations(loss, self.block.reads)
        if not names:
            return {}
        session = Session(with_outputs(written, names))
        one, two = (session.run(self._read(self.tensors.floats, range(count))) for count in (1, 2))
        shapes = {name: value.shape for name, value in one.items() if value.ndim}
        return {name: it for name, it in shapes.items() if two[name].shape == (2 * it[0], *it[1:])}

    def _drawn(self, rng: np.random.Generator) -> Iterator[Tensors]:
        """Micro-batches without end, of batches that each have a sample once."""
        while True:
            batch = sorted(rng.choice(self.learned, self.batch, replace=False).tolist())
            for start in range(0, self.batch, self.micro_batch):
                yield self._mixed(batch[start : start + self.micro_batch], rng)

    def _mixed(self, chosen: Sequence[int], rng: np.random.Generator) -> Tensors:
        """Samples with what is left unquantized this time: elements inside the block, and of what it reads."""
        feed = self._read(self.tensors.inputs, chosen)
        if self.how.drops:
            for name, exact in self._read(self.tensors.floats, chosen).items():
                if name not in self.tensors.types:
                    feed[name] = np.where(_coins(rng, exact.shape), exact, feed[name])
        for name, (rows, *others) in self.dropping.masks.items():
            feed[name] = _coins(rng, (rows * len(chosen), *others))
        return feed | self._reference(chosen)

    def _read(self, held: Known, chosen: Sequence[int]) -> Tensors:
        types = self.tensors.types
        reads = ((name, held[name].read(chosen)) for name in self.block.reads)
        return {name: value.astype(types.get(name, np.float32), copy=False) for name, value in reads}

    def _reference(self, chosen: Sequence[int]) -> Tensors:
        targets = {name: self.tensors.targets[name].read(chosen) for name in self.block.makes}
        return {**model_reference(targets, self.kinds, self.padded, self._positions(chosen))}

    def _positions(self, chosen: Sequence[int]) -> Counts | None:
        return None if self.tensors.mask is None else self.tensors.mask.read(chosen) != 0

    def _with_reference(self, feed: Tensors) -> Tensors:
        return feed


def _coins(rng: np.random.Generator, shape: Sequence[int]) -> npt.NDArray[np.bool_]:
    return rng.integers(0, 2, shape, np.bool_)
