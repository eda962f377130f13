"""Execution providers: by name, absent ones, those that cannot be started, and every other one that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from command_line import case_in, said_by
from said import names, one_error, refused

from models import conv_net, feed_for
from onnxcalib import Pipeline, Recipe, evaluate, quantize
from onnxcalib.errors import RecipeError
from onnxcalib.executors.workers import Workers
from onnxcalib.recipe import parse_bits
from onnxcalib.runtime import opening
from onnxcalib.runtime.providers import CPU, chosen, find_provider, using
from onnxcalib.runtime.session import Session

# Those that compute here; AzureExecutionProvider only calls services.
THERE = [find_provider(name) for name in ort.get_available_providers() if not name.startswith(("CPU", "Azure"))]


@pytest.mark.parametrize("name", ["cpu", "CPU", "CPUExecutionProvider"])
def test_the_cpu_by_name_changes_no_byte(name: str) -> None:
    model = conv_net()
    data = feed_for(model, 16)
    one, two = (quantize(model, data, Recipe(), **more).model for more in ({}, {"provider": name}))
    assert one.SerializeToString(deterministic=True) == two.SerializeToString(deterministic=True)


def test_one_that_nobody_knows_and_one_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = conv_net()
    with refused(RecipeError, "--provider cude", "unknown", "cpu", "cuda"):
        quantize(model, feed_for(model, 16), Recipe(), provider="cude")
    absent = next(name for name in ("cuda", "dml") if name not in THERE)
    case_in(tmp_path, 16)
    for command in (
        ("quantize", tmp_path / "model.onnx", "-c", tmp_path / "data.npz", "-o", tmp_path / "small.onnx"),
        ("evaluate", tmp_path / "model.onnx", "-d", tmp_path / "data.npz"),
    ):
        code, _, err = said_by(capsys, *command, "--provider", absent)
        assert code == RecipeError.exit_code
        one_error(err, f"--provider {absent}", "cpu", "pip install")
    assert not (tmp_path / "small.onnx").exists()


def provider_of(_value: object, _key: int) -> str:
    return chosen()


def test_it_holds_for_one_call_and_for_the_jobs_that_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxcalib.runtime.providers.find_provider", str)
    workers = Workers(2)
    with using("elsewhere"), workers.sharing(None) as shared:
        assert {found for _, found in workers.map(provider_of, shared, range(4))} == {"elsewhere"}
        with using(None):
            assert chosen() == "elsewhere"
    assert chosen() == CPU
    workers.close()


def test_one_that_cannot_be_started_is_an_error_and_no_silent_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnxruntime does it where the libraries of CUDA are missing: a line in its log, and a session on the CPU."""
    monkeypatch.setattr(opening, "providers_for", lambda _name: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    with refused(RecipeError, "--provider cuda", "cannot start"), pytest.MonkeyPatch.context():
        Session(conv_net(), provider="cuda")


@pytest.mark.parametrize("provider", THERE or [pytest.param("", marks=pytest.mark.skip(reason="only a CPU build"))])
def test_what_is_measured_there_is_near_the_cpu_and_the_file_as_good(provider: str, tmp_path: Path) -> None:
    model = conv_net()
    data, recipe = feed_for(model, 64), Recipe(Pipeline.LIGHT, parse_bits("w4a4,w8a8"), compression=0.6)
    heard: list[Any] = []

    class Heard:
        def __call__(self, *_step: object) -> None:
            pass

        def event(self, event: Any) -> None:
            heard.append(event)

    here = quantize(model, data, recipe, run_dir=tmp_path / "run")
    there = quantize(model, data, recipe, run_dir=tmp_path / "run", provider=provider, progress=Heard())
    # Nothing that was measured on the CPU is taken for what this provider would measure.
    assert not [event for event in heard if event.name == "stage_end" and event.values["reused"]]
    names(next(event.values["runtime"] for event in heard if event.name == "start"), provider)
    scale = [plan.shared["r1"].scale for plan in (here.plan, there.plan)]
    np.testing.assert_allclose(*scale, rtol=1e-2)
    rows = [evaluate(there, data, model, provider=each)[0] for each in (CPU, provider)]
    assert rows[1].sqnr_db == pytest.approx(rows[0].sqnr_db, abs=1.0)
