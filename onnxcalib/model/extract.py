"""Sub-models: a model that shows inner tensors."""

from __future__ import annotations

from collections.abc import Sequence

import onnx


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy whose outputs are exactly the named float tensors, without the nodes that none of them needs."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    known = {value.name: value for value in (*shown.graph.output, *shown.graph.value_info)}
    del shown.graph.output[:]
    for name in names:
        value = known.get(name)
        shown.graph.output.append(value or onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return shown
