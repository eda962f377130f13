"""Small float models and how to run them; weights are random, with a fixed seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper, parser

Arrays = dict[str, np.ndarray]
HAS_TRAINING = hasattr(ort.capi._pybind_state, "GradientGraphBuilder")
UNOPTIMIZED = {"graph_optimization_level": ort.GraphOptimizationLevel.ORT_DISABLE_ALL}


def build(text: str, opset: int = 13, ir: int = 8, **stored: np.ndarray) -> onnx.ModelProto:
    """A model from the text of its graph; keyword arguments become initialisers."""
    model = parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]>\n{text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items())
    return model


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Gaussian float32 values."""
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def norm_of(prefix: str, channels: int, seed: int = 0) -> Arrays:
    """The four constants of a batch norm, far from those of an identity."""
    rng = np.random.default_rng([seed, channels])
    return {
        f"{prefix}_gamma": rng.uniform(0.5, 1.5, channels).astype(np.float32),
        f"{prefix}_beta": rng.normal(0, 0.5, channels).astype(np.float32),
        f"{prefix}_mean": rng.normal(0, 0.3, channels).astype(np.float32),
        f"{prefix}_var": rng.uniform(0.5, 2.0, channels).astype(np.float32),
    }


def conv_net() -> onnx.ModelProto:
    """Conv, BN and Clip; depthwise; a residual Add; pooling; Gemm."""
    text = """
    net (float[N,3,8,8] x) => (float[N,5] y) {
        [stem] c1 = Conv <pads=[1,1,1,1]> (x, w1)
        [bn1] b1 = BatchNormalization (c1, n1_gamma, n1_beta, n1_mean, n1_var)
        [clip1] r1 = Clip (b1, zero, six)
        [depth] c2 = Conv <pads=[1,1,1,1], group=8> (r1, w2)
        [bn2] b2 = BatchNormalization (c2, n2_gamma, n2_beta, n2_mean, n2_var)
        [clip2] r2 = Clip (b2, zero, six)
        [project] c3 = Conv (r2, w3)
        [bn3] b3 = BatchNormalization (c3, n3_gamma, n3_beta, n3_mean, n3_var)
        [sum] s = Add (r1, b3)
        [head] c4 = Conv (s, w4, bias4)
        [relu] r4 = Relu (c4)
        [pool] p = GlobalAveragePool (r4)
        [flat] f = Flatten (p)
        [fc] y = Gemm <transB=1> (f, w5, bias5)
    }"""
    return build(
        text,
        w1=normal(8, 3, 3, 3, scale=0.3), w2=normal(8, 1, 3, 3, scale=0.4), w3=normal(8, 8, 1, 1, scale=0.4),
        w4=normal(16, 8, 1, 1, scale=0.4), bias4=normal(16, scale=0.2), w5=normal(5, 16), bias5=normal(5),
        zero=np.float32(0), six=np.float32(6),
        **norm_of("n1", 8, 1), **norm_of("n2", 8, 2), **norm_of("n3", 8, 3),
    )  # fmt: skip


def clipped_net(low: float = 0.0, high: float = 1.0) -> onnx.ModelProto:
    """Convolutions whose activations cut much of what they make, one of them after a sum of two others."""
    text = """
    net (float[N,3,8,8] x) => (float[N,4,8,8] y) {
        [stem] c1 = Conv <pads=[1,1,1,1]> (x, w1, b1)
        [clip1] r1 = Clip (c1, low, high)
        [depth] c2 = Conv <pads=[1,1,1,1], group=8> (r1, w2, b2)
        [clip2] r2 = Clip (c2, low, high)
        [middle] c3 = Conv (r2, w3, b3)
        [clip3] r3 = Clip (c3, low, high)
        [sum] s = Add (r1, r3)
        [clip4] r4 = Clip (s, low, high)
        [wide] c5 = Conv (r4, w5, b5)
        [relu] r5 = Relu (c5)
        [last] y = Conv (r5, w6, b6)
    }"""
    return build(
        text,
        w1=normal(8, 3, 3, 3, scale=0.5), b1=normal(8), w2=normal(8, 1, 3, 3, scale=0.5), b2=normal(8),
        w3=normal(8, 8, 1, 1, scale=0.5), b3=normal(8), w5=normal(8, 8, 1, 1, scale=0.5), b5=normal(8),
        w6=normal(4, 8, 1, 1), b6=normal(4), low=np.float32(low), high=np.float32(high),
    )  # fmt: skip


def transformer_block() -> onnx.ModelProto:
    """Attention of one head and a feed-forward pair: MatMul and Add, some MatMuls with computed operands."""
    text = """
    net (float[N,4,6] x) => (float[N,4,6] y) {
        [query] q0 = MatMul (x, wq)
        [query_bias] q = Add (q0, bq)
        [key] k = MatMul (x, wk)
        [value] v = MatMul (x, wv)
        [turn] kt = Transpose <perm=[0,2,1]> (k)
        [scores] s = MatMul (q, kt)
        [soft] a = Softmax <axis=-1> (s)
        [mix] m = MatMul (a, v)
        [skip] h = Add (x, m)
        [up] u0 = MatMul (h, wu)
        [up_bias] u1 = Add (bu, u0)
        [act] u = Relu (u1)
        [down] d0 = MatMul (u, wd)
        [down_bias] d = Add (d0, bd)
        [out] y = Add (h, d)
    }"""
    return build(
        text,
        wq=normal(6, 6, seed=1, scale=0.4), bq=normal(6, seed=2), wk=normal(6, 6, seed=3, scale=0.4),
        wv=normal(6, 6, seed=4, scale=0.4), wu=normal(6, 12, seed=5, scale=0.4), bu=normal(12, seed=6),
        wd=normal(12, 6, seed=7, scale=0.4), bd=normal(6, seed=8),
    )  # fmt: skip


def mlp() -> onnx.ModelProto:
    """A Gemm with a transposed weight, one without, and a MatMul."""
    text = """
    net (float[N,80] x) => (float[N,12] y) {
        [turned] a = Gemm <transB=1> (x, w1, b1)
        [relu] r = Relu (a)
        [straight] b = Gemm (r, w2, b2)
        [tanh] t = Tanh (b)
        [bare] y = MatMul (t, w3)
    }"""
    return build(
        text, w1=normal(64, 80, scale=0.2), b1=normal(64), w2=normal(64, 48, scale=0.2), b2=normal(48),
        w3=normal(48, 12, scale=0.3),
    )  # fmt: skip


def conv1d() -> onnx.ModelProto:
    """Two convolutions over a line."""
    text = """
    net (float[N,4,12] x) => (float[N,3,6] y) {
        [first] c = Conv <pads=[1,1]> (x, w1, b1)
        [relu] r = Relu (c)
        [second] y = Conv <pads=[1,1], strides=[2]> (r, w2, b2)
    }"""
    return build(text, w1=normal(6, 4, 3, scale=0.4), b1=normal(6), w2=normal(3, 6, 3, scale=0.4), b2=normal(3))


def conv3d() -> onnx.ModelProto:
    """Two convolutions over a volume."""
    text = """
    net (float[N,2,4,4,4] x) => (float[N,3,4,4,4] y) {
        [first] c = Conv <pads=[1,1,1,1,1,1]> (x, w1, b1)
        [relu] r = Relu (c)
        [second] y = Conv (r, w2)
    }"""
    return build(text, w1=normal(4, 2, 3, 3, 3, scale=0.3), b1=normal(4), w2=normal(3, 4, 1, 1, 1))


def grouped() -> onnx.ModelProto:
    """A convolution of two groups, then a plain one."""
    text = """
    net (float[N,4,6,6] x) => (float[N,2,6,6] y) {
        [groups] c = Conv <pads=[1,1,1,1], group=2> (x, w1, b1)
        [relu] r = Relu (c)
        [join] y = Conv (r, w2, b2)
    }"""
    return build(text, w1=normal(6, 2, 3, 3, scale=0.4), b1=normal(6), w2=normal(2, 6, 1, 1, scale=0.5), b2=normal(2))


def conv_transpose() -> onnx.ModelProto:
    """A plain and a grouped ConvTranspose after a convolution."""
    text = """
    net (float[N,3,5,5] x) => (float[N,4,12,12] y) {
        [down] c = Conv <pads=[1,1,1,1]> (x, w1, b1)
        [relu] r = Relu (c)
        [up] u = ConvTranspose <strides=[2,2]> (r, w2, b2)
        [clip] k = Relu (u)
        [last] y = ConvTranspose <group=2> (k, w3)
    }"""
    return build(
        text,
        w1=normal(4, 3, 3, 3, scale=0.3), b1=normal(4), w2=normal(4, 6, 3, 3, scale=0.3), b2=normal(6),
        w3=normal(6, 2, 2, 2, scale=0.4),
    )  # fmt: skip


def branches() -> onnx.ModelProto:
    """Two paths, SiLU on one and MaxPool on the other, joined by Concat."""
    text = """
    net (float[N,3,8,8] x) => (float[N,4,4,4] y) {
        [stem] c = Conv <pads=[1,1,1,1]> (x, w1, b1)
        [relu] r = Relu (c)
        [left] l = Conv <strides=[2,2], pads=[1,1,1,1]> (r, w2, b2)
        [sigmoid] g = Sigmoid (l)
        [silu] s = Mul (l, g)
        [shrink] m = MaxPool <kernel_shape=[2,2], strides=[2,2]> (r)
        [both] k = Concat <axis=1> (s, m)
        [last] y = Conv (k, w3, b3)
    }"""
    return build(
        text,
        w1=normal(4, 3, 3, 3, scale=0.4), b1=normal(4), w2=normal(6, 4, 3, 3, scale=0.3), b2=normal(6),
        w3=normal(4, 10, 1, 1, scale=0.4), b3=normal(4),
    )  # fmt: skip


def two_heads(more: str = "", shown: str = "") -> onnx.ModelProto:
    """Logits on one branch, plain values on the other; the first layer feeds both, and more nodes may follow."""
    text = f"""
    net (float[N,3,6,6] x) => (float[N,5] y, float[N,4,6,6] z{shown}) {{
        [stem] c = Conv <pads=[1,1,1,1]> (x, w1, b1)
        [relu] r = Relu (c)
        [pool] p = GlobalAveragePool (r)
        [flat] f = Flatten (p)
        [fc] y = Gemm <transB=1> (f, w2, b2)
        [side] s = Conv (r, w3, b3)
        [tanh] z = Tanh (s)
        {more}
    }}"""
    return build(
        text, w1=normal(6, 3, 3, 3, scale=0.3), b1=normal(6), w2=normal(5, 6), b2=normal(5),
        w3=normal(4, 6, 1, 1, scale=0.4), b3=normal(4),
    )  # fmt: skip


def two_gemms(activation: str = "Tanh", hidden: int = 8) -> onnx.ModelProto:
    """Two small layers, which are quick to train."""
    text = f"""
    net (float[N,6] x) => (float[N,3] y) {{
        [one] c = Gemm (x, w1, b1)
        [act] t = {activation} (c)
        [two] y = Gemm (t, w2, b2)
    }}"""
    return build(text, w1=normal(6, hidden), b1=normal(hidden), w2=normal(hidden, 3), b2=normal(3))


def any_length() -> onnx.ModelProto:
    """Two products over sequences of any length."""
    text = """
    net (float[N,S,6] x) => (float[N,S,3] y) {
        [one] a = MatMul (x, w1)
        [bias] c = Add (a, b1)
        [relu] r = Relu (c)
        [two] y = MatMul (r, w2)
    }"""
    return build(text, w1=normal(6, 8), b1=normal(8), w2=normal(8, 3))


BUILDERS = {
    builder.__name__: builder
    for builder in (conv_net, transformer_block, conv1d, conv3d, grouped, conv_transpose, branches)
}


def feed_for(model: onnx.ModelProto, samples: int = 16, seed: int = 0) -> Arrays:
    """Gaussian values for every input of the model."""
    stored = {tensor.name for tensor in model.graph.initializer}
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
        if value.name not in stored
    }
    return {name: normal(shape[0] or samples, *shape[1:], seed=seed) for name, shape in shapes.items()}


def session_of(model: onnx.ModelProto | Path, **settings: Any) -> ort.InferenceSession:
    """A silent session on one thread."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    for name, value in settings.items():
        setattr(options, name, value)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto | Path, feed: Arrays, **settings: Any) -> Arrays:
    """All outputs by name."""
    session = session_of(model, **settings)
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feed), strict=True))


def optimized_ops(model: onnx.ModelProto | Path, folder: Path) -> list[str]:
    """The ops that are left once the runtime has fused what it can."""
    path = folder / "optimized.onnx"
    session_of(model, optimized_model_filepath=str(path))
    return op_types(onnx.load(path))


def op_types(model: onnx.ModelProto) -> list[str]:
    """The ops of the main graph, in its order."""
    return [node.op_type for node in model.graph.node]


def initializer(model: onnx.ModelProto, name: str) -> np.ndarray:
    """The value of an initialiser."""
    return next(numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name == name)


def change(model: onnx.ModelProto, name: str, value: np.ndarray) -> None:
    """Gives an initialiser another value, in place."""
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(value, name))
