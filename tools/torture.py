"""Kills runs at random moments and fills the disk under them: inputs stay, outputs are whole, and runs go on.

Each run is killed with SIGKILL again and again until it comes through, on one model with one recipe, and so is one on
disks of falling size. After every end the inputs must be what they were, the output must be the undisturbed run's or
not there, and nothing half-written may lie about; a resumed run must write the same bytes. Disks are tmpfs where root
may mount them; elsewhere a limit on the size of files stands in, which fails writes the same way.

python tools/torture.py --kills 20 --disks 6
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
MODEL, DATA = ROOT / "models" / "fashion_mobilenet.onnx", ROOT / "models" / "fashion_calibration.npz"
QUICK = (
    "--pipeline", "advanced", "--bits", "w4a4,w8a8", "--compression", "0.18", "--steps", "4", "--ranges", "minmax",
)  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
OUTPUT = "out.onnx"
FULL = 6  # the exit code of what cannot be written


@dataclass
class Case:
    """Inputs in a folder of their own, a recipe, and what an undisturbed run makes of them."""

    inputs: Path
    recipe: Sequence[str]
    model: Path = field(init=False)
    data: Path = field(init=False)
    before: dict[str, str] = field(init=False)
    whole: bytes = b""
    lasted: float = 0.0
    took: int = 0  # bytes on disk

    def __post_init__(self) -> None:
        self.model, self.data = sorted(self.inputs.glob("*.onnx"))[0], sorted(self.inputs.glob("*.npz"))[0]
        self.before = hashes(self.inputs)

    def start(self, folder: Path, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        """A run in a process of its own that writes into the folder."""
        files = [self.model, "-c", self.data, "-o", folder / OUTPUT]
        words = [sys.executable, "-m", "onnxcalib.cli.main", "quantize", *files, *self.recipe]
        return subprocess.Popen(
            [str(word) for word in words],
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            preexec_fn=limit,  # noqa: PLW1509 - no threads here
        )

    def measure(self, folder: Path) -> None:
        """Runs once without any trouble."""
        begun = time.monotonic()
        process = self.start(folder)
        said = process.communicate()[1]
        if process.returncode:
            sys.exit(f"the undisturbed run failed with exit code {process.returncode}: {said}")
        self.lasted, self.whole = time.monotonic() - begun, (folder / OUTPUT).read_bytes()
        self.took = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def breaches(self, folder: Path, *, ended: bool) -> list[str]:
        """What is not as promised after a run was killed, or ended by itself."""
        found = [] if hashes(self.inputs) == self.before else ["an input changed"]
        output = folder / OUTPUT
        if output.exists() and output.read_bytes() != self.whole:
            found.append("the output is not the undisturbed run's")
        if ended and (left := [path.name for path in folder.rglob("*.part")]):
            found.append(f"left behind: {', '.join(left)}")
        return found


def hashes(folder: Path) -> dict[str, str]:
    """The content of every file in a folder, by name."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*"))}


def killed_runs(case: Case, folder: Path, kills: int, rng: random.Random) -> Iterator[tuple[str, str, list[str]]]:
    """Kills at random moments, spread over all stages as runs go on: what was done, how it ended, breaches."""
    done, run = 0, 0
    while done < kills:
        run += 1
        own = folder / f"run{run}"
        own.mkdir()
        while True:
            process = case.start(own)
            life = rng.uniform(0.03, 0.5) * case.lasted if done < kills else None
            try:
                said = process.communicate(timeout=life)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                done += 1
                values = len(list(own.glob(f"{OUTPUT}.run/values/*.npz")))
                yield f"kill {done} after {life:.1f} s", f"{values} values kept", case.breaches(own, ended=False)
                continue
            yield f"run {run} goes on", *_came_through(case, own, process.returncode, said)
            break


def _came_through(case: Case, folder: Path, code: int, said: str) -> tuple[str, list[str]]:
    """How a run ended that nothing disturbed any more."""
    if code:
        return f"exit code {code}", [f"it failed: {said.strip()}"]
    same = (folder / OUTPUT).read_bytes() == case.whole
    return "the same bytes" if same else "other bytes", case.breaches(folder, ended=True)


def full_disks(case: Case, folder: Path, disks: int, mount: bool) -> Iterator[tuple[str, str, list[str]]]:
    """Disks from nearly nothing to nearly enough, then one with room on which the last run goes on."""
    for number in range(disks):
        size = int(case.took * (number + 0.5) / disks)
        own = folder / f"disk{number}"
        own.mkdir()
        with _disk(own, size) if mount else contextlib.nullcontext():
            # A file larger than the limit fails to be written as on a full disk; the limit is for each file alone.
            largest = int(len(case.whole) * (number + 0.5) / disks)
            process = case.start(own, None if mount else lambda most=largest: _limit(most))
            said, code = process.communicate()[1], process.returncode
            found = case.breaches(own, ended=True)
            if code != FULL or said.count("Error: ") != 1 or "Traceback" in said:
                found.append(f"exit code {code}: {said.strip()}")
            kept = folder / f"disk{number}-kept"
            shutil.copytree(own, kept)
        yield f"{size if mount else largest:,} bytes of room", f"exit code {code}", found
        process = case.start(kept)
        yield "room again: it goes on", *_came_through(case, kept, *_reversed(process))


def _reversed(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = process.communicate()[1]
    return process.returncode, said


@contextlib.contextmanager
def _disk(folder: Path, size: int) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={max(size, 8192)}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _limit(most: int) -> None:
    # Python ignores the signal that comes with it, so that a write fails with an error.
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def can_mount(folder: Path) -> bool:
    """Whether disks of any size can be made here."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    probe = folder / "probe"
    probe.mkdir()
    try:
        with _disk(probe, 2**20):
            return True
    except subprocess.CalledProcessError:
        return False


def torture(case: Case, folder: Path, kills: int, disks: int, seed: int = 0) -> list[str]:
    """Prints a line for every kill and every disk; gives all breaches."""
    whole = folder / "whole"
    whole.mkdir()
    case.measure(whole)
    print(
        f"undisturbed: {case.lasted:.0f} s, {len(case.whole):,} bytes, {case.took:,} with its run directory", flush=True
    )
    mount = can_mount(folder)
    if disks:
        print(f"full disks by {'tmpfs' if mount else 'RLIMIT_FSIZE'}", flush=True)
    breaches, counts = [], {"kills": 0, "goes on": 0, "room": 0}
    rounds = (killed_runs(case, folder, kills, random.Random(seed)), full_disks(case, folder, disks, mount))
    for what, how, found in (row for each in rounds for row in each):
        print(f"{what:28} {how:22} {'; '.join(found) or 'as promised'}", flush=True)
        breaches += [f"{what}: {breach}" for breach in found]
        for kind, word in (("kills", "kill "), ("goes on", "goes on"), ("room", "bytes of room")):
            counts[kind] += word in what
    told = f"{counts['kills']} kills, {counts['room']} full disks, {counts['goes on']} runs resumed"
    print(f"{told}: {len(breaches)} breaches", flush=True)
    return breaches


def main() -> None:
    """Exits with 1 at a breach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--data", type=Path, default=DATA, help="An npz file for it.")
    parser.add_argument("--samples", type=int, default=48, help="So many of them, to be done sooner.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--disks", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="Options of quantize after --, instead of a quick recipe.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        inputs = Path(name) / "inputs"
        inputs.mkdir()
        shutil.copy(asked.model, inputs)
        with np.load(asked.data) as arrays:
            np.savez(inputs / asked.data.name, **{name: arrays[name][: asked.samples] for name in arrays.files})
        case = Case(inputs, asked.options or QUICK)
        sys.exit(1 if torture(case, Path(name), asked.kills, asked.disks, asked.seed) else 0)


if __name__ == "__main__":
    main()
