"""The checks that every kind of data goes through; each failure is one sentence and a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxcalib.data.containers import by_name
from onnxcalib.data.spec import LABELS, Array, Feed, InputSpec, Labels, show
from onnxcalib.errors import DataError, near


def check_names(found: Iterable[str], inputs: Sequence[InputSpec], where: str) -> None:
    """Every input has its array, and every array is an input or the labels."""
    present = list(found)
    wanted = [spec.name for spec in inputs]
    for name in wanted:
        if name not in present:
            listed = ", ".join(present) if present else "none"
            hint = near(name, [other for other in present if other not in {*wanted, LABELS}])
            hint = f"Name each array after its input. {hint}".strip()
            raise DataError(f"The input '{name}' has no array in {where}, which has: {listed}.", hint)
    for name in present:
        if name not in wanted and name != LABELS:
            hint = f"Remove it, or rename it: the inputs are {', '.join(wanted)}, and labels are named '{LABELS}'."
            raise DataError(f"The array '{name}' of {where} is no input of the model.", hint)


def check_dtype(dtype: np.dtype[Any], spec: InputSpec, where: str) -> None:
    """The element type is the input's own: nothing is cast silently."""
    if dtype != spec.dtype:
        hint = f'Convert it first: array.astype("{spec.dtype}").'
        raise DataError(f"{where} is {dtype}, but the input '{spec.name}' is {spec.dtype}.", hint)


def check_axes(shape: tuple[int, ...], wanted: tuple[int | None, ...], spec: InputSpec, where: str) -> None:
    """Every axis has the size that is wanted, where that is fixed."""
    needs = f"the input '{spec.name}' is {show(spec.shape)}"
    if len(shape) != len(wanted):
        hint = f"Give it {len(wanted)} axes, as {show(wanted)}."
        raise DataError(f"{where} has shape {show(shape)}, {len(shape)} axes, but {needs}.", hint)
    for axis, (found, fixed) in enumerate(zip(shape, wanted, strict=True)):
        if fixed is not None and found != fixed:
            message = f"{where} has shape {show(shape)}: its axis {axis} is {found} and must be {fixed}, as {needs}."
            raise DataError(message, f"Reshape, crop or pad the data to {show(wanted)}.")


def check_counts(counts: Mapping[str, int], where: str, hint: str) -> int:
    """The number of samples, on which all arrays agree."""
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        raise DataError(f"The arrays of {where} differ in their number of samples: {listed}.", hint)
    return next(iter(counts.values()))


_LABELS = "Labels are one class index, 0 or higher, for every sample, or numbers that a metric takes."


def check_label_header(shape: tuple[int, ...], dtype: np.dtype[Any], count: int, where: str) -> None:
    """Numbers, samples first, which an array tells before it is read."""
    if dtype.kind not in "biuf":
        raise DataError(f"{where} is {dtype}, but labels are numbers.", _LABELS)
    if shape[:1] != (count,):
        raise DataError(f"{where} has shape {show(shape)}, but there are {count} samples.", _LABELS)


def check_labels(labels: Array, count: int, where: str) -> Labels:
    """One class index a sample, as int64, or what a metric of the user's takes."""
    check_label_header(labels.shape, labels.dtype, count, where)
    if labels.dtype.kind in "iu" and labels.size == count:
        labels = labels.reshape(count)  # a class has no axis of its own
    if labels.dtype.kind == "f":
        return check_finite(np.array(labels), lambda sample: f"{where}, sample {sample},")
    if are_classes(labels) and count and labels.min() < 0:
        sample = int(np.argmax(labels < 0))
        raise DataError(f"{where} holds {labels[sample]} for sample {sample}, but labels are not negative.", _LABELS)
    return np.array(labels, dtype=np.int64)


def are_classes(labels: Labels) -> bool:
    """Whether the labels are class indices."""
    return labels.ndim == 1 and labels.dtype.kind in "iu"


def check_finite(array: Array, where: Callable[[int], str]) -> Array:
    """Return the array if it holds no NaN or Inf; `where` names the place of a row along the first axis."""
    # bfloat16 and its small relatives have the kind V; integers, booleans and text cannot be NaN.
    if array.dtype.kind not in "fcV":
        return array
    good = np.isfinite(array)
    if good.all():
        return array
    row = int(np.argmin(good.reshape(len(good), -1).all(axis=1))) if array.ndim else 0
    raise DataError(f"{where(row)} holds NaN or Inf.", "Remove that sample, or repair what produced it.")


def check_feed(item: object, inputs: Sequence[InputSpec], where: str) -> tuple[Feed, Labels | None]:
    """Turn what somebody gave as one feed into arrays that fit the inputs, and its labels if it has them."""
    given = by_name(item, inputs, where)
    check_names(given, inputs, where)
    feed = {}
    for spec in inputs:
        title = f"Array '{spec.name}' of {where}"
        array = as_array(given[spec.name], title)
        if array.ndim == spec.rank - 1 and spec.shape[0] in (None, 1):
            array = array[np.newaxis]  # a single sample, as datasets of torch give them
        feed[spec.name] = array
        check_dtype(array.dtype, spec, title)
        check_axes(array.shape, spec.shape, spec, title)
        if array.size == 0:
            raise DataError(f"{title} is empty.", "Leave that feed out.")
    if LABELS in feed or LABELS not in given:
        return feed, None
    title = f"Array '{LABELS}' of {where}"
    try:
        return feed, check_labels(np.atleast_1d(as_array(given[LABELS], title)), samples_in(feed), title)
    except DataError as error:
        raise DataError(error.message, f"{error.hint} Others are left out by a `transform` of each item.") from error


def samples_in(feed: Feed) -> int:
    """The length of the batch axis if all inputs agree on it, else 1."""
    lengths = {len(array) if array.ndim else 1 for array in feed.values()}
    return lengths.pop() if len(lengths) == 1 else 1


def as_array(value: object, where: str) -> Array:
    """A NumPy array, whatever array-like it was; a tensor of torch may be on another device, or want gradients."""
    try:
        if callable(getattr(value, "detach", None)) and callable(getattr(value, "cpu", None)):
            value = value.detach().cpu()  # type: ignore[attr-defined]
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{where} is not an array: {error}.", "Give a NumPy array.") from error
