"""Sessions, streaming over batches, captured tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from onnxcalib.data import Dataset
from onnxcalib.errors import ModelError, first_line
from onnxcalib.model.graph import GraphIndex
from onnxcalib.model.io import PROTOBUF_LIMIT
from onnxcalib.model.subgraph import with_outputs
from onnxcalib.runtime.handing import open_model
from onnxcalib.runtime.memory import buffer_bytes, has_room_for_pools
from onnxcalib.runtime.opening import MEMORY, UNSUPPORTED, failed, new_options, safe_levels
from onnxcalib.runtime.providers import CPU, chosen
from onnxcalib.runtime.trial import LEVELS, is_risky, try_levels

Tensors = dict[str, npt.NDArray[Any]]

# Captured tensors of one batch stay below this, whatever the number of samples.
CAPTURE_BYTES = 4 * 2**20
DRAWN_BYTES = 16 * 2**20  # where positions are drawn of them, whatever memory is allowed: the draw depends on the batch
LARGEST_BATCH = 16  # more is no faster, and what lies between captured tensors takes as much more memory


class Session:
    """A model ready to run, by the provider that was chosen for the call, or by the one that is named.

    A pool of memory halves the time of a run with large tensors, and goes with the session; one that is kept beside
    many others should have none. Of the levels of optimization the first that works is taken; None: all that are safe.
    So many threads share a run, 0: one a core; a job that may run anywhere has one, as sums can depend on their number.
    Quantizers that are not fused are computed as they are written, and those of constants once, when the model is read.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        source: str = "the model",
        limit: int = PROTOBUF_LIMIT,
        *,
        pool: bool = True,
        levels: Sequence[str] | None = None,
        threads: int = 0,
        provider: str | None = None,
        fused: bool = True,
    ) -> None:
        options = new_options()
        provider = provider or chosen()
        options.enable_cpu_mem_arena = pool and has_room_for_pools()
        # A block for all tensors of a run lies beside those of the first run, and is no faster where it is not pooled;
        # DirectML takes none.
        options.enable_mem_pattern = options.enable_cpu_mem_arena and provider == CPU
        options.intra_op_num_threads = threads
        # Threads that spin between runs would take the cores from other sessions, and from what is made of a result.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not fused:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        import onnxruntime as ort

        # In the order of the file: by default what measures a tensor runs last, and all of them wait for it in memory.
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        self.source, self.outputs = source, [value.name for value in model.graph.output]
        self.inputs = [value.name for value in model.graph.input]
        self._passed: list[str] = []
        if not self.outputs:  # every tensor that is asked for is an input, and the runtime takes no such model
            return
        index = GraphIndex(model.graph)
        # Providers other than the CPU may fail on an output that is an input: it is handed over here.
        self._passed += [name for name in self.outputs if name in index.inputs] if provider != CPU else []
        if self._passed:
            self.outputs = [name for name in self.outputs if name not in self._passed]
            model = with_outputs(model, self.outputs)
            if not self.outputs:
                return
        # What no node computes from an input is the runtime's or the caller's memory, and goes when these let go of it.
        self._borrowed = set(self.outputs) - (index.downstream(index.inputs)[0] - index.inputs)
        levels = levels or safe_levels(model, source)
        self._session = open_model(model, options, source, levels=levels, provider=provider, limit=limit)

    def run(self, feed: Tensors) -> Tensors:
        """All outputs for one feed."""
        passed = {name: feed[name].copy() for name in self._passed}
        if not self.outputs:
            return passed
        try:
            outputs = dict(zip(self.outputs, self._session.run(None, feed), strict=True))
            return outputs | passed | {name: copy.copy(outputs[name]) for name in self._borrowed}
        except Exception as error:
            hint = "Check that the data has the shapes the model was exported for."
            raise failed(f"running {self.source}", error, hint) from error


def stream(session: Session, data: Dataset, batch: int | None = None) -> Iterator[tuple[int, Tensors]]:
    """Runs over the data; gives for each batch its number of samples and all outputs."""
    size = batch or fitting_batch(session, data)
    for feed in data.batches(size):
        yield samples_in(feed, data), session.run(feed)


def fitting_batch(session: Session, data: Dataset, most: int | None = None) -> int:
    """How many samples' outputs fit into so many bytes, or the memory for captured tensors, measured on one sample."""
    feed = next(iter(data.batches(1)))
    outputs = session.run(feed).values()
    held = sum(value.nbytes for value in outputs if isinstance(value, np.ndarray))  # a sequence is a list
    return batch_of(held, most)


def batch_of(held: int, most: int | None = None) -> int:
    """How many samples fit into so many bytes, or the memory for captured tensors, where each takes what it holds."""
    return int(np.clip((most or buffer_bytes(CAPTURE_BYTES)) // max(held, 1), 1, LARGEST_BATCH))


def samples_in(feed: Tensors, data: Dataset) -> int:
    """Samples in one feed: the common first axis, or one where the inputs share none."""
    sizes = {value.shape[0] for value in feed.values() if value.ndim}
    return sizes.pop() if len(sizes) == 1 and all(value.ndim for value in feed.values()) and len(data) > 0 else 1


def refusal(model: onnx.ModelProto, source: str) -> str | None:
    """Why onnxruntime, on its CPU, loads a model unoptimized, but not at full optimization; None if it does.

    Raises a ModelError where it loads neither, unless this runtime is just older than the file.
    """
    if is_risky(model):
        level, why = try_levels(model)
        if level is None and why:
            _check_loadable(source, why)
        return None if level in (LEVELS[0], None) else first_line(RuntimeError(why))
    try:
        Session(model, levels=LEVELS[:1], provider=CPU)
    except ModelError as error:
        try:
            Session(model, levels=LEVELS[-1:], provider=CPU)
        except ModelError as again:  # not for the optimizer's sake
            _check_loadable(source, again.message)
            return None
        return error.message.removesuffix(".")
    return None


def _check_loadable(source: str, why: str) -> None:
    if not any(sign in why.lower() for sign in (*UNSUPPORTED, *MEMORY)):
        message = f"{source} becomes a file that onnxruntime does not load: {first_line(RuntimeError(why))}."
        raise ModelError(message, "Check that onnxruntime loads the model itself, or export it again.")
