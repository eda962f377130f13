"""A loss and its gradients by either engine, with the parameters in place."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.autodiff.interface import NoGradientError, gradient_name
from onnxcalib.autodiff.opened import OpenedSessions
from onnxcalib.autodiff.prologue import parted, reading
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


@dataclass(frozen=True)
class SharedLoss:
    """How losses of one graph share sessions."""

    sessions: OpenedSessions
    key: bytes  # of the graph
    own: Mapping[str, Array]  # the inputs that are neither parameters nor data


@dataclass(frozen=True)
class _Opened:
    """The sessions of a loss with its gradients, as yet over nobody's arrays."""

    main: BoundSession
    prologue: BoundSession | None
    shared: tuple[str, ...]  # what the second makes for the first


class Gradients:
    """A loss with its gradients, parameters in place."""

    def __init__(
        self,
        model: onnx.ModelProto,
        parameters: Mapping[str, Array],
        engine: Engine,
        threads: int = 0,
        shares: SharedLoss | None = None,
    ) -> None:
        self.parameters = {name: np.array(value, np.float32, order="C") for name, value in parameters.items()}
        self._own = dict(shares.own) if shares else {}
        self._inputs = {value.name for value in model.graph.input} - {*self.parameters, *self._own}
        self._inputs -= {tensor.name for tensor in model.graph.initializer}
        for value in model.graph.input:
            if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
                raise NoGradientError("input", value.name, "text cannot be fed to a training step", "Take it out")
        self._output = model.graph.output[0].name
        self._shared: dict[str, npt.NDArray[Any]] = {}  # what parameters alone decide
        self._prologue: BoundSession | None = None
        if shares is None:
            opened = self._opened(model, engine, threads)
        else:
            key = (shares.key, tuple(self.parameters), engine, threads)
            opened = shares.sessions.get(key, lambda: self._opened(model, engine, threads))
        if opened.prologue is not None and self._prologue is None:
            self._start_prologue(opened.prologue, opened.shared)
        self._start(opened.main.twin())

    def _opened(self, model: onnx.ModelProto, engine: Engine, threads: int) -> _Opened:
        differentiated = _differentiated(model, tuple(self.parameters), engine)
        parts = parted(differentiated, {*self.parameters, *self._own})
        if parts is None:
            return _Opened(BoundSession(differentiated, threads), None, ())
        prologue = BoundSession(parts.prologue, threads)
        self._start_prologue(prologue, parts.shared)
        return _Opened(BoundSession(reading(parts.main, self._shared), threads), prologue, parts.shared)

    def _start_prologue(self, session: BoundSession, shared: tuple[str, ...]) -> None:
        self._prologue = session.twin()
        for name in session.inputs:
            self._prologue.bind_input(name, self.parameters[name] if name in self.parameters else self._own[name])
        self._shared = self._prologue.bind_outputs(shared)

    def _start(self, session: BoundSession) -> None:
        """What each twin has of its own."""
        self.gradients = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self._loss = np.zeros((), np.float32)
        self._session = session
        for name, value in (*self.parameters.items(), *self._own.items(), *self._shared.items()):
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

    def __init__(self, model: onnx.ModelProto, threads: int = 0, shares: SharedLoss | None = None) -> None:
        self._name = model.graph.output[0].name
        self._own = shares.own if shares else {}

        def opened() -> BoundSession:
            return BoundSession(standard.lower_fake_quantize(model), threads)

        self._session = shares.sessions.get((shares.key, threads), opened) if shares else opened()

    def run(self, feed: Mapping[str, npt.NDArray[Any]]) -> float:
        """The loss for one feed."""
        return self._session.run(self._name, {**self._own, **feed})


def _differentiated(model: onnx.ModelProto, parameters: tuple[str, ...], asked: Engine) -> onnx.ModelProto:
    """The gradient model by the asked engine; where none is asked for, by the one that has the gradients."""
    if choose_engine(asked) is Engine.TRAINING:
        try:
            return training.gradient_model(model, parameters)
        except ModelError:  # no gradient of an op, or none that the builder can build
            if asked is Engine.TRAINING:
                raise
    return standard.gradient_model(model, parameters)
