"""Samples in one .npz file or one dict: batches, whole tensors, fixed batches, labels, laziness."""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxcalib.data import InputSpec, open_data
from onnxcalib.errors import DataError

F32 = np.dtype("float32")
X = InputSpec("x", F32, (None, 3))


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@given(n=st.integers(1, 20), size=st.integers(1, 25))
def test_batches_join_to_the_whole_array(n: int, size: int) -> None:
    data = open_data({"x": numbers(n, 3)}, [X])
    feeds = [feed["x"] for feed in data.batches(size)]
    assert [len(feed) for feed in feeds[:-1]] == [size] * (len(feeds) - 1)
    assert 1 <= len(feeds[-1]) <= size
    assert np.array_equal(np.concatenate(feeds), numbers(n, 3))
    assert len(data) == n


@given(n=st.integers(1, 20), size=st.integers(1, 9), fixed=st.integers(1, 7))
def test_a_fixed_batch_axis_wins_over_the_size(n: int, size: int, fixed: int) -> None:
    spec = InputSpec("x", F32, (fixed, 3))
    source = {"x": numbers(n, 3), "labels": np.arange(n)}
    if n < fixed:
        with pytest.raises(DataError, match=f"{n} samples.*fixed at {fixed}"):
            open_data(source, [spec])
        return
    data = open_data(source, [spec])
    feeds = [feed["x"] for feed in data.batches(size)]
    assert {len(feed) for feed in feeds} == {fixed}
    assert len(data) == len(data.labels) == n // fixed * fixed
    assert np.array_equal(np.concatenate(feeds), numbers(n, 3)[: len(data)])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_gives_what_was_saved_every_time(tmp_path: Path, save) -> None:
    arrays = {"x": numbers(7, 3), "y": np.asfortranarray(numbers(7, 2, 4))}
    save(tmp_path / "d.npz", **arrays, labels=np.arange(7, dtype=np.uint8))
    data = open_data(str(tmp_path / "d.npz"), [X, InputSpec("y", F32, (None, 2, 4))])
    for _ in range(2):
        feeds = list(data.batches(3))
        for name, array in arrays.items():
            assert np.array_equal(np.concatenate([feed[name] for feed in feeds]), array)
    assert all(type(feed[name]) is np.ndarray and feed[name].flags.c_contiguous for feed in feeds for name in arrays)
    assert data.labels.dtype == np.int64
    assert data.labels.tolist() == list(range(7))
    assert data.source == str(tmp_path / "d.npz")


def test_writing_into_a_feed_leaves_the_data_alone() -> None:
    data = open_data({"x": numbers(4, 3)}, [X])
    for feed in data.batches(2):
        feed["x"][:] = -1
    assert np.array_equal(next(data.batches(4))["x"], numbers(4, 3))


def test_one_axis_more_means_whole_tensors() -> None:
    inputs = [X, InputSpec("state", F32, (2, 1, 4)), InputSpec("sr", np.dtype("int64"), ())]
    source = {"x": numbers(3, 3), "state": numbers(3, 2, 1, 4), "sr": np.array([16, 17, 18])}
    data = open_data(source, inputs)
    feeds = list(data.batches(8))
    assert len(data) == len(feeds) == 3
    for index, feed in enumerate(feeds):
        assert np.array_equal(feed["x"], source["x"][index : index + 1])
        assert np.array_equal(feed["state"], source["state"][index])
        assert isinstance(feed["sr"], np.ndarray)
        assert feed["sr"].shape == ()
        assert feed["sr"] == 16 + index


def test_whole_tensors_do_not_mix_with_a_longer_fixed_batch() -> None:
    inputs = [InputSpec("x", F32, (2, 3)), InputSpec("sr", np.dtype("int64"), ())]
    with pytest.raises(DataError, match=r"share a batch axis.*'x' 2.*one axis more"):
        open_data({"x": numbers(2, 3), "sr": np.array([1, 2])}, inputs)


def test_inputs_that_fix_different_batches_are_refused_unless_given_whole() -> None:
    inputs = [InputSpec("x", F32, (1, 3)), InputSpec("h", F32, (2, 5))]
    with pytest.raises(DataError, match="'x' 1, 'h' 2"):
        open_data({"x": numbers(4, 3), "h": numbers(4, 5)}, inputs)
    data = open_data({"x": numbers(4, 3), "h": numbers(4, 2, 5)}, inputs)
    assert [feed["h"].shape for feed in data.batches(1)] == [(2, 5)] * 4


def test_a_model_input_may_be_called_labels() -> None:
    data = open_data({"labels": numbers(2, 3)}, [InputSpec("labels", F32, (None, 3))])
    assert data.labels is None
    assert next(data.batches(2))["labels"].shape == (2, 3)


def peak(path: Path) -> int:
    data = open_data(path, [InputSpec("x", F32, (None, 1000))])
    tracemalloc.start()
    total = sum(len(feed["x"]) for feed in data.batches(8))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == len(data)
    return used


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_memory_does_not_grow_with_the_samples(tmp_path: Path, save) -> None:
    save(tmp_path / "small.npz", x=np.ones((250, 1000), np.float32))
    save(tmp_path / "large.npz", x=np.ones((1000, 1000), np.float32))
    peak(tmp_path / "small.npz")  # the first run pays for imports
    small, large = peak(tmp_path / "small.npz"), peak(tmp_path / "large.npz")
    assert large < small + 50_000
    assert large < 400_000  # the array has 4,000,000 bytes


def test_opening_a_compressed_npz_does_not_read_it_into_memory(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=np.ones((5000, 1000), np.float32))
    tracemalloc.start()
    data = open_data(tmp_path / "d.npz", [InputSpec("x", F32, (None, 1000))])
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) == 5000
    assert used < 8_000_000  # of 20,000,000


def test_the_unpacked_copy_has_no_name_that_a_kill_could_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=numbers(4, 3))
    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spool))
    data = open_data(tmp_path / "d.npz", [X])
    assert np.array_equal(next(data.batches(4))["x"], numbers(4, 3))
    assert list(spool.iterdir()) == []


def test_a_plain_npz_is_never_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "d.npz", x=numbers(4, 3))
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    data = open_data(tmp_path / "d.npz", [X])
    assert np.array_equal(next(data.batches(4))["x"], numbers(4, 3))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_mapped_samples_do_not_stay_resident(tmp_path: Path) -> None:
    path = tmp_path / "large.npz"
    np.savez(path, x=np.zeros((64, 1024, 256), np.float32))  # 64 MB
    data = open_data(path, [InputSpec("x", np.dtype(np.float32), (None, 1024, 256))])

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    before = resident()
    for _ in data.batches(4):
        assert resident() - before < 16 * 1024  # kB
