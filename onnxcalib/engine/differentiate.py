"""A loss and its gradients by either engine, with the parameters in place."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.engine.inference import first_line
from onnxcalib.engine.runtime import check_runtime, find_runtime
from onnxcalib.errors import ModelError, RuntimeMissingError
from onnxcalib.model.io import serialized
from onnxcalib.recipe import Engine

Array = npt.NDArray[np.float32]


def choose_engine(asked: Engine) -> Engine:
    """The engine to use: training where its wheel is installed, unless another is asked for."""
    if asked is Engine.STANDARD:
        return asked
    runtime = find_runtime()
    if runtime.gradients:
        return Engine.TRAINING
    if asked is Engine.AUTO:
        return Engine.STANDARD
    first = f"pip uninstall -y {' '.join(runtime.packages)} && " if runtime.packages else ""
    raise RuntimeMissingError(
        f"onnxruntime {runtime.version} has no training; the training engine needs onnxruntime-training-cpu.",
        f"Type: {first}pip install 'onnxcalib[training]'; --engine standard works without.",
    )


class Gradients:
    """A loss with its gradients, parameters in place."""

    def __init__(
        self, model: onnx.ModelProto, parameters: Mapping[str, Array], engine: Engine, threads: int = 0
    ) -> None:
        self.parameters = {name: np.array(value, np.float32, order="C") for name, value in parameters.items()}
        self._inputs = {value.name for value in model.graph.input} - set(self.parameters)
        self._inputs -= {tensor.name for tensor in model.graph.initializer}
        self._output, self._threads = model.graph.output[0].name, threads
        self._model = _differentiated(model, tuple(self.parameters), engine)
        self._start()

    def _start(self) -> None:
        """What each twin has of its own."""
        self.gradients = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self._loss = np.zeros((), np.float32)
        self._session = _open(self._model, self._threads)
        self._binding = self._session.io_binding()
        self._values: dict[str, Any] = {}
        self._bind(self._output)

    def twin(self) -> Gradients:
        """Another that reads the same parameters in place, to run at the same time."""
        twin = copy(self)
        twin._start()
        return twin

    def run(self, feed: Mapping[str, npt.NDArray[Any]]) -> float:
        """The loss for one feed; the gradients are overwritten in place."""
        if feed.keys() != self._inputs:
            raise ModelError(
                f"the loss reads {', '.join(sorted(self._inputs))}, but was fed {', '.join(sorted(feed))}."
            )
        try:
            for name, value in feed.items():
                self._values[name] = _shared(np.asarray(value, order="C"))
                self._binding.bind_ortvalue_input(name, self._values[name])
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # the runtime's exceptions share no base class but this one
            raise _failed("differentiating the loss", error) from error
        return float(self._loss)

    def _bind(self, loss: str) -> None:
        """Binds every buffer once: what is written into it later is what the runtime reads, and the other way round."""
        from onnxcalib.engine.gradients import gradient_name

        for name, value in self.parameters.items():
            self._values[name] = _shared(value)
            self._binding.bind_ortvalue_input(name, self._values[name])
        for name, value in {loss: self._loss, **{gradient_name(n): g for n, g in self.gradients.items()}}.items():
            self._values[name] = _shared(value)
            self._binding.bind_ortvalue_output(name, self._values[name])


class Loss:
    """A loss without gradients; parameters are fed like data."""

    def __init__(self, model: onnx.ModelProto, threads: int = 0) -> None:
        from onnxcalib.engine.gradients import lower_fake_quantize

        self._name = model.graph.output[0].name
        self._session = _open(lower_fake_quantize(model), threads)

    def run(self, feed: Mapping[str, npt.NDArray[Any]]) -> float:
        """The loss for one feed."""
        try:
            feed = {name: np.asarray(value) for name, value in feed.items()}
            return float(self._session.run([self._name], feed)[0])
        except Exception as error:
            raise _failed("computing the loss", error) from error


def _differentiated(model: onnx.ModelProto, parameters: tuple[str, ...], asked: Engine) -> onnx.ModelProto:
    """The gradient model by the asked engine; where none is asked for, by the one that has the gradients."""
    from onnxcalib.engine import gradients

    if choose_engine(asked) is Engine.TRAINING:
        from onnxcalib.engine import training

        try:
            return training.gradient_model(model, parameters)
        except gradients.NoGradientError:
            if asked is Engine.TRAINING:
                raise
    return gradients.gradient_model(model, parameters)


def _open(model: onnx.ModelProto, threads: int) -> Any:
    check_runtime()
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    # A pool of memory makes steps a quarter faster; it goes with the session, which lives for one layer.
    options.enable_cpu_mem_arena = True
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that spin between steps would take the cores from the optimiser and from other layers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Quantizers must stay as written: the runtime would copy them for each reader, or compute in integers.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        return ort.InferenceSession(serialized(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"onnxruntime {ort.__version__} cannot load a loss: {first_line(error)}.") from error


def _shared(array: npt.NDArray[Any]) -> Any:
    """A runtime value over the array's own memory."""
    import onnxruntime as ort

    return ort.OrtValue.ortvalue_from_numpy(array)


def _failed(doing: str, error: Exception) -> ModelError:
    return ModelError(
        f"onnxruntime failed while {doing}: {first_line(error)}.", "Check the shapes of what the loss is fed."
    )
