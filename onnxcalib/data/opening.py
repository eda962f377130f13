"""One door for every kind of data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxcalib.data.arrays import Npz, readable
from onnxcalib.data.check import as_array, check_label_header, check_names
from onnxcalib.data.containers import Transformed, batches_samples, items_of
from onnxcalib.data.feeds import FeedDataset, from_iterable, from_one_shot
from onnxcalib.data.folder import open_folder, refuse_preprocess
from onnxcalib.data.images import SUFFIXES
from onnxcalib.data.preprocess import Preprocess
from onnxcalib.data.samples import SampleDataset, from_arrays
from onnxcalib.data.spec import LABELS, Array, Dataset, InputSpec
from onnxcalib.data.steady import SteadyDataset
from onnxcalib.errors import DataError

_KINDS = (
    "Give a .npz file; a folder of .npy files, .npz files, images or test_data_set_* folders; "
    "or arrays, feeds or a loader from Python."
)


def open_data(source: Any, inputs: Sequence[InputSpec], preprocess: Preprocess | None = None) -> Dataset:
    """Open a path, a dict of arrays, feeds from Python, or a Dataset, for a model with these inputs."""
    if not inputs:
        raise DataError("The model has no inputs, so it needs no data.", "Check that it is the right model.")
    if isinstance(source, str | os.PathLike):
        return _open_path(Path(source), inputs, preprocess)
    given = source.source if isinstance(source, Transformed) else source
    refuse_preprocess(preprocess, f"a Python {type(given).__name__}")
    if isinstance(source, Mapping):
        arrays = {str(name): value for name, value in source.items()}
        check_names(arrays, inputs, "the dict")
        return _open_arrays("python dict", inputs, arrays, lambda name: as_array(arrays[name], f"Array '{name}'"))
    if isinstance(source, SampleDataset | FeedDataset | SteadyDataset):
        return source
    if isinstance(source, Dataset):
        return SteadyDataset(source)
    if hasattr(source, "__array__") and len(inputs) == 1:
        arrays = {inputs[0].name: as_array(source, "The array")}
        return _open_arrays("python array", inputs, arrays, arrays.__getitem__)
    found = items_of(source)
    if found is None:
        raise DataError(f"A {type(source).__name__} is no data.", _KINDS)
    name, items, once = found
    opened = from_one_shot if once else from_iterable
    return opened(name, inputs, items, batched=batches_samples(source))


def data_files(path: Path) -> Iterator[Path]:
    """The files that may be data: the path itself, or those of a folder and of the folders in it."""
    if not path.is_dir():
        yield path
        return
    for folder in (path, *(inner for inner in path.iterdir() if inner.is_dir())):
        yield from (file for file in folder.iterdir() if file.suffix.lower() in {".npy", ".npz", ".pb", *SUFFIXES})


def _open_path(path: Path, inputs: Sequence[InputSpec], preprocess: Preprocess | None) -> Dataset:
    with readable(path):
        is_folder, is_there = path.is_dir(), path.exists()
    if is_folder:
        return open_folder(path, inputs, preprocess)
    if not is_there:
        raise DataError(f"{path} does not exist.", "Check the path of the data.")
    if path.suffix.lower() != ".npz":
        raise DataError(f"{path} is of an unknown kind.", _KINDS)
    refuse_preprocess(preprocess, str(path))
    archive = Npz(path)
    check_names(archive.names, inputs, str(path))
    _check_headers(archive, inputs)
    return _open_arrays(str(path), inputs, archive.names, archive.__getitem__)


def _check_headers(archive: Npz, inputs: Sequence[InputSpec]) -> None:
    """Says what does not fit before anything is unpacked."""
    empty = {name: archive.empty(name) for name in archive.names}
    from_arrays(str(archive.path), inputs, empty, None)
    if LABELS in empty and all(spec.name != LABELS for spec in inputs):
        check_label_header(*archive.header(LABELS), len(empty[inputs[0].name]), archive.title(LABELS))


def _open_arrays(
    source: str, inputs: Sequence[InputSpec], names: Iterable[str], get: Callable[[str], Array]
) -> SampleDataset:
    """The inputs' arrays, and the labels unless the model has an input of that name."""
    arrays = {spec.name: get(spec.name) for spec in inputs}
    labels = get(LABELS) if LABELS in names and LABELS not in arrays else None
    return from_arrays(source, inputs, arrays, labels)
