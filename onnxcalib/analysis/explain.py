"""Answers to what people ask of a quantized file, from the file, what the runtime makes of it, and the run's report."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxcalib.analysis.advice import without_recipe
from onnxcalib.analysis.layer_rows import ReportData, worst_rows
from onnxcalib.analysis.speed import speed
from onnxcalib.errors import listed
from onnxcalib.model.float_nodes import FloatNode
from onnxcalib.model.io import file_bytes, load
from onnxcalib.model.left_float import left_float_of, sentences
from onnxcalib.model.placement import INTEGER_OPS
from onnxcalib.model.quantized import (
    QuantizedFile,
    QuantizedLayer,
    bytes_by_kind,
    float_constants,
    float_ops,
    read_quantized,
)
from onnxcalib.recipe import MAX_BITS

TOLD = 5
NEED_DATA = "Give `model`, the float model, and `data`, or quantize with `report`."


class Question(enum.StrEnum):
    """What can be asked."""

    ACCURACY = "accuracy"
    FLOAT = "float"
    SIZE = "size"
    SPEED = "speed"
    BITS = "bits"


TITLES = {
    Question.ACCURACY: "Which layer loses the accuracy?",
    Question.FLOAT: "Why is this op still float?",
    Question.SIZE: "Why is the file not smaller?",
    Question.SPEED: "Why is it not faster?",
    Question.BITS: "What would one more bit buy?",
}


@dataclass(frozen=True)
class Facts:
    """A quantized file and what is known of the run that wrote it."""

    path: Path
    proto: onnx.ModelProto
    file: QuantizedFile
    rows: Sequence[ReportData] = ()  # of the diagnosis
    report: ReportData | None = None  # the run's report

    @classmethod
    def read(cls, path: Path) -> Facts:
        """What the file alone tells."""
        proto = load(path)
        return cls(path, proto, read_quantized(proto, str(path)))


def answer(question: Question, facts: Facts) -> list[str]:
    """One question, answered in a few lines."""
    tellers: Mapping[Question, Callable[[Facts], list[str]]] = {
        Question.ACCURACY: _accuracy,
        Question.FLOAT: _float,
        Question.SIZE: _size,
        Question.SPEED: lambda given: speed(given.path, given.file.layers, given.report),
        Question.BITS: _bits,
    }
    return tellers[question](facts)


def _accuracy(facts: Facts) -> list[str]:
    if not facts.rows:
        return [f"The file alone does not tell. {NEED_DATA}"]
    worst = worst_rows(facts.rows, TOLD)
    if not worst:
        return ["No layer alone costs anything that could be measured."]
    lines = []
    for place, row in enumerate(worst):
        most = " loses the most:" if place == 0 else ":"
        lines.append(
            f"{row['layer']} ({row['bits']}){most} {100 * row['loss_share']:.1f} % of what all layers cost one by one; "
            f"SQNR {_db(row['alone_db'])} alone, {_db(row['sqnr_db'])} in the whole; "
            f"to help it: {row.get('advice') or without_recipe(row)}"
        )
    return lines + _clipped(facts)


def _clipped(facts: Facts) -> list[str]:
    """Ranges that cut off a good part of what a bad layer holds or reads."""
    lines = []
    for row in facts.report["histograms"] if facts.report is not None else ():
        for what, words in (("weight", "weights"), ("input", "inputs")):
            share = row[what]["clipped"] if row[what] is not None else 0.0
            if share > 0.01:
                lines.append(f"{row['layer']}: its range clips {100 * share:.1f} % of its {words}.")
    return lines


def _float(facts: Facts) -> list[str]:
    reasons = {row["node"]: row["reason"] for row in facts.report["float"]} if facts.report is not None else {}
    known = {node.name for node in facts.file.floats}
    more = [FloatNode(row["node"], row["op"], row["reason"]) for row in facts.report["float"]] if facts.report else []
    nodes = [*facts.file.floats, *(node for node in more if node.name not in known)]
    lines = [f"{node.name} ({node.op}): {reasons.get(node.name, node.reason)}." for node in nodes]
    for op, names in float_ops(facts.file).items():
        why = (
            "it has an integer kernel, but not all of its inputs are quantized here, or no layer comes after it"
            if op in INTEGER_OPS
            else "no integer kernel is used for this op"
        )
        lines.append(f"{listed(names)} ({op}): {why}.")
    lines += [f"{sentence}." for sentence in sentences(left_float_of(facts.proto))]
    return lines or ["Nothing is: every layer and every op between layers has quantized inputs."]


def _size(facts: Facts) -> list[str]:
    kinds, whole = bytes_by_kind(facts.proto), file_bytes(facts.path)
    kinds = {**kinds, "the graph: nodes and names": whole - sum(kinds.values())}
    parts = [
        f"{name} {count:,} ({100 * count / whole:.0f} %)"
        for name, count in sorted(kinds.items(), key=lambda item: -item[1])
        if count
    ]
    compared = ""
    if facts.report is not None:
        before = facts.report["outcome"]["float"]["bytes"]
        compared = f", {100 * whole / before:.1f} % of the float file's {before:,}"
    lines = [f"{whole:,} bytes{compared}: {', '.join(parts)}."]
    if kinds["the graph: nodes and names"] > 0.2 * whole:
        lines.append("The graph does not shrink with bits: in a small model it weighs as much as the weights.")
    if kinds["scales and zero points"] > 0.15 * whole:
        lines.append("Every output channel has scales and zero points of its own, for its weights and for its bias.")
    if kinds["float constants"] > 0.05 * whole:
        lines += [
            f"{name} is still float: {count:,} bytes, read by {reader}."
            for name, count, reader in float_constants(facts.proto, TOLD)
            if count > 0.01 * whole
        ]
    wide = [each for each in facts.file.layers if each.weight.bits < 8 and each.stored >= each.quantized.size]
    if wide:
        lines.append(
            f"{listed([each.name for each in wide])}: narrow weights that lie in a byte each, as the target asks."
        )
    heavy = sorted(facts.file.layers, key=lambda each: -each.stored)[:3]
    lines += [
        f"{each.name} ({each.bits}) holds {each.stored:,} bytes of quantized weights{_narrower(each)}."
        for each in heavy
    ]
    return lines


def _narrower(layer: QuantizedLayer) -> str:
    half = layer.weight.bits // 2
    return f"; {layer.quantized.size * half // 8:,} at {half} bits" if half >= 2 else ""


def _bits(facts: Facts) -> list[str]:
    table = facts.report["sensitivity"] if facts.report is not None else None
    if table is not None:
        return _measured_gains(facts, table)
    if not facts.rows:
        return [f"The file alone does not tell. {NEED_DATA}"]
    rows = [row for row in worst_rows(facts.rows, len(facts.rows)) if row["weight_bits"] < MAX_BITS][:TOLD]
    if not rows:
        return ["Every layer has 8 bits, the most that there is; `exclude` leaves a layer float."]
    return [
        "Estimated, for one more bit leaves a quarter of the noise:",
        *(
            f"{row['layer']}: loss {0.75 * row['alone_loss']:.3g} less, {row['parameters'] // 8:,} bytes more"
            for row in rows
        ),
    ]


def _measured_gains(facts: Facts, table: ReportData) -> list[str]:
    """The next precision up in the sensitivity table, most loss saved for a byte first."""
    bits = {layer.name: layer.bits for layer in facts.file.layers}
    gains = []
    for row in table["layers"]:
        here = bits.get(row["layer"])
        sizes = row["costs"].get("size", {})
        if here not in row["losses"] or here not in sizes:
            continue
        more = [choice for choice in row["losses"] if sizes[choice] > sizes[here]]
        if more:
            best = min(more, key=lambda choice: sizes[choice])
            gain, price = row["losses"][here] - row["losses"][best], sizes[best] - sizes[here]
            gains.append((gain / price, row["layer"], here, best, gain, price))
    if not gains:
        return ["Every layer has the most bits that were on offer; offer more in `bits`."]
    return [
        f"{layer}: {here} to {best} saves {gain:.3g} of the {table['loss']} loss for {price:,.0f} more bytes."
        for _, layer, here, best, gain, price in sorted(gains, reverse=True)[:TOLD]
    ]


def _db(value: float | None) -> str:
    return "without noise" if value is None else f"{value:.1f} dB"
