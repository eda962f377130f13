"""A loss and its gradients by either engine, with the parameters in place."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.autodiff.interface import NoGradientError, gradient_name
from onnxcalib.autodiff.prologue import Parted, parted, reading
from onnxcalib.autodiff.standard import gradient_model as standard
from onnxcalib.autodiff.training import gradient_model as training
from onnxcalib.errors import ModelError, RuntimeMissingError
from onnxcalib.recipe import Engine
from onnxcalib.runtime.bound import BoundSession
from onnxcalib.runtime.installed import check_runtime, how_to_train

Array = npt.NDArray[np.float32]


def choose_engine(asked: Engine) -> Engine:
    """The engine to use: training where its wheel is installed, unless another is asked for."""
    if asked is Engine.STANDARD:
        return asked
    runtime = check_runtime()
    if runtime.gradients:
        return Engine.TRAINING
    if asked is Engine.AUTO:
        return Engine.STANDARD
    raise RuntimeMissingError(
        f"onnxruntime {runtime.version} has no training; the training engine needs onnxruntime-training-cpu.",
        f"{how_to_train(runtime)}; `engine='standard'` works without.",
    )


class Gradients:
    """A loss with its gradients, parameters in place."""

    def __init__(
        self, model: onnx.ModelProto, parameters: Mapping[str, Array], engine: Engine, threads: int = 0
    ) -> None:
        self.parameters = {name: np.array(value, np.float32, order="C") for name, value in parameters.items()}
        self._inputs = {value.name for value in model.graph.input} - set(self.parameters)
        self._inputs -= {tensor.name for tensor in model.graph.initializer}
        for value in model.graph.input:
            if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
                raise NoGradientError("input", value.name, "text cannot be fed to a training step", "Take it out")
        self._output = model.graph.output[0].name
        differentiated = _differentiated(model, tuple(self.parameters), engine)
        self._shared: dict[str, npt.NDArray[Any]] = {}  # what parameters alone decide
        self._prologue: BoundSession | None = None
        parts = parted(differentiated, self.parameters)
        if parts is not None:
            self._open_prologue(parts, threads)
            differentiated = reading(parts.main, self._shared)
        self._start(BoundSession(differentiated, threads))

    def _open_prologue(self, parts: Parted, threads: int) -> None:
        self._prologue = BoundSession(parts.prologue, threads)
        for value in parts.prologue.graph.input:
            self._prologue.bind_input(value.name, self.parameters[value.name])
        self._shared = self._prologue.bind_outputs(parts.shared)

    def _start(self, session: BoundSession) -> None:
        """What each twin has of its own."""
        self.gradients = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self._loss = np.zeros((), np.float32)
        self._session = session
        for name, value in (*self.parameters.items(), *self._shared.items()):
            self._session.bind_input(name, value)
        self._session.bind_output(self._output, self._loss)
        for name, value in self.gradients.items():
            self._session.bind_output(gradient_name(name), value)

    def twin(self) -> Gradients:
        """Another that reads the same parameters in place, to run at the same time."""
        twin = copy(self)
        twin._start(self._session.twin())
        return twin

    def prepare(self) -> None:
        """Computes what parameters alone decide; twins share it."""
        if self._prologue is not None:
            self._prologue.run_bound({})

    def run(self, feed: Mapping[str, npt.NDArray[Any]]) -> float:
        """The loss for one feed; the gradients are overwritten in place."""
        self.prepare()
        return self.run_prepared(feed)

    def run_prepared(self, feed: Mapping[str, npt.NDArray[Any]]) -> float:
        """The same where parameters have not changed since `prepare`."""
        if feed.keys() != self._inputs:
            raise ModelError(
                f"the loss reads {', '.join(sorted(self._inputs))}, but was fed {', '.join(sorted(feed))}."
            )
        self._session.run_bound(feed)
        return float(self._loss)


class Loss:
    """A loss without gradients; parameters are fed like data."""

    def __init__(self, model: onnx.ModelProto, threads: int = 0) -> None:
        self._name = model.graph.output[0].name
        self._session = BoundSession(standard.lower_fake_quantize(model), threads)

    def run(self, feed: Mapping[str, npt.NDArray[Any]]) -> float:
        """The loss for one feed."""
        return self._session.run(self._name, feed)


def _differentiated(model: onnx.ModelProto, parameters: tuple[str, ...], asked: Engine) -> onnx.ModelProto:
    """The gradient model by the asked engine; where none is asked for, by the one that has the gradients."""
    if choose_engine(asked) is Engine.TRAINING:
        try:
            return training.gradient_model(model, parameters)
        except ModelError:  # no gradient of an op, or none that the builder can build
            if asked is Engine.TRAINING:
                raise
    return standard.gradient_model(model, parameters)
