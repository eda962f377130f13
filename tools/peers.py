#!/usr/bin/env python3
"""Quantizes the same models with onnxcalib and with other tools, and writes a table and a figure of what came out.

    python tools/peers.py --smoke --work /tmp/peers          # the demo model, few samples and steps
    python tools/peers.py ZOO --work /tmp/peers              # ResNet-20 and MobileNet-V2 by every tool
    python tools/peers.py ZOO --work /tmp/peers --part resnet20 --tool 'onnxruntime static' --bits w8a8
    python tools/peers.py ZOO --work /tmp/peers --retry      # rows that failed are tried again
    python tools/peers.py ZOO --work /tmp/peers --page docs/peers.md    # its table and figure, peers.json beside it

Each tool is installed into an environment of its own below --work at its first use (several GB with PyTorch), versions
pinned. All get the same float model and the same 512 images; weights at 4 bits leave those of the first and the last
layer at 8. A row is one process from start to end, imports included: wall and CPU time, and the memory of it and its
children. A file is judged by onnxruntime 1.31.1 as it is installed by pip: top-1, agreement with the float model,
latency (batch of one, one thread, in turn with float). Rows are kept in --out (peers.json; beside it peers.md and
peers.png) and not run again. A tool that cannot be installed, fails or takes more than --longest CPU seconds gets a
row that says so. The last line is the CPU and wall time of the command, installations included.

ZOO holds mobilenet_v2_bn.onnx, cifar_resnet20_bn.onnx, imagenet_train512.npz, imagenet_val2000.npz (`jpeg` bytes,
`offsets`, `y`), cifar10_train2k.npz and cifar10_test10k.npz (`x`, `y`). Needs matplotlib; for ImageNet pillow.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from peer_report import Row, figure, table
from peer_run import Environment, Measured, cpu_so_far, measured, python_of

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "peer_tools"
LONGEST = 4 * 3600.0  # CPU seconds of one row
TABLE_BEGIN, TABLE_END = "| model, bits |", "!["  # of a page; the figure follows the table
W8, W4 = "w8a8", "w4a8, edges 8"
TORCH = ("torch==2.13.0",)  # alone first, then beside the tool, or pip takes the newest, built for GPUs
RUNTIME = ("onnxruntime==1.31.1", "onnx==1.23.2")
STOCK = Environment("onnxruntime", ((*RUNTIME, "sympy==1.14.0"),))
OWN = Environment("onnxcalib", ((*RUNTIME, "-e", f"{ROOT}[runtime]"),))
AIMET = Environment("aimet", (TORCH, (*TORCH, "aimet-onnx==2.42.0", *RUNTIME)))
QUARK = Environment(
    "quark", (TORCH, (*TORCH, "amd-quark==0.13", "onnxruntime==1.31.1", "onnx==1.22.0")), compiles="quark.onnx"
)
NNCF = Environment("nncf", (("nncf==3.4.0", *RUNTIME),))
COMPRESSOR = Environment(
    "neural_compressor", (("onnx-neural-compressor==1.0", "prettytable==3.18.0", "scipy==1.17.1", *RUNTIME),)
)
MODELOPT = Environment("modelopt", (TORCH, (*TORCH, "nvidia-modelopt[onnx]==0.47.0", "onnx==1.21.0")))


@dataclass(frozen=True)
class Peer:
    """A method of a tool: its script's, the environment, the bits that it has, and the steps where it trains."""

    script: str
    method: str
    environment: Environment
    bits: tuple[str, ...] = (W8,)
    steps: int | None = None  # iterations a layer; 0: its default

    @property
    def quick(self) -> bool:
        """Without training."""
        return self.steps is None


PEERS = {
    "onnxcalib plain": Peer("onnxcalib", "plain", OWN, (W8, W4)),
    "onnxcalib light": Peer("onnxcalib", "light", OWN, (W8, W4)),
    "onnxruntime static": Peer("onnxruntime", "static", STOCK, (W8, W4)),
    "onnxruntime dynamic": Peer("onnxruntime", "dynamic", STOCK),
    "AIMET": Peer("aimet", "plain", AIMET, (W8, W4)),
    "Quark": Peer("quark", "plain", QUARK),
    "NNCF": Peer("nncf", "plain", NNCF),
    "neural-compressor": Peer("neural_compressor", "static", COMPRESSOR),
    "ModelOptimizer": Peer("modelopt", "max", MODELOPT),
    "onnxcalib advanced": Peer("onnxcalib", "advanced", OWN, (W8, W4), 0),
    "AIMET AdaRound": Peer("aimet", "adaround", AIMET, (W8, W4), 300),
    "Quark AdaRound": Peer("quark", "adaround", QUARK, steps=300),
    "Quark AdaQuant": Peer("quark", "adaquant", QUARK, steps=300),
}


@dataclass(frozen=True)
class Part:
    """A float model with its arrays for calibration and test."""

    name: str
    model: Path
    calibration: Path
    test: Path


def demo(work: Path, samples: int = 64, tested: int = 500) -> Part:
    """The demo model with few samples."""
    folder = work / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("calibration", samples), ("test", tested)):
        arrays = np.load(ROOT / "models" / f"fashion_{name}.npz")
        np.savez(folder / f"demo_{name}.npz", **{key: values[:count] for key, values in arrays.items()})
    model = ROOT / "models" / "fashion_mobilenet.onnx"
    return Part("demo", model, folder / "demo_calibration.npz", folder / "demo_test.npz")


def zoo_part(name: str, zoo: Path, work: Path) -> Part:
    """A model of the zoo; its preprocessed arrays are written once."""
    from zoo import decoded, normalized

    folder = work / "data"
    folder.mkdir(parents=True, exist_ok=True)
    part = Part(
        name,
        zoo / {"resnet20": "cifar_resnet20_bn.onnx", "mobilenet_v2": "mobilenet_v2_bn.onnx"}[name],
        folder / f"{name}_calibration.npz",
        folder / f"{name}_test.npz",
    )
    if part.test.exists():
        return part
    if name == "resnet20":
        (train, _), (test, labels) = (_pixels(zoo / f"cifar10_{kind}.npz") for kind in ("train2k", "test10k"))
    else:
        (train, _), (test, labels) = (decoded(zoo / f"imagenet_{kind}.npz") for kind in ("train512", "val2000"))
    np.savez(part.calibration, input=normalized(train[:512]))
    np.savez(part.test, input=normalized(test), labels=labels.astype(np.int64))
    return part


def _pixels(path: Path) -> tuple[Any, Any]:
    data = np.load(path)
    return data["x"], data["y"]


class Rows:
    """The rows so far, written after each; what is there is not run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        self.rows = {row.key: row for row in (Row(**each) for each in found)}

    def add(self, row: Row) -> None:
        """Writes JSON and table anew."""
        self.rows[row.key] = row
        text = json.dumps([asdict(each) for each in self.rows.values()], indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")
        self.path.with_suffix(".md").write_text(table(self.rows.values()) + "\n", encoding="utf-8")

    def into(self, page: Path) -> None:
        """The table in place of the one in a Markdown page, JSON and figure beside it under the page's name."""
        text = page.read_text(encoding="utf-8")
        begin = text.find(TABLE_BEGIN)
        end = text.find(TABLE_END, begin)
        if min(begin, end) < 0:
            sys.exit(f"Error: {page} has no table between a line that begins with {TABLE_BEGIN!r} and {TABLE_END!r}.")
        page.write_text(f"{text[:begin]}{table(self.rows.values())}\n\n{text[end:]}", encoding="utf-8")
        shutil.copyfile(self.path, page.with_suffix(".json"))
        figure(self.rows.values(), page.with_suffix(".png"))

    def forget_failed(self) -> None:
        """Rows without a figure are run again."""
        self.rows = {key: row for key, row in self.rows.items() if row.top1 is not None}


def last_words(done: Measured) -> str:
    """Why a process ended early, in a sentence."""
    if done.stopped:
        return f"Stopped after {done.cpu:,.0f} CPU seconds."
    lines = [line.strip() for line in done.said.splitlines() if line.strip()]
    return f"Ended with code {done.code}: {lines[-1] if lines else 'no word'}"[:300]


def float_predictions(part: Part, work: Path) -> Path:
    """Where those of the float model lie once it was judged."""
    return work / "files" / f"{part.name}_float.npy"


def judged(row: Row, part: Part, file: Path, work: Path, longest: float) -> Row:
    """The row with what stock onnxruntime makes of the file."""
    python, trouble = python_of(STOCK, work)
    if python is None:
        return replace(row, note=f"Not judged: onnxruntime: {trouble}")
    found, reference = file.with_suffix(".npy"), float_predictions(part, work)
    done = measured(
        [python, SCRIPTS / "judge.py", part.model, file, part.test, found], file.with_suffix(".txt"), longest
    )
    if done.code:
        return replace(row, loads=False, note=f"Does not run in stock onnxruntime. {last_words(done)}")
    answer, labels = json.loads(done.said.splitlines()[-1]), np.load(part.test)["labels"]
    predicted, float_predicted = np.load(found), np.load(reference)
    return replace(
        row,
        n=len(labels),
        top1=100 * float((predicted == labels).mean()),
        agreement=100 * float((predicted == float_predicted).mean()),
        latency=answer["latency"],
        loads=True,
    )


def quantized(row: Row, peer: Peer, part: Part, work: Path, longest: float) -> Row:
    """The row of one tool; whatever goes wrong is a sentence in it."""
    python, trouble = python_of(peer.environment, work)
    if python is None:
        return replace(row, note=trouble)
    file = work / "files" / f"{part.name}_{row.bits[:4]}_{row.tool.replace(' ', '_')}.onnx"
    for old in [file.with_suffix(".json"), *file.parent.glob(f"{file.name}*")]:
        old.unlink(missing_ok=True)
    source = file.with_name(f"{file.stem}_input.onnx")  # a copy: not every tool leaves its input as it was
    shutil.copyfile(part.model, source)
    command = [python, SCRIPTS / f"tool_{peer.script}.py", source, part.calibration, file, peer.method]
    done = measured([*command, row.bits[1], row.steps or 0], file.with_suffix(".log"), longest)
    row = replace(row, wall=done.wall, cpu=done.cpu, peak=done.peak)
    if not file.with_suffix(".json").exists():
        return replace(row, note=last_words(done))
    answer = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    notes = [answer.get("note", ""), "" if filecmp.cmp(source, part.model, shallow=False) else "changed its input file"]
    row = replace(row, version=answer["version"], note="; ".join(filter(None, notes)))
    if "error" in answer or not file.exists():
        return replace(row, note=f"Failed: {answer.get('error', 'it wrote no file')}")
    return judged(replace(row, bytes=written(file)), part, file, work, longest)


def written(file: Path) -> int:
    """Bytes of a file and of the external data beside it."""
    return sum(each.stat().st_size for each in file.parent.glob(f"{file.name}*") if each.is_file())


def float_row(part: Part, work: Path, samples: int, longest: float) -> Row:
    """The float model, whose predictions the others are compared with."""
    file = work / "files" / f"{part.name}_float.onnx"
    file.write_bytes(part.model.read_bytes())
    row = Row(part.name, "float", "float", samples, None, bytes=written(file))
    return judged(row, part, file, work, longest)


def compare(
    part: Part, names: Sequence[str], bits: Sequence[str], rows: Rows, work: Path, longest: float, steps: int | None
) -> Iterator[Row]:
    """Every tool at every precision that it has, those without training first, in rows that are not there yet."""
    (work / "files").mkdir(parents=True, exist_ok=True)
    samples = len(next(iter(np.load(part.calibration).values())))
    todo = [Row(part.name, "float", "float", samples, None)]
    for name in names:
        own = PEERS[name].steps if PEERS[name].quick or steps is None else steps
        todo += [Row(part.name, each, name, samples, own) for each in PEERS[name].bits if each in bits]
    for row in todo:
        # Rows that came from elsewhere come without the float model's predictions.
        if row.key in rows.rows and (row.bits != "float" or float_predictions(part, work).exists()):
            continue
        if row.bits == "float":
            row = float_row(part, work, samples, longest)  # noqa: PLW2901
        else:
            row = quantized(row, PEERS[row.tool], part, work, longest)  # noqa: PLW2901
        rows.add(row)
        yield row


def main() -> None:
    """Runs what is not there yet, and prints the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", type=Path, nargs="?", help="The folder of models and data; --smoke needs none.")
    parser.add_argument("--smoke", action="store_true", help="The demo model, 64 samples, 5 steps a layer.")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "onnxcalib-peers")
    parser.add_argument("--out", type=Path, help="Rows as JSON (default: peers.json in --work).")
    parser.add_argument("--page", type=Path, help="A Markdown page whose table and figure are replaced at the end.")
    parser.add_argument("--part", action="append", choices=["resnet20", "mobilenet_v2"], help="Only these.")
    parser.add_argument("--tool", action="append", choices=list(PEERS), help="Only these.")
    parser.add_argument("--bits", action="append", choices=["w8a8", "w4a8"], help="Only these.")
    parser.add_argument("--steps", type=int, help="Iterations a layer in every tool that trains.")
    parser.add_argument("--longest", type=float, default=LONGEST, help="CPU seconds after which a row is stopped.")
    parser.add_argument("--retry", action="store_true", help="Rows that failed are tried again.")
    given = parser.parse_args()
    begin = time.perf_counter()
    if given.zoo is None and not given.smoke:
        sys.exit("Error: Give a folder of models and data, or --smoke.")
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows = Rows((given.out or work / ("smoke.json" if given.smoke else "peers.json")).resolve())
    if given.retry:
        rows.forget_failed()
    steps = 5 if given.smoke and given.steps is None else given.steps
    bits = [each for each in (W8, W4) if given.bits is None or each[:4] in given.bits]
    for name in ["demo"] if given.smoke else given.part or ["resnet20", "mobilenet_v2"]:
        part = demo(work) if given.smoke else zoo_part(name, given.zoo.resolve(), work)
        for row in compare(part, given.tool or list(PEERS), bits, rows, work, given.longest, steps):
            print(table([row]).splitlines()[2], flush=True)
    figure(rows.rows.values(), rows.path.with_suffix(".png"))
    print(table(rows.rows.values()))
    if given.page:
        rows.into(given.page)
    wall = time.perf_counter() - begin
    print(f"\nIn all, installations included: {cpu_so_far():,.0f} CPU seconds, {wall:,.0f} s of wall time.")


if __name__ == "__main__":
    main()
