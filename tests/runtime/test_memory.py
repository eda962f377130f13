"""What `memory` bounds, and that it changes no result."""

from __future__ import annotations

import numpy as np
import pytest

from models import build, conv_net, feed_for, normal
from onnxcalib import Recipe, RecipeError, quantize
from onnxcalib.data import open_data
from onnxcalib.model.shapes import input_specs
from onnxcalib.progress import Event
from onnxcalib.runtime.memory import SHARE, allowed, bounded, buffer_bytes, parse_size
from onnxcalib.runtime.providers import CPU
from onnxcalib.runtime.session import CAPTURE_BYTES, Session, fitting_batch
from onnxcalib.runtime.surroundings import Surroundings, surroundings, within
from onnxcalib.runtime.threads import in_threads


class Heard:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def __call__(self, stage: str, done: int, of: int) -> None:
        pass

    def event(self, event: Event) -> None:
        if event.name == "warning":
            self.warnings.append(event.values["message"])


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2 * 2**30), ("1.5gb", 3 * 2**29), ("500 MB", 500 * 2**20), ("7", 7), ("many", None), ("2XB", None)],
)
def test_sizes_are_read(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("memory", ["much", "10MB", 10, "-2GB"])
def test_what_is_no_memory_is_refused_before_any_work(memory: str | int) -> None:
    with pytest.raises(RecipeError, match="memory"):
        quantize(conv_net(), feed_for(conv_net(), 8), memory=memory)


def test_as_many_samples_are_captured_at_a_time_as_fit() -> None:
    wide = build("net (float[N,4] x) => (float[N,524288] y) { [one] y = Gemm (x, w) }", w=normal(4, 2**19))
    session, data = Session(wide), open_data({"x": np.ones((64, 4), np.float32)}, input_specs(wide))
    assert fitting_batch(session, data) == CAPTURE_BYTES // 2**21


def test_a_large_buffer_shrinks_where_little_is_allowed() -> None:
    assert buffer_bytes(2**28) == 2**28
    with bounded("256MB"):
        assert buffer_bytes(2**28) == 2**28 // SHARE
        assert buffer_bytes(2**20) == 2**20


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("light", bits="w4a8"), Recipe("advanced", "w4a4", steps=1)])
def test_the_file_is_the_same_and_too_little_is_told(recipe: Recipe) -> None:
    model, data, heard = conv_net(), feed_for(conv_net(), 48), Heard()
    assert np.ones(40 * 2**20).all()  # 320 MB: this process has taken more than is allowed
    little = quantize(model, data, recipe, memory=256 * 2**20, progress=heard)
    assert little.model == quantize(model, data, recipe).model
    assert any("memory" in message for message in heard.warnings)


def test_jobs_and_threads_have_the_surroundings_of_their_call() -> None:
    with bounded("1GB"):
        given = surroundings()
        assert in_threads(lambda _: allowed(), range(2)) == [2**30, 2**30]
    assert given == Surroundings(CPU, 2**30)
    assert allowed() is None
    with within(given):
        assert allowed() == 2**30
