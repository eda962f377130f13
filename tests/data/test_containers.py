"""What Python programs hold data in gives the samples that an array of them gives."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models import conv_net, feed_for
from onnxcalib.data import Dataset, InputSpec, open_data, shuffled, transformed
from onnxcalib.data.augmentation import augmented
from onnxcalib.errors import DataError

COUNT, SIDE = 12, 16
IMAGES = np.random.default_rng(0).standard_normal((COUNT, 3, SIDE, SIDE)).astype(np.float32)
CLASSES = np.arange(COUNT) % 4
X = InputSpec("x", np.dtype("float32"), (None, 3, SIDE, SIDE))
IDS, MASK = (InputSpec(name, np.dtype("int64"), (None, None)) for name in ("ids", "mask"))


class Tensor:
    """What a tensor of torch lets others do: it must be detached and brought home first."""

    def __init__(self, values: np.ndarray, *, ready: bool = False) -> None:
        self.values, self.ready = values, ready

    def detach(self) -> Tensor:
        return Tensor(self.values)

    def cpu(self) -> Tensor:
        return Tensor(self.values, ready=True)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if not self.ready:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        return self.values


class Loader:
    """Batches again and again, the last one shorter; `make` puts images and labels together."""

    def __init__(self, make: Callable[[Any, Any], Any], size: int = 5) -> None:
        self.make, self.size = make, size

    def __iter__(self) -> Iterator[Any]:
        for at in range(0, COUNT, self.size):
            yield self.make(Tensor(IMAGES[at : at + self.size]), Tensor(CLASSES[at : at + self.size]))


class BatchLoader(Loader):
    """As torch's DataLoader: it tells how many samples a batch has."""

    @property
    def batch_size(self) -> int:
        return self.size


class OutOfRange(Exception):  # noqa: N818 - tf.errors.OutOfRangeError
    """What tf.data raises instead of ending."""


class TfIterator:
    """As tf.data's: its get_next raises at the end, and it says what its elements are."""

    element_spec = "(TensorSpec(shape=(None, 3, 16, 16)), TensorSpec(shape=(None,)))"

    def __init__(self, loader: Loader) -> None:
        self.items = iter(loader)

    def __iter__(self) -> TfIterator:
        return self

    def __next__(self) -> Any:
        return next(self.items)

    def get_next(self) -> Any:
        try:
            return next(self.items)
        except StopIteration:
            raise OutOfRange from None


class ByNumber:
    """Single samples without a batch axis, read by number; it tells its end by its length alone."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return IMAGES[number % COUNT], int(CLASSES[number % COUNT])


class Reader:
    """As onnxruntime has them; it was read to its end already."""

    def __init__(self) -> None:
        self.items: Iterator[Any] = iter(())

    def get_next(self) -> Any:
        return next(self.items, None)

    def rewind(self) -> None:
        self.items = iter({"x": IMAGES[[at]]} for at in range(COUNT))


def generator() -> Iterator[Any]:
    yield from (IMAGES[at : at + 4] for at in range(0, COUNT, 4))


CONTAINERS: dict[str, Any] = {
    "loader of tuples": Loader(lambda images, labels: (images, labels)),
    "loader of lists": Loader(lambda images, labels: [images, labels]),
    "loader of dicts": Loader(lambda images, labels: {"x": images, "labels": labels}),
    "loader of tensors": Loader(lambda images, _: images),
    "inputs and labels, as Keras has them": Loader(lambda images, labels: ({"x": images}, labels)),
    "one tuple in another": Loader(lambda images, labels: ((images,), labels)),
    "loader of dicts without labels": BatchLoader(lambda images, _: {"x": images}),
    "iterator of tf.data, tuples": TfIterator(Loader(lambda images, labels: (images, labels))),
    "iterator of tf.data, dicts without labels": TfIterator(Loader(lambda images, _: {"x": images})),
    "dataset by number": ByNumber(),
    "reader that rewinds": Reader(),
    "generator function": generator,
    "generator": generator(),
    "list of arrays": list(generator()),
    "array": IMAGES,
    "tensor": Tensor(IMAGES),
}


def whole(data: Dataset) -> np.ndarray:
    return np.concatenate([feed["x"] for feed in data.batches(4)])


@pytest.mark.parametrize("name", CONTAINERS)
def test_order_and_forms_do_not_depend_on_the_container(name: str) -> None:
    data = open_data(CONTAINERS[name], [X])
    assert np.array_equal(whole(data), IMAGES)
    expected = shuffled(open_data({"x": IMAGES, "labels": CLASSES}, [X]), 3)
    found = shuffled(data, 3)
    assert np.array_equal(whole(found), whole(expected))
    assert np.array_equal(whole(augmented(found, 2, 0)), whole(augmented(expected, 2, 0)))
    assert not np.array_equal(whole(augmented(found, 2, 0)), whole(found))
    assert data.labels is None or (found.labels == expected.labels).all()


LABELLED = ("loader of tuples", "loader of lists", "loader of dicts", "one tuple in another", "dataset by number")


@pytest.mark.parametrize("name", LABELLED)
def test_labels_come_along(name: str) -> None:
    assert open_data(CONTAINERS[name], [X]).labels.tolist() == CLASSES.tolist()


def test_an_iterator_of_tf_data_is_read_to_its_end_with_its_labels() -> None:
    source = TfIterator(Loader(lambda images, labels: ({"x": images}, labels)))
    assert open_data(source, [X]).labels.tolist() == CLASSES.tolist()


def test_dicts_of_what_does_not_say_that_it_batches_are_fed_as_they_are() -> None:
    data = shuffled(open_data(Loader(lambda images, _: {"x": images}, size=4), [X]), 0)
    assert [len(feed["x"]) for feed in data.batches(1)] == [4, 4, 4]


def test_feeds_of_a_fixed_batch_are_shuffled_sample_by_sample() -> None:
    fixed = InputSpec("x", X.dtype, (4, *X.shape[1:]))
    expected = shuffled(open_data({"x": IMAGES}, [fixed]), 1)
    found = shuffled(open_data(generator, [fixed]), 1)
    assert np.array_equal(whole(found), whole(expected))
    assert {len(feed["x"]) for feed in found.batches(1)} == {4}


def test_sequences_of_many_lengths_stay_whole_and_are_shuffled_alike() -> None:
    def feeds() -> Iterator[dict[str, np.ndarray]]:
        for length in (3, 5, 2, 7, 4):
            yield {"ids": np.full((1, length), length), "mask": np.ones((1, length), np.int64)}

    orders = [
        [feed["ids"].shape[1] for feed in shuffled(open_data(source, [IDS, MASK]), 2).batches(1)]
        for source in (feeds, feeds(), list(feeds()))
    ]
    assert orders[0] == orders[1] == orders[2] != [3, 5, 2, 7, 4]


def test_several_inputs_come_in_their_order() -> None:
    ids = np.arange(6).reshape(2, 3)
    (feed,) = open_data([(ids, ids + 1)], [IDS, MASK]).batches(1)
    assert feed["mask"].tolist() == (ids + 1).tolist()
    labelled = open_data([(ids, ids + 1, np.array([1, 0]))], [IDS, MASK])
    assert labelled.labels is not None
    assert labelled.labels.tolist() == [1, 0]


RECORDS = [SimpleNamespace(pixels=IMAGES[at]) for at in range(COUNT)]


@pytest.mark.parametrize(
    "source", [RECORDS, iter(RECORDS), lambda: iter(RECORDS)], ids=["list", "iterator", "function"]
)
def test_a_transform_makes_feeds_of_items(source: Any) -> None:
    data = open_data(transformed(source, lambda record: {"x": 2 * record.pixels[None]}), [X])
    assert np.array_equal(whole(shuffled(data, 1)), 2 * whole(shuffled(open_data(IMAGES, [X]), 1)))


@pytest.mark.parametrize("source", ["data.npz", Path("folder"), {"x": IMAGES}])
def test_a_transform_of_what_has_no_items_is_refused(source: Any) -> None:
    with pytest.raises(DataError, match="transform"):
        transformed(source, lambda item: item)


BAD: dict[str, tuple[Any, str]] = {
    "labels of other samples": ([(IMAGES[:2], CLASSES[:3])], "(?s)labels.*transform"),
    "one array too many": ([(IMAGES[:2], CLASSES[:2], CLASSES[:2])], "3 arrays.*transform"),
    "text": (["hello"], "is a str"),
    "a function that yields nothing": (lambda: None, "NoneType"),
    "a class": (Reader, "is no data"),
    "a number": (3, "is no data"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_says_what_to_do(name: str) -> None:
    source, words = BAD[name]
    with pytest.raises(DataError, match=words) as caught:
        open_data(source, [X])
    assert caught.value.hint


def test_what_is_stored_goes_when_nobody_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_files = Path("/proc/self/fd")
    if not open_files.is_dir():
        pytest.skip("what is open is read off /proc")
    before = len(list(open_files.iterdir()))
    data = shuffled(open_data(generator, [X]), 0)
    assert len(list(open_files.iterdir())) > before
    del data
    gc.collect()
    assert len(list(open_files.iterdir())) == before
    bad = IMAGES.copy()
    bad[7, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match="sample 7,"):
        shuffled(open_data([bad[:6], bad[6:]], [X]), 0)
    assert not list(tmp_path.iterdir())  # the file has no name, so that nothing can stay behind


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = open_data(generator, [X])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(DataError, match=r"cannot be stored.*TMPDIR"):
        shuffled(data, 0)


def test_a_model_fed_by_any_of_them_is_the_same() -> None:
    from onnxcalib import Pipeline, Precision, Recipe, quantize

    model = conv_net()
    samples = feed_for(model, COUNT)["x"]
    recipe = Recipe(Pipeline.LIGHT, bits=(Precision(4, 8),))
    by_array = quantize(model, {"x": samples}, recipe)
    by_batches = quantize(model, lambda: ((samples[at : at + 5], CLASSES[at : at + 5]) for at in (0, 5, 10)), recipe)
    assert by_array.model == by_batches.model


def same_samples(sources: dict[str, Any]) -> None:
    """All give the samples of an array, in its order, and their labels where they have any."""
    expected = shuffled(open_data({"x": IMAGES, "labels": CLASSES}, [X]), 1)
    for name, source in sources.items():
        found = shuffled(open_data(source, [X]), 1)
        assert np.array_equal(whole(found), whole(expected)), name
        assert ("labels" in name) == (found.labels is not None), name
        assert found.labels is None or found.labels.tolist() == expected.labels.tolist(), name


class Items:
    """A dataset of torch by its protocol; workers are sent copies of it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Any:
        image, label = IMAGES[number], CLASSES[number]
        made: dict[str, Any] = {
            "tuples, labels": (image, label),
            "dicts, labels": {"x": image, "labels": label},
            "dicts": {"x": image},
            "tensors": image,
        }
        return made[self.kind]


def test_loaders_of_torch_itself() -> None:
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader
    images, labels = torch.tensor(IMAGES, requires_grad=True), torch.tensor(CLASSES)
    samples = torch.utils.data.TensorDataset(images, labels)
    kinds = [(kind, workers) for kind in ("tuples, labels", "dicts, labels", "dicts", "tensors") for workers in (0, 2)]
    loaders = {
        f"{kind}, {workers} workers": loader(Items(kind), batch_size=5, num_workers=workers) for kind, workers in kinds
    }
    same_samples(loaders)
    same_samples({"set, labels": samples, "labels": loader(samples, batch_size=5), "tensor": images})
    same_samples({"a dict": {"x": images}, "once, labels": iter(loader(samples, batch_size=5))})
    function = transformed(lambda: iter(loader(samples, batch_size=5)), lambda batch: batch[0])
    same_samples({"function": function, "dict": transformed(loader(samples, 5), lambda batch: {"x": batch[0]})})
    with pytest.raises(DataError, match="other samples"):
        shuffled(open_data(loader(samples, batch_size=5, shuffle=True), [X]), 1)


def test_sets_of_tf_data_itself() -> None:
    tf = pytest.importorskip("tensorflow")
    sliced = tf.data.Dataset.from_tensor_slices
    pairs, dicts = sliced((IMAGES, CLASSES)).batch(5), sliced({"x": IMAGES}).batch(5)
    same_samples(
        {"labels": pairs, "one by one, labels": sliced((IMAGES, CLASSES)), "fetched, labels": pairs.prefetch(2)}
    )
    same_samples(
        {"dicts": dicts, "tensors": sliced(IMAGES).batch(5), "keras, labels": sliced(({"x": IMAGES}, CLASSES))}
    )
    same_samples({"once, labels": iter(pairs), "dicts once": iter(dicts), "arrays, labels": pairs.as_numpy_iterator()})
    last = sliced((IMAGES.transpose(0, 2, 3, 1), CLASSES)).batch(5)
    first = transformed(last, lambda batch: (tf.transpose(batch[0], (0, 3, 1, 2)), batch[1]))
    same_samples({"channels last, labels": first, "tensor": tf.constant(IMAGES)})
    with pytest.raises(DataError, match="other samples"):
        shuffled(open_data(pairs.shuffle(3), [X]), 1)
