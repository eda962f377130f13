"""Block after block trained against its float outputs, reading what the quantized network gives it."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.algorithms.reconstruction.activations import DiskActivations, capture
from onnxcalib.algorithms.reconstruction.adaquant import parts
from onnxcalib.algorithms.reconstruction.end_to_end import NetworkTuner, Schedule, _Training
from onnxcalib.autodiff.adam import Adam, cosine
from onnxcalib.autodiff.gradients import Loss
from onnxcalib.autodiff.micro_batches import GROUPS, MicroBatchGradients
from onnxcalib.errors import ModelError
from onnxcalib.model.block_loss import narrow_activations, with_dropping
from onnxcalib.model.blocks import Block, find_blocks
from onnxcalib.model.model_loss import distillation_loss, input_scale_name, reference_name
from onnxcalib.model.qdq import write_plain, write_qdq
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.numerics.output_kind import OutputKind
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import NO_CHECKPOINT, Checkpoint, Progress
from onnxcalib.runtime.session import Session, Tensors
from onnxcalib.targets import Dynamic, Placement

FloatArray = npt.NDArray[np.float32]
Known = Mapping[str, DiskActivations]

BATCH = 16
JUDGED = 16
MICRO_BATCH_BYTES = 40 * 10**6
CHECKS = 5


@dataclass(frozen=True)
class Trials:
    batch: int = BATCH
    drop: float = 0.5
    drop_input: bool = True
    last: bool = False


class Blockwise:
    def __init__(self, tuner: NetworkTuner, how: Trials, scratch=None):
        self.tuner, self.how, self.scratch = tuner, how, scratch

    def train(self, plan: QuantPlan, progress: Progress, checkpoint: Checkpoint = NO_CHECKPOINT):
        tuner = self.tuner
        blocks = find_blocks(tuner.model, tuner.layers)
        floats: dict[str, DiskActivations] = {}
        quants: dict[str, DiskActivations] = {}
        log = []
        with tempfile.TemporaryDirectory(prefix="onnxcalib_", dir=self.scratch) as folder:
            for number, block in enumerate(blocks):
                own = Path(folder) / str(number)
                own.mkdir()
                graph_inputs = [name for name in block.reads if name not in floats]
                if graph_inputs:
                    (own / "inputs").mkdir()
                    got = capture(tuner.model.proto, graph_inputs, tuner.data, own / "inputs")
                    floats |= got
                    quants |= got
                (own / "float").mkdir()
                targets = capture(block.model.proto, block.makes, tuner.data, own / "float", {}, floats)
                training = _BlockTraining(tuner, self.how, block, plan, quants, floats, targets)
                before, after, part = training.train()
                log.append((block.name, before, after))
                plan = replace(plan, layers={**plan.layers, **part.layers}, inputs={**plan.inputs, **part.inputs})
                progress("blocks", number + 1, len(blocks))
                print(number, block.name, len(block.layers), f"{before:.5f} {after:.5f}", flush=True)
                (own / "quant").mkdir()
                quantized = write_plain(block.model, block.layers, block.part_of(plan), tuner.target)
                made = capture(quantized, block.makes, tuner.data, own / "quant", {}, quants)
                for name in set(floats) - set(block.makes):
                    floats.pop(name).close()
                    quants.pop(name).close()
                floats |= targets
                quants |= made
        return plan, log


def shaped(model: onnx.ModelProto, known: Known) -> onnx.ModelProto:
    """The model with the shapes of its inputs, but for their rows."""
    from onnxcalib.model.io import copied

    copy = copied(model)
    for value in copy.graph.input:
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        shape.dim.add().dim_param = "samples"
        for size in known[value.name].shape[1:]:
            shape.dim.add().dim_value = size
    return copy


class _BlockTraining(_Training):
    def __init__(self, tuner, how, block: Block, plan: QuantPlan, inputs: Known, floats: Known, targets: Known):
        block = replace(block, model=replace(block.model, proto=shaped(block.model.proto, inputs)))
        self.block, self.inputs, self.floats, self.targets, self.how = block, inputs, floats, targets, how
        tuner = replace(tuner, model=block.model, layers=block.layers)
        self.tuner, self.start = tuner, block.part_of(plan)
        self.most = {name: self._most_scale(name, qparams) for name, qparams in self.start.inputs.items()}
        self.train_rows, self.held_out = parts(next(iter(targets.values())).samples)
        feed = {name: floats[name].read(range(min(16, len(self.train_rows)))) for name in block.reads}
        parameters, rates = self._parameters(feed)
        self.units = {name: parameter.unit for name, parameter in parameters.items()}
        starts = {name: parameter.start for name, parameter in parameters.items()}
        simple = replace(tuner.target, placement=Placement.LAYER_INPUTS, dynamic=Dynamic.QDQ)
        bare = replace(simple, float_compute=False, float_activations=False)
        written = write_qdq(tuner.model, tuner.layers, self._plan_of(starts), bare.in_place)
        outputs = {name: np.zeros((1, *it.shape[1:]), np.float32) + np.sqrt(it.energy, dtype=np.float32) for name, it in targets.items()}
        kinds = dict.fromkeys(outputs, OutputKind.VALUES)
        proto = distillation_loss(written, tuner.layers, self.start, parameters, kinds, outputs)
        self.judge_loss = Loss(proto, 0)
        narrow = narrow_activations(proto, block.reads)
        sizes = {name: value.shape for name, value in Session(with_outputs(written, narrow)).run({n: v[:1] for n, v in feed.items()}).items()} if narrow else {}
        self.masks: Mapping[str, tuple[int, ...]] = {}
        if how.drop:
            dropped = with_dropping(proto, {name: shape[1:] for name, shape in sizes.items()})
            proto, self.masks = dropped.model, dropped.masks
        size = 4 * sum(int(np.prod(shape)) for shape in sizes.values()) + 1
        batch = min(how.batch, len(self.train_rows))
        self.micro = int(np.clip(MICRO_BATCH_BYTES // size, 1, max(batch // GROUPS, 1)))
        self.batch = batch
        self.gradients = MicroBatchGradients(proto, starts, tuner.engine, tuner.workers)
        self.adam = Adam(self.gradients.parameters, rates)
        self.rng = np.random.default_rng([tuner.seed, zlib.crc32(block.name.encode())])

    def feed(self, chosen, rng=None):
        found = {name: self.inputs[name].read(chosen) for name in self.block.reads}
        if rng is not None and self.how.drop and self.how.drop_input:
            for name, value in found.items():
                if self.floats[name] is not self.inputs[name]:
                    found[name] = np.where(rng.random(value.shape, np.float32) < 0.5, value, self.floats[name].read(chosen))
        found |= {reference_name(name): it.read(chosen) for name, it in self.targets.items()}
        if rng is not None:
            for name, shape in self.masks.items():
                found[name] = rng.random((len(chosen), *shape)) < 0.5
        return found

    def judge(self) -> float:
        total = 0.0
        for at in range(0, len(self.held_out), JUDGED):
            chosen = self.held_out[at : at + JUDGED]
            total += len(chosen) * self.judge_loss.run({**self.feed(chosen), **self.gradients.parameters})
        return total / len(self.held_out)

    def train(self):
        schedule = self.tuner.schedule
        before = least = self.judge()
        best = {name: value.copy() for name, value in self.gradients.parameters.items()}
        for done in range(1, schedule.steps + 1):
            chosen = sorted(self.rng.choice(self.train_rows, self.batch, replace=False).tolist())
            feeds = [self.feed(chosen[at : at + self.micro], self.rng) for at in range(0, self.batch, self.micro)]
            self.adam.step(self.gradients.run(feeds), cosine(done, schedule.steps))
            for tensor, most in self.most.items():
                name = input_scale_name(tensor)
                if name in self.gradients.parameters:
                    scale = self.gradients.parameters[name]
                    np.minimum(scale, most / self.units[name], out=scale)
            if done % max(schedule.steps // CHECKS, 1) == 0 or done == schedule.steps:
                error = self.judge()
                if error < least:
                    least, best = error, {name: value.copy() for name, value in self.gradients.parameters.items()}
        return before, least, (self._plan_of(best) if least < before else self.start)
