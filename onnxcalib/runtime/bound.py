"""A session for training steps: every buffer is bound once, and what is written into it is what the runtime reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.model.io import PROTOBUF_LIMIT
from onnxcalib.runtime.handing import open_model
from onnxcalib.runtime.opening import failed, new_options

Array = npt.NDArray[Any]

OURS = "Use `pipeline='light'`, and report this with the model: onnxcalib wrote that graph."
FED = "Check the shapes of what the loss is fed."


class BoundSession:
    """A loss graph, with its inputs and outputs over arrays of the caller's."""

    def __init__(self, model: onnx.ModelProto, threads: int, limit: int = PROTOBUF_LIMIT) -> None:
        options = new_options()
        # A pool of memory makes steps a quarter faster, and takes no more; it goes with the session.
        options.enable_cpu_mem_arena = True
        # A plan of memory would be kept beside what the first run took: half a gigabyte of ResNet-50, and no faster.
        options.enable_mem_pattern = False
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Threads that spin between steps would take the cores from the optimiser and from other layers.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Quantizers must stay as written: the runtime would copy them for each reader, or compute in integers.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._session = open_model(model, options, "the loss to train on", OURS, limit=limit)
        from onnxruntime import OrtValue

        self._value_of = OrtValue.ortvalue_from_numpy
        self._bind_anew()

    def _bind_anew(self) -> None:
        self._binding = self._session.io_binding()
        self._values: dict[str, Any] = {}  # the runtime keeps no reference to the memory

    def twin(self) -> BoundSession:
        """The same session over other arrays; both may run at the same time."""
        twin = copy(self)
        twin._bind_anew()
        return twin

    def bind_input(self, name: str, array: Array) -> None:
        """From now on the input is what the array holds."""
        self._values[name] = self._value_of(array)
        self._binding.bind_ortvalue_input(name, self._values[name])

    def bind_output(self, name: str, array: Array) -> None:
        """From now on the output goes into the array."""
        self._values[name] = self._value_of(array)
        self._binding.bind_ortvalue_output(name, self._values[name])

    def bind_outputs(self, names: Sequence[str]) -> dict[str, Array]:
        """New arrays that hold these outputs from now on; what is bound is run once to know their shapes."""
        for name in names:
            self._binding.bind_output(name)
        self.run_bound({})
        found = dict(zip(names, self._binding.copy_outputs_to_cpu(), strict=True))
        self._binding.clear_binding_outputs()
        for name, array in found.items():
            self.bind_output(name, array)
        return found

    def run_bound(self, feed: Mapping[str, Array]) -> None:
        """One run on what is bound, with these inputs as well."""
        try:
            for name, value in feed.items():
                self.bind_input(name, np.asarray(value, order="C"))
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise failed("differentiating the loss", error, FED) from error

    def run(self, output: str, feed: Mapping[str, Array]) -> float:
        """One number, with every input fed."""
        try:
            return float(self._session.run([output], {name: np.asarray(value) for name, value in feed.items()})[0])
        except Exception as error:
            raise failed("computing the loss", error, FED) from error
