"""A job while it runs, as the launching process sees it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field

from . import _files, _keeper, _results
from ._channel import Channel
from ._errors import JobFailedError
from ._logs import LogTee, last_lines
from ._plan import PlannedJob
from ._port import ReservedPort, is_port_clash
from ._results import Verdict
from ._spawner import SpawnerLink
from ._specs import GroupReport

# Lines of rank 0's log in which to look for a port that was taken.
_LAST_WORDS = 50


@dataclass(eq=False)
class RunningJob:
    """A job with a keeper.

    Attributes:
        plan: The job.
        paths: Its files.
        lease: Its devices.
        port: Its rendezvous port.
        link: The spawner that forked its keeper.
        channel: To the keeper.
        tees: One a rank that is shown.
        retry: Whether this is the second start, after a port clash.
        began: Start of the ranks, monotonic seconds.
        report: The keeper's last word.
        buried: Whether the spawner said that the keeper and all below it are gone.
        compared: Whether `check_config` has been done.
        difference: What it found; empty: nothing.
    """

    plan: PlannedJob
    paths: _files.JobPaths
    lease: tuple[str, ...]
    port: ReservedPort
    link: SpawnerLink
    channel: Channel
    tees: list[LogTee]
    retry: bool
    began: float = field(default_factory=time.monotonic)
    report: GroupReport | None = None
    buried: bool = False
    compared: bool = False
    difference: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing of the job is alive."""
        return self.channel.lost and (self.buried or self.link.lost)

    def hear(self) -> list[str]:
        """Take what the keeper has sent, and return its lines for the user."""
        lines = []
        self.channel.flush()
        for message in self.channel.receive():
            if isinstance(message, GroupReport):
                self.report = message
            elif isinstance(message, _keeper.Note):
                lines.append(message.text)
        return lines

    def stop(self, detail: str, *, at_once: bool = False) -> None:
        """Have the group ended."""
        self.channel.send(_keeper.Stop(at_once=at_once, detail=detail))

    def compare_configs(self) -> bool:
        """Compare what the ranks resolved, once, as soon as every rank has written it; return whether it differs."""
        files = [self.paths.resolved_config(rank) for rank in range(self.plan.nproc)]
        if self.compared or not all(map(os.path.exists, files)):
            return False
        self.compared = True
        differing = _differing_keys(files)
        if differing:
            self.difference = f"the ranks' configs differ in {', '.join(differing)}"
        return bool(differing)

    def met_port_clash(self) -> bool:
        """Return whether rank 0 found its port taken."""
        outcome = _files.read_outcome(self.paths, 0)
        words = outcome.traceback if outcome is not None else "\n".join(last_lines(self.paths.log(0), _LAST_WORDS))
        return is_port_clash(words, self.port.number)

    def verdict(self) -> Verdict:
        """Decide how the job ended, when it is over."""
        if self.report is not None:
            return _results.judge(self.report, self.plan.nproc, self.paths)
        lost = JobFailedError(
            "The process that kept this job was killed from outside, and its ranks with it. "
            f"The logs of the ranks are in {self.paths.folder}."
        )
        return _results.failed_before_start(lost)

    def close(self) -> None:
        """Let go of the keeper's socket and the port."""
        self.channel.close()
        self.port.release()


def make_tees(plan: PlannedJob, paths: _files.JobPaths, shown: tuple[int, ...] | None, *, alone: bool) -> list[LogTee]:
    """Return what shows the ranks of a job on the terminal.

    Args:
        plan: The job.
        paths: Its files.
        shown: Ranks to show; None: all.
        alone: Whether jobs run one at a time: a single stream is then shown as it comes.
    """
    ranks = [rank for rank in range(plan.nproc) if shown is None or rank in shown]
    bare = alone and len(ranks) == 1
    return [LogTee(paths.log(rank), "" if bare else f"[job {plan.number} rank {rank}] ") for rank in ranks]


def _differing_keys(files: list[str]) -> list[str]:
    configs = []
    for file in files:
        with open(file, encoding="utf-8") as opened:
            configs.append(json.load(opened))
    keys = {key: None for config in configs for key in config}
    own = ("hydra.output_subdir", "hydra.job_logging.handlers.")
    return [key for key in keys if not key.startswith(own) and len({str(config.get(key)) for config in configs}) > 1]
