"""A real Dask cluster on this machine: killed workers, values that move once, schedulers that do not answer."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import case_in, said_by
from jobs import trained_by_layers
from said import one_error, refused

from models import feed_for, two_gemms
from onnxcalib import Pipeline, Recipe, quantize
from onnxcalib.executors import dask, wire
from onnxcalib.executors.jobs import WorkerError
from onnxcalib.executors.workers import find_workers
from onnxcalib.recipe import parse_bits

distributed = pytest.importorskip("distributed")

MIXED = trained_by_layers(40)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    options = {"threads_per_worker": 1, "dashboard_address": ":0", "host": "127.0.0.1", "silence_logs": 50}
    with distributed.LocalCluster(n_workers=3, processes=True, **options) as found:
        yield found


class Killer:
    """Kills a worker that is in the middle of a job, once the first job of training is done."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.killed = cluster, 0

    def __call__(self, stage: str, done: int, _total: int) -> None:
        if stage.startswith("parallel") and done >= 1 and not self.killed:
            with distributed.Client(self.cluster.scheduler_address, set_as_default=False) as client:
                busy = next(address for address, jobs in client.processing().items() if jobs)
            nanny = next(each for each in self.cluster.workers.values() if each.worker_address == busy)
            self.killed = nanny.process.pid
            os.kill(self.killed, signal.SIGKILL)


def quantized(**options: Any) -> bytes:
    model = two_gemms("Relu", 40)
    return quantize(model, feed_for(model, 24), MIXED, **options).model.SerializeToString(deterministic=True)


def test_a_worker_killed_in_the_middle_of_training_changes_no_byte(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, packed = [], wire.packed

    def counted(value: Any, *rest: Any) -> bytes:
        sent.append(type(value).__name__)
        return packed(value, *rest)

    monkeypatch.setattr(wire, "packed", counted)
    killer = Killer(cluster)
    found = quantized(scheduler=cluster.scheduler_address, progress=killer)
    assert killer.killed
    assert found == quantized(workers=1)
    # Once for each worker at the most, though there are more jobs than workers.
    assert {"ParallelWork", "ProbeWork"} == set(sent)
    assert len(sent) <= 2 * 3


def test_the_executor_of_a_client_and_a_scheduler_file(cluster: Any, tmp_path: Path) -> None:
    model, recipe = two_gemms("Relu", 40), Recipe(Pipeline.LIGHT, parse_bits("w3a4,w4a8,w8a8"), compression=0.7)
    data = feed_for(model, 24)
    one = quantize(model, data, recipe, workers=1).model.SerializeToString(deterministic=True)
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        two = quantize(model, data, recipe, executor=client.get_executor())
        # Dask's own writer fails on what its workers measure now and then.
        (tmp_path / "scheduler.json").write_text(json.dumps({"address": cluster.scheduler_address}))
        assert client.status == "running"
    assert two.model.SerializeToString(deterministic=True) == one
    three = quantize(model, data, recipe, scheduler=tmp_path / "scheduler.json")
    assert three.model.SerializeToString(deterministic=True) == one


def test_a_scheduler_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "PATIENCE", 1)
    with refused(WorkerError, "tcp://127.0.0.1:1", "does not answer"):
        find_workers(scheduler="tcp://127.0.0.1:1")
    with refused(WorkerError, "none.json"):
        find_workers(scheduler=tmp_path / "none.json")
    (tmp_path / "odd.json").write_text("{")
    with refused(WorkerError, "odd.json"):
        find_workers(scheduler=tmp_path / "odd.json")


def test_a_client_that_fails_is_not_left_to_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed by it while a thread starts another loop, both would wait for each other forever."""
    monkeypatch.setattr(dask, "PATIENCE", 1)
    (tmp_path / "odd.json").write_text("{")
    with pytest.raises(WorkerError) as caught:
        find_workers(scheduler=tmp_path / "odd.json")
    clients = [each for each in gc.get_objects() if isinstance(each, distributed.Client)]
    assert caught.value
    assert {each.status for each in clients} <= {"closed", "running"}


def test_a_scheduler_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "PATIENCE", 1)
    options = {"dashboard_address": ":0", "host": "127.0.0.1", "silence_logs": 50}
    with distributed.LocalCluster(n_workers=0, **options) as empty, refused(WorkerError, "no workers"):
        find_workers(scheduler=empty.scheduler_address)


def test_the_command_says_it_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, small = case_in(tmp_path, 24), tmp_path / "small.onnx"
    options = ("--pipeline", "light", "--bits", "w3a4,w8a8", "--compression", "0.5", "--scheduler", "none.json")
    code, _, err = said_by(capsys, "quantize", folder / "model.onnx", "-c", folder / "data.npz", "-o", small, *options)
    assert code == WorkerError.exit_code
    one_error(err, "none.json")
    assert not small.exists()
