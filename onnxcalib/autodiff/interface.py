"""What both engines agree on: the name of a gradient, and the error where there is none."""

from __future__ import annotations

from onnxcalib.errors import ModelError


class NoGradientError(ModelError):
    """A node between a parameter and the loss has no gradient rule."""

    def __init__(self, op: str, node: str, reason: str, remedy: str = "Use the training runtime") -> None:
        why = f": {reason}" if reason else ""
        hint = f"{remedy}, or leave this part of the model out of the optimisation."
        super().__init__(f"No gradient can be made for {op} node '{node}'{why}.", hint)
        self.op, self.node = op, node


def gradient_name(parameter: str) -> str:
    """The name of the output that holds a parameter's gradient."""
    return f"{parameter}:gradient"
