"""Block after block trained against its float outputs, reading what the quantized network gives it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnxcalib.algorithms.reconstruction.activations import DiskActivations, capture
from onnxcalib.algorithms.reconstruction.block_training import BlockSchedule, BlockTensors, BlockTraining
from onnxcalib.algorithms.reconstruction.end_to_end import NetworkTuner
from onnxcalib.data import first
from onnxcalib.data.padding import find_mask
from onnxcalib.errors import ModelError
from onnxcalib.model.blocks import Block, find_blocks
from onnxcalib.model.qdq import write_plain
from onnxcalib.numerics.quant_params import QuantParams
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Progress
from onnxcalib.runtime.session import Session, samples_in

Known = dict[str, DiskActivations]

DISK_BYTES = 4 * 2**30  # what lies on disk at a time: what a block reads and makes, in both networks


@dataclass(frozen=True)
class TrainedBlock:
    """What training changed in a block, and its held-out error relative to its outputs, before and after."""

    layers: Mapping[str, LayerParams]
    inputs: Mapping[str, QuantParams]
    before: float
    after: float
    skip_reason: str | None = None  # why it could not be trained

    def put_into(self, plan: QuantPlan) -> QuantPlan:
        """The plan with these."""
        return replace(plan, layers={**plan.layers, **self.layers}, inputs={**plan.inputs, **self.inputs})


@dataclass(frozen=True)
class Blockwise:
    """Training of one block after the other; the tuner says of what, and the held-out samples of each block choose."""

    tuner: NetworkTuner
    schedule: BlockSchedule
    progress: Progress
    checkpoint: Checkpoint = NO_CHECKPOINT

    def train(self, plan: QuantPlan) -> tuple[QuantPlan, tuple[str, ...]]:
        """The trained plan, and why blocks could not be trained."""
        blocks = find_blocks(self.tuner.model, self.tuner.layers)
        cached: list[TrainedBlock | None] = self.checkpoint.found([block.name for block in blocks])
        last = max((place for place, found in enumerate(cached) if found is None), default=-1)
        skip_reasons = []
        with tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=self.checkpoint.scratch) as folder:
            networks = _Networks(self._with_enough(blocks), Path(folder)) if last >= 0 else None
            for place, (block, known) in enumerate(zip(blocks, cached, strict=True)):
                # Of kept blocks too: what comes after is computed from it, bit for bit as in an unbroken run.
                tensors = networks.read(block) if networks is not None and place <= last else None
                found = known or self._trained(block, plan, tensors)
                if known is None:
                    self.checkpoint.put(block.name, found)
                    self.progress(self.schedule.stage, place + 1, len(blocks))
                plan = found.put_into(plan)
                skip_reasons += [found.skip_reason] if found.skip_reason is not None else []
                if networks is not None and place < last:
                    networks.advance(block, plan)
        return plan, tuple(dict.fromkeys(skip_reasons))

    def _trained(self, block: Block, plan: QuantPlan, tensors: BlockTensors | None) -> TrainedBlock:
        if tensors is None:
            reason = f"the rows of what '{block.layers[0].name}' and those after it read are not those of samples."
            return TrainedBlock({}, {}, 0.0, 0.0, reason)
        try:
            return self._learned(BlockTraining(self.tuner, self.schedule, block, plan, tensors))
        except ModelError as error:
            if self.tuner.strict:
                raise
            return TrainedBlock({}, {}, 0.0, 0.0, str(error))

    def _learned(self, training: BlockTraining) -> TrainedBlock:
        """The best of a few states on the way, by samples that nothing learns from; it may be the start."""
        before = least = training.judge()
        best, steps = None, self.schedule.steps
        for done in range(1, steps + 1):
            training.step(done)
            if done % max(steps // self.schedule.checks, 1) and done < steps:
                continue
            error = training.judge()
            if error < least:
                best, least = training.plan(), error
        if best is None:
            return TrainedBlock({}, {}, before, before)
        layers = {layer.name: best.layers[layer.name] for layer in training.tuner.layers}
        return TrainedBlock(layers, best.inputs, before, least)

    def _with_enough(self, blocks: Sequence[Block]) -> NetworkTuner:
        """The tuner with as many samples as the disk holds."""
        feed = known = next(iter(first(self.tuner.data, 1).batches(1)))
        most = 1
        for block in blocks:
            read = {name: known[name] for name in block.reads}
            known = {**feed, **Session(block.model.proto).run(read)}
            held = sum(value.nbytes for value in (*read.values(), *(known[name] for name in block.makes)))
            most = max(most, 2 * held // samples_in(feed, self.tuner.data))
        return replace(self.tuner, data=first(self.tuner.data, max(DISK_BYTES // most, 1)))


class _Networks:
    """The float network and the quantized one on the samples, run from block to block; what is read lies on disk."""

    def __init__(self, tuner: NetworkTuner, folder: Path) -> None:
        self.tuner, self.folder = tuner, folder
        self.files = 0
        self.floats: Known = {}
        self.quantized: Known = {}
        self.types = {name: value.dtype for name, value in next(iter(tuner.data.batches(1))).items()}
        mask = find_mask(tuner.data)
        self.mask = None if mask is None else capture(tuner.model.proto, [mask], tuner.data, self._new()).get(mask)

    def read(self, block: Block) -> BlockTensors | None:
        """What the block reads and is to make; None where rows are not those of samples."""
        inputs = [name for name in block.reads if name in self.types and name not in self.floats]
        self.floats |= (given := capture(self.tuner.model.proto, inputs, self.tuner.data, self._new()))
        self.quantized |= given
        if not self.floats.keys() >= set(block.reads) or not self.quantized.keys() >= set(block.reads):
            return None
        self.made = capture(block.model.proto, block.makes, self.tuner.data, self._new(), {}, self.floats)
        if self.made.keys() != set(block.makes):
            return None
        return BlockTensors(self.quantized, self.floats, self.made, self.types, self.mask)

    def advance(self, block: Block, plan: QuantPlan) -> None:
        """Runs the quantized network through the block as well, and lets go of what no later one reads."""
        made: Known = {}
        if self.quantized.keys() >= set(block.reads) and self.made:
            part = write_plain(block.model, block.layers, block.part_of(plan), self.tuner.target)
            made = capture(part, block.makes, self.tuner.data, self._new(), {}, self.quantized)
        for name in [name for name in self.floats if name not in self.types]:
            self.floats.pop(name).close()
            self.quantized.pop(name).close()
        self.floats |= self.made
        self.quantized |= made
        self.made = {}

    def _new(self) -> Path:
        self.files += 1
        folder = self.folder / str(self.files)
        folder.mkdir()
        return folder
