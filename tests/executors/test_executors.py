"""Executors of the user's: the same bytes, values that move once, and what cannot be sent."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import trained_by_layers
from said import refused

from models import conv_net, feed_for, two_gemms
from onnxcalib import Pipeline, Recipe, quantize
from onnxcalib.errors import RecipeError
from onnxcalib.executors import shared as sharing
from onnxcalib.executors import wire, workers
from onnxcalib.executors.jobs import WorkerError
from onnxcalib.executors.local import LocalExecutor
from onnxcalib.executors.workers import Workers, find_workers
from onnxcalib.recipe import parse_bits

MIXED = trained_by_layers(2)


class Elsewhere(Executor):
    """Does each job on what is left of it after a journey by wire."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        content = pickle.dumps((fn, args, kwargs))
        self.sent.append(len(content))
        own, given, more = pickle.loads(content)
        future: Future[Any] = Future()
        future.set_result(pickle.loads(pickle.dumps(own(*given, **more))))
        return future


@pytest.fixture(scope="module")
def whole() -> bytes:
    return quantized(workers=1)


def quantized(**where: Any) -> bytes:
    model = two_gemms("Relu", 40)
    return quantize(model, feed_for(model, 24), MIXED, **where).model.SerializeToString(deterministic=True)


def test_the_same_bytes_by_processes(whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LocalExecutor", lambda count: LocalExecutor(count, patience=0))
    assert quantized(workers=2) == whole


def test_the_same_bytes_by_threads_of_the_users(whole: bytes) -> None:
    with ThreadPoolExecutor(3) as executor:
        assert quantized(executor=executor) == whole
        assert executor.submit(int, "3").result() == 3  # it is the user's to shut down


@pytest.mark.parametrize("reads_our_files", [True, False])
def test_the_same_bytes_by_any_executor(whole: bytes, reads_our_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path) -> Any:
        raise FileNotFoundError(path)

    if not reads_our_files:
        monkeypatch.setattr(wire, "read", absent)
    monkeypatch.setattr(sharing, "_VALUES", type(sharing._VALUES)())
    executor = Elsewhere()
    assert quantized(executor=executor) == whole
    large = [size for size in executor.sent if size > 8000]
    # Training and probes share one value each, which is sent once, and only where it cannot be read.
    assert len(large) == (0 if reads_our_files else 2)
    assert len(executor.sent) > 5


class Deaf(Elsewhere):
    """Says that its software is another."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        kwargs["expected"] = {**kwargs["expected"], "runtime": "onnxruntime 0.1"}
        return super().submit(fn, *args, **kwargs)


def test_workers_with_other_software_are_refused() -> None:
    with refused(WorkerError, "onnxruntime 0.1", "runtime"):
        quantized(executor=Deaf())


def test_where_jobs_run_is_said_once_and_has_an_effect() -> None:
    with refused(RecipeError, "`executor`", "--workers"):
        find_workers(2, None, Elsewhere())
    for given in ({"executor": Elsewhere()}, {"scheduler": "tcp://127.0.0.1:1"}):
        with pytest.raises(RecipeError, match="no effect"):
            quantize(conv_net(), feed_for(conv_net(), 8), Recipe(), **given)


def of_samples(outputs: Any, labels: Any) -> float:
    return float((np.asarray(outputs).argmax(axis=1) == labels).mean())


def test_a_metric_of_the_users_is_measured_here_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = conv_net(), Recipe(Pipeline.LIGHT, parse_bits("w3a4,w8a8"), compression=0.5, loss="metric")
    data = feed_for(model, 24) | {"labels": np.arange(24) % 3}
    with refused(RecipeError, "sent to workers", "MODULE:FUNCTION"):
        quantize(model, data, recipe, metric=of_samples, executor=Elsewhere())
    one = quantize(model, data, recipe, metric=of_samples, workers=1)
    monkeypatch.setattr(workers, "LocalExecutor", lambda count: LocalExecutor(count, patience=0))
    two = quantize(model, data, recipe, metric=of_samples, workers=2)
    assert one.model.SerializeToString(deterministic=True) == two.model.SerializeToString(deterministic=True)


def test_models_of_any_size_and_arrays_go_by_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROTOBUF_LIMIT", 1000)
    model, array = conv_net(), np.arange(12.0).reshape(3, 4)
    path, key = wire.write({"model": model, "array": array, "text": np.array(["a", None], object)}, tmp_path)
    found = wire.read(path)
    assert found["model"].SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    np.testing.assert_array_equal(found["array"], array)
    assert found["text"].tolist() == ["a", None]
    assert wire.write({"model": model, "array": array, "text": np.array(["a", None], object)}, tmp_path)[1] == key
    assert wire.write({"model": model, "array": array + 1}, tmp_path)[1] != key


def test_an_executor_of_ours_closes_and_refuses_more() -> None:
    own = Workers(2)
    with own.sharing(3) as shared:
        assert own.submit(pow, shared, 2).result() == 9
        own.close()
        with pytest.raises(RuntimeError):
            own.submit(pow, shared, 2)
