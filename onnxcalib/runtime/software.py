"""What results depend on beside their inputs: the versions of this package and of the runtime."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import onnxcalib
from onnxcalib.runtime.installed import find_runtime


@cache
def software() -> dict[str, str]:
    """The version of this package with a digest of its code, for checkouts change more often, and the runtime's."""
    total = hashlib.sha256()
    for path in sorted(Path(onnxcalib.__file__).parent.rglob("*.py")):
        total.update(path.read_bytes())
    runtime = find_runtime()
    return {
        "version": onnxcalib.__version__,
        "code": total.hexdigest()[:16],
        "runtime": f"{' '.join(runtime.packages) or 'onnxruntime'} {runtime.version}",
    }
