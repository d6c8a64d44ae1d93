"""The running jobs of a batch, their keepers' sockets and their spawner, and waiting for all of them."""

from __future__ import annotations

import logging
import os
import selectors
from collections.abc import Iterable, Sequence

from ._channel import Channel
from ._errors import StartError
from ._running import RunningJob
from ._spawner_link import MOST_HELD, SpawnerLink
from ._words import counted

# Of the descriptors that a keeper holds, those that are no locks: the claim, and a terminal.
_FOR_OTHERS = 4
_log = logging.getLogger(__name__)


class Hub:
    """Get keepers for jobs and hear what they say.

    Args:
        selector: On which to wait.

    Attributes:
        running: Jobs that have a keeper, by number.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._spawner: SpawnerLink | None = None
        self.running: dict[int, RunningJob] = {}

    def refuse_shared_directory(self, run_dir: str, pausing: Iterable[tuple[int, str]]) -> None:
        """Refuse a run directory that another job has.

        Args:
            run_dir: The directory.
            pausing: Number and directory of the jobs that are between two starts.

        Raises:
            StartError: naming that job.
        """
        directory = os.path.realpath(run_dir)
        running = ((number, job.start.run_dir) for number, job in self.running.items())
        for number, taken in (*running, *pausing):
            if os.path.realpath(taken) == directory:
                raise StartError(
                    f"Its run directory {run_dir} is in use by job {number}, which still runs. Give each job one "
                    "of its own (hydra.sweep.subdir), or run one at a time (hydra.launcher.max_parallel_jobs=1)."
                )

    def ask_for_keeper(
        self, number: int, held: Sequence[int], preloader: SpawnerLink | None = None
    ) -> tuple[SpawnerLink, Channel]:
        """Have a keeper forked, by a new spawner if there is none.

        Args:
            number: Number of the job.
            held: Descriptors that the keeper holds until its job is over.
            preloader: To fork it if it can; None: a plain spawner does.

        Raises:
            OSError: when there can be none.
            StartError: when that is too much to hold.
        """
        if len(held) > MOST_HELD:
            raise StartError(
                f"A job can lock about {counted(MOST_HELD - _FOR_OTHERS, 'device')} at most. Give this one fewer "
                "ranks, or set hydra.launcher.lock_devices=false."
            )
        for link in (preloader, self._spawner):
            if link is not None and not link.lost:
                self._listen_to(link)
                try:
                    return link, Channel(link.start_keeper(number, held))
                except OSError:
                    # It was killed since we heard from it. Its jobs go on; this one gets a new spawner.
                    _log.debug("The spawner is gone; starting another")
        self._spawner = SpawnerLink()
        self._listen_to(self._spawner)
        return self._spawner, Channel(self._spawner.start_keeper(number, held))

    def _listen_to(self, link: SpawnerLink) -> None:
        if link not in [key.data for key in self._selector.get_map().values()]:
            self._selector.register(link, selectors.EVENT_READ, link)

    def add(self, job: RunningJob) -> None:
        """Listen to a job's keeper from now on."""
        self.running[job.start.number] = job
        self._selector.register(job.channel, selectors.EVENT_READ, job)

    def remove(self, job: RunningJob) -> None:
        """Forget a job that is over."""
        job.close()
        del self.running[job.start.number]

    def wait(self, timeout: float | None) -> None:
        """Wait until somebody has said something, for `timeout` seconds at most, and take it."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, RunningJob):
                write = selectors.EVENT_WRITE if key.data.channel.wants_to_write else 0
                self._selector.modify(key.fileobj, selectors.EVENT_READ | write, key.data)
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, RunningJob):
                self._hear(key.data)
            elif isinstance(key.data, SpawnerLink):
                self._hear_spawner(key.data)

    def _hear(self, job: RunningJob) -> None:
        for line in job.hear():
            _log.info("#%d : %s", job.start.number, line)
        if job.channel.lost:
            self._selector.unregister(job.channel)

    def _hear_spawner(self, link: SpawnerLink) -> None:
        for ended in link.receive():
            if ended.job in self.running:
                self.running[ended.job].buried = True
                self.running[ended.job].left = ended.left
                self.running[ended.job].keeper_code = ended.code
        if link.lost:
            self._selector.unregister(link)
            link.close()

    def close(self) -> None:
        """Let go of everybody: without their sockets, keepers end their groups by themselves."""
        for job in self.running.values():
            job.channel.close()
        if self._spawner is not None:
            self._spawner.close()
