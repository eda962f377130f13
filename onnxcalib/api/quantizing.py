"""Quantizes a model."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import onnx

from onnxcalib.data import Preprocess, Transform, transformed
from onnxcalib.numerics.metric import MetricFunction
from onnxcalib.pipeline import pipelines
from onnxcalib.pipeline.result import Result
from onnxcalib.progress import Progress, silent
from onnxcalib.recipe import Recipe


def quantize(  # noqa: PLR0913 - one call does it all, as one command does
    model: str | Path | onnx.ModelProto,
    calibration: Any,
    recipe: Recipe = pipelines.DEFAULT,
    *,
    output: str | Path | None = None,
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    progress: Progress = silent,
    workers: int | None = None,
    scheduler: str | Path | None = None,
    executor: Executor | None = None,
    provider: str | None = None,
    memory: str | int | None = None,
    run_dir: str | Path | None = None,
    metric: MetricFunction | None = None,
) -> Result:
    """Quantizes a float model.

    Args:
        model: The float model, as a path or in memory; it stays as it is.
        calibration: A few hundred unlabelled samples: a path, arrays by input name, feeds, a loader, a generator
            function, or an object with `get_next()`.
        recipe: What is asked for; by default w8a8 by rounding to nearest, for onnxruntime.
        output: The file to write; without one, the result's `save` writes it.
        preprocess: How images become arrays, where the data is a folder of images.
        transform: Makes a feed of each item of the data: an array, a tuple in the order of the inputs, or a dict.
        progress: Called with a stage, how much of it is done, and of how much; if it has a method `event`, that
            hears of every `Event`.
        workers: Independent jobs that are done side by side on this machine, one a core by default; the result is the
            same for any number, and wherever they run.
        scheduler: The Dask scheduler whose workers do these jobs: its address such as "tcp://host:8786", or its file.
        executor: What does these jobs instead: any `concurrent.futures.Executor`; the caller shuts it down.
        provider: The execution provider of onnxruntime that runs the model, such as "cuda" or "openvino"; training
            steps stay on the CPU. What is measured is measured there.
        memory: What to keep to as far as possible, at the price of time: bytes, or text such as "2GB". The result
            stays the same; a warning says if it was not enough.
        run_dir: A folder that keeps what is finished: an interrupted call, made again, goes on from there.
        metric: What `max_drop` and the loss 'metric' judge by in place of the recipe's metric: a function of all
            outputs and all labels that gives a number, higher is better.

    Returns:
        The quantized model, and how it came to be.

    Raises:
        OnnxcalibError: One of its kinds, for a model, data or a recipe that do not fit; the message says what to do.
    """
    data = transformed(calibration, transform)
    return pipelines.quantize(
        model,
        data,
        recipe,
        output=output,
        preprocess=preprocess,
        progress=progress,
        workers=workers,
        scheduler=scheduler,
        executor=executor,
        provider=provider,
        memory=memory,
        run_dir=run_dir,
        metric=metric,
    )
