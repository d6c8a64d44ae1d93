"""The end of a job in a rank: its outcome, its use of a process group, and Hydra's callbacks."""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from ..common import files
from ..common.protocol import Outcome
from ..common.text import bounded, bounded_lines
from . import frozen_config

_log = logging.getLogger(__name__)


def after_exit(stop: SystemExit) -> tuple[Outcome, int]:
    """Interpret `sys.exit(…)` as Python does: None and 0 mean success, a number is the code, others are a message."""
    if stop.code is None or (isinstance(stop.code, int) and stop.code == 0):
        return Outcome(completed=True, note="the job called sys.exit(0): its value is None"), 0
    code = int(stop.code) if isinstance(stop.code, int) else 1
    text = "".join(traceback.format_exception(_without_hydra_frames(stop)))
    summary = f"SystemExit: exit code {code}" if isinstance(stop.code, int) else f"SystemExit: {stop.code}"
    return Outcome(completed=False, summary=summary, traceback=text, failed_at=time.time()), code & 0xFF or 1


def outcome_of(
    job_return: JobReturn, main_namespace: Mapping[str, Any] | None, *, with_value: bool
) -> tuple[Outcome, int]:
    """Return the outcome of a job that Hydra has run, and the exit code of the rank."""
    if job_return.status is not JobStatus.COMPLETED:
        remote = {name: value for name, value in vars(job_return).items() if name.startswith("_remote_")}
        return failure(job_return._return_value, main_namespace, remote), 1
    if not with_value:
        return Outcome(completed=True), 0
    value = job_return.return_value
    try:
        # A value that contains itself can be pickled, but not searched for tensors.
        movable = _attempt(lambda: portable(value))
        return Outcome(
            completed=True, value=frozen_config.dumps(value if movable is None else movable, main_namespace)
        ), 0
    except (Exception, SystemExit) as error:  # noqa: BLE001  (pickling may raise anything)
        lost = f"a {type(value).__name__} that cannot be pickled ({type(error).__name__}: {error})"
        return Outcome(completed=True, lost=lost), 0


def failure(
    error: BaseException, main_namespace: Mapping[str, Any] | None, remote: Mapping[str, object] | None = None
) -> Outcome:
    """Return the outcome of a job that has failed."""
    text = _attempt(lambda: "".join(traceback.format_exception(_without_hydra_frames(error)))) or repr(type(error))
    message = _attempt(lambda: str(error)) or ""
    summary = f"{type(error).__qualname__}: {message.lstrip()}".splitlines()[0].rstrip(": ")
    return Outcome(
        completed=False,
        exception=_attempt(lambda: _rebuildable(error, main_namespace)),
        summary=summary,
        traceback=text,
        failed_at=time.time(),
        remote=remote or None,
    )


def as_stored(outcome: Outcome, main_namespace: Mapping[str, Any] | None) -> Outcome:
    """Return an outcome with texts cut to a limit: a message may have megabytes, and the log has all of it.

    Args:
        main_namespace: Namespace of the program's `__main__`, or None if there is no program.
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
    # Drop Hydra 1.4's fields, which repeat the texts.
    return replace(
        stored, exception=_attempt(lambda: _with_short_words(outcome.exception, main_namespace)), remote=None
    )


def _with_short_words(pickled: bytes | None, main_namespace: Mapping[str, Any] | None) -> bytes | None:
    """Return a pickled exception with texts cut to a limit, or None if they cannot be cut."""
    if pickled is None:
        return None
    error: BaseException = frozen_config.loads(pickled)
    error.args = tuple(bounded_lines(part) if isinstance(part, str) else part for part in error.args)
    if notes := getattr(error, "__notes__", None):
        error.__dict__["__notes__"] = [bounded_lines(note) for note in notes]
    text = "".join(traceback.format_exception(error))
    return _rebuildable(error, main_namespace) if bounded_lines(text) == text else None


def _without_hydra_frames(error: BaseException) -> BaseException:
    """Drop the frames above the user's function, which are Hydra's and the launcher's, and the same for every job."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_name not in ("run_job", "_run_job"):
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_name in ("run_job", "_run_job"):
        trace = trace.tb_next
    return error.with_traceback(trace) if trace is not None else error


def _rebuildable(error: BaseException, main_namespace: Mapping[str, Any] | None) -> bytes | None:
    """Pickle an exception. Return None if loading it would not return the same type."""
    data = frozen_config.dumps(error, main_namespace)
    return data if type(frozen_config.loads(data)) is type(error) else None


def _attempt(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (Exception, SystemExit):  # noqa: BLE001  (a user's __str__ or __reduce__ may raise anything)
        return None


def portable(value: Any) -> Any:
    """Return a job's value in a form that the launching process can load without touching a GPU.

    Zero-dimensional tensors become numbers, others move to the CPU, also in dicts, lists and tuples.
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


_TORCH = "torch.distributed.distributed_c10d"
# multiprocessing imports these to start a new interpreter, in which a GroupWatch cannot see process groups.
_SPAWNED = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")


class GroupWatch:
    """Detect every default process group that this process or a fork of it opens from now on.

    A destroyed group leaves no trace in torch. Therefore, the one function with which torch sets a default group is
    wrapped as soon as it exists: at once, or at the first import after torch's own.
    """

    def __init__(self) -> None:
        # Shared memory, so that forks can set it.
        self._seen = mmap.mmap(-1, 1)
        self._wrapped: ModuleType | None = None
        if not self._wrap():
            sys.meta_path.insert(0, self)

    def find_spec(self, _name: str, _path: Any = None, _target: Any = None) -> None:
        """Find no module; as part of `sys.meta_path`, this is called before each import."""
        if self._wrap() and self in sys.meta_path:
            sys.meta_path.remove(self)

    def _wrap(self) -> bool:
        torch = sys.modules.get(_TORCH)
        announce = getattr(torch, "_update_default_pg", None)
        if torch is None or announce is None:
            return False
        if self._wrapped is torch:
            return True

        @functools.wraps(announce)
        def noting(group: Any) -> Any:
            self._note(group)
            return announce(group)

        torch._update_default_pg = noting  # type: ignore[attr-defined]
        self._wrapped = torch
        # A group opened earlier, for instance when the program was imported.
        self._note(getattr(getattr(torch, "GroupMember", None), "WORLD", None))
        return True

    def _note(self, group: Any) -> None:
        try:
            if group is not None and group.size() > 1:
                self._seen[0] = 1
        except Exception:  # noqa: BLE001  (a user's own group may raise anything; then it counts)
            self._seen[0] = 1

    @property
    def ran_alone(self) -> bool:
        """Whether torch.distributed was imported, but no group of several processes was opened, as far as is known."""
        self._wrap()
        return self._wrapped is not None and not self._seen[0] and not any(name in sys.modules for name in _SPAWNED)


class RankCallbacks(Callbacks):
    """The callbacks of rank 0. A fork of rank 0 that continues the job calls none.

    Args:
        paths: Files of the job.
        main_namespace: Namespace of the program's `__main__`, or None if there is no program.
        before_job: Called after the `on_job_start` callbacks, directly before the job's function.
        can_restart: Whether the job is restarted if it fails.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        paths: files.JobPaths,
        main_namespace: Mapping[str, Any] | None,
        before_job: Callable[[], None],
        *,
        can_restart: bool,
    ) -> None:
        super().__init__()
        vars(self).update(vars(callbacks))
        self._paths = paths
        self._main_namespace = main_namespace
        self._before_job = before_job
        self._can_restart = can_restart
        self._process = os.getpid()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Call the callbacks, and store their state after the call."""
        if os.getpid() != self._process:
            return
        super().on_job_start(config=config, **kwargs)
        if self.callbacks:
            # If they cannot be pickled, the launching process uses its own.
            with contextlib.suppress(Exception):
                files.write_private(self._paths.callbacks, frozen_config.dumps(self.callbacks, self._main_namespace))
        self._before_job()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Call the callbacks, unless the job may be restarted."""
        if os.getpid() != self._process or self._comes_again(job_return):
            return
        if self.callbacks:
            with contextlib.suppress(OSError):
                files.write_private(self._paths.callbacks, b"")
        super().on_job_end(config=config, job_return=job_return, **kwargs)

    def _comes_again(self, job_return: JobReturn) -> bool:
        """Return whether the job may be restarted. If it is not, the launching process calls `end_job`."""
        if job_return.status is JobStatus.COMPLETED:
            return False
        if self._can_restart:
            return True
        from ..resources.port import says_taken

        error = job_return._return_value
        return isinstance(error, BaseException) and says_taken("".join(traceback.format_exception(error)))


def end_job(callbacks: Callbacks, run_dir: str, config: DictConfig, job_return: JobReturn) -> None:
    """Call `on_job_end` for a job that is over, unless its rank 0 has called it.

    Args:
        callbacks: The sweep's callbacks, used if rank 0 has not stored its own.
        run_dir: Run directory of the job.
        config: Config of the job.
    """
    if not callbacks.callbacks:
        return
    path = files.JobPaths(run_dir).callbacks
    if os.path.exists(path) and not os.path.getsize(path):
        return
    stored = files.read_own_pickle(path)
    ending = Callbacks()
    ending.callbacks = stored if isinstance(stored, list) else callbacks.callbacks
    try:
        with frozen_config.hydra_config(config), _in_directory(job_return.working_dir or "."):
            ending.on_job_end(config=config, job_return=job_return)
    except Exception as error:  # noqa: BLE001  (Hydra turns a callback's error into a warning, which may raise)
        _log.warning("on_job_end: %s: %s", type(error).__name__, error)


@contextlib.contextmanager
def _in_directory(path: str) -> Iterator[None]:
    """Change to the job's directory, as with Hydra's own launcher, if it still exists."""
    try:
        earlier = os.getcwd()
        os.chdir(path)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.chdir(earlier)
