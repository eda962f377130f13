"""Names that an exporter made long: what is added to the file repeats only their ends."""

from __future__ import annotations

import numpy as np
import onnx

from models import conv_net, feed_for, run
from onnxcalib import quantize


def test_long_names_do_not_outgrow_what_is_saved() -> None:
    """Some exporters name a tensor after all that it was made of; two of them may end alike."""
    model, long = conv_net(), "model/block/" * 20
    inner = {name for node in model.graph.node for name in node.output} - {"y"}
    for node in model.graph.node:
        node.name = f"{long}{node.name}"
        node.output[:] = [f"{long}{name}" if name in inner else name for name in node.output]
        node.input[:] = [f"{long}{name}" if name in inner else name for name in node.input]
    written = quantize(model, feed_for(model, 8)).model
    onnx.checker.check_model(written)
    added = {node.name for node in written.graph.node} - {node.name for node in model.graph.node}
    assert max(map(len, added)) < 60
    short = conv_net()
    expected, found = (run(quantize(each, feed_for(each, 8)).model, feed_for(each, 4))["y"] for each in (short, model))
    np.testing.assert_array_equal(found, expected)
