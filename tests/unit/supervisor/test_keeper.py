"""What a keeper does with its group, with real ranks that are shell commands, told and watched over its socket."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.processes import descendants
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import (
    Channel,
    Forward,
    GroupReport,
    GroupSpec,
    Limits,
    Note,
    Preempt,
    RankOptions,
    RendezvousDir,
    Started,
    Stop,
    StopReason,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.spawners import KeeperEnded, SpawnerLink
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor.heartbeat import report_for_keeper
from support.runner import PATIENCE_S
from support.spawning import Job, is_alive, spec, wait_for_file

if TYPE_CHECKING:
    from support.runner import Runner

SLEEP = "exec sleep 1000"
DEAF = "trap '' TERM INT HUP; while :; do sleep 0.1; done"
# A machine that runs other things, too, is late by this much at most.
SLACK_S = 3.0


class Kept(Job):
    """One of several jobs of a spawner, which tells of all of them through one socket."""

    def __init__(self, link: SpawnerLink, number: int, group: GroupSpec, ended: dict[int, KeeperEnded]) -> None:
        super().__init__(link, number, group)
        self._all_ended = ended
        self.notes: list[str] = []

    def hear(self, timeout_s: float = 0.05) -> None:
        if self.ended is None:
            waiting: list[SpawnerLink | Channel] = [one for one in (self.link, self.channel) if not one.disconnected]
            select.select(waiting, [], [], timeout_s)
            # First: what a keeper says last, it has said before its spawner says that it ended.
            self._all_ended.update({ended.job: ended for ended in self.link.receive()})
            self.channel.flush()
            for message in self.channel.receive():
                self.started = message if isinstance(message, Started) and message.ranks else self.started
                self.report = message if isinstance(message, GroupReport) else self.report
                self.notes += [message.text] if isinstance(message, Note) else []
            self.ended = self._all_ended.get(self.number)


@pytest.fixture
def link(runner: Runner) -> Iterator[SpawnerLink]:
    """A spawner for the test; when it has ended, no process of its jobs may be left."""
    link = SpawnerLink()
    yield link
    link.close()


@pytest.fixture
def start(link: SpawnerLink, tmp_path: Path, runner: Runner) -> Iterator[Callable[..., Job]]:
    """Start jobs whose processes carry the test's marker; those that are left are given up, which ends them."""
    jobs: list[Job] = []
    ended: dict[int, KeeperEnded] = {}

    def start(script: str, nproc: int = 2, **changes: object) -> Job:
        changes.setdefault("environment", runner.environment())
        jobs.append(Kept(link, len(jobs), spec(tmp_path, script, nproc, **changes), ended))
        return jobs[-1]

    yield start
    for job in jobs:
        job.channel.close()


def report_of(job: Job) -> GroupReport:
    job.wait("ended")
    assert job.ended == KeeperEnded(job.number, 0)
    assert job.report is not None
    return job.report


def codes(report: GroupReport) -> dict[int, int]:
    return {ended.rank: ended.code for ended in report.exits}


# --- how a group is ended


def test_ranks_that_do_not_hear(start: Callable[..., Job], runner: Runner) -> None:
    """Of eight ranks whose children ignore SIGTERM, too, none is left after the grace period."""
    script = f'if [ $RANK = 3 ]; then sleep 0.5; exit 4; fi; (setsid sh -c "{DEAF}" &); {DEAF}'
    job = start(script, 8, limits=Limits(grace_period_s=0.5))
    report = report_of(job)
    assert (report.reason, report.cause) == (StopReason.RANK_FAILED, 3)
    assert codes(report) == {**dict.fromkeys(range(8), -9), 3: 4}
    failed_after_s = report.exits[0].after_s
    assert report.exits[0].rank == 3
    assert all(0.5 <= ended.after_s - failed_after_s < 0.5 + SLACK_S for ended in report.exits[1:])
    assert runner.alive() == {}


def test_sigterm_comes_first(start: Callable[..., Job], tmp_path: Path) -> None:
    """A rank and what it started have the whole grace period to put things in order."""
    script = "trap 'sleep 0.3; echo saved > saved_$RANK; exit 0' TERM; echo > ready_$RANK; while :; do sleep 0.05; done"
    job = start(script, limits=Limits(grace_period_s=20))
    for rank in (0, 1):
        wait_for_file(job, tmp_path / f"ready_{rank}")
    job.channel.send(Stop(at_once=False))
    report = report_of(job)
    assert codes(report) == {0: 0, 1: 0}
    assert all(ended.stopped and ended.after_s < 20 for ended in report.exits)
    assert [(tmp_path / f"saved_{rank}").read_text() for rank in (0, 1)] == ["saved\n"] * 2


def test_killed_at_once(start: Callable[..., Job], tmp_path: Path) -> None:
    """An order to stop at once does not wait for anybody, also when it comes second."""
    job = start(f"echo > ready_$RANK; {DEAF}", limits=Limits(grace_period_s=1000))
    for rank in (0, 1):
        wait_for_file(job, tmp_path / f"ready_{rank}")
    job.channel.send(Stop(at_once=False, detail="SIGINT"))
    time.sleep(0.2)
    job.hear()
    assert job.report is None
    job.channel.send(Stop(at_once=True, detail="again"))
    report = report_of(job)
    assert (report.reason, report.detail, codes(report)) == (StopReason.ORDERED, "SIGINT", {0: -9, 1: -9})


def test_a_stopped_rank_is_ended(start: Callable[..., Job]) -> None:
    """A rank that somebody stopped (SIGSTOP) obeys SIGTERM all the same."""
    job = start("kill -STOP $$", 1, limits=Limits(grace_period_s=20))
    job.wait("started")
    assert job.started is not None
    pid = job.started.ranks[0]
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.channel.send(Stop(at_once=False))
    report = report_of(job)
    assert codes(report) == {0: -15}
    assert report.exits[0].after_s < 15


def test_what_is_left_behind_gets_sigterm(start: Callable[..., Job], tmp_path: Path) -> None:
    """A process that ranks leave behind may put things in order, and is waited for; its end is not the job's."""
    script = (
        "setsid sh -c 'trap \"sleep 0.3; echo saved > left; exit 9\" TERM; echo > up; while :; do sleep 0.05; done' &"
    )
    job = start(f"{script} while [ ! -e up ]; do sleep 0.02; done", 1, limits=Limits(grace_period_s=20))
    report = report_of(job)
    assert (tmp_path / "left").read_text() == "saved\n"
    assert (report.reason, report.cause, codes(report)) == (None, None, {0: 0})


@pytest.mark.parametrize("ending", ["exit 0", "echo > failure_0; exit 1", SLEEP])
def test_what_does_not_go_is_waited_for_with_a_word(start: Callable[..., Job], tmp_path: Path, ending: str) -> None:
    """Whether ranks end well, fail or are stopped: one line, as the wait begins, names what is still there."""
    left = "setsid sh -c \"trap '' TERM; echo \\$\\$ > left.new; mv left.new left; while :; do sleep 0.1; done\" &"
    outcome = "echo > outcome_0; " if ending == "exit 0" else ""
    # Longer than the test may take: the line comes before the end.
    job = start(f"{left} while [ ! -e left ]; do sleep 0.02; done; {outcome}{ending}", 1, limits=Limits(1000))
    wait_for_file(job, tmp_path / "left")
    if ending == SLEEP:
        job.channel.send(Stop(at_once=False))
    deadline = time.monotonic() + 30
    while not job.notes:
        assert time.monotonic() < deadline
        job.hear()
    pid = int((tmp_path / "left").read_text())
    assert f"sh (pid {pid})" in job.notes[0]
    assert "grace_period_s" in job.notes[0]
    assert job.ended is None and is_alive(pid)
    job.channel.send(Stop(at_once=True))
    report_of(job)
    assert len(job.notes) == 1
    assert not is_alive(pid)


def test_what_goes_is_not_mentioned(start: Callable[..., Job]) -> None:
    """A process that obeys SIGTERM is no reason for a line."""
    job = start(f"setsid sh -c '{SLEEP}' & echo > outcome_0", 1, limits=Limits(1000))
    report_of(job)
    assert job.notes == []


def test_more_and_more_processes(start: Callable[..., Job], runner: Runner) -> None:
    """Processes that start others as fast as they can are ended, too."""
    script = "f() { sleep 0.02; (trap '' TERM; f) & (sleep 5 &) ; wait; }; f & sleep 0.4; exit 1"
    report = report_of(start(script, 1, limits=Limits(grace_period_s=0.2)))
    assert codes(report) == {0: 1}
    assert runner.alive() == {}


@pytest.mark.parametrize("code", [0, 1])
def test_a_rank_that_stored_an_error_has_failed(start: Callable[..., Job], code: int) -> None:
    """A rank whose error is stored is the cause, whatever its exit code: it may have ended by `os._exit(0)`."""
    report = report_of(start(f"if [ $RANK = 1 ]; then echo > failure_1; exit {code}; fi; {SLEEP}"))
    assert (report.reason, report.cause) == (StopReason.RANK_FAILED, 1)
    assert [(ended.rank, ended.code, ended.stopped) for ended in report.exits] == [(1, code, False), (0, -15, True)]


def test_a_failed_rank_that_cleans_up(start: Callable[..., Job], tmp_path: Path) -> None:
    """A rank that stored its error and does not end at once is left alone while the others are told to stop."""
    script = (
        f"if [ $RANK = 0 ]; then {SLEEP}; fi; trap 'echo > disturbed' TERM; echo > failure_1;"
        "n=0; while [ $n -lt 50 ]; do sleep 0.05; n=$((n + 1)); done; echo > clean; exit 1"
    )
    report = report_of(start(script, limits=Limits(grace_period_s=20)))
    assert (report.reason, report.cause) == (StopReason.RANK_FAILED, 1)
    assert codes(report) == {0: -15, 1: 1}
    assert (tmp_path / "clean").exists() and not (tmp_path / "disturbed").exists()


# --- time limits


def test_timeout(start: Callable[..., Job]) -> None:
    """A job that takes too long is ended; a rank that does not know the stacks' signal is not ended by that."""
    report = report_of(start(SLEEP, limits=Limits(grace_period_s=20, timeout_s=0.3)))
    assert (report.reason, report.cause, report.detail) == (StopReason.TIMEOUT, None, "ranks 0, 1 still running")
    assert codes(report) == {0: -15, 1: -15}
    assert all(0.3 <= ended.after_s < 0.3 + SLACK_S for ended in report.exits)


def test_exit_timeout(start: Callable[..., Job]) -> None:
    """After the first good exit the others have `exit_timeout_s`."""
    job = start(f"if [ $RANK = 1 ]; then exit 0; fi; {SLEEP}", limits=Limits(20, exit_timeout_s=0.3))
    report = report_of(job)
    assert (report.reason, report.cause, report.detail) == (StopReason.EXIT_TIMEOUT, None, "rank 0 still running")
    assert [(ended.rank, ended.code, ended.stopped) for ended in report.exits] == [(1, 0, False), (0, -15, True)]


def test_no_limit_is_met(start: Callable[..., Job]) -> None:
    """A job that ends in time is not touched by its limits."""
    report = report_of(start("sleep 0.2", limits=Limits(20, timeout_s=60, exit_timeout_s=60)))
    assert (report.reason, codes(report)) == (None, {0: 0, 1: 0})
    assert all(not ended.stopped and ended.after_s >= 0.2 for ended in report.exits)
    assert abs(report.began_at - time.time()) < 60


# --- a start that fails


def test_a_rank_that_cannot_be_started(start: Callable[..., Job], tmp_path: Path, runner: Runner) -> None:
    """When rank 1 cannot be started, rank 0 is ended and rank 2 never begins; the detail names the cause."""
    logs = (str(tmp_path / "rank_0.log"), str(tmp_path / "gone" / "rank_1.log"), str(tmp_path / "rank_2.log"))
    job = start(SLEEP, 3, log_files=logs)
    report = report_of(job)
    assert (report.reason, report.cause) == (StopReason.START_FAILED, 1)
    assert report.detail == f"No such file or directory: {logs[1]}"
    assert [(ended.rank, ended.stopped) for ended in report.exits] == [(0, True)]
    assert job.started is not None and len(job.started.ranks) == 1
    assert not (tmp_path / "rank_2.log").exists()
    assert runner.alive() == {}


@pytest.mark.parametrize("cwd", ["gone", "file"])
def test_a_folder_that_cannot_be_used(start: Callable[..., Job], tmp_path: Path, cwd: str) -> None:
    """A working directory that is gone is named."""
    (tmp_path / "file").touch()
    report = report_of(start("true", cwd=str(tmp_path / cwd)))
    assert (report.reason, report.cause, report.exits) == (StopReason.START_FAILED, 0, ())
    assert report.detail.endswith(f": {tmp_path / cwd}")


# --- between launcher and keeper


def test_a_forwarded_signal(start: Callable[..., Job], tmp_path: Path) -> None:
    """A signal is sent to every rank that still runs, and to nobody else."""
    script = (
        "if [ $RANK = 2 ]; then exit 0; fi; trap 'echo heard; exit 0' USR1;"
        "sh -c 'trap \"echo child\" USR1; while [ ! -e go ]; do sleep 0.05; done' & echo > ready_$RANK; wait; wait"
    )
    job = start(script, 3)
    for rank in (0, 1):
        wait_for_file(job, tmp_path / f"ready_{rank}")
    time.sleep(0.1)
    job.channel.send(Forward(signal.SIGUSR1))
    report = report_of(job)
    (tmp_path / "go").touch()
    assert (report.reason, codes(report)) == (None, {0: 0, 1: 0, 2: 0})
    assert [(tmp_path / f"rank_{rank}.log").read_text() for rank in range(3)] == ["heard\n", "heard\n", ""]


def test_a_launcher_that_does_not_listen(start: Callable[..., Job], tmp_path: Path) -> None:
    """A keeper does not wait for a launcher that is busy or stopped: a failed group ends meanwhile."""
    job = start(f"if [ $RANK = 1 ]; then exit 3; fi; {SLEEP}")
    logs = [tmp_path / f"rank_{rank}.log" for rank in (0, 1)]
    deadline = time.monotonic() + PATIENCE_S
    while not all(log.exists() for log in logs) or any(is_alive(pid) for pid in pids_of(logs)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert codes(report_of(job)) == {0: -15, 1: 3}


def pids_of(logs: list[Path]) -> list[int]:
    """Return the processes that have one of these files open."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if any(os.readlink(link) in map(str, logs) for link in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:
            continue  # It ended meanwhile, or is somebody else's.
    return found


def test_a_big_spec(start: Callable[..., Job], tmp_path: Path, runner: Runner) -> None:
    """A spec that no socket takes at once arrives piece by piece."""
    environment = {**runner.environment(), **{f"VALUE_{n}": "x" * 100_000 for n in range(10)}}
    job = start("echo ${#VALUE_0} ${#VALUE_9}", environment=environment)
    assert job.channel.wants_to_write
    assert codes(report_of(job)) == {0: 0, 1: 0}
    assert (tmp_path / "rank_1.log").read_text() == "100000 100000\n"


def test_a_launcher_that_lets_go(start: Callable[..., Job], link: SpawnerLink, runner: Runner) -> None:
    """A keeper whose socket is closed ends its group at once, whatever the grace period; so does its spawner."""
    job = start(SLEEP, limits=Limits(grace_period_s=1000))
    job.wait("started")
    job.channel.close()
    runner.wait_until(lambda: not runner.alive(), 0.5 + SLACK_S, "the end of the ranks")


def test_a_keeper_that_is_stuck_when_the_launcher_goes(
    start: Callable[..., Job], link: SpawnerLink, runner: Runner, tmp_path: Path
) -> None:
    """A keeper that is stuck in the start of a rank, as on a dead disk, is ended all the same."""
    os.mkfifo(tmp_path / "fifo")
    start(SLEEP, log_files=(str(tmp_path / "rank_0.log"), str(tmp_path / "fifo")))
    runner.wait_until(lambda: len(runner.alive()) == 1, what="rank 0")
    link.close()
    runner.wait_until(lambda: not runner.alive(), what="the end of rank 0")


def test_a_launcher_that_never_sends_a_spec(link: SpawnerLink) -> None:
    """A keeper without a job ends when nobody can send one any more."""
    Channel(link.start_keeper(5)).close()
    deadline = time.monotonic() + PATIENCE_S
    ended: list[KeeperEnded] = []
    while not ended:
        assert time.monotonic() < deadline
        ended = link.receive()
        time.sleep(0.01)
    assert ended == [KeeperEnded(5, 0)]


def test_what_a_keeper_is(start: Callable[..., Job]) -> None:
    """A keeper is named, has its own session and one thread, is nobody's of the ranks, and the ranks are its own."""
    job = start(SLEEP)
    job.wait("started")
    assert job.started is not None
    keeper, ranks = job.started.keeper, job.started.ranks
    assert Path(f"/proc/{keeper}/comm").read_text() == "ddp-keeper\n"
    assert os.getsid(keeper) == keeper != os.getsid(0)
    assert [os.getsid(pid) for pid in ranks] == list(ranks)
    assert descendants([keeper]) == [keeper, *ranks]
    assert len(os.listdir(f"/proc/{keeper}/task")) == 1


# --- a terminal for rank 0


def test_rank_0_has_the_terminal(link: SpawnerLink, runner: Runner, tmp_path: Path) -> None:
    """The last three descriptors are rank 0's alone, also beside the keeper; all ranks hold those before them."""
    script = 'if [ $RANK = 0 ]; then read line; fi; echo "$line"; readlink /proc/$$/fd/*; echo error >&2; read line; :'
    (in_read, in_write), (out_read, out_write), (err_read, err_write) = (os.pipe() for _ in range(3))
    with (tmp_path / "lock").open("w") as lock:
        group = spec(tmp_path, script, environment=runner.environment(), terminal=True)
        job = Job(link, 0, group, [lock.fileno(), in_read, out_write, err_write])
        for number in (in_read, out_write, err_write):
            os.close(number)
        job.wait("started")
        assert job.started is not None
        pipe_names = {os.readlink(f"/proc/self/fd/{number}") for number in (in_write, out_read, err_read)}
        of_keeper = {os.readlink(entry) for entry in Path(f"/proc/{job.started.keeper}/fd").iterdir()}
        assert not of_keeper & pipe_names
        os.write(in_write, b"typed\nmore\n")
        assert codes(report_of(job)) == {0: 0, 1: 0}
    said, *of_rank_0 = os.read(out_read, 10_000).decode().splitlines()
    assert said == "typed"
    assert set(of_rank_0) == {*pipe_names, str(tmp_path / "lock")}
    assert os.read(err_read, 100) == b"error\n"
    assert (tmp_path / "rank_0.log").read_text().count("\n") == 1
    of_rank_1 = (tmp_path / "rank_1.log").read_text().split()
    assert set(of_rank_1) == {"/dev/null", str(tmp_path / "rank_1.log"), str(tmp_path / "lock"), "error"}
    for number in (in_write, out_read, err_read):
        os.close(number)


def test_a_signal_for_one_rank(start: Callable[..., Job], tmp_path: Path) -> None:
    """A signal can be passed on to one rank alone."""
    script = "trap 'echo heard > heard_$RANK' USR1; echo > ready_$RANK; while [ ! -e go ]; do sleep 0.05; done"
    job = start(script, 3)
    for rank in range(3):
        wait_for_file(job, tmp_path / f"ready_{rank}")
    job.channel.send(Forward(signal.SIGUSR1, 1))
    wait_for_file(job, tmp_path / "heard_1")
    (tmp_path / "go").touch()
    assert codes(report_of(job)) == {0: 0, 1: 0, 2: 0}
    assert [(tmp_path / f"heard_{rank}").exists() for rank in range(3)] == [False, True, False]


def test_a_signal_that_was_sent_to_all(start: Callable[..., Job], tmp_path: Path) -> None:
    """One that a cluster has sent to every process of a job is not forwarded once more."""
    script = "trap 'echo heard' USR1; echo > ready_$RANK; while [ ! -e go ]; do sleep 0.05; done"
    job = start(script, 1)
    wait_for_file(job, tmp_path / "ready_0")
    job.wait("started")
    assert job.started is not None
    for pid in (job.started.keeper, *job.started.ranks):
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    job.channel.send(Forward(signal.SIGUSR1))
    time.sleep(0.5)
    (tmp_path / "go").touch()
    report_of(job)
    assert (tmp_path / "rank_0.log").read_text() == "heard\n"


PREEMPTED = """
import os, signal, sys, time
def say(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(1)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGUSR2, say)
signal.signal(signal.SIGTERM, say)
with open("ready_" + os.environ["RANK"], "w") as ready:
    print(file=ready)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("to_all", [True, False])
def test_preempted(start: Callable[..., Job], tmp_path: Path, to_all: bool) -> None:
    """A rank that handles the cluster's signal hears of it once, and has time; then all get SIGTERM.

    Whether the cluster has sent it to all processes, before or after the launcher tells of it, or to one alone.
    """
    argv = (sys.executable, "-c", PREEMPTED)
    job = start("", argv=argv, rank_options=RankOptions((signal.SIGUSR2,)), limits=Limits(grace_period_s=1.0))
    for rank in (0, 1):
        wait_for_file(job, tmp_path / f"ready_{rank}")
    job.wait("started")
    assert job.started is not None
    job.channel.send(Preempt(signal.SIGUSR2))
    if to_all:
        for pid in (job.started.keeper, *job.started.ranks):
            os.kill(pid, signal.SIGUSR2)
    report = report_of(job)
    assert (report.reason, report.cause, report.detail) == (StopReason.PREEMPTED, None, "SIGUSR2")
    said = [(tmp_path / f"rank_{rank}.log").read_text().split() for rank in (0, 1)]
    assert said == [["SIGUSR2", "SIGTERM"], ["SIGTERM"]]


# --- several at once


def test_jobs_side_by_side(start: Callable[..., Job]) -> None:
    """Jobs of one spawner do not touch each other: a failure, a kill and a good end side by side."""
    slow = start("while [ ! -e go ]; do sleep 0.05; done; exit 7", 1)
    failing, good = start("exit $RANK"), start("exit 0")
    assert codes(report_of(failing))[1] == 1
    assert codes(report_of(good)) == {0: 0, 1: 0}
    slow.wait("started")
    assert slow.report is None
    slow.channel.send(Stop(at_once=True))
    assert codes(report_of(slow)) == {0: -9}


def test_nothing_of_the_users_is_imported(tmp_path: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither PYTHONPATH nor the working directory reaches spawner and keepers; ranks have them as they were."""
    for name in ("selectors", "pickle", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'imported {__name__}')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    link = SpawnerLink()
    group = spec(tmp_path, 'echo "$PYTHONPATH"', 1, environment={**runner.environment(), "PYTHONPATH": "mine"})
    job = Job(link, 0, group)
    assert codes(report_of(job)) == {0: 0}
    assert (tmp_path / "rank_0.log").read_text() == "mine\n"
    link.close()


def test_a_rank_that_is_python(start: Callable[..., Job], tmp_path: Path) -> None:
    """A rank in Python has default handlers: SIGTERM ends it, and SIGPIPE is Python's."""
    code = (
        "import signal, sys; print(signal.getsignal(signal.SIGTERM).name, signal.pthread_sigmask(0, ()),"
        " signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    report = report_of(start("", 1, argv=(sys.executable, "-c", code)))
    assert codes(report) == {0: 0}
    assert (tmp_path / "rank_0.log").read_text() == "SIG_DFL set() True\n"


# --- a job on two nodes


@pytest.fixture
def on_node(start: Callable[..., Job], tmp_path: Path) -> Callable[..., Job]:
    """Start one node's group of a job of four ranks on two nodes."""

    def start_it(node: int, script: str, **changes: object) -> Job:
        ranks = (2 * node, 2 * node + 1)
        changes.setdefault("rendezvous", RendezvousDir(str(tmp_path / "meeting"), node, 2))
        return start(
            script,
            2,
            first_rank=ranks[0],
            rank_environments=tuple({"RANK": str(rank)} for rank in ranks),
            **{
                f"{name}_files": tuple(str(tmp_path / f"{file}_{rank}") for rank in ranks)
                for name, file in (("log", "log"), ("outcome", "outcome"), ("failure", "failure"))
            },
            **changes,
        )

    return start_it


def heard(job: Job, other: Job, what: str) -> None:
    """Wait for something that a job says, while the other one is heard, too."""
    deadline = time.monotonic() + PATIENCE_S
    while getattr(job, what) is None:
        assert time.monotonic() < deadline, f"{what} did not come"
        job.hear()
        other.hear()


def reports_of(first: Job, second: Job) -> tuple[GroupReport, GroupReport]:
    heard(first, second, "ended")
    heard(second, first, "ended")
    return report_of(first), report_of(second)


def test_no_rank_starts_before_all_nodes_are_there(on_node: Callable[..., Job], tmp_path: Path) -> None:
    """Both keepers report about the ranks of both."""
    first = on_node(0, "echo > began_$RANK")
    time.sleep(0.5)
    first.hear()
    assert first.started is None and not (tmp_path / "began_0").exists()
    second = on_node(1, "echo > began_$RANK")
    for report in reports_of(first, second):
        assert codes(report) == dict.fromkeys(range(4), 0)
        assert (report.reason, report.cause, report.finished, len(report.hosts)) == (None, None, True, 2)


def test_a_failure_on_one_node_ends_both(on_node: Callable[..., Job]) -> None:
    """The rank that failed is the cause for both; its peers are ended wherever they are."""
    first, second = on_node(0, SLEEP), on_node(1, f"if [ $RANK = 3 ]; then sleep 0.3; exit 5; fi; {SLEEP}")
    for report in reports_of(first, second):
        assert (report.reason, report.cause) == (StopReason.RANK_FAILED, 3)
        assert codes(report) == {3: 5, 0: -15, 1: -15, 2: -15}
        assert {ended.rank for ended in report.exits if ended.stopped} == {0, 1, 2}
        assert report.detail.startswith("on node 1 (")


def test_stopped_while_it_waits_for_a_node(on_node: Callable[..., Job]) -> None:
    """No rank is started, and the one that has not come is not waited for."""
    first = on_node(0, SLEEP, limits=Limits(grace_period_s=1000))
    time.sleep(0.3)
    first.channel.send(Stop(at_once=False, detail="SIGINT"))
    report = report_of(first)
    assert (report.reason, report.exits) == (StopReason.ORDERED, ())
    late = on_node(1, SLEEP)
    report = report_of(late)
    assert (report.reason, report.exits) == (StopReason.ORDERED, ())
    assert report.detail.startswith("on node 0 (") and report.detail.endswith("): SIGINT")


def test_stopped_after_its_own_ranks_have_ended(on_node: Callable[..., Job], tmp_path: Path) -> None:
    """The ranks of the other node are ended, too."""
    first, second = on_node(0, "exit 0"), on_node(1, f"echo > began_$RANK; {SLEEP}")
    heard(second, first, "started")
    said = tmp_path / "meeting" / "node_0.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while '"ended"' not in said.read_text():
        assert time.monotonic() < deadline
        first.hear()
    first.channel.send(Stop(at_once=False, detail="SIGINT"))
    for report in reports_of(first, second):
        assert codes(report) == {0: 0, 1: 0, 2: -15, 3: -15}
        assert report.reason is StopReason.ORDERED
        assert report.detail.startswith("on node 0 (") and report.detail.endswith("): SIGINT")


def test_the_launching_process_of_one_node_is_gone(on_node: Callable[..., Job]) -> None:
    """The ranks of all nodes end, and the other one knows why."""
    first, second = on_node(0, SLEEP), on_node(1, SLEEP)
    heard(first, second, "started")
    second.channel.close()
    first.wait("ended")
    report = report_of(first)
    assert report.reason is StopReason.LAUNCHER_LOST
    assert report.detail.startswith("on node 1 (")


def test_a_keeper_of_one_node_is_killed(on_node: Callable[..., Job], tmp_path: Path) -> None:
    """Who speaks for it ends the other node's ranks at once."""
    first, second = on_node(0, SLEEP), on_node(1, SLEEP)
    heard(second, first, "started")
    heard(first, second, "started")
    assert second.started is not None
    os.kill(second.started.keeper, signal.SIGKILL)
    heard(second, first, "ended")
    assert second.report is None
    lost = GroupReport((), StopReason.KEEPER_LOST, None)
    report_for_keeper(RendezvousDir(str(tmp_path / "meeting"), 1, 2), "here", lost)
    first.wait("ended")
    report = report_of(first)
    assert report.reason is StopReason.KEEPER_LOST and report.detail.startswith("on node 1 (")
    assert codes(report) == {0: -15, 1: -15}


def test_nodes_that_cannot_meet(on_node: Callable[..., Job], tmp_path: Path) -> None:
    """No rank is started, and the error says where they would have met."""
    (tmp_path / "file").write_text("")
    job = on_node(1, SLEEP, rendezvous=RendezvousDir(str(tmp_path / "file" / "m"), 1, 2))
    report = report_of(job)
    assert (report.reason, report.cause, report.hosts) == (StopReason.START_FAILED, 2, ())
    assert report.detail == f"Not a directory: {tmp_path}/file/m, where its nodes meet"


def test_the_first_to_end_sets_the_limit_for_other_nodes(on_node: Callable[..., Job]) -> None:
    """exit_timeout_s counts over all nodes."""
    first = on_node(0, "exit 0", limits=Limits(1.0, exit_timeout_s=0.5))
    second = on_node(1, SLEEP, limits=Limits(1.0, exit_timeout_s=0.5))
    for report in reports_of(first, second):
        assert report.reason is StopReason.EXIT_TIMEOUT
        assert report.detail.endswith("): ranks 2, 3 still running")


def test_preempted_ranks(on_node: Callable[..., Job], tmp_path: Path) -> None:
    """The cluster's signal goes to ranks that handle it, and all nodes end."""
    deaf = "sleep 1000 & wait"
    script = f"echo > began_$RANK; trap 'echo > saved_$RANK; exit 0' USR1; if [ $RANK = 3 ]; then {SLEEP}; fi; {deaf}"
    first, second = on_node(0, SLEEP), on_node(1, script, limits=Limits(20.0))
    for rank in (2, 3):
        wait_for_file(second, tmp_path / f"began_{rank}")
    heard(first, second, "started")
    time.sleep(0.2)
    second.channel.send(Preempt(signal.SIGUSR1))
    wait_for_file(second, tmp_path / "saved_2")
    second.channel.send(Stop(at_once=True))
    for report in reports_of(first, second):
        assert report.reason is StopReason.PREEMPTED
        assert report.detail.startswith("on node 1 (") and report.detail.endswith("): SIGUSR1")
    assert not (tmp_path / "saved_3").exists()
