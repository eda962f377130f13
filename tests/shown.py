"""What documents show: their code blocks, and running them as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import onnx

from models import build, norm_of, normal

ROOT = Path(__file__).parents[1]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language in a Markdown text."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def lines_of(text: str, language: str) -> list[str]:
    """The lines of a language's code blocks, those joined that a backslash parts; without comments."""
    joined = "".join(blocks(text, language)).replace("\\\n", " ").splitlines()
    return [line for line in joined if line and not line.startswith("#")]


def written_by(commands: list[str]) -> list[str]:
    """The files that the commands say they write."""
    return re.findall(r"(?:-o|--output|--plot) (\S+)", "\n".join(commands))


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A program, in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def stand_in() -> onnx.ModelProto:
    """A classifier of small images, nearly all of whose bytes are weights; the last layer has the tutorial's name."""
    text = """
    net (float[N,3,8,8] x) => (float[N,5] y) {
        [stem] c1 = Conv <pads=[1,1,1,1]> (x, w1)
        b1 = BatchNormalization (c1, n1_gamma, n1_beta, n1_mean, n1_var)
        r1 = Relu (b1)
        [block] c2 = Conv <pads=[1,1,1,1]> (r1, w2)
        b2 = BatchNormalization (c2, n2_gamma, n2_beta, n2_mean, n2_var)
        s = Add (r1, b2)
        p = GlobalAveragePool (s)
        f = Flatten (p)
        [classifier] y = Gemm <transB=1> (f, w3, bias)
    }"""
    weights = {
        "w1": normal(40, 3, 3, 3, scale=0.3),
        "w2": normal(40, 40, 3, 3, scale=0.1),
        "w3": normal(5, 40, scale=0.3),
    }
    model = build(text, **weights, **norm_of("n1", 40, 1), **norm_of("n2", 40, 2), bias=normal(5))
    model.graph.node[-1].name = "/classifier/classifier.1/Gemm"
    return model
