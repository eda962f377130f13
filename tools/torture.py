"""Kills runs of the advanced pipeline at random moments, resumes them, and compares the bytes with an undisturbed run.

python tools/torture.py --kills 20 --steps 20
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = Path(__file__).parents[1] / "models"
OPTIONS = ["--pipeline", "advanced", "--bits", "w4a4,w8a8", "--compression", "0.18"]


def start(output: Path, steps: int) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    data = [MODELS / "fashion_mobilenet.onnx", "-c", MODELS / "fashion_calibration.npz", "-o", output]
    words = [sys.executable, "-m", "onnxcalib.cli.main", "quantize", *data, *OPTIONS, "--steps", steps]
    return subprocess.Popen([str(word) for word in words], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """What a run said in the end; it must not fail."""
    err = process.communicate()[1]
    if process.returncode:
        sys.exit(f"a run failed with exit code {process.returncode}: {err}")
    return err


def main() -> None:
    """Prints one line a kill, and the outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, torn = Path(folder) / "whole.onnx", Path(folder) / "torn.onnx"
        begun = time.monotonic()
        finish(start(whole, asked.steps))
        lasted = time.monotonic() - begun
        print(f"undisturbed: {lasted:.0f} s, {whole.stat().st_size:,} bytes", flush=True)
        kills, rounds = 0, 0
        while kills < asked.kills:
            rounds += 1
            # Lives of a few seconds on average, so that the kills spread over all stages.
            kills += torn_run(torn.with_name(f"torn{rounds}.onnx"), asked.kills - kills, lasted, asked.steps, rng)
        same = [path.read_bytes() == whole.read_bytes() for path in sorted(Path(folder).glob("torn*.onnx"))]
    print(f"{kills} kills in {rounds} runs: {sum(same)} of {len(same)} files are byte-identical to the undisturbed run")
    sys.exit(0 if all(same) else 1)


def torn_run(output: Path, most: int, lasted: float, steps: int, rng: random.Random) -> int:
    """One run that is killed again and again until it comes through or no kills are left; counts them."""
    for kill in range(most):
        process = start(output, steps)
        life = rng.uniform(0.02, 0.2) * lasted
        try:
            process.wait(life)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            values = len(list(output.with_name(f"{output.name}.run").glob("values/*.npz")))
            print(f"killed {output.name} after {life:.1f} s, {values} values on disk", flush=True)
            continue
        finish(process)
        return kill
    print(finish(start(output, steps)).splitlines()[0], flush=True)
    return most


if __name__ == "__main__":
    main()
