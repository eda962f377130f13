"""From a plan to a file: QuantizeLinear and DequantizeLinear nodes where the plan has grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx import numpy_helper

from onnxcalib.model.gemm_form import GemmForm
from onnxcalib.model.graph import GraphIndex, activation_bounds, edit
from onnxcalib.model.integer_products import GEMM_BIAS
from onnxcalib.model.layers import Layer
from onnxcalib.model.placement import CROSSED_OPS
from onnxcalib.model.prepare import Model
from onnxcalib.model.quantizers import FLOAT_TYPE, QONNX_DOMAIN, Quantizers, QuantNodes, int32_steps
from onnxcalib.model.shapes import free_shapes
from onnxcalib.model.storage import QuantizedArray, store_int4
from onnxcalib.numerics.quant_params import QuantParams, dequantize, transposed
from onnxcalib.plan import LayerParams, QuantPlan
from onnxcalib.recipe import MAX_BITS
from onnxcalib.targets import Bias, Constants, Dynamic, Format, Narrow, Placement, Storage, Target

PACKED_BITS = (4, 8)  # of weights that onnxruntime's MatMulNBits multiplies with as they are
LEAST_SOFTMAX_SCALE = 0.95 / 255  # measured on 1.19 and 1.31: below about 0.9 / 255 results wrap around to zero


def write_qdq(
    model: Model,
    layers: Sequence[Layer],
    plan: QuantPlan,
    target: Target,
    quantizers: Callable[[gs.Graph, Target], Quantizers] | None = None,
) -> onnx.ModelProto:
    """Requires a plan made for this model; ensures the same inputs, outputs and metadata."""
    int4: dict[str, QuantizedArray] = {}
    declared: dict[str, list[int | str]] = {}
    made = quantizers or (QuantNodes if target.format is Format.QUANT else Quantizers)

    def change(graph: gs.Graph) -> None:
        writer = _Writer(graph, model.proto, plan, target, made(graph, target))
        writer.write([layer for layer in layers if layer.name in plan.layers])
        int4.update(writer.quantizers.int4)
        declared.update(writer.gemms.declared)

    written = edit(model.proto, change)
    ends = {value.name for value in written.graph.output}
    written.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)
        for name, sizes in declared.items()
        if name not in ends
    )
    store_int4(written.graph, int4)
    _round_tables(written.graph, plan)
    if target.format is Format.QUANT:
        written.opset_import.append(onnx.helper.make_opsetid(QONNX_DOMAIN, 1))
    return written


def write_plain(model: Model, layers: Sequence[Layer], plan: QuantPlan, target: Target) -> onnx.ModelProto:
    """The same numbers in a form that is easy to work on: one byte a code, every tensor of the model still there."""
    return write_qdq(model, layers, plan, _plain(target))


def write_plain_part(
    model: Model, part: onnx.ModelProto, layers: Sequence[Layer], plan: QuantPlan, target: Target
) -> onnx.ModelProto:
    """The same of a part of the model."""
    return write_part(model, part, layers, plan, _plain(target))


def _plain(target: Target) -> Target:
    # No fused placement: a Relu that the writer leaves out, as a narrow grid repeats it, would take a tensor away.
    return replace(target.simulated, placement=Placement.LAYER_INPUTS, dynamic=Dynamic.QDQ)


def write_part(
    model: Model, part: onnx.ModelProto, layers: Sequence[Layer], plan: QuantPlan, target: Target
) -> onnx.ModelProto:
    """A part of the model: its layers, and what they and others in it read, quantized by the plan."""
    nodes = {node.name for node in part.graph.node}
    inside = [layer for layer in layers if layer.name in nodes]
    present = {name for node in part.graph.node for name in (*node.input, *node.output)}
    read = {layer.input for layer in inside}
    own = replace(
        plan,
        layers={name: params for name, params in plan.layers.items() if name in nodes or params.table},
        shared={name: qparams for name, qparams in plan.shared.items() if name in present},
        inputs={name: qparams for name, qparams in plan.inputs.items() if name in read},
        dynamic=tuple(name for name in plan.dynamic if name in read),
    )
    return write_qdq(replace(model, proto=part), inside, own, target)


class _Writer:
    def __init__(
        self, graph: gs.Graph, model: onnx.ModelProto, plan: QuantPlan, target: Target, quantizers: Quantizers
    ) -> None:
        self.index = index = GraphIndex(model.graph)
        self.graph, self.plan, self.target = graph, plan, target
        self.quantizers, self.build = quantizers, quantizers.build
        self.gemms = GemmForm(self.build, lambda: free_shapes(model))
        self.tensors: dict[str, gs.Tensor] = graph.tensors()
        self.nodes = {node.name: node for node in graph.nodes}
        self.dynamic: dict[str, list[gs.Variable]] = {}  # by tensor: quantized values, scale and zero point
        # A branch that is put back later reads by name; what was moved only is on the grid already.
        captured = {name for node in index.graph.node for name in GraphIndex.captures(node)}
        moved = (name for name in captured if name in index.producers)
        self.kept_names = {name for name in moved if index.producers[name].op_type in CROSSED_OPS}

    def write(self, layers: Sequence[Layer]) -> None:
        readers: dict[str, list[gs.Node]] = {}
        for layer in layers:
            readers.setdefault(layer.input, []).append(self.nodes[layer.name])
        for name in {**self.plan.shared, **self.plan.inputs}:
            self._quantize_activation(name, readers.get(name, []))
        for name in self.plan.dynamic:
            self._quantize_at_run_time(name, readers.get(name, []))
        for layer in layers:
            self._quantize_layer(layer)
        for node in [node for node in self.graph.nodes if node.op == "Softmax" and not node.domain]:
            self._keep_float_softmax(node)

    def _keep_float_softmax(self, node: gs.Node) -> None:
        """Parts a Softmax from the quantizer before it: onnxruntime's integer kernel overflows on fine grids."""
        read, made = node.inputs[0], node.outputs[0]
        grids = [reader.inputs[1] for reader in made.outputs if reader.op == "QuantizeLinear"]
        fine = any(isinstance(scale, gs.Constant) and scale.values.max() < LEAST_SOFTMAX_SCALE for scale in grids)
        if fine and read.inputs and read.inputs[0].op == "DequantizeLinear":
            lowest = self.build.constant("lowest", np.array(np.finfo(np.float32).min, np.float32))
            node.inputs[0] = self.build.node("Max", [read, lowest], f"{made.name}_kept")

    def _quantize_activation(self, name: str, layers: Sequence[gs.Node]) -> None:
        source = self.tensors[name]
        if name in self.plan.shared:
            source = self._share(source, self.plan.shared[name])
        if name in self.plan.inputs:
            qparams = self.plan.inputs[name]
            if self._repeats_activation(source, qparams, layers):
                source = source.inputs[0].inputs[0]
            narrow = self.quantizers.activation(source, qparams, f"{name}_input")
            for node in layers:
                node.inputs[0] = narrow

    def _quantize_at_run_time(self, name: str, layers: Sequence[gs.Node]) -> None:
        """One DynamicQuantizeLinear for all layers that read a tensor."""
        if not layers:
            return
        found = self.quantizers.dynamic(layers[0].inputs[0], name)
        if self.target.dynamic is Dynamic.MATMUL_INTEGER:
            self.dynamic[name] = found
            return
        values = self.build.node("DequantizeLinear", found, f"{name}_dequantized")
        for node in layers:
            node.inputs[0] = values

    def _share(self, tensor: gs.Variable, qparams: QuantParams) -> gs.Variable:
        """Every reader gets the quantized value; a graph output keeps its name, and so does a copy in subgraphs."""
        readers = list(tensor.outputs)
        multiplied = bool(readers) and all(map(_is_product, readers))
        is_output = any(value is tensor for value in self.graph.outputs) and not multiplied
        if (tensor.name in self.kept_names or is_output) and tensor.inputs:  # an input that is an output stays itself
            inner = gs.Variable(self.build.fresh(f"{tensor.name}_float"), tensor.dtype, tensor.shape)
            producer = tensor.inputs[0]
            producer.outputs[[value is tensor for value in producer.outputs].index(True)] = inner
            result = self.quantizers.activation(inner, qparams, tensor.name, into=tensor)
        else:
            result = self.quantizers.activation(tensor, qparams, tensor.name)
        for node in readers:
            for place, value in enumerate(node.inputs):
                if value is tensor:
                    node.inputs[place] = result
        return result

    def _repeats_activation(self, tensor: gs.Variable, qparams: QuantParams, layers: Sequence[gs.Node]) -> bool:
        """Whether a narrow grid does all that a Relu or Clip does: runtimes absorb these only into full grids."""
        bounds = activation_bounds(self.index.producers.get(tensor.name), self.index.constant)
        written = (self.target.placement, self.target.format, self.target.narrow)
        if qparams.fills_container or written != (Placement.FUSED, Format.QDQ, Narrow.CLIP_CODES) or bounds is None:
            return False
        if tensor in self.graph.outputs:
            return False
        if not all(any(reader is layer for layer in layers) for reader in tensor.outputs):
            return False
        low, high = (float(value) for value in qparams.range)
        return bounds[0] <= low and high <= bounds[1] + 0.5 * float(qparams.scale)

    def _quantize_layer(self, layer: Layer) -> None:
        node, params = self.nodes[layer.name], self.plan.layers[layer.name]
        if layer.input in self.dynamic:
            self._as_integer_product(layer, node, params)
            return
        narrow = self._narrow_table(params)
        if narrow is not None:
            turned = self.build.node("Transpose", [narrow], weight_name(layer.name), perm=[1, 0])
            node.inputs[1] = narrow if layer.transposed else turned
        else:
            node.inputs[1] = self._weight(layer, params)
        if self.target.float_activations and layer.has_sums and self._is_packed(layer) and narrow is None:
            self._as_packed_product(layer, node)
        if params.bias is None:
            return
        if layer.bias is None and len(node.inputs) < 3:  # tuning gave the layer a bias
            node.inputs.append(gs.Variable.empty())
        if layer.bias_node is None:
            node.inputs[2] = self._bias(layer, params, params.bias)
        else:
            self._add_bias(layer, params, params.bias)

    def _narrow_table(self, params: LayerParams) -> gs.Tensor | None:
        """The table that a layer reads with an embedding; at eight bits it has the codes in a form of its own."""
        if params.table is None or params.qparams.bits == MAX_BITS or not self.target.float_activations:
            return None
        return self.tensors[params.table.name]

    def _add_bias(self, layer: Layer, params: LayerParams, bias: npt.NDArray[np.float32]) -> None:
        """The bias of a MatMul, which a node of its own adds, unless the target takes it in."""
        add, read = self.nodes[layer.bias_node], self.plan.layer_input(layer.input)
        if read is not None and self.target.integer_bias and layer.op in self.target.bias_ops:
            if self.target.placement is Placement.FUSED and self.gemms.knows(add.outputs[0].name):
                self.gemms.write(self.nodes[layer.name], add, self._bias(layer, params, bias), layer.weight_shape)
                return
            scale = bias_scale(params.qparams, read)
            bias = (int32_steps(bias, scale) * scale).astype(np.float32)  # the same number, in the form of the model
        place = next(i for i, value in enumerate(add.inputs) if value.name == layer.bias)
        add.inputs[place] = self.build.constant(f"{layer.name}_bias", bias)

    def _as_integer_product(self, layer: Layer, node: gs.Node, params: LayerParams) -> None:
        """MatMulInteger on values quantized at run time, and what makes a float of it: the form that runtimes fuse."""
        weight, qparams, name = params.quantized, params.qparams, weight_name(layer.name)
        if layer.transposed:
            weight, qparams = weight.T, transposed(qparams)
        read, scale, zero = self.dynamic[layer.input]
        result = node.outputs[0]
        node.op, node.attrs = "MatMulInteger", {}
        node.inputs = [read, self.quantizers.codes(weight, qparams, name), zero]
        zero_point = self.quantizers.stored_qparams(qparams).zero_point
        if zero_point.any():
            node.inputs.append(self.build.constant(f"{name}_zero", zero_point.astype(qparams.dtype)))
        node.outputs = [gs.Variable(self.build.fresh(f"{layer.name}_sums"))]
        sums = self.build.node("Cast", node.outputs, f"{layer.name}_cast", to=FLOAT_TYPE)
        steps = self.build.constant(f"{name}_scale", qparams.scale.astype(np.float32))
        unit = self.build.node("Mul", [scale, steps], f"{layer.name}_unit")
        if params.bias is None or layer.bias_node is not None:
            self.build.into(result, "Mul", [sums, unit])
        else:
            product = self.build.node("Mul", [sums, unit], f"{layer.name}_product")
            bias = self.build.constant(f"{layer.name}_bias", params.bias)
            self.graph.nodes.append(gs.Node("Add", f"{layer.name}{GEMM_BIAS}", {}, [product, bias], [result]))
        if params.bias is not None and layer.bias_node is not None:
            self._add_bias(layer, params, params.bias)
            # onnxruntime 1.19 takes the bias in where it comes last.
            add = self.nodes[layer.bias_node]
            add.inputs = sorted(add.inputs, key=lambda value: isinstance(value, gs.Constant))

    def _as_packed_product(self, layer: Layer, node: gs.Node) -> None:
        """The form that onnxruntime computes with packed weights: the weight not transposed, and no Relu after it."""
        node.attrs.pop("transB", None)
        if layer.activation == "Relu" and layer.bias_node is None:
            relu = self.tensors[layer.output].outputs[0]
            relu.op = "Max"
            relu.inputs.append(self.build.constant("nothing", np.array(0, np.float32)))

    def _bias(self, layer: Layer, params: LayerParams, bias: npt.NDArray[np.float32]) -> gs.Tensor:
        name = f"{layer.name}_bias"
        if layer.op not in self.target.bias_ops:
            return self.build.constant(name, bias)
        read = self.plan.layer_input(layer.input)
        if self.target.integer_bias and read is not None:
            return self.quantizers.int32_bias(bias, bias_scale(params.qparams, read), name)
        if self.target.bias is Bias.INT8:
            return self.quantizers.int8_bias(bias, name)
        return self.build.constant(name, bias)

    def _is_packed(self, layer: Layer) -> bool:
        """Whether a runtime multiplies with the weight as it is stored; others are made float at load, if they can."""
        held = self.target.constants is not Constants.FOLDED
        known = held or self.plan.layers[layer.name].qparams.bits in PACKED_BITS
        return self.target.float_activations and layer.has_sums and known

    def _weight(self, layer: Layer, params: LayerParams) -> gs.Variable:
        name = weight_name(layer.name)
        packed = self._is_packed(layer)
        if self.plan.layer_input(layer.input) is None and self.target.constants is Constants.FOLDED and not packed:
            return self.quantizers.folded(params.quantized, params.qparams, name)
        if self.target.float_activations and packed and layer.transposed:
            return self.quantizers.weight(params.quantized.T, transposed(params.qparams), name)
        if not (self.target.float_compute and layer.op == "Conv"):
            return self.quantizers.weight(params.quantized, params.qparams, name)
        # A Reshape between the weight and its Conv is what no runtime looks through for a pattern to fuse.
        rows = self.quantizers.weight(
            params.quantized.reshape(len(params.quantized), -1), params.qparams, f"{name}_rows"
        )
        shape = self.build.constant(f"{name}_shape", np.array(params.quantized.shape, np.int64))
        return self.build.node("Reshape", [rows, shape], name)


def _round_tables(graph: onnx.GraphProto, plan: QuantPlan) -> None:
    """Gives tables the values of a layer's codes; the model has those of eight bits already."""
    narrow = {name: it for name, it in plan.tables.items() if it.qparams.bits < MAX_BITS}
    for tensor in (it for it in graph.initializer if it.name in narrow):
        table = narrow[tensor.name]
        tensor.CopyFrom(numpy_helper.from_array(dequantize(table.quantized, table.qparams), tensor.name))


def _is_product(node: gs.Node) -> bool:
    """Whether it multiplies two computed tensors: what it reads may be an output as well, which stays float then."""
    return node.op == "MatMul" and not any(isinstance(value, gs.Constant) for value in node.inputs)


def storage_of(target: Target, bits: int) -> Storage:
    """How weights of a width lie in the file: those that become float at load lie in planes."""
    folded = target.float_activations and target.constants is Constants.FOLDED and bits not in PACKED_BITS
    return Storage.BIT_PLANES if folded else target.storage


def weight_name(layer: str) -> str:
    """What the written weight of a layer is called."""
    return f"{layer}_weight"


def bias_scale(weight: QuantParams, activation: QuantParams) -> npt.NDArray[np.float32]:
    """The grid of an int32 bias: products of weight and activation steps."""
    return (weight.scale * activation.scale).astype(np.float32)
