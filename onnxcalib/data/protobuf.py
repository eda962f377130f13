"""ONNX test sets: folders named test_data_set_* with input_0.pb, input_1.pb, ..."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from onnxcalib.data.arrays import natural
from onnxcalib.data.feeds import FeedDataset, from_files
from onnxcalib.data.spec import Feed, InputSpec
from onnxcalib.errors import DataError, first_line
from onnxcalib.files import check_regular


def set_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a test set, else the test sets in it, 2 before 10."""
    if any(folder.glob("input_*.pb")):
        return [folder]
    return sorted((path for path in folder.glob("test_data_set_*") if path.is_dir()), key=natural)


def open_test_sets(folder: Path, inputs: Sequence[InputSpec]) -> FeedDataset:
    """One feed a test set."""
    folders = set_folders(folder)
    titles = [str(path) for path in folders]
    return from_files(str(folder), inputs, titles, lambda number: _load(folders[number], inputs))


def _load(folder: Path, inputs: Sequence[InputSpec]) -> Feed:
    files = sorted(folder.glob("input_*.pb"), key=natural)
    if len(files) != len(inputs):
        hint = f"Give input_0.pb to input_{len(inputs) - 1}.pb, in the order of the inputs."
        raise DataError(f"{folder} has {len(files)} input files, but the model has {len(inputs)} inputs.", hint)
    feed: Feed = {}
    names = {spec.name for spec in inputs}
    for file, spec in zip(files, inputs, strict=True):
        try:
            check_regular(file)
            tensor = onnx.load_tensor(file)
            array = onnx.numpy_helper.to_array(tensor, str(folder))
        except Exception as error:  # what onnx raises at damaged tensors knows no bounds
            hint = "Write it again with onnx.save_tensor(onnx.numpy_helper.from_array(array), path)."
            raise DataError(f"{file} is not a readable TensorProto: {first_line(error)}.", hint) from error
        name = tensor.name if tensor.name in names else spec.name
        if name in feed:
            raise DataError(f"{file} is a second tensor for the input '{name}'.", "Name all tensors, or none.")
        feed[name] = array
    return feed
