"""The words that calls of onnxruntime.quantization are made of."""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from onnxcalib.errors import RecipeError, near

Word = TypeVar("Word", bound=enum.Enum)


class _Named(enum.Enum):
    """Words that command lines take by their names, as argparse does with `type` and `choices`."""

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_string(cls, name: str) -> Self:
        """The member of that name."""
        try:
            return cls[name]
        except KeyError:
            raise ValueError(f"'{name}' is none of {', '.join(cls.__members__)}") from None


class QuantType(_Named):
    """The element type of quantized weights or activations."""

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6


class QuantFormat(_Named):
    """How a quantized graph is written."""

    QOperator = 0
    QDQ = 1


class CalibrationMethod(enum.Enum):
    """How ranges are estimated."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class CalibrationDataReader(abc.ABC):
    """What calibration data is read from: feeds one by one, then None."""

    @abc.abstractmethod
    def get_next(self) -> dict[str, Any] | None:
        """The next feed, by input name; None after the last."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.get_next, None)


@dataclass
class DynamicQuantConfig:
    """The arguments of `quantize_dynamic` beside the files."""

    weight_type: Any = QuantType.QInt8
    op_types_to_quantize: Any = None
    nodes_to_quantize: Any = None
    nodes_to_exclude: Any = None
    per_channel: bool = False
    reduce_range: bool = False
    use_external_data_format: bool = False
    extra_options: Any = None


@dataclass
class StaticQuantConfig:
    """The arguments of `quantize_static` beside the files."""

    calibration_data_reader: Any
    calibrate_method: Any = CalibrationMethod.MinMax
    quant_format: Any = QuantFormat.QDQ
    activation_type: Any = QuantType.QInt8
    weight_type: Any = QuantType.QInt8
    op_types_to_quantize: Any = None
    nodes_to_quantize: Any = None
    nodes_to_exclude: Any = None
    per_channel: bool = False
    reduce_range: bool = False
    use_external_data_format: bool = False
    calibration_providers: Any = None
    extra_options: Any = None


def word_of(kind: type[Word], argument: str, given: object) -> Word:
    """The member that a value names: ours, onnxruntime's of the same name, or the name itself."""
    name = given.name if isinstance(given, enum.Enum) else str(given)
    try:
        return kind[name]
    except KeyError as error:
        raise RecipeError(f"{argument}={name} is no {kind.__name__}.", near(name, kind.__members__)) from error
