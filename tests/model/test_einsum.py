"""Einsums become MatMuls that compute the same, biases go before Reshapes, weights with axes of one become matrices."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from models import run
from onnxcalib.model.layers import LayerList, find_layers
from onnxcalib.model.prepare import Model, prepare

RANDOM = np.random.default_rng(0)


def made(
    body: str, inputs: str, opset: int = 20, **constants: tuple[int, ...]
) -> tuple[onnx.ModelProto, Model, LayerList]:
    """A model that makes y with random constants of these shapes, prepared, and its layers."""
    text = f'<ir_version: 9, opset_import: ["" : {opset}]> g ({inputs}) => (float y) {{ {body} }}'
    model = parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for name, shape in constants.items():
        values = RANDOM.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    ready = prepare(copy, "test")
    return model, ready, find_layers(ready)


def same(model: onnx.ModelProto, ready: Model, **shapes: tuple[int, ...]) -> None:
    feed = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    np.testing.assert_allclose(run(ready.proto, feed)["y"], run(model, feed)["y"], rtol=1e-4, atol=1e-5)


LAYERS = {
    "btd,df->btf": ((2, 3, 4), (4, 5)),
    "btd,fd->btf": ((2, 3, 4), (5, 4)),
    "...d,df->...f": ((2, 3, 4), (4, 5)),
    "btd,dhk->bthk": ((2, 3, 4), (4, 5, 6)),
    "bthk,hkd->btd": ((2, 3, 4, 5), (4, 5, 6)),
    "btd,dhk->bhtk": ((2, 3, 4), (4, 5, 6)),
    "dbt,df->bft": ((4, 2, 3), (4, 5)),
}


@pytest.mark.parametrize("equation", LAYERS)
def test_an_einsum_with_a_weight_is_a_layer(equation: str) -> None:
    shape, weight = LAYERS[equation]
    sizes = ",".join(["N", *map(str, shape[1:])])
    model, ready, listed = made(f'[one] y = Einsum <equation="{equation}"> (x, w)', f"float[{sizes}] x", w=weight)
    assert [(layer.name, layer.op, len(layer.weight_shape)) for layer in listed.layers] == [("one", "MatMul", 2)]
    same(model, ready, x=shape)


PRODUCTS = {
    "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "bqhd,bkhd->bhqk": ((2, 4, 3, 5), (2, 6, 3, 5)),
    "bhqk,bkhd->bqhd": ((2, 3, 4, 6), (2, 6, 3, 5)),
}


@pytest.mark.parametrize("equation", PRODUCTS)
def test_an_einsum_of_two_computed_tensors_is_a_product(equation: str) -> None:
    left, right = PRODUCTS[equation]
    model, ready, _ = made(f'[one] y = Einsum <equation="{equation}"> (x, z)', "float[N,P,Q,R] x, float[N,S,U,V] z")
    assert "MatMul" in [node.op_type for node in ready.proto.graph.node]
    assert "Einsum" not in [node.op_type for node in ready.proto.graph.node]
    same(model, ready, x=left, z=right)


@pytest.mark.parametrize("equation", ["bij,bjk->ik", "ij,ij->ij", "bi,bj->bij", "bii,ij->bj"])
def test_other_einsums_stay(equation: str) -> None:
    left, right = (f"float[{','.join('ABC'[: len(part)])}]" for part in equation.partition("->")[0].split(","))
    _, ready, _ = made(f'y = Einsum <equation="{equation}"> (x, z)', f"{left} x, {right} z")
    assert [node.op_type for node in ready.proto.graph.node] == ["Einsum"]


def test_a_bias_past_a_reshape_belongs_to_the_layer() -> None:
    body = """[layer] m = MatMul (x, w) [cut] r = Reshape (m, shape) [add] a = Add (b, r) [act] y = Relu (a)"""
    for bias in ((2, 3), (3,), (1, 1, 2, 3), (1, 2, 1)):
        text = f"shape = Constant <value = int64[4] {{-1, 5, 2, 3}}> () {body}"
        model, ready, listed = made(text, "float[N,5,4] x", w=(4, 6), b=bias)
        (layer,) = listed.layers
        assert layer.bias is not None, bias
        same(model, ready, x=(2, 5, 4))


def test_what_differs_from_row_to_row_is_no_bias() -> None:
    text = """shape = Constant <value = int64[4] {-1, 5, 2, 3}> () [layer] m = MatMul (x, w)
        [cut] r = Reshape (m, shape) [add] y = Add (b, r)"""
    model, ready, listed = made(text, "float[N,5,4] x", w=(4, 6), b=(5, 2, 3))
    assert listed.layers[0].bias is None
    same(model, ready, x=(2, 5, 4))


@pytest.mark.parametrize("rank", [3, 4])
def test_a_weight_with_axes_of_one_is_a_matrix(rank: int) -> None:
    shape = (2, 5, 3, 4)[-rank:]
    model, ready, listed = made(
        "y = MatMul (x, w)", f"float[N,{','.join(map(str, shape[1:]))}] x", w=(*[1] * (rank - 2), 4, 6)
    )
    assert listed.layers[0].weight_shape == (4, 6)
    same(model, ready, x=shape)
