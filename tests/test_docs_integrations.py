"""The pages on Olive and optimum run as they stand, where these packages are installed."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from shown import ROOT, blocks, run, stand_in

from models import feed_for

WORDS = ("the", "file", "is", "small", "and", "it", "runs", "on", "every", "machine")


def shown(page: str, language: str) -> list[str]:
    return blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), language)


def needs(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def test_a_pass_of_olive(tmp_path: Path) -> None:
    needs("olive")
    onnx.save(stand_in(), tmp_path / "model.onnx")
    np.savez(tmp_path / "calibration.npz", **feed_for(stand_in(), 24))
    own, used = shown("olive", "python")
    (tmp_path / "onnxcalib_pass.py").write_text(own)
    for name, text in zip(("packages.json", "workflow.json"), shown("olive", "json"), strict=True):
        (tmp_path / name).write_text(text)
    (line,) = shown("olive", "bash")
    workflow = ["-m", *shlex.split(line)[1:]]  # without the setting of PYTHONPATH: with -m, the folder is on it
    for arguments in (["-c", used], workflow):
        done = run([sys.executable, *arguments], tmp_path)
        assert done.returncode == 0, done.stderr
    for written in ("olive", "workflow"):
        file = tmp_path / written / "model.onnx"
        assert file.stat().st_size < (tmp_path / "model.onnx").stat().st_size / 2
        assert "QuantizeLinear" in {node.op_type for node in onnx.load(file).graph.node}


EXPORT = """
import torch
from pathlib import Path
from transformers import BertConfig, BertModel, BertTokenizer
from optimum.exporters.onnx import main_export

words = Path("sentences.txt").read_text().split()
Path("vocab.txt").write_text("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(words))]))
torch.manual_seed(0)
config = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
BertModel(config).save_pretrained("own")
BertTokenizer("vocab.txt").save_pretrained("own")
main_export("own", "exported", task="feature-extraction", do_validation=False)
"""


def test_a_folder_of_optimum(tmp_path: Path) -> None:
    needs("optimum.onnxruntime", "transformers", "torch") if importlib.util.find_spec("optimum") else needs("optimum")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, length)) for length in rng.integers(3, 9, 16)]
    (tmp_path / "sentences.txt").write_text("\n".join(lines))
    exported = run([sys.executable, "-c", EXPORT], tmp_path)
    assert exported.returncode == 0, exported.stderr
    done = run([sys.executable, "-c", *shown("optimum", "python")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch.Size" in done.stdout
    ops = {node.op_type for node in onnx.load(tmp_path / "quantized" / "model.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= ops
