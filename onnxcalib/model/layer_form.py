"""The form of a layer's loss: what is left of the graph when names and the layer's own numbers are taken out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from onnxcalib.model.io import copied
from onnxcalib.model.loss_writer import OF_LAYER
from onnxcalib.model.walk import refill

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerForm:
    """A graph that layers of one structure have in common, and what is one layer's own."""

    model: onnx.ModelProto
    own: Mapping[str, FloatArray]  # inputs of the graph that stay as they are while the layer trains
    names: Mapping[str, str]  # of the loss graph's inputs, in this one

    @classmethod
    def of(cls, loss: onnx.ModelProto, kept: Collection[str]) -> LayerForm:
        """The form of a loss graph without bodies inside nodes; inputs and outputs that are `kept` keep their names."""
        model = copied(loss)
        graph, names = model.graph, {"": "", **{name: name for name in kept}}
        own = [tensor for tensor in graph.initializer if tensor.doc_string == OF_LAYER]
        refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.doc_string != OF_LAYER])
        for tensor in own:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        for value in (*graph.input, *graph.initializer, *graph.output):
            value.name = _numbered(names, value.name)
        for place, node in enumerate(graph.node):
            node.name = f"node{place}"
            node.doc_string = ""
            node.input[:] = [_numbered(names, name) for name in node.input]
            node.output[:] = [_numbered(names, name) for name in node.output]
        values = {names[tensor.name]: np.array(numpy_helper.to_array(tensor)) for tensor in own}
        return cls(model, values, {value.name: names[value.name] for value in loss.graph.input})

    @property
    def key(self) -> bytes:
        """The same for layers that may share what is made of the graph."""
        return bytes(self.model.SerializeToString(deterministic=True))


def _numbered(names: dict[str, str], name: str) -> str:
    return names.setdefault(name, f"t{len(names)}")
