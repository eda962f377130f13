"""Folders of .npy or .npz files, and which kind of data a folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from onnxcalib.data.arrays import Npz, map_npy, natural, readable
from onnxcalib.data.check import check_axes, check_counts, check_dtype, check_feed, check_label_header, check_names
from onnxcalib.data.feeds import from_files
from onnxcalib.data.images import class_folders, images_in, open_images
from onnxcalib.data.preprocess import Preprocess
from onnxcalib.data.protobuf import open_test_sets, set_folders
from onnxcalib.data.samples import FileRows, join_rows
from onnxcalib.data.spec import LABELS, Array, Dataset, InputSpec
from onnxcalib.data.spool import Spool
from onnxcalib.errors import DataError


def open_folder(folder: Path, inputs: Sequence[InputSpec], preprocess: Preprocess | None) -> Dataset:
    """Look at what the folder holds and open it as that."""
    with readable(folder):
        kind = _kind(folder)
    if kind == "images":
        return open_images(folder, inputs, preprocess)
    refuse_preprocess(preprocess, str(folder))
    if kind == "test sets":
        return open_test_sets(folder, inputs)
    files = sorted(folder.glob(f"[!.]*{kind}"), key=natural)
    return _open_npy(folder, files, inputs) if kind == ".npy" else _open_npz(folder, files, inputs)


def refuse_preprocess(preprocess: Preprocess | None, source: str) -> None:
    """Preprocessing has no effect on data that is no images, so it is an error there."""
    if preprocess is not None:
        hint = "Leave it out, and store the arrays as the model reads them."
        raise DataError(f"Preprocessing was given, but {source} holds no images.", hint)


def _kind(folder: Path) -> str:
    if set_folders(folder):  # the model zoo keeps other files beside them
        return "test sets"
    kinds = [suffix for suffix in (".npy", ".npz") if any(folder.glob(f"[!.]*{suffix}"))]
    if images_in(folder) or class_folders(folder):
        kinds.append("images")
    if not kinds:
        hint = "Give a folder with .npy files, .npz files, images or test_data_set_* folders."
        raise DataError(f"{folder} holds no data.", hint)
    if len(kinds) > 1:
        raise DataError(f"{folder} holds more than one kind of data: {', '.join(kinds)}.", "Keep one kind in a folder.")
    return kinds[0]


def _open_npy(folder: Path, files: list[Path], inputs: Sequence[InputSpec]) -> Dataset:
    """Each file is one sample, or a batch of them, for the only input; one feed where lengths differ."""
    if len(inputs) != 1:
        hint = "Save .npz files with one array an input name instead."
        raise DataError(f"{folder} holds .npy files, but the model has {len(inputs)} inputs.", hint)
    spec, titles = inputs[0], [str(file) for file in files]

    def load(index: int) -> Array:
        return _batched(map_npy(files[index], titles[index]), spec, titles[index])

    shapes = [load(index).shape for index in range(len(files))]
    if len({shape[1:] for shape in shapes}) > 1:
        return from_files(str(folder), inputs, titles, lambda index: {spec.name: np.array(load(index))})
    rows = FileRows(titles, [shape[0] for shape in shapes], load)
    return join_rows(str(folder), inputs, {spec.name: rows}, None)


def _open_npz(folder: Path, files: list[Path], inputs: Sequence[InputSpec]) -> Dataset:
    """Each file is one sample or a batch; where the inputs share no batch axis, or lengths differ, it is one feed."""
    names = [str(file) for file in files]
    if any(spec.rank == 0 for spec in inputs) or len({spec.shape[0] for spec in inputs}) > 1:
        return from_files(str(folder), inputs, names, lambda index: _feed(files[index], inputs))
    spool = cache(Spool)
    archives = [Npz(file, spool) for file in files]
    counts = [_samples(archive, inputs) for archive in archives]
    if len({_sizes(archive, inputs) for archive in archives}) > 1:

        def feed(index: int) -> dict[str, Array]:
            archive = Npz(files[index])
            found = {name: np.array(archive[name]) for name in archive.names}
            return found | {it.name: _batched(found[it.name], it, archive.title(it.name)) for it in inputs}

        return from_files(str(folder), inputs, names, feed)

    def load(spec: InputSpec, index: int) -> Array:
        # A file with one sample is opened once a pass: a copy of what it compresses is not worth the disk.
        archive = archives[index] if counts[index] > 1 else Npz(files[index])
        return _batched(archive[spec.name], spec, archive.title(spec.name))

    titles = {spec.name: [archive.title(spec.name) for archive in archives] for spec in inputs}
    rows = {spec.name: FileRows(titles[spec.name], counts, partial(load, spec)) for spec in inputs}
    return join_rows(str(folder), inputs, rows, _labels(folder, archives, counts, inputs))


def _sizes(archive: Npz, inputs: Sequence[InputSpec]) -> tuple[tuple[int, ...], ...]:
    """The shapes of a sample."""
    return tuple(_with_batch(*archive.header(it.name), it, archive.title(it.name))[1:] for it in inputs)


def _feed(file: Path, inputs: Sequence[InputSpec]) -> dict[str, Array]:
    archive = Npz(file)
    check_feed({name: archive.empty(name) for name in archive.names}, inputs, str(file))  # before it is unpacked
    return {name: np.array(archive[name]) for name in archive.names}


def _samples(archive: Npz, inputs: Sequence[InputSpec]) -> int:
    """The number of samples in a file, from the headers of its arrays alone."""
    check_names(archive.names, inputs, str(archive.path))
    counts = {spec.name: _with_batch(*archive.header(spec.name), spec, archive.title(spec.name))[0] for spec in inputs}
    return check_counts(counts, str(archive.path), "Every array has one entry a sample.")


def _labels(folder: Path, archives: list[Npz], counts: list[int], inputs: Sequence[InputSpec]) -> Array | None:
    holders = [archive for archive in archives if LABELS in archive.names]
    if not holders or any(spec.name == LABELS for spec in inputs):
        return None
    if len(holders) < len(archives):
        hint = "Give labels in every file, or in none."
        raise DataError(f"{len(archives) - len(holders)} of the files in {folder} have no labels.", hint)
    for archive, count in zip(archives, counts, strict=True):
        shape, dtype = archive.header(LABELS)
        check_label_header(shape or (1,), dtype, count, archive.title(LABELS))
    return np.concatenate([np.atleast_1d(np.array(Npz(archive.path)[LABELS])) for archive in archives])  # no copy stays


def _batched(array: Array, spec: InputSpec, where: str) -> Array:
    return array.reshape(_with_batch(array.shape, array.dtype, spec, where))


def _with_batch(shape: tuple[int, ...], dtype: np.dtype[Any], spec: InputSpec, where: str) -> tuple[int, ...]:
    """The shape with a batch axis, which a file with one sample may leave out."""
    check_dtype(dtype, spec, where)
    full = (1, *shape) if len(shape) == spec.rank - 1 else shape
    check_axes(full, (None, *spec.shape[1:]), spec, where)
    if full[0] == 0:
        raise DataError(f"{where} holds no samples.", "Remove that file.")
    return full
