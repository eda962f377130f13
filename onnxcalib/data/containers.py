"""What Python programs hold data in: loaders, readers, generator functions; and what one item of them holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onnxcalib.data.spec import LABELS, InputSpec
from onnxcalib.errors import DataError

Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class Transformed:
    """Somebody's data, each of whose items becomes a feed by a function of theirs."""

    source: Any
    transform: Transform


def transformed(source: Any, transform: Transform | None) -> Any:
    """The data with its function; files and arrays by name have no items that it could take."""
    if transform is None:
        return source
    if isinstance(source, str | os.PathLike | Mapping):
        what = "a dict of arrays" if isinstance(source, Mapping) else source
        hint = "Leave it out, or give an iterable: each of its items is given to the function."
        raise DataError(f"`transform` has no effect on {what}.", hint)
    return Transformed(source, transform)


@dataclass(frozen=True)
class _Indexed(Sequence[Any]):
    """An object with a length that is read by number, such as torch's datasets of samples."""

    source: Any
    transform: Transform | None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: Any) -> Any:
        item = self.source[number]
        return item if self.transform is None else self.transform(item)

    def __iter__(self) -> Iterator[Any]:
        # By length: some have no end that they would tell of by an IndexError.
        return (self[number] for number in range(len(self)))


@dataclass(frozen=True)
class _Anew:
    """Items of an iterable that begins anew whenever it is asked."""

    begin: Callable[[], Iterable[Any]]
    transform: Transform | None

    def __iter__(self) -> Iterator[Any]:
        found = self.begin()
        return iter(found) if self.transform is None else map(self.transform, found)


def batches_samples(source: Any) -> bool:
    """Whether an object says that its items are batches of samples: torch's loaders do, and tf.data's sets."""
    given = source.source if isinstance(source, Transformed) else source
    return isinstance(getattr(given, "batch_size", None), int) or hasattr(given, "element_spec")


def items_of(source: Any) -> tuple[str, Iterable[Any], bool] | None:
    """What a Python object is called, its items, and whether they can be had only once; None if it has none."""
    transform = None
    if isinstance(source, Transformed):
        source, transform = source.source, source.transform
    if isinstance(source, type):  # whoever gives a class forgot to make an object of it
        return None
    # An iterator of tf.data has a get_next too, which raises at the end: what is an iterator tells its end by itself.
    rewinds, iterates = callable(getattr(source, "rewind", None)), isinstance(source, Iterator)
    if callable(getattr(source, "get_next", None)) and (rewinds or not iterates):
        return "python data reader", _Anew(lambda: _read(source), transform), True
    if isinstance(source, Iterable):
        found = iter(source)
        # An iterator, or an object that hands out the same iterator again, can be read only once.
        if found is source or iter(source) is found:
            return "python iterable", _Anew(lambda: found, transform), True
        whole = isinstance(source, Sequence)
        return "python iterable", _Indexed(source, transform) if whole else _Anew(lambda: source, transform), False
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return "python dataset", _Indexed(source, transform), False
    if callable(source):
        return "python function", _Anew(lambda: _called(source), transform), False
    return None


def by_name(item: object, inputs: Sequence[InputSpec], where: str) -> dict[str, object]:
    """The arrays of one item by input; those without names come in the order of the inputs, labels last."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple | list):
        return _by_place(item, inputs, where)
    if not hasattr(item, "__array__"):
        hint = "Yield a dict from input name to array, a tuple of arrays or, for one input, an array."
        raise DataError(f"A feed is made of arrays, but {where} is a {type(item).__name__}.", hint)
    return _by_place((item,), inputs, where)


def _by_place(parts: Sequence[object], inputs: Sequence[InputSpec], where: str) -> dict[str, object]:
    names = [spec.name for spec in inputs]
    if len(parts) == 2 and isinstance(parts[0], Mapping | tuple | list):  # as Keras has them: inputs and labels
        return {**by_name(parts[0], inputs, where), LABELS: parts[1]}
    if len(parts) == len(names) + 1 and LABELS not in names:
        names.append(LABELS)
    if len(parts) != len(names):
        hint = "Give them in this order, labels last, or a dict of them; `transform` can make one of each item."
        what = f"{len(parts)} array{'s' * (len(parts) != 1)}"
        raise DataError(f"{where} has {what}, but the model has the inputs {', '.join(names)}.", hint)
    return dict(zip(names, parts, strict=True))


def _read(reader: Any) -> Iterator[Any]:
    """What a reader gives until it gives None; from its beginning, if it can go back there."""
    rewind = getattr(reader, "rewind", None)
    if callable(rewind):
        rewind()
    while (feed := reader.get_next()) is not None:
        yield feed


def _called(function: Callable[[], Any]) -> Iterable[Any]:
    found = function()
    if not isinstance(found, Iterable):
        name = getattr(function, "__name__", type(function).__name__)
        raise DataError(f"The function {name} gives a {type(found).__name__}, no feeds.", "Let it yield feeds.")
    return found
