"""Models of a kind that onnxruntime's optimizer may die of are opened in another process first."""

from __future__ import annotations

import atexit
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import onnx

from onnxcalib.model.io import write_model
from onnxcalib.model.walk import all_nodes, bodies, graphs_in

LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL")
DIED = "its optimizer ends the process"
WORKER = Path(__file__).with_name("worker.py")


def is_risky(model: onnx.ModelProto) -> bool:
    """Whether quantizers and subgraphs meet: assertions of the optimizer, which no caller can catch, fail on these."""
    nodes = list(all_nodes(model.graph))
    return any(next(bodies(node), None) is not None for node in nodes) and any(
        node.op_type == "DequantizeLinear" for node in nodes
    )


def try_levels(model: onnx.ModelProto) -> tuple[str | None, str]:
    """The highest level at which the model loads, None for none, and why it does not at the levels above.

    Tried once for each graph: values of constants make no difference.
    """
    key = _key(model.graph)
    if key not in _FOUND:
        _FOUND[key] = _tried(model)
    return _FOUND[key]


def _key(graph: onnx.GraphProto) -> bytes:
    """What tells graphs apart, but for values of initialisers: those in bodies may take more than protobuf writes."""
    key = hashlib.sha256()
    for body in graphs_in(graph):
        stored = (onnx.TensorProto(name=it.name, data_type=it.data_type, dims=it.dims) for it in body.initializer)
        for part in (*body.input, *body.output, *stored, *map(_without_bodies, body.node)):
            key.update(part.SerializeToString(deterministic=True))
    return key.digest()


def _without_bodies(node: onnx.NodeProto) -> onnx.NodeProto:
    bare = onnx.NodeProto(name=node.name, op_type=node.op_type, domain=node.domain)
    bare.input.extend(node.input)
    bare.output.extend(node.output)
    for attribute in node.attribute:
        if attribute.HasField("g") or attribute.graphs:
            bare.attribute.append(onnx.AttributeProto(name=attribute.name))
        else:
            bare.attribute.append(attribute)
    return bare


_FOUND: dict[bytes, tuple[str | None, str]] = {}


def _tried(model: onnx.ModelProto) -> tuple[str | None, str]:
    first = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_model(model, path)
        for level in LEVELS:
            why = _TRIALS.why_not(path, level)
            if not why:
                return level, first
            first = first or why
    return None, first


class _Trials:
    """One process that lives on from trial to trial, as starting it takes longer than most trials."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def why_not(self, path: Path, level: str) -> str:
        """Why a file does not load at a level; empty if it does, and where no process can be started to try it."""
        with self._lock:
            if self._process is None and not self._start():
                return ""
            answer = self._exchange(json.dumps({"level": level, "path": str(path)}))
            if answer is None:
                self.stop()
            return DIED if answer is None else answer

    def _start(self) -> bool:
        words = [sys.executable, "-P", str(WORKER)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(words, text=True, stdin=pipe, stdout=pipe, stderr=null)
        except OSError:
            return False
        if self._exchange(None) is None:
            self.stop()
        return self._process is not None

    def _exchange(self, line: str | None) -> str | None:
        """What the process answers to a line, None if it is gone."""
        assert self._process is not None
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        try:
            if line is not None:
                asked.write(line + "\n")
                asked.flush()
            return str(json.loads(answers.readline()))
        except (OSError, ValueError):
            return None

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_TRIALS = _Trials()
atexit.register(_TRIALS.stop)
