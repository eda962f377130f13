"""The sensitivity table in files: JSON, CSV, and further costs from a CSV of the user's."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxcalib.errors import RecipeError, near
from onnxcalib.files import check_writable, replacing
from onnxcalib.mixed_precision.table import LayerChoices, SensitivityTable, check
from onnxcalib.recipe import Precision

FORMAT = "onnxcalib sensitivity table 1"
SCALARS = ("base", "loss", "base_loss", "samples")
COLUMNS = ("layer", "tensor", "precision", "loss")


def save(table: SensitivityTable, path: str | Path) -> None:
    """Write the table as .json or .csv; the file appears whole or not at all."""
    path = Path(path)
    check(table)
    text = _to_json(table) if _suffix(path) == ".json" else _to_csv(table)
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
    try:
        table = read(_text(path))
        check(table)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error.message}", error.hint) from error
    return table


def with_costs(table: SensitivityTable, name: str, path: str | Path) -> SensitivityTable:
    """The table with one more cost, read from a CSV file with the columns layer, precision and cost."""
    check(table)
    if name in table.cost_names():
        raise RecipeError(f"the sensitivity table already has a cost {name!r}.", "Give the new cost another name.")
    try:
        costs = _user_costs(table, _text(Path(path)))
    except RecipeError as error:
        raise RecipeError(f"{path}: {error.message}", error.hint) from error
    layers = tuple(replace(row, costs={**row.costs, name: costs[row.layer]}) for row in table.layers)
    grown = replace(table, layers=layers)
    check(grown)
    return grown


def _suffix(path: Path) -> str:
    if path.suffix not in {".json", ".csv"}:
        raise RecipeError(f"{path}: a sensitivity table ends in .json or .csv.")
    return path.suffix


def _text(path: Path) -> str:
    try:
        # Spreadsheets put a byte order mark first.
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RecipeError(f"the file cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"line {line}: the file is not UTF-8 text.") from error


def as_dict(table: SensitivityTable) -> dict[str, Any]:
    """The table as JSON holds it."""
    layers = [
        {
            "layer": row.layer,
            "tensor": row.tensor,
            "losses": _named(row.losses),
            "costs": {name: _named(costs) for name, costs in row.costs.items()},
        }
        for row in table.layers
    ]
    head = {
        "format": FORMAT,
        "base": str(table.base),
        "loss": table.loss,
        "base_loss": float(table.base_loss),
        "samples": int(table.samples),
        "fixed": {name: float(value) for name, value in table.fixed.items()},
        "float_costs": {name: float(value) for name, value in table.float_costs.items()},
    }
    return {**head, "layers": layers}


def _to_json(table: SensitivityTable) -> str:
    return json.dumps(as_dict(table), indent=1, allow_nan=False) + "\n"


def _named(values: Mapping[Precision, float]) -> dict[str, float]:
    return {str(precision): float(value) for precision, value in values.items()}


def _from_json(text: str) -> SensitivityTable:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError(f"line {error.lineno}: not JSON: {error.msg}.") from error
    if _kind(data, dict, "the file").get("format") != FORMAT:
        raise RecipeError(f"the file does not say format {FORMAT!r}.")
    return SensitivityTable(
        base=Precision.parse(_get(data, "base", str)),
        loss=_get(data, "loss", str),
        base_loss=_number(data.get("base_loss"), "base_loss"),
        samples=_get(data, "samples", int),
        fixed=_numbers(data, "fixed"),
        float_costs=_numbers(data, "float_costs"),
        layers=tuple(_json_layer(row, index) for index, row in enumerate(_get(data, "layers", list))),
    )


def _json_layer(row: Any, index: int) -> LayerChoices:
    place = f"layers[{index}]"
    layer = _get(_kind(row, dict, place), "layer", str, place)
    place = f"{place} ({layer})"
    costs = _get(row, "costs", dict, place)
    return LayerChoices(
        layer=layer,
        tensor=_get(row, "tensor", str, place),
        losses=_choices(row, "losses", place),
        costs={name: _choices(costs, name, f"{place}.costs") for name in costs},
    )


def _choices(data: Any, key: str, place: str) -> dict[Precision, float]:
    values: dict[Precision, float] = {}
    for text, value in _numbers(data, key, place).items():
        precision = Precision.parse(text)
        if precision in values:
            raise RecipeError(f"{place}.{key}: {precision} is there twice.")
        values[precision] = value
    return values


def _get(data: Any, key: str, kind: type, place: str = "the file") -> Any:
    if key not in data:
        raise RecipeError(f"{place} has no {key!r}.")
    return _kind(data[key], kind, f"{key!r} of {place}")


def _kind(value: Any, kind: type, what: str) -> Any:
    # A bool is an int to Python, but not to a person.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RecipeError(f"{what} is {value!r:.40}, not of kind {kind.__name__}.")
    return value


def _integer(text: str) -> int | str:
    return int(text) if text.strip().isdecimal() else text


def _numbers(data: Any, key: str, place: str = "the file") -> dict[str, float]:
    return {name: _number(value, f"{key}.{name} of {place}") for name, value in _get(data, key, dict, place).items()}


def _number(value: Any, what: str) -> float:
    """A finite number from a number or from its text."""
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RecipeError(f"{what} is {value!r:.40}, not a finite number.")
    return number


def _to_csv(table: SensitivityTable) -> str:
    head = [FORMAT, f"base: {table.base}", f"loss: {table.loss}", f"base_loss: {float(table.base_loss)!r}"]
    head.append(f"samples: {int(table.samples)}")
    head += [f"fixed {name}: {float(value)!r}" for name, value in table.fixed.items()]
    head += [f"float {name}: {float(value)!r}" for name, value in table.float_costs.items()]
    names = table.cost_names()
    out = io.StringIO()
    out.writelines(f"# {line}\n" for line in head)
    # The csv module does not see that a lone carriage return needs quotes.
    odd = any("\r" in row.layer + row.tensor for row in table.layers)
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL if odd else csv.QUOTE_MINIMAL)
    writer.writerow([*COLUMNS, *(f"cost:{name}" for name in names)])
    for row in table.layers:
        for precision, loss in row.losses.items():
            costs = [repr(float(row.costs[name][precision])) for name in names]
            writer.writerow([row.layer, row.tensor, str(precision), repr(float(loss)), *costs])
    return out.getvalue()


def _from_csv(text: str) -> SensitivityTable:
    head, skipped, body = _comments(text)
    if FORMAT not in head:
        raise RecipeError(f"line 1: the file does not begin with '# {FORMAT}'.")
    missing = [key for key in SCALARS if key not in head]
    if missing:
        raise RecipeError(f"line 1: the comment lines at the top lack {', '.join(missing)}.")
    for key, value in head.items():
        if key not in {FORMAT, *SCALARS} and not key.startswith(("fixed ", "float ")):
            raise RecipeError(f"line {value.line}: the key {key!r} is unknown.", near(key, SCALARS))
    with _at_line(head["base"].line):
        base = Precision.parse(head["base"].text)
    with _at_line(head["samples"].line):
        samples = _kind(_integer(head["samples"].text), int, "samples")
    return SensitivityTable(
        base=base,
        loss=head["loss"].text,
        base_loss=head["base_loss"].number("base_loss"),
        samples=samples,
        fixed={key[6:]: value.number(key) for key, value in head.items() if key.startswith("fixed ")},
        float_costs={key[6:]: value.number(key) for key, value in head.items() if key.startswith("float ")},
        layers=_csv_layers(body, skipped),
    )


@dataclass(frozen=True)
class _Comment:
    text: str
    line: int

    def number(self, what: str) -> float:
        with _at_line(self.line):
            return _number(self.text, what)


@contextmanager
def _at_line(line: int) -> Iterator[None]:
    """Say at which line an error inside the block arose."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"line {line}: {error.message}", error.hint) from error


def _comments(text: str) -> tuple[dict[str, _Comment], int, str]:
    """The "# key: value" lines at the top, how many they are, and the text after them."""
    head: dict[str, _Comment] = {}
    line = 0
    while text.startswith("#"):
        first, _, text = text.partition("\n")
        line += 1
        # Spreadsheets pad a line with commas up to the width of the table.
        key, _, value = first.rstrip(",\r")[2:].rpartition(": ")
        if key in head:
            raise RecipeError(f"line {line}: {key!r} is there twice.")
        head[key or value] = _Comment(value, line)
    return head, line, text


def _csv_layers(body: str, skipped: int) -> tuple[LayerChoices, ...]:
    tensors: dict[str, str] = {}
    losses: dict[str, dict[Precision, float]] = {}
    costs: dict[str, dict[str, dict[Precision, float]]] = {}
    for line, row in _rows(body, skipped, COLUMNS, "cost:"):
        with _at_line(line):
            layer, tensor, precision = row["layer"], row["tensor"], Precision.parse(row["precision"])
            if tensors.setdefault(layer, tensor) != tensor:
                raise RecipeError(f"layer {layer!r} reads {tensor!r} here and {tensors[layer]!r} above.")
            if precision in losses.setdefault(layer, {}):
                raise RecipeError(f"layer {layer!r} at {precision} is there twice.")
            losses[layer][precision] = _number(row["loss"], "the loss")
            for name in row:
                if name.startswith("cost:"):
                    per_choice = costs.setdefault(layer, {}).setdefault(name[5:], {})
                    per_choice[precision] = _number(row[name], f"the {name[5:]} cost")
    return tuple(LayerChoices(name, tensors[name], losses[name], costs.get(name, {})) for name in tensors)


def _rows(body: str, skipped: int, columns: tuple[str, ...], more: str = "") -> Iterator[tuple[int, dict[str, str]]]:
    """Each row by column name with its line; only the given columns, and those that begin with `more`, may be there."""
    reader = csv.reader(io.StringIO(body, newline=""), strict=True)
    try:
        header = next(reader, [])
        with _at_line(skipped + 1):
            _check_header(header, columns, more)
        for row in reader:
            if row and len(row) != len(header):
                raise RecipeError(f"line {skipped + reader.line_num}: {len(row)} fields, not {len(header)}.")
            if row:
                yield skipped + reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise RecipeError(f"line {skipped + reader.line_num}: not CSV: {error}.") from error


def _check_header(header: list[str], columns: tuple[str, ...], more: str) -> None:
    for name in columns:
        if name not in header:
            raise RecipeError(f"there is no column {name!r}.", f"The first row must name {', '.join(columns)}.")
    for name in header:
        if header.count(name) > 1:
            raise RecipeError(f"the column {name!r} is there twice.")
        if name not in columns and not (more and name.startswith(more)):
            raise RecipeError(f"the column {name!r} is unknown.", near(name, columns))


def _user_costs(table: SensitivityTable, text: str) -> dict[str, dict[Precision, float]]:
    choices = {row.layer: row.losses for row in table.layers}
    costs: dict[str, dict[Precision, float]] = {layer: {} for layer in choices}
    _, skipped, body = _comments(text)
    for line, row in _rows(body, skipped, ("layer", "precision", "cost")):
        with _at_line(line):
            layer, precision = row["layer"], Precision.parse(row["precision"])
            if layer not in choices:
                raise RecipeError(f"layer {layer!r} is unknown.", near(layer, choices))
            if precision not in choices[layer]:
                known = near(str(precision), map(str, choices[layer]))
                raise RecipeError(f"{precision} is not a choice of layer {layer!r}.", known)
            if precision in costs[layer]:
                raise RecipeError(f"layer {layer!r} at {precision} is there twice.")
            costs[layer][precision] = _number(row["cost"], "the cost")
            if costs[layer][precision] < 0:
                raise RecipeError(f"the cost {row['cost']} is negative.")
    missing = [f"{layer} at {choice}" for layer in choices for choice in choices[layer] if choice not in costs[layer]]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise RecipeError(f"no cost for {', '.join(missing[:3])}{more}.")
    return costs
