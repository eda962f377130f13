"""What a target is: types, symmetry, placement, storage, opset, allowed bits, and what it makes of other files."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxcalib.numerics.quant_params import QuantScheme

BLOCK_OPSET = 21  # the first with int4 tensors and with scales for blocks


class Placement(enum.StrEnum):
    """Which tensors get QDQ nodes."""

    FUSED = "fused"  # every tensor between ops that the runtime has integer kernels for
    EVERYWHERE = "everywhere"  # the same, and the result of every layer, whatever reads it
    LAYER_INPUTS = "layer-inputs"  # only what a layer reads
    RESIDUALS = "residuals"  # what a layer reads, and the shortcut into an Add, which runs within the layer before it


class Storage(enum.StrEnum):
    """How quantized weights narrower than eight bits lie in the file."""

    INT8 = "int8"  # one byte a code
    BIT_PLANES = "planes"  # packed bits that the runtime unpacks once, at load
    INT4 = "int4"  # at four bits two quantized values a byte, else one
    INT4_CAST = "int4-cast"  # the same, cast to int8 before it is dequantized


class Constants(enum.StrEnum):
    """How large constants lie in the file that no integer kernel reads: recurrent weights, tables, and such."""

    FOLDED = "folded"  # int8, and a Cast and a Mul that the runtime computes once, at load
    FLOAT = "float"


class Bias(enum.StrEnum):
    """The type of a layer's bias."""

    FLOAT = "float"
    INT32 = "int32"  # in steps of activation times weight
    INT8 = "int8"  # on a grid of its own


class Narrow(enum.StrEnum):
    """How an activation is kept within fewer quantized values than its container has."""

    CLIP_CODES = "clip-codes"  # a Clip on the integers, between the quantizer and the dequantizer
    CLIP_VALUES = "clip-values"  # a Clip on the floats, before the quantizer


class Dynamic(enum.StrEnum):
    """How a Gemm or MatMul is written whose input has its range taken at run time."""

    MATMUL_INTEGER = "matmul-integer"  # DynamicQuantizeLinear, MatMulInteger, Cast, Mul, Add
    QDQ = "qdq"  # DynamicQuantizeLinear and DequantizeLinear, and the layer as it is
    NONE = "none"


class Blocks(enum.StrEnum):
    """Whether weights under float activations may have a scale for each block of their sums."""

    OPTIONAL = "optional"
    NEEDED = "needed"  # at four bits
    NONE = "none"


class Format(enum.StrEnum):
    """The nodes that quantize."""

    QDQ = "qdq"  # QuantizeLinear and DequantizeLinear
    QUANT = "quant"  # QONNX's Quant


class Severity(enum.StrEnum):
    """What a target makes of something in a file."""

    REFUSED = "refused"
    FLOAT = "float"
    SLOW = "slow"
    FINE = "fine"


@dataclass(frozen=True)
class Verdict:
    """What a target makes of one thing that files may hold, why, and who says so."""

    severity: Severity
    reason: str
    source: str


def widths(bits: Sequence[int]) -> str:
    """Allowed bits in words: 2 to 8, or 4, 8."""
    if len(bits) > 2 and list(bits) == list(range(bits[0], bits[-1] + 1)):
        return f"{bits[0]} to {bits[-1]}"
    return ", ".join(map(str, bits))


@dataclass(frozen=True)
class Target:
    """One runtime or compiler, as far as the written file goes."""

    name: str
    summary: str
    signed_activations: bool
    symmetric_activations: bool
    signed_weights: bool
    symmetric_weights: bool
    per_channel: bool
    bias: Bias
    placement: Placement
    storage: Storage
    weight_bits: tuple[int, ...]
    activation_bits: tuple[int, ...]
    unsigned_if_positive: bool = False  # activations that are never negative get an unsigned grid from zero
    shifted_bits: tuple[int, ...] = ()  # widths of weights whose zero points are taken off what is stored
    per_channel_ops: tuple[str, ...] = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    bias_ops: tuple[str, ...] = ("Conv", "ConvTranspose", "Gemm")  # whose bias has the type; others keep floats
    narrow: Narrow = Narrow.CLIP_CODES
    dynamic: Dynamic = Dynamic.NONE
    format: Format = Format.QDQ
    power_of_two: bool = False  # scales of activations and weights
    rounding_safe: bool = False  # scales move so that no result lies halfway between two quantized values
    float_compute: bool = False  # keep runtimes from fusing convolutions into integer kernels
    integer_products: bool = False  # of attention: products of two computed tensors, each on its own grid
    fixed_shapes: bool = False  # a free batch is written as one
    shared_constants: bool = True  # equal constants are stored once
    constants: Constants = Constants.FLOAT  # of those beside layers, and of weights that runtimes unpack in no product
    table_bits: tuple[int, ...] = (8,)  # of embedding tables among these constants
    weight_only_bits: tuple[int, ...] = ()  # of weights under float activations
    weight_only_ops: tuple[str, ...] = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    weight_only_blocks: Blocks = Blocks.OPTIONAL
    float_activations: bool = False  # nothing but weights is quantized
    oldest_opset: int = 13  # per-channel QuantizeLinear
    newest_opset: int = 21  # newer models are taken back to it where their nodes allow
    opset_limit: int = 21  # nothing newer is read at all
    newest_ir: int = 10
    domains: tuple[str, ...] = ()  # of ops beside the standard ones
    sources: Mapping[str, str] = field(default_factory=dict)  # by section or key: who says so
    check: Mapping[str, Verdict] = field(default_factory=dict)  # by rule

    @property
    def integer_bias(self) -> bool:
        """Whether a bias counts in steps of activation times weight."""
        return self.bias is Bias.INT32

    @property
    def simulated(self) -> Target:
        """The target in a form that onnxruntime computes to the last bit, whatever the file will look like."""
        return replace(
            self,
            storage=Storage.INT8,
            format=Format.QDQ,
            narrow=Narrow.CLIP_CODES,
            constants=Constants.FLOAT,
        )

    @property
    def in_place(self) -> Target:
        """The same with every layer in the form that the model has, for those who look for its nodes."""
        return replace(self.simulated, bias_ops=tuple(op for op in self.bias_ops if op != "MatMul"))

    @property
    def weight_only(self) -> Target:
        """The target where activations stay float: weights in the form that runtimes unpack within the product."""
        return replace(
            self,
            bias=Bias.FLOAT,
            storage=Storage.INT4,
            weight_bits=self.weight_only_bits,
            shifted_bits=(),
            float_activations=True,
            float_compute=False,
        )

    def activation_scheme(self, bits: int, *, positive: bool = False) -> QuantScheme:
        """The form of an activation's grid; positive says that no value is below zero."""
        signed, symmetric = self.signed_activations, self.symmetric_activations
        if self.unsigned_if_positive and positive:
            return QuantScheme(bits, signed=False, symmetric=True, power_of_two=self.power_of_two, positive=True)
        return QuantScheme(bits, signed, symmetric, self.power_of_two, whole=signed and symmetric)

    def weight_scheme(self, bits: int) -> QuantScheme:
        """The form of a weight's grid."""
        symmetric = self.symmetric_weights and not self.shifts(bits)
        return QuantScheme(bits, self.signed_weights, symmetric, self.power_of_two)

    def shifts(self, bits: int) -> bool:
        """Whether weights of that width have zero points that are taken off what is stored."""
        return bits in self.shifted_bits and self.signed_weights and self.symmetric_weights

    def has_channels(self, op: str) -> bool:
        """Whether a layer of that op may have one weight scale a channel."""
        return self.per_channel and op in self.per_channel_ops

    def least_opset(self, weight_bits: set[int], *, blocks: bool = False) -> int:
        """The oldest opset that holds weights of these widths: int4 tensors and blocks came with the same one."""
        four = self.storage in (Storage.INT4, Storage.INT4_CAST) and 4 in weight_bits
        return max(self.oldest_opset, BLOCK_OPSET) if four or blocks else self.oldest_opset
