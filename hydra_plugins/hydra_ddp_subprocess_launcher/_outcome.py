"""What a rank says about its part of a job: made in the rank, read by the launching process."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from . import _pickling
from ._specs import Outcome
from ._words import bounded, bounded_lines


def after_exit(stop: SystemExit) -> tuple[Outcome, int]:
    """Read `sys.exit(…)` as Python does: None and 0 are good, a number is the code, anything else is a message."""
    if stop.code is None or (isinstance(stop.code, int) and stop.code == 0):
        return Outcome(completed=True, note="the job called sys.exit(0): its value is None"), 0
    code = int(stop.code) if isinstance(stop.code, int) else 1
    text = "".join(traceback.format_exception(_without_hydra_frames(stop)))
    summary = f"SystemExit: exit code {code}" if isinstance(stop.code, int) else f"SystemExit: {stop.code}"
    return Outcome(completed=False, summary=summary, traceback=text, failed_at=time.time()), code & 0xFF or 1


def outcome_of(job_return: JobReturn, main: Mapping[str, Any] | None, *, with_value: bool) -> tuple[Outcome, int]:
    if job_return.status is not JobStatus.COMPLETED:
        remote = {name: value for name, value in vars(job_return).items() if name.startswith("_remote_")}
        return failure(job_return._return_value, main, remote), 1
    if not with_value:
        return Outcome(completed=True), 0
    value = job_return.return_value
    try:
        # A value that contains itself has no end to look for tensors, but a pickle.
        movable = _attempt(lambda: portable(value))
        return Outcome(completed=True, value=_pickling.dumps(value if movable is None else movable, main)), 0
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a pickle can fail with anything)
        lost = f"a {type(value).__name__} that cannot be pickled ({type(error).__name__}: {error})"
        return Outcome(completed=True, lost=lost), 0


def failure(
    error: BaseException, main: Mapping[str, Any] | None, remote: Mapping[str, object] | None = None
) -> Outcome:
    text = _attempt(lambda: "".join(traceback.format_exception(_without_hydra_frames(error)))) or repr(type(error))
    message = _attempt(lambda: str(error)) or ""
    summary = f"{type(error).__qualname__}: {message.lstrip()}".splitlines()[0].rstrip(": ")
    return Outcome(
        completed=False,
        exception=_attempt(lambda: _rebuildable(error, main)),
        summary=summary,
        traceback=text,
        failed_at=time.time(),
        remote=remote or None,
    )


def as_stored(outcome: Outcome, main: Mapping[str, Any] | None) -> Outcome:
    """Return an outcome whose texts are bounded: a message may have megabytes, and all of it is in the log.

    Args:
        outcome: What happened.
        main: Names of the program's `__main__`.
    """
    stored = replace(
        outcome,
        summary=bounded(outcome.summary),
        traceback=bounded_lines(outcome.traceback),
        note=bounded(outcome.note),
        lost=bounded(outcome.lost),
    )
    if stored.traceback == outcome.traceback:
        return stored
    # Hydra 1.4's fields have the texts once more.
    return replace(stored, exception=_attempt(lambda: _with_short_words(outcome.exception, main)), remote=None)


def _with_short_words(pickled: bytes | None, main: Mapping[str, Any] | None) -> bytes | None:
    """Return a pickled exception with bounded texts; None where they cannot be bounded."""
    if pickled is None:
        return None
    error: BaseException = _pickling.loads(pickled)
    error.args = tuple(bounded_lines(part) if isinstance(part, str) else part for part in error.args)
    if notes := getattr(error, "__notes__", None):
        error.__dict__["__notes__"] = [bounded_lines(note) for note in notes]
    text = "".join(traceback.format_exception(error))
    return _rebuildable(error, main) if bounded_lines(text) == text else None


def _without_hydra_frames(error: BaseException) -> BaseException:
    """Drop the frames above the user's function: they are Hydra's and ours, and the same for every job."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_name not in ("run_job", "_run_job"):
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_name in ("run_job", "_run_job"):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


def _rebuildable(error: BaseException, main: Mapping[str, Any] | None) -> bytes | None:
    """Pickle an exception; None where it would not come back as what it is."""
    data = _pickling.dumps(error, main)
    return data if type(_pickling.loads(data)) is type(error) else None


def _attempt(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (Exception, SystemExit):  # noqa: BLE001  (a user's __str__ or __reduce__ may raise anything)
        return None


def portable(value: Any) -> Any:
    """Return a job's value in a form that the launching process can hold without touching a GPU.

    Tensors without dimensions become numbers, others move to the CPU; dicts, lists and tuples are looked into.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach()
        return value.item() if value.dim() == 0 else value.cpu()
    if type(value) is dict:
        return {key: portable(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(portable(part) for part in value)
    return value
