"""Jobs on this machine: in processes that are replaced when lost, killed when nobody waits, gone with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from said import refused

from onnxcalib.errors import ModelError, OnnxcalibWarning
from onnxcalib.executors.jobs import WorkerError
from onnxcalib.executors.local import LocalExecutor
from onnxcalib.executors.workers import Workers


def process(_value: object, *_more: object) -> int:
    return os.getpid()


def total(value: dict[str, np.ndarray], factor: int) -> float:
    assert not value["x"].flags.owndata  # it is mapped, not read
    return float(value["x"].sum() * factor)


def dies_once(_value: object, marker: Path) -> int:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def dies(_value: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fails(_value: object) -> None:
    warnings.warn("look here", OnnxcalibWarning, stacklevel=1)
    raise ModelError("a layer is odd.", "Mend it.")


def sleeps(_value: object, marker: Path) -> None:
    marker.write_text(str(os.getpid()))
    time.sleep(600)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def until(fact: object, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if fact():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def processes():
    executor = LocalExecutor(2, patience=0)
    yield Workers(executor=executor)
    executor.abandon()


def test_values_arrive_mapped_and_results_in_any_order(processes: Workers) -> None:
    value = {"x": np.arange(100_000, dtype=np.float64)}
    with processes.sharing(value) as shared:
        found = dict(processes.map(total, shared, range(6)))
        assert found == {factor: value["x"].sum() * factor for factor in range(6)}
        pids = {pid for _, pid in processes.map(process, shared, range(6))}
        assert os.getpid() not in pids
        assert len(pids) <= 2
        folder = shared.file[0].parent
    assert not folder.exists()


def test_short_work_and_a_single_worker_never_leave_the_process() -> None:
    for executor in (LocalExecutor(2, patience=60), LocalExecutor(1, patience=0)):
        workers = Workers(executor=executor)
        with workers.sharing(None) as shared:
            assert {pid for _, pid in workers.map(process, shared, range(4))} == {os.getpid()}
        executor.shutdown()


def test_what_cannot_be_sent_is_done_here(processes: Workers) -> None:
    with processes.sharing(threading.Lock()) as shared:
        assert {pid for _, pid in processes.map(process, shared, range(3))} == {os.getpid()}


def test_a_job_whose_process_dies_is_done_again(processes: Workers, tmp_path: Path) -> None:
    with processes.sharing(None) as shared:
        assert processes.submit(dies_once, shared, tmp_path / "seen").result() == 7


def test_a_job_that_kills_every_process_is_an_error(processes: Workers) -> None:
    with processes.sharing(None) as shared, refused(WorkerError, "3 times", "--workers 1"):
        list(processes.results({processes.submit(dies, shared): 0}))


def test_errors_and_warnings_come_back(processes: Workers) -> None:
    heard = pytest.warns(OnnxcalibWarning, match="look here")
    with processes.sharing(None) as shared, heard, pytest.raises(ModelError) as caught:
        list(processes.results({processes.submit(fails, shared): 0}))
    assert (caught.value.message, caught.value.hint) == ("a layer is odd.", "Mend it.")


def test_what_nobody_waits_for_is_killed(processes: Workers, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    with processes.sharing(None) as shared:
        future = processes.submit(sleeps, shared, marker)
        assert until(lambda: marker.exists() and marker.read_text())
        pid = int(marker.read_text())
        processes.executor.abandon()  # type: ignore[attr-defined]
        assert until(lambda: not is_alive(pid))
        with pytest.raises(WorkerError):
            future.result()


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from onnxcalib.executors.local import LocalExecutor
sys.path.insert(0, {tests!r})
from test_local import sleeps
LocalExecutor(2, patience=0).submit(sleeps, None, Path({marker!r}))
while not Path({marker!r}).exists():
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_without_a_guard_may_start_them_and_they_go_when_it_is_killed(tmp_path: Path) -> None:
    marker, script = tmp_path / "pid", tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), marker=str(marker)))
    path = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, script], env=os.environ | {"PYTHONPATH": path}, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert until(lambda: bool(marker.read_text()))
    assert until(lambda: not is_alive(int(marker.read_text())))
