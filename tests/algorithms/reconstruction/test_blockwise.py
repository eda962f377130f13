"""Block after block: what each reads and imitates, what is left unquantized, and runs that go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from end_to_end_training import job_for, tuner_of
from jobs import job_on, plan_of

from models import any_length, branches, conv_net, normal, run, transformer_block
from onnxcalib.algorithms.reconstruction import blockwise
from onnxcalib.algorithms.reconstruction.block_training import BlockSchedule, BlockTensors, BlockTraining
from onnxcalib.algorithms.reconstruction.blockwise import Blockwise, TrainedBlock
from onnxcalib.autodiff.gradients import Loss
from onnxcalib.model.blocks import Block, find_blocks
from onnxcalib.model.model_loss import reference_name
from onnxcalib.model.qdq import write_plain
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.pipeline.job import Job
from onnxcalib.plan import QuantPlan
from onnxcalib.progress import silent
from onnxcalib.recipe import Engine, Pipeline
from onnxcalib.runtime.installed import find_runtime

ENGINES = [Engine.STANDARD, *([Engine.TRAINING] if find_runtime().gradients else [])]
QUICK = BlockSchedule("blocks", steps=20, bias=1e-2, weight=6e-2, scale=6e-3, batch=8, checks=2)
BUILDERS = [conv_net, transformer_block, branches]
Builder = Callable[[], onnx.ModelProto]


def blockwise_of(job: Job, engine: Engine = Engine.AUTO, schedule: BlockSchedule = QUICK, **more: Any) -> Blockwise:
    return Blockwise(replace(tuner_of(job, engine, schedule), **more), schedule, silent)


def contents(plan: QuantPlan) -> list[bytes]:
    """All that training may change."""
    arrays = [array for it in plan.layers.values() for array in (it.quantized, it.qparams.scale, it.bias)]
    arrays += [qparams.scale for qparams in plan.inputs.values()]
    return [b"" if array is None else np.asarray(array).tobytes() for array in arrays]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("target", ["ort", "paper"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_the_errors_of_blocks_and_of_the_model_fall(
    builder: Builder, target: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for(builder(), "w3a4", target, samples=96)
    found: list[TrainedBlock] = []
    learned = Blockwise._learned

    def kept(self: Blockwise, training: BlockTraining) -> TrainedBlock:
        found.append(learned(self, training))
        return found[-1]

    monkeypatch.setattr(Blockwise, "_learned", kept)
    plan, tuner = plan_of(job), tuner_of(job)
    trained, skip_reasons = blockwise_of(job, engine).train(plan)
    assert skip_reasons == ()
    assert len(found) == len(find_blocks(job.model, job.layers))
    assert all(it.after <= it.before for it in found)
    assert any(it.after < 0.9 * it.before for it in found)
    assert tuner._loss(trained) < tuner._loss(plan)
    run(job.write(trained), next(iter(job.data.batches(4))))


def trainings_of(job: Job, plan: QuantPlan, schedule: BlockSchedule, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each block is given, with the plan that stands then; nothing is trained."""
    seen: list[Any] = []

    def keep(self: Blockwise, block: Block, plan: QuantPlan, tensors: BlockTensors) -> TrainedBlock:
        training = BlockTraining(self.tuner, self.schedule, block, plan, tensors)
        held = training.held_out
        read = {name: tensors.inputs[name].read(held) for name in block.reads}
        targets = {name: tensors.targets[name].read(held) for name in block.makes}
        seen.append((block, training.judge(), read, targets, next(training.feeds), training.dropping, training))
        return TrainedBlock({}, {}, 0.0, 0.0)

    monkeypatch.setattr(Blockwise, "_trained", keep)
    blockwise_of(job, schedule=schedule).train(plan)
    return seen


@pytest.mark.parametrize("builder", BUILDERS)
def test_what_a_block_reads_and_imitates_and_how_it_is_judged(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judged error is that of the written network, from its start to the end of the block."""
    job = job_for(builder(), "w4a4", "paper")
    plan = plan_of(job)
    seen = trainings_of(job, plan, QUICK, monkeypatch)
    quantized = write_plain(job.model, job.layers, plan, job.target)
    data = next(iter(tuner_of(job).data.batches(1000)))
    for block, error, read, targets, _, _, training in seen:
        feed = {name: value[training.held_out] for name, value in data.items()}
        inner = [name for name in block.reads if name not in feed]
        for name, value in run(with_outputs(quantized, inner), feed).items() if inner else ():
            np.testing.assert_allclose(read[name], value, rtol=1e-4, atol=1e-5)
        wanted, found = (run(with_outputs(model, block.makes), feed) for model in (job.model.proto, quantized))
        for name, value in wanted.items():
            np.testing.assert_allclose(targets[name], value, rtol=1e-4, atol=1e-5)
        energies = {name: training.tensors.targets[name].energy for name in wanted}
        by_numpy = sum(np.mean((wanted[name] - found[name]) ** 2) / energies[name] for name in wanted)
        assert error == pytest.approx(by_numpy, rel=2e-3)


def test_half_of_the_narrow_activations_are_left_unquantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all masks alike nothing is left, with opposite ones all is."""
    job = job_for(conv_net(), "w4a4", "paper", samples=96)
    for block, _, _, _, feed, dropping, training in trainings_of(job, plan_of(job), QUICK, monkeypatch):
        assert dropping.masks
        parameters = training.gradients.parameters
        loss, plain = Loss(dropping.model), training.forward
        names = list(dropping.masks)
        for first, second in zip(names[::2], names[1::2], strict=True):
            share = np.mean(feed[first] ^ feed[second])
            assert 0.3 < share < 0.7
        without = {name: value for name, value in feed.items() if name not in dropping.masks}
        alike = {**feed, **{name: np.ones_like(feed[name]) for name in names}}
        assert loss.run({**alike, **parameters}) == pytest.approx(plain.run({**without, **parameters}), rel=1e-4)
        opposite = {**alike, **{name: np.zeros_like(feed[name]) for name in names[::2]}}
        floats = replace(training.start, inputs={})
        model = write_plain(block.model, block.layers, floats, job.target)
        made = run(model, {name: feed[name] for name in block.reads})
        by_numpy = sum(
            np.mean((made[name] - feed[reference_name(name)]) ** 2) / training.tensors.targets[name].energy
            for name in block.makes
        )
        assert loss.run({**opposite, **parameters}) == pytest.approx(by_numpy, rel=1e-2)


def test_wide_activations_are_all_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(conv_net(), "w4a8", "paper")
    assert not any(it[5].masks for it in trainings_of(job, plan_of(job), QUICK, monkeypatch))


def test_nothing_changes_where_nothing_helps() -> None:
    job = job_for(conv_net(), "w4a4")
    plan = plan_of(job)
    trained, _ = blockwise_of(job, schedule=replace(QUICK, bias=1e6, weight=None, scale=None)).train(plan)
    assert contents(trained) == contents(plan)


class Kept(dict[Any, Any]):
    """A checkpoint that fails after so many values."""

    scratch = None

    def __init__(self, most: int) -> None:
        self.most = most

    def found(self, parts: Sequence[Any]) -> list[Any]:
        return [self.get(part) for part in parts]

    def put(self, part: Any, value: Any) -> None:
        self[part] = value
        if len(self) >= self.most:
            raise KeyboardInterrupt


@pytest.mark.parametrize("builder", BUILDERS)
def test_going_on_gives_the_same_bytes_whatever_the_workers(builder: Builder) -> None:
    job = job_for(builder(), "w3a4")
    plan, schedule = plan_of(job), replace(QUICK, steps=4)
    one, two = (blockwise_of(job, schedule=schedule, workers=count).train(plan)[0] for count in (1, 2))
    assert contents(one) == contents(two) != contents(plan)
    checkpoint = Kept(1)
    with pytest.raises(KeyboardInterrupt):
        replace(blockwise_of(job, schedule=schedule), checkpoint=checkpoint).train(plan)
    assert len(checkpoint) == 1
    checkpoint.most = 1000
    again = replace(blockwise_of(job, schedule=schedule), checkpoint=checkpoint)
    assert contents(again.train(plan)[0]) == contents(one)
    told: list[Any] = []
    assert contents(replace(again, progress=lambda *each: told.append(each)).train(plan)[0]) == contents(one)
    assert told == []


def test_fewer_samples_where_the_disk_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(conv_net(), "w4a4")
    monkeypatch.setattr(blockwise, "DISK_BYTES", 150_000)
    seen = trainings_of(job, plan_of(job), QUICK, monkeypatch)
    assert 4 <= seen[0][6].tensors.samples < len(tuner_of(job).data)


def test_sequences_of_many_lengths_are_left_alone() -> None:
    feeds = [{"x": normal(1, 4 + place % 3, 6, seed=place)} for place in range(16)]
    job = job_on(any_length(), feeds, "w4a8", pipeline=Pipeline.ADVANCED)
    plan = plan_of(job)
    trained, skip_reasons = blockwise_of(job).train(plan)
    assert skip_reasons
    assert contents(trained) == contents(plan)
