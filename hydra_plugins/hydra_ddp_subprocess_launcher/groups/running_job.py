"""A running job as the launching process sees it, and the monitor of all running jobs."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..common import processes
from ..common.errors import StartError
from ..common.files import JobPaths, read_outcome
from ..common.protocol import (
    Channel,
    GroupReport,
    GroupSpec,
    LaunchSpec,
    Note,
    Started,
    Stop,
    StopReason,
)
from ..common.text import list_numbers, pluralize
from ..display.logs import LogTee, last_lines
from ..job.plan import Allocation, Attempt
from ..resources.port import is_of_spawned, is_port_clash
from ..supervisor.keeper import GIVE_UP_S
from .spawners import MAX_HELD, ForkServer, SpawnerLink

_log = logging.getLogger(__name__)
# Descriptors held by a keeper that are not device locks: the sweep lock and a terminal.
_OTHER_DESCRIPTORS = 4
# Seconds for a keeper or spawner to answer before it is continued, and again before it is killed.
_ANSWER_S = 5.0
# Maximum number of restarts of a job because no spawner took it up.
_MOST_UNANSWERED = 3
# Number of last lines of rank 0's log in which to look for a port that was taken.
_LAST_WORDS = 50
# Arguments: the number of a job, and which of its processes.
LEFTOVERS_MESSAGE = (
    "#%d : %s of it cannot be ended, as where a disk or driver does not answer. What it holds is not given out before "
    "it has gone"
)


@dataclass(eq=False)
class RunningJob:
    """A job that runs under a keeper.

    Attributes:
        spec: The start of the job.
        allocation: Its devices and port.
        attempt: Which start of the job this is.
        link: Link to the spawner that forked its keeper.
        channel: Channel to the keeper.
        tees: One per rank that is shown.
        node: Number of this node.
        began: Start of the ranks, monotonic seconds.
        ranks_run: Whether the ranks have been started. On a single node, set with the keeper's first answer.
        keeper: The keeper's process, or None if it has not answered yet.
        end_by: Deadline for the keeper to exit after an order to stop, monotonic seconds, or None without an order.
        stopped_for: Why it was ordered to stop.
        stopped_at: When the keeper was first seen stopped (SIGSTOP), monotonic seconds, or None if it is not.
        lost_at: When the keeper sent its report, or ended without one, monotonic seconds, or None before that.
        report: The keeper's report, or None if there is none yet.
        reaped: Whether the spawner has reported that the keeper and all its descendants have ended.
        has_leftovers: Whether one of its processes could not be ended.
        keeper_code: Exit code of the keeper, or None if it is not known.
        compared: Whether the configs of the ranks have been compared (`check_config`).
        difference: The difference found, or empty.
    """

    spec: LaunchSpec
    allocation: Allocation
    attempt: Attempt
    link: SpawnerLink
    channel: Channel
    tees: list[LogTee]
    node: int = 0
    began: float = field(default_factory=time.monotonic)
    ranks_run: bool = False
    keeper: processes.ProcessHandle | None = None
    end_by: float | None = None
    stopped_for: str = ""
    stopped_at: float | None = None
    lost_at: float | None = None
    report: GroupReport | None = None
    reaped: bool = False
    has_leftovers: bool = False
    keeper_code: int | None = None
    compared: bool = False
    difference: str = ""

    @property
    def started(self) -> bool:
        """Whether a keeper is known to have started the job."""
        return self.keeper is not None or self.report is not None

    @property
    def finished(self) -> bool:
        """Whether no process of the job is alive."""
        return self.channel.disconnected and (self.reaped or self.link.disconnected)

    def receive(self) -> list[str]:
        """Receive the keeper's messages, and return those for the user."""
        lines = []
        self.channel.flush()
        for message in self.channel.receive():
            if isinstance(message, GroupReport):
                self.report = message
            elif isinstance(message, Note):
                lines.append(message.text)
            elif isinstance(message, Started):
                self.keeper = self.keeper or processes.ProcessHandle(message.keeper)
                self.ranks_run = bool(message.ranks) or not self.spec.rendezvous_dir
                # Until now, it may have waited for other nodes.
                self.began = time.monotonic()
        if (self.channel.disconnected or self.report is not None) and self.lost_at is None:
            self.lost_at = time.monotonic()
        return lines

    def stop(self, detail: str, *, at_once: bool = False) -> None:
        """Order the keeper to end the group."""
        self.channel.send(Stop(at_once=at_once, detail=detail))
        self.stopped_for = self.stopped_for or detail
        if self.keeper is not None:
            # A stopped keeper (SIGSTOP) could not act on the order.
            self.keeper.send(signal.SIGCONT)
        # After the second order, do not wait for processes that cannot be killed.
        patience_s = 0.0 if at_once else self.spec.limits.grace_period_s + GIVE_UP_S
        end_by = time.monotonic() + _ANSWER_S + patience_s
        self.end_by = end_by if self.end_by is None else min(self.end_by, end_by)

    def check_stuck(self, now: float) -> None:
        """Continue or kill a keeper or spawner that does not answer, such as one that was stopped (SIGSTOP).

        Args:
            now: Monotonic seconds.
        """
        if self.lost_at is not None:
            self._insist_on_spawner(now - self.lost_at)
        elif self.keeper is None:
            if now < self.link.ready_at:
                # It is importing modules, unless it was stopped (SIGSTOP). An order to stop does not wait for imports.
                self.link.wake()
                if self.end_by is not None or now > self.link.ready_by:
                    self.link.kill()
            self._insist_on_spawner(now - max(self.began, self.link.ready_at))
        else:
            self._wake_keeper(self.keeper, now)
            limit = self.spec.limits.timeout_s
            patience_s = self.spec.limits.grace_period_s + GIVE_UP_S + _ANSWER_S
            # The time limit does not include waiting for other nodes.
            due = [] if limit is None or not self.ranks_run else [self.began + limit + patience_s]
            if self.end_by is not None:
                due.append(self.end_by)
            if due and now > min(due):
                # Its ranks die with it, and the spawner ends what they leave behind.
                self.keeper.send(signal.SIGKILL)
            if self.keeper.ended:
                # Do not rely on its socket, of which a spawner that was stopped while forking holds a copy.
                self.lost_at = now

    def _wake_keeper(self, keeper: processes.ProcessHandle, now: float) -> None:
        if not keeper.stopped:
            self.stopped_at = None
        elif self.stopped_at is None:
            self.stopped_at = now
        elif now - self.stopped_at > _ANSWER_S:
            # Its ranks would go on, and no process would notice their end.
            keeper.send(signal.SIGCONT)

    def _insist_on_spawner(self, waited_s: float) -> None:
        if waited_s > 2 * _ANSWER_S:
            self.link.kill()
        elif waited_s > _ANSWER_S:
            self.link.wake()

    def end_leftovers(self) -> list[int]:
        """End the processes of a lost keeper, as its spawner may be lost, too, and return the pids that remain."""
        if self.report is not None:
            self.has_leftovers = self.report.left
            return []
        marks = {"TORCHELASTIC_RUN_ID": self.spec.run_id}
        if self.spec.rendezvous_dir:
            # Another node of the job may be on the same machine.
            marks["GROUP_RANK"] = str(self.node)
        found = processes.kill_marked(marks, _ANSWER_S)
        self.has_leftovers |= bool(found)
        if self.keeper is None and self.end_by is not None:
            # It had not begun, and no keeper was killed.
            self.report = GroupReport((), StopReason.ORDERED, None, self.stopped_for)
        return found

    def compare_configs(self) -> bool:
        """Compare the ranks' resolved configs once all are written, and return whether a difference was just found."""
        found = None if self.compared else config_difference(self.spec)
        if found is None:
            return False
        self.compared, self.difference = True, found
        return bool(found)

    def met_port_clash(self) -> bool:
        """Return whether rank 0 found its port taken."""
        paths = JobPaths(self.spec.run_dir)
        outcome = read_outcome(paths, 0, self.spec.run_id)
        words = outcome.traceback if outcome is not None else "\n".join(last_lines(paths.log(0), _LAST_WORDS))
        if self.spec.world_size > 1 and is_of_spawned(words):
            return False  # Spawned processes would take each other's port again.
        return is_port_clash(words, self.allocation.port.number)

    def next_attempt(self, completed: bool, *, own_port: bool) -> Attempt | None:
        """Return the next start of a job that has ended, or None if it is not restarted.

        Args:
            own_port: Whether the launcher chose the port, so that it can choose another one.
        """
        if completed or self.has_leftovers:
            return None
        last, most = self.attempt, self.spec.max_restarts
        following = replace(last, number=last.number + 1)
        if not self.started and last.unanswered < _MOST_UNANSWERED:
            return replace(following, unanswered=last.unanswered + 1, why="lost before it had begun, starting again")
        if own_port and not last.port_clash and self.met_port_clash():
            why = f"port {self.allocation.port.number} was taken, starting again on another"
            return replace(following, port_clash=True, why=why)
        if last.restarts < most:
            return replace(following, restarts=last.restarts + 1, why=f"failed, restart {last.restarts + 1} of {most}")
        return None

    def close(self) -> None:
        """Release the keeper's socket and the port."""
        self.channel.close()
        self.allocation.port.release()
        if self.keeper is not None:
            self.keeper.close()


def name_leftovers(pids: Sequence[int]) -> str:
    """Return the processes of a job that cannot be ended, as text; their pids may not be known."""
    return list_numbers("process", pids) if pids else "a process"


def config_difference(spec: LaunchSpec) -> str | None:
    """Describe the keys in which the ranks of a start resolved their configs differently; empty if there are none.

    Return None until all ranks have written their resolved configs (`check_config`).
    """
    paths = JobPaths(spec.run_dir)
    files = [paths.resolved_config(rank) for rank in range(spec.world_size)]
    if not all(map(os.path.exists, files)):
        return None
    differing = _differing_keys(files)
    return f"the ranks' configs differ in {', '.join(differing)}" if differing else ""


def _differing_keys(files: list[str]) -> list[str]:
    configs = []
    for file in files:
        try:
            with open(file, encoding="utf-8") as opened:
                configs.append(json.load(opened))
        except (OSError, ValueError):
            return []  # The job has deleted or changed the file, so there is nothing to compare.
    keys = {key: None for config in configs for key in config}
    own = ("hydra.output_subdir", "hydra.job_logging.handlers.")
    return [key for key in keys if not key.startswith(own) and len({str(config.get(key)) for config in configs}) > 1]


class JobMonitor:
    """Start keepers for jobs, and receive their messages.

    Args:
        selector: Selector to wait on.
        fork_server: Forks keepers whose ranks may be forks, too. If None, each rank is a new interpreter.

    Attributes:
        running: Jobs that have a keeper, by number.
    """

    def __init__(self, selector: selectors.BaseSelector, fork_server: ForkServer | None = None) -> None:
        self._selector = selector
        self._fork_server = fork_server
        self._spawner: SpawnerLink | None = None
        self.running: dict[int, RunningJob] = {}

    def start(
        self,
        spec: LaunchSpec,
        group: GroupSpec,
        allocation: Allocation,
        attempt: Attempt,
        held: Sequence[int] = (),
        tees: Sequence[LogTee] = (),
    ) -> RunningJob:
        """Start one node's group of a job, and receive its keeper's messages from now on.

        Args:
            spec: The start of the job.
            attempt: Which start of the job this is.
            held: Descriptors that the keeper holds until its job is over.
            tees: One per rank that is shown.

        Raises:
            OSError: if no keeper can be started.
            StartError: if there are too many descriptors to hold.
        """
        if len(held) > MAX_HELD:
            raise StartError(
                f"A job can lock about {pluralize(MAX_HELD - _OTHER_DESCRIPTORS, 'device')} at most. Give this one "
                "fewer ranks, or set hydra.launcher.lock_devices=false."
            )
        if self._fork_server is not None:
            group = self._fork_server.admit(spec.number, group)
        link, channel = self._ask_for_keeper(spec.number, held, forked=group.program_at is not None)
        channel.send(group)
        node = group.rendezvous.node if group.rendezvous is not None else 0
        job = RunningJob(spec, allocation, attempt, link, channel, list(tees), node)
        self.running[spec.number] = job
        self._selector.register(job.channel, selectors.EVENT_READ, job)
        return job

    def _ask_for_keeper(self, number: int, held: Sequence[int], *, forked: bool) -> tuple[SpawnerLink, Channel]:
        """Request a keeper from the fork server, from the spawner, or from a new spawner if that is gone."""
        server = self._fork_server.link() if forked and self._fork_server is not None else None
        for link in (server, self._spawner):
            if link is not None and not link.disconnected:
                self._listen_to(link)
                try:
                    return link, Channel(link.start_keeper(number, held))
                except OSError:
                    # It was killed after its last message. Its jobs go on; this one gets a new spawner.
                    _log.debug("The spawner is gone; starting another")
        self._spawner = SpawnerLink()
        self._listen_to(self._spawner)
        return self._spawner, Channel(self._spawner.start_keeper(number, held))

    def _listen_to(self, link: SpawnerLink) -> None:
        if link not in [key.data for key in self._selector.get_map().values()]:
            self._selector.register(link, selectors.EVENT_READ, link)

    def remove(self, job: RunningJob) -> None:
        """Remove a job that is over."""
        job.close()
        del self.running[job.spec.number]

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds for messages of keepers and spawners, and receive them."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, RunningJob):
                write = selectors.EVENT_WRITE if key.data.channel.wants_to_write else 0
                self._selector.modify(key.fileobj, selectors.EVENT_READ | write, key.data)
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, RunningJob):
                self._receive(key.data)
            elif isinstance(key.data, SpawnerLink):
                self._receive_from_spawner(key.data)

    def _receive(self, job: RunningJob) -> None:
        for line in job.receive():
            _log.info("#%d : %s", job.spec.number, line)
        if job.channel.disconnected:
            self._selector.unregister(job.channel)

    def _receive_from_spawner(self, link: SpawnerLink) -> None:
        for ended in link.receive():
            if ended.job in self.running:
                self.running[ended.job].reaped = True
                self.running[ended.job].has_leftovers = ended.left
                self.running[ended.job].keeper_code = ended.code
        if link.disconnected:
            self._selector.unregister(link)
            link.close()

    def close(self) -> None:
        """Close all sockets, upon which keepers end their groups by themselves."""
        for job in self.running.values():
            job.channel.close()
        if self._spawner is not None:
            self._spawner.close()
