"""The sensitivity table in files: JSON, CSV, and further costs from a CSV of the user's."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from onnxcalib.errors import RecipeError, first_line, listed, near
from onnxcalib.files import check_writable, read_text, replacing
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable, check
from onnxcalib.names import as_cell, from_cell
from onnxcalib.recipe import Precision

FORMAT = "onnxcalib sensitivity table 1"
COLUMNS = ("layer", "tensor", "precision", "loss")
COST = "cost:"  # how the names of further columns begin
TOTALS = {"fixed": "fixed", "float": "float_costs"}  # by the first word of their names in CSV
Head = Mapping[str, tuple[str, Any]]  # values at the top of a file, each with its place


def save(table: SensitivityTable, path: str | Path) -> None:
    """Write the table as .json or .csv; the file appears whole or not at all."""
    path = Path(path)
    check(table)
    as_csv = _suffix(path) == ".csv"
    text = _to_csv(table) if as_csv else json.dumps(as_dict(table), indent=1, allow_nan=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def check_output(path: Path) -> None:
    """Fails now rather than after the measurement when save could not write the file."""
    _suffix(path)
    check_writable(path)


def load(path: str | Path) -> SensitivityTable:
    """Read a table that save wrote, by its suffix."""
    path = Path(path)
    read = _from_json if _suffix(path) == ".json" else _from_csv
    with _at(path):
        table = read(_text(path))
        check(table)
    return table


def with_costs(table: SensitivityTable, name: str, path: str | Path) -> SensitivityTable:
    """The table with one more cost, read from a CSV file with the columns layer, precision and cost."""
    check(table)
    if name in table.cost_names():
        raise RecipeError(f"the sensitivity table already has a cost {name!r}.", "Give the new cost another name.")
    with _at(path):
        costs = _user_costs(table, _text(Path(path)))
    layers = tuple(replace(row, costs={**row.costs, name: costs[row.layer]}) for row in table.layers)
    grown = replace(table, layers=layers)
    check(grown)
    return grown


def as_dict(table: SensitivityTable) -> dict[str, Any]:
    """The table as JSON holds it."""
    layers = [
        {
            "layer": row.layer,
            "tensor": row.tensor,
            "losses": _plain(row.losses),
            "costs": {name: _plain(costs) for name, costs in row.costs.items()},
        }
        for row in table.layers
    ]
    scalars = (str(table.base), table.loss, float(table.base_loss), int(table.samples))
    totals = {key: _plain(getattr(table, key)) for key in TOTALS.values()}
    return {"format": FORMAT, **dict(zip(SCALARS, scalars, strict=True)), **totals, "layers": layers}


def _plain(values: Mapping[Any, float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def _to_csv(table: SensitivityTable) -> str:
    data, names = as_dict(table), table.cost_names()
    head = [FORMAT, *(f"{key}: {data[key]}" for key in SCALARS)]
    head += [f"{word} {name}: {value}" for word, key in TOTALS.items() for name, value in data[key].items()]
    out = io.StringIO()
    out.writelines(f"# {line}\n" for line in head)
    # The csv module does not see that a lone carriage return needs quotes.
    odd = any("\r" in row.layer + row.tensor for row in table.layers)
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL if odd else csv.QUOTE_MINIMAL)
    writer.writerow([*COLUMNS, *(COST + name for name in names)])
    for row in data["layers"]:
        for precision, loss in row["losses"].items():
            costs = [row["costs"][name][precision] for name in names]
            writer.writerow([as_cell(row["layer"]), as_cell(row["tensor"]), precision, loss, *costs])
    return out.getvalue()


def _suffix(path: Path) -> str:
    if path.suffix not in {".json", ".csv"}:
        raise RecipeError(f"{path}: a sensitivity table ends in .json or .csv.")
    return path.suffix


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise RecipeError(f"the file cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"line {line}: the file is not UTF-8 text.") from error


@contextmanager
def _at(place: object) -> Iterator[None]:
    """Say where an error inside the block arose."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{place}: {error.message}", error.hint) from error


def _word(value: Any) -> str:
    return str(_kind(value, str))


def _count(value: Any) -> int:
    if not re.fullmatch("[0-9]{1,18}", str(value).strip()):
        raise RecipeError(f"{brief(value)} is not a whole number.")
    return int(value)


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{brief(value)} is not a finite number.")
    return number


def _kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise RecipeError(f"{brief(value)} is not of kind {kind.__name__}.")
    return value


def _put(values: dict[Precision, float], precision: Precision, value: Any) -> None:
    """Adds the number of a precision that is not there yet."""
    if precision in values:
        raise RecipeError(f"{precision} is there twice.")
    values[precision] = _number(value)


SCALARS: Mapping[str, Callable[[Any], Any]] = {
    "base": lambda value: Precision.parse(_word(value)),
    "loss": _word,
    "base_loss": _number,
    "samples": _count,
}


def _table(head: Head, layers: tuple[LayerChoices, ...]) -> SensitivityTable:
    """The table of a head, by the names that values have in CSV, and of layers."""
    values: dict[str, Any] = {key: {} for key in TOTALS.values()}
    for name, (place, value) in head.items():
        word, _, cost = name.partition(" ")
        with _at(place):
            if name in SCALARS:
                values[name] = SCALARS[name](value)
            elif word in TOTALS and cost:
                values[TOTALS[word]][cost] = _number(value)
            elif name != FORMAT:
                raise RecipeError("the key is unknown.", near(name, SCALARS))
    return SensitivityTable(**values, layers=layers)


def _from_json(text: str) -> SensitivityTable:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError(f"line {error.lineno}: not JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:  # numbers too long to read, brackets too deep
        raise RecipeError(f"not JSON: {first_line(error)}.") from error
    if _kind(data, dict).get("format") != FORMAT:
        raise RecipeError(f"the file does not say format {FORMAT!r}.")
    head = {key: (repr(key), _get(data, key, object)) for key in SCALARS}
    for word, key in TOTALS.items():
        head |= {f"{word} {name}": (f"{key}.{name}", value) for name, value in _get(data, key, dict).items()}
    return _table(head, tuple(_json_layer(*each) for each in enumerate(_get(data, "layers", list))))


def _json_layer(index: int, row: Any) -> LayerChoices:
    with _at(f"layers[{index}]"):
        layer = _get(row, "layer", str)
        with _at(repr(layer)):
            costs = _get(row, "costs", dict)
            per_cost = {name: _choices(costs, name) for name in costs}
            return LayerChoices(layer, _get(row, "tensor", str), _choices(row, "losses"), per_cost)


def _choices(data: dict[str, Any], key: str) -> dict[Precision, float]:
    values: dict[Precision, float] = {}
    for name, value in _get(data, key, dict).items():
        with _at(f"{key}.{name}"):
            _put(values, Precision.parse(name), value)
    return values


def _get(data: Any, key: str, kind: type) -> Any:
    if key not in _kind(data, dict):
        raise RecipeError(f"there is no {key!r}.")
    with _at(repr(key)):
        return _kind(data[key], kind)


def _from_csv(text: str) -> SensitivityTable:
    head, skipped, body = _comments(text)
    for key in (FORMAT, *SCALARS):
        if key not in head:
            raise RecipeError(f"line 1: the comment lines at the top lack {key!r}.")
    return _table(head, _csv_layers(body, skipped))


def _comments(text: str) -> tuple[Head, int, str]:
    """The "# key: value" lines at the top, how many they are, and the text after them."""
    head: dict[str, tuple[str, Any]] = {}
    line = start = 0
    while text.startswith("#", start):
        line += 1
        end = text.find("\n", start) % (len(text) + 1)  # the last line may lack it
        # Spreadsheets pad a line with commas up to the width of the table.
        key, _, value = text[start:end].rstrip(",\r")[2:].rpartition(": ")
        if key in head:
            raise RecipeError(f"line {line}: {key!r} is there twice.")
        head[key or value] = (f"line {line}: {key or value!r}", value)
        start = end + 1
    return head, line, text[start:]


def _csv_layers(body: str, skipped: int) -> tuple[LayerChoices, ...]:
    tensors: dict[str, str] = {}
    columns: dict[str, dict[str, dict[Precision, float]]] = {}  # of each layer
    for line, row in _rows(body, skipped, COLUMNS, COST):
        layer, tensor, precision = (from_cell(row.pop(name)) for name in COLUMNS[:3])
        with _at(f"line {line}: layer {layer!r}"):
            if tensors.setdefault(layer, tensor) != tensor:
                raise RecipeError(f"it reads {tensor!r} here and {tensors[layer]!r} above.")
            choice, own = Precision.parse(precision), columns.setdefault(layer, {name: {} for name in row})
            for name, value in row.items():
                with _at(name):
                    _put(own[name], choice, value)
    return tuple(
        LayerChoices(layer, tensor, own.pop("loss"), {name.removeprefix(COST): each for name, each in own.items()})
        for (layer, tensor), own in zip(tensors.items(), columns.values(), strict=True)
    )


def _rows(body: str, skipped: int, columns: tuple[str, ...], more: str = "") -> Iterator[tuple[int, dict[str, str]]]:
    """Each row by column name with its line; only the given columns, and those that begin with `more`, may be there."""
    reader = csv.reader(io.StringIO(body, newline=""), strict=True)
    try:
        header = next(reader, [])
        with _at(f"line {skipped + 1}"):
            _check_header(header, columns, more)
        for row in filter(None, reader):
            if len(row) != len(header):
                raise RecipeError(f"line {skipped + reader.line_num}: {len(row)} fields, not {len(header)}.")
            yield skipped + reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise RecipeError(f"line {skipped + reader.line_num}: not CSV: {error}.") from error


def _check_header(header: list[str], columns: tuple[str, ...], more: str) -> None:
    for name in columns:
        if name not in header:
            raise RecipeError(f"there is no column {name!r}.", f"The first row must name {', '.join(columns)}.")
    for name, count in Counter(header).items():
        if count > 1:
            raise RecipeError(f"the column {name!r} is there twice.")
        if name not in columns and not (more and name.startswith(more)):
            raise RecipeError(f"the column {name!r} is unknown.", near(name, columns))


def _user_costs(table: SensitivityTable, text: str) -> dict[str, dict[Precision, float]]:
    choices = {row.layer: row.losses for row in table.layers}
    costs: dict[str, dict[Precision, float]] = {layer: {} for layer in choices}
    _, skipped, body = _comments(text)
    for line, row in _rows(body, skipped, ("layer", "precision", "cost")):
        layer = from_cell(row["layer"])
        with _at(f"line {line}: layer {layer!r}"):
            precision = Precision.parse(row["precision"])
            if layer not in choices:
                raise RecipeError("it is unknown.", near(layer, choices))
            if precision not in choices[layer]:
                known = near(str(precision), map(str, choices[layer]))
                raise RecipeError(f"{precision} is not one of its choices.", known)
            _put(costs[layer], precision, row["cost"])
            if costs[layer][precision] < 0:
                raise RecipeError(f"the cost {row['cost']} is negative.")
    missing = [f"{layer} at {choice}" for layer in choices for choice in choices[layer] if choice not in costs[layer]]
    if missing:
        raise RecipeError(f"no cost for {listed(missing, 3)}.")
    return costs
