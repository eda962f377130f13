"""The gradient rule of each op."""

from __future__ import annotations

from onnxcalib.autodiff.standard.rules.activation import ACTIVATIONS
from onnxcalib.autodiff.standard.rules.conv import CONVOLUTIONS
from onnxcalib.autodiff.standard.rules.elementwise import ELEMENTWISE
from onnxcalib.autodiff.standard.rules.linear import PRODUCTS
from onnxcalib.autodiff.standard.rules.reduction import REDUCTIONS
from onnxcalib.autodiff.standard.rules.shape import SHAPES
from onnxcalib.autodiff.standard.step import Rule

RULES: dict[str, Rule] = {**ELEMENTWISE, **ACTIVATIONS, **PRODUCTS, **CONVOLUTIONS, **REDUCTIONS, **SHAPES}
