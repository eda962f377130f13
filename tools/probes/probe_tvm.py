"""TVM for the CPU: imports with Relax, compiles, runs; it reports no precision of single layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import tvm
from common import Feed, Found, main
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx


def probe(model: Path, feeds: list[Feed]) -> Found:
    """Weights stay constants of the module, so that TVM may fold what only depends on them."""
    proto = onnx.load(model)
    module = from_onnx(proto, keep_params_in_input=False)
    built = tvm.compile(module, target="llvm")
    machine = relax.VirtualMachine(built, tvm.cpu())
    outputs = []
    for feed in feeds:
        made = machine["main"](*(tvm.runtime.tensor(np.ascontiguousarray(value)) for value in feed.values()))
        outputs.append([part.numpy() for part in (made if isinstance(made, list | tvm.ir.Array) else [made])])
    return outputs, {}


if __name__ == "__main__":
    main(lambda: str(tvm.__version__), probe)
