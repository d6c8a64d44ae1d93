"""What a rank says about its part of a job: values made portable, exceptions rebuilt or told in words."""

from __future__ import annotations

import pickle
import sys
import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hydra.core.utils import JobReturn, JobStatus

from hydra_plugins.hydra_ddp_subprocess_launcher.job.outcome import after_exit, failure, outcome_of, portable


class NeedsTwo(Exception):
    """An exception that cannot be rebuilt from its message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class BadText(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class HoldsLock(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def raised(error: BaseException) -> BaseException:
    """Return an error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


# --- sys.exit


@pytest.mark.parametrize("code", [None, 0, False])
def test_a_good_exit(code: Any) -> None:
    """`sys.exit()` and `sys.exit(0)` complete the job, and a note says that they were called."""
    outcome, given = after_exit(SystemExit(code))
    assert (outcome.completed, outcome.value, given) == (True, None, 0)
    assert "sys.exit(0)" in outcome.note


@pytest.mark.parametrize(
    ("code", "given"), [(3, 3), (255, 255), (-1, 255), (256, 1), (True, 1), ("stop here", 1), ([0], 1)]
)
def test_a_bad_exit(code: Any, given: int) -> None:
    """Any other code fails the job; a text is a message, with exit code 1, and never 0 by wrapping around."""
    error = raised(SystemExit(code))
    assert isinstance(error, SystemExit)
    outcome, exit_code = after_exit(error)
    assert (outcome.completed, exit_code) == (False, given)
    assert outcome.summary == f"SystemExit: {f'exit code {int(code)}' if isinstance(code, int) else code}"
    assert "raise error" in outcome.traceback
    assert outcome.failed_at is not None


# --- exceptions


def test_an_exception() -> None:
    """An exception comes back as itself, with one line to name it, its traceback, and when it was noticed."""
    outcome = failure(raised(ValueError("broken\nin two lines")), None)
    assert not outcome.completed
    assert outcome.summary == "ValueError: broken"
    assert outcome.traceback.startswith("Traceback (most recent call last)")
    assert outcome.traceback.endswith("ValueError: broken\nin two lines\n")
    assert outcome.exception is not None
    error = pickle.loads(outcome.exception)
    assert type(error) is ValueError and error.args == ("broken\nin two lines",)
    assert outcome.failed_at is not None and outcome.remote is None


@pytest.mark.parametrize(
    ("error", "summary", "rebuilt"),
    [
        (ValueError(), "ValueError", True),
        (KeyError("k"), "KeyError: 'k'", True),
        (NeedsTwo("a", "b"), "NeedsTwo: a and b", False),
        (HoldsLock(), "HoldsLock: locked", False),
        (BadText(), "BadText", True),
        (KeyboardInterrupt(), "KeyboardInterrupt", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_odd_exceptions(error: BaseException, summary: str, rebuilt: bool) -> None:
    """One that cannot be rebuilt, pickled or shown still has its name, its text if there is one, and a traceback."""
    outcome = failure(raised(error), None)
    assert outcome.summary == summary
    assert (outcome.exception is not None) is rebuilt
    assert type(error).__name__ in outcome.traceback


def test_causes_are_told() -> None:
    """The cause of an exception is in its traceback."""
    error = ValueError("outer")
    error.__cause__ = raised(KeyError("inner"))
    assert "KeyError: 'inner'" in failure(raised(error), None).traceback


def test_frames_above_the_users_are_left_out() -> None:
    """Hydra's frames and ours are the same for every job: the traceback begins in the user's function."""

    def run_job() -> None:
        the_users_function()

    def the_users_function() -> None:
        raise ValueError("here")

    def caught() -> BaseException:
        try:
            run_job()
        except ValueError as error:
            return error
        raise AssertionError

    text = failure(caught(), None).traceback
    assert "in the_users_function" in text
    assert "in run_job" not in text and "in caught" not in text


# --- JobReturns


def job_return(value: Any, status: JobStatus = JobStatus.COMPLETED) -> JobReturn:
    result = JobReturn()
    result.status = status
    result._return_value = value
    return result


def test_a_value_of_rank_0() -> None:
    """The value of rank 0 travels with its type; that of other ranks stays there."""
    outcome, code = outcome_of(job_return({"a": (1, 2.5)}), None, with_value=True)
    assert (outcome.completed, code) == (True, 0)
    assert outcome.value is not None and pickle.loads(outcome.value) == {"a": (1, 2.5)}
    outcome, code = outcome_of(job_return(threading.Lock()), None, with_value=False)
    assert (outcome.completed, code, outcome.value, outcome.lost) == (True, 0, None, "")


def test_a_value_that_cannot_be_pickled() -> None:
    """A job whose value cannot travel has completed, and says what was lost and why."""
    outcome, code = outcome_of(job_return(threading.Lock()), None, with_value=True)
    assert (outcome.completed, code, outcome.value) == (True, 0, None)
    assert "a lock that cannot be pickled (TypeError: cannot pickle" in outcome.lost


def test_a_failed_job() -> None:
    """A failed job's exception is the outcome, with the fields that Hydra 1.4 adds, in every rank."""
    result = job_return(raised(ValueError("broken")), JobStatus.FAILED)
    result._remote_note = "x"  # type: ignore[attr-defined]
    for with_value in (True, False):
        outcome, code = outcome_of(result, None, with_value=with_value)
        assert (outcome.completed, code, outcome.summary) == (False, 1, "ValueError: broken")
        assert outcome.remote is not None and outcome.remote["_remote_note"] == "x"


# --- values made portable


class FakeTensor:
    """Stand in for a tensor: on a device, with dimensions or without."""

    def __init__(self, data: Any, *, dims: int, place: str = "cuda:0", grad: bool = True) -> None:
        self.data, self.dims, self.place, self.grad = data, dims, place, grad

    def detach(self) -> FakeTensor:
        return FakeTensor(self.data, dims=self.dims, place=self.place, grad=False)

    def dim(self) -> int:
        return self.dims

    def item(self) -> Any:
        return self.data

    def cpu(self) -> FakeTensor:
        return FakeTensor(self.data, dims=self.dims, place="cpu", grad=self.grad)


class Pair(NamedTuple):
    """A tuple with names."""

    x: Any
    y: Any


def test_values_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch a value is what it was, and torch is not imported for it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    value = {"a": [1, (2, {"b": None})], "c": Pair(1, 2), "d": OrderedDict(x=1)}
    result = portable(value)
    assert result == value
    assert type(result["c"]) is Pair and type(result["d"]) is OrderedDict
    assert "torch" not in sys.modules


def test_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without dimensions is a number, another is on the CPU and without its graph, however deep it lies."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=FakeTensor))
    result = portable({"loss": FakeTensor(0.5, dims=0), "deep": [1, (FakeTensor([1, 2], dims=1),)]})
    assert result["loss"] == 0.5 and result["deep"][0] == 1
    (tensor,) = result["deep"][1]
    assert (tensor.data, tensor.place, tensor.grad) == ([1, 2], "cpu", False)


def test_a_value_may_hold_itself_twice() -> None:
    """Nothing is changed in place: the job's own objects stay as they are."""
    inner = [1]
    value = {"a": inner, "b": inner}
    result = portable(value)
    assert result == value and result["a"] is not inner
