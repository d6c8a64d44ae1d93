"""Hydra's callbacks of a job: called in rank 0, and where that could not, in the launching process.

`on_job_end` comes once a job. Rank 0 stores its callbacks as `on_job_start` has left them; an empty file in their place
says that it has begun to call `on_job_end`, and that nobody else shall.
"""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from . import _files, _freeze, _pickling

_log = logging.getLogger(__name__)


class RankCallbacks(Callbacks):
    """The callbacks of rank 0. A process that it forks, and that goes on in the job, calls none.

    Args:
        callbacks: The sweep's.
        paths: Files of the job.
        main: Namespace of the program's `__main__`; None: there is no program.
        can_restart: Whether the job is started again if it fails.
    """

    def __init__(
        self, callbacks: Callbacks, paths: _files.JobPaths, main: Mapping[str, Any] | None, *, can_restart: bool
    ) -> None:
        super().__init__()
        vars(self).update(vars(callbacks))
        self._paths = paths
        self._main = main
        self._can_restart = can_restart
        self._process = os.getpid()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Call them, and store them as they then are."""
        if os.getpid() != self._process:
            return
        super().on_job_start(config=config, **kwargs)
        if self.callbacks:
            # One that cannot be pickled is not lost: the launching process has its own.
            with contextlib.suppress(Exception):
                _files.write_private(self._paths.callbacks, _pickling.dumps(self.callbacks, self._main))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Call them, unless the job may not be over."""
        if os.getpid() != self._process or self._comes_again(job_return):
            return
        if self.callbacks:
            with contextlib.suppress(OSError):
                _files.write_private(self._paths.callbacks, b"")
        super().on_job_end(config=config, job_return=job_return, **kwargs)

    def _comes_again(self, job_return: JobReturn) -> bool:
        """Return whether the job may be started again; if it is not, the launching process ends it."""
        if job_return.status is JobStatus.COMPLETED:
            return False
        if self._can_restart:
            return True
        from ._port import says_taken

        error = job_return._return_value
        return isinstance(error, BaseException) and says_taken("".join(traceback.format_exception(error)))


def end_job(callbacks: Callbacks, run_dir: str, config: DictConfig, job_return: JobReturn) -> None:
    """Call `on_job_end` for a job that is over and whose rank 0 has not called it.

    Args:
        callbacks: The sweep's, for a rank 0 that has not stored its own.
        run_dir: Run directory of the job.
        config: Config of the job.
        job_return: How it ended.
    """
    if not callbacks.callbacks:
        return
    path = _files.JobPaths(run_dir).callbacks
    if os.path.exists(path) and not os.path.getsize(path):
        return
    stored = _files.read_own_pickle(path)
    ending = Callbacks()
    ending.callbacks = stored if isinstance(stored, list) else callbacks.callbacks
    try:
        with _freeze.hydra_config(config), _in_directory(job_return.working_dir or "."):
            ending.on_job_end(config=config, job_return=job_return)
    except Exception as error:  # noqa: BLE001  (Hydra warns of what a callback raises, and a warning may be an error)
        _log.warning("on_job_end: %s: %s", type(error).__name__, error)


@contextlib.contextmanager
def _in_directory(path: str) -> Iterator[None]:
    """Be where the job was, as with Hydra's own launcher, as far as that still exists."""
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
