"""One job, wherever it runs: its value comes back with what was warned of, or with the error that ended it."""

from __future__ import annotations

import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from onnxcalib.errors import OnnxcalibError
from onnxcalib.runtime.software import software

Warned = tuple[str, type[Warning]]


class WorkerError(OnnxcalibError):
    """Jobs cannot be done where they are sent."""

    exit_code = 8


class Stop(threading.Event):
    """Tells the jobs of this process to end; those of others are ended with their process."""

    def __reduce__(self) -> tuple[type[Stop], tuple[()]]:
        return Stop, ()


class PerProcess:
    """Values that each process makes for itself, once for all of its threads."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]

    def __reduce__(self) -> tuple[type[PerProcess], tuple[()]]:
        return PerProcess, ()


@dataclass(frozen=True)
class Answer:
    """What became of a job."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""  # where the error came from, in the process that did the job
    warned: tuple[Warned, ...] = ()


def carry_out(work: Callable[..., Any], *given: Any, expected: Mapping[str, str] | None = None) -> Answer:
    """Does a job in another process than the one that asks for it, which expects the software that it has itself."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            if expected is not None:
                _check_software(expected)
            answer = Answer(work(*given))
        except Exception as error:
            answer = _failed(error)
    warned = tuple((str(each.message), each.category) for each in heard if issubclass(each.category, UserWarning))
    return Answer(answer.value, answer.error, answer.trace, warned)


def value_of(answer: Answer) -> Any:
    """The value of a job, or its error; warnings are given once more, here."""
    for message, category in answer.warned:
        warnings.warn(message, category, stacklevel=3)
    if answer.error is not None:
        if answer.trace:
            answer.error.add_note(f"In the worker:\n{answer.trace}")
        raise answer.error
    return answer.value


def failed_to_load(error: BaseException) -> Answer:
    """The answer where a job cannot even begin."""
    return _failed(error)


def _failed(error: BaseException) -> Answer:
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of libraries may need arguments that pickle does not know of
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Answer(error=error, trace=trace)


def _check_software(expected: Mapping[str, str]) -> None:
    own = software()
    for name, words in (("runtime", "the runtime"), ("version", "onnxcalib"), ("code", "the code of onnxcalib")):
        if own[name] != expected[name]:
            raise WorkerError(
                f"a worker has {words} {own[name]}, but here it is {expected[name]}: results would depend on where "
                "they were computed.",
                "Install the same on both.",
            )
