"""IREE for the CPU: imports, compiles, runs; it reports no precision of single layers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import iree.compiler.tools as iree_compiler
import iree.runtime as iree_runtime
import numpy as np
from common import Feed, Found, main


def probe(model: Path, feeds: list[Feed]) -> Found:
    """The importer is a program of its own, and so its answer is a file."""
    with tempfile.TemporaryDirectory() as folder:
        imported = Path(folder) / "model.mlir"
        command = [sys.executable, "-m", "iree.compiler.tools.import_onnx", str(model), "-o", str(imported)]
        done = subprocess.run([*command, "--opset-version", "17"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        # Its guess of the stack that a strided shortcut needs is too careful for its own limit.
        arguments = ["--iree-llvmcpu-target-cpu=host", "--iree-llvmcpu-fail-on-out-of-bounds-stack-allocation=false"]
        settings = {"input_type": "onnx", "target_backends": ["llvm-cpu"], "extra_args": arguments}
        binary = iree_compiler.compile_file(str(imported), **settings)
    module = iree_runtime.load_vm_flatbuffer(binary, driver="local-sync")
    name = next(name for name in module.vm_module.function_names if "$" not in name and not name.startswith("__"))
    run = getattr(module, name)
    outputs = []
    for feed in feeds:
        made = run(*feed.values())
        outputs.append([np.asarray(part) for part in (made if isinstance(made, tuple | list) else [made])])
    return outputs, {}


if __name__ == "__main__":
    main(lambda: version("iree-base-compiler"), probe)
