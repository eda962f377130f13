"""The gradient rule of each op."""

from __future__ import annotations

from onnxcalib.engine.gradient_rules_activation import ACTIVATIONS
from onnxcalib.engine.gradient_rules_conv import CONVOLUTIONS
from onnxcalib.engine.gradient_rules_elementwise import ELEMENTWISE
from onnxcalib.engine.gradient_rules_linear import PRODUCTS
from onnxcalib.engine.gradient_rules_reduction import REDUCTIONS
from onnxcalib.engine.gradient_rules_shape import SHAPES
from onnxcalib.engine.gradient_step import Rule

RULES: dict[str, Rule] = {**ELEMENTWISE, **ACTIVATIONS, **PRODUCTS, **CONVOLUTIONS, **REDUCTIONS, **SHAPES}
