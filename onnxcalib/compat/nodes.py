"""From onnxruntime's lists of op types and node names to patterns of layer names."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

import onnx

from onnxcalib.errors import RecipeError, near
from onnxcalib.model.io import load
from onnxcalib.model.placement import find_insertion_points
from onnxcalib.model.read import graphs_of, read_prepared
from onnxcalib.model.walk import all_nodes
from onnxcalib.targets import Target

Patterns = tuple[str, ...]


class Nodes:
    """What a model holds, and what becomes of it."""

    def __init__(self, model: str | Path | onnx.ModelProto, target: Target) -> None:
        self.source = "the given model" if isinstance(model, onnx.ModelProto) else str(model)
        proto = model if isinstance(model, onnx.ModelProto) else load(Path(model))
        self.ops = {node.name: node.op_type for node in all_nodes(proto.graph) if node.name}
        graphs = graphs_of(read_prepared(model, target))
        # Batch norms that were folded and Constants are no ops any more: naming them asks for nothing.
        self.kinds = {node.op_type for graph in graphs for node in graph.model.proto.graph.node}
        self.layers = {layer.name: layer.op for graph in graphs for layer in graph.listed.layers}
        self._integer: dict[str, str] = {}  # ops between layers that are quantized with them
        for graph in graphs:
            products = graph.listed.products if target.integer_products else ()
            points = find_insertion_points(graph.model, graph.listed.layers, target, products)
            own = {layer.name for layer in graph.listed.layers}
            self._integer |= {
                node.name: node.op_type
                for node in graph.model.proto.graph.node
                if node.name not in own and any(name in points.tensors for name in node.output)
            }

    def included(self, op_types: Iterable[str] | None, names: Iterable[str] | None) -> Patterns:
        """The layers to quantize; none where that is all of them."""
        kinds, chosen = list(op_types or ()), list(names or ())
        for op in kinds:
            if op in self.kinds and op not in {*self.layers.values(), *self._integer.values()}:
                raise RecipeError(
                    f"op_types_to_quantize names {op}, of which {self.source} has nodes that stay float.",
                    "Leave it out; `onnxcalib inspect` lists what is quantized, and why other nodes are not.",
                )
        for name in chosen:
            self._known("nodes_to_quantize", name)
            if name not in self.layers and name not in self._integer:
                raise RecipeError(
                    f"nodes_to_quantize names '{name}', a {self.ops[name]} that is not quantized by itself.",
                    "Name layers: Conv, ConvTranspose, Gemm or MatMul with constant weights.",
                )
        if not kinds and not chosen:
            return ()
        wanted = [
            name for name, op in self.layers.items() if (not kinds or op in kinds) and (not chosen or name in chosen)
        ]
        if not wanted:
            raise RecipeError(
                f"op_types_to_quantize and nodes_to_quantize leave no layer of {self.source}.",
                f"It has {', '.join(sorted(set(self.layers.values())))}.",
            )
        return tuple(map(glob.escape, wanted)) if len(wanted) < len(self.layers) else ()

    def excluded(self, names: Iterable[str] | None) -> Patterns:
        """The layers to leave float; nodes that stay float anyway need no pattern."""
        patterns = []
        for name in names or ():
            self._known("nodes_to_exclude", name)
            if name in self.layers:
                patterns.append(glob.escape(name))
            elif name in self._integer or self.ops[name] == "BatchNormalization":
                raise RecipeError(
                    f"nodes_to_exclude names '{name}', a {self.ops[name]} that is quantized with the layers around it.",
                    "Exclude those layers instead.",
                )
        return tuple(patterns)

    def _known(self, argument: str, name: str) -> None:
        if name not in self.ops and name not in self.layers:
            raise RecipeError(f"{argument} names '{name}', which {self.source} does not have.", near(name, self.ops))
