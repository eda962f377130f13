"""Which embedding tables are stored at four bits, where layers have no more: rows are unpacked after the look-up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from onnxcalib.model.external import values_of
from onnxcalib.model.graph import attributes
from onnxcalib.model.large_constants import LargeConstant
from onnxcalib.numerics.quant_params import QuantScheme, quantize
from onnxcalib.numerics.range_estimators import weight_qparams
from onnxcalib.plan import StoredConstant
from onnxcalib.targets import Target

NARROW = QuantScheme(4, signed=True, symmetric=True)
# Of the outputs with all such tables at four bits; layers at four bits leave 10 to 20 dB.
NARROW_OUTPUT_DB = 15.0

Constants = Mapping[int, StoredConstant]


def narrowed(
    constants: Constants,
    large: Iterable[LargeConstant],
    target: Target,
    worst: Callable[[Constants], float],
    shared: Collection[str] = (),
) -> dict[int, StoredConstant]:
    """The constants with tables at four bits, as many of them, the largest first, as the outputs bear.

    Worst tells the signal to noise of the outputs with some constants rounded; shared tables stay as they are.
    """
    if NARROW.bits not in target.table_bits:
        return dict(constants)
    found = {
        place: _at_four_bits(it, constants[place])
        for place, it in enumerate(large)
        if place in constants and constants[place].qparams.bits == 8 and is_table(it) and it.tensor.name not in shared
    }
    if found and worst({**constants, **found}) >= NARROW_OUTPUT_DB:
        return {**constants, **found}
    kept = dict(constants)
    for place, table in sorted(found.items(), key=lambda item: -item[1].quantized.size):
        tried = {**kept, place: table}
        kept = tried if worst(tried) >= NARROW_OUTPUT_DB else kept
    return kept


def is_table(constant: LargeConstant) -> bool:
    """Whether rows of an even length are looked up, and nothing else is done with it."""
    dims = constant.tensor.dims
    return (
        len(dims) == 2
        and dims[1] % 2 == 0
        and all(
            use.node.op_type == "Gather" and not (use.node.domain or use.place or use.moved)
            and attributes(use.node).get("axis", 0) == 0
            for use in constant.uses
        )
    )  # fmt: skip


def _at_four_bits(constant: LargeConstant, stored: StoredConstant) -> StoredConstant:
    values = values_of(constant.tensor)
    qparams = weight_qparams(values, NARROW, 0, "mse")
    return replace(stored, quantized=quantize(values, qparams), qparams=qparams)
