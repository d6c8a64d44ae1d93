"""The spawner and its keepers, driven as the launching process drives them, with ranks that are shell commands."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Channel, GroupReport, Stop, StopReason
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.spawners import KeeperEnded, SpawnerLink
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor import spawner
from support.spawning import PATIENCE_S, Job, is_alive, spec, wait_for_file


def test_ranks_that_all_end_well(link: SpawnerLink, tmp_path: Path) -> None:
    """Every rank gets its own environment and log, and the report has every exit."""
    job = Job(link, 7, spec(tmp_path, 'echo "rank $RANK in $PWD"; readlink /proc/self/fd/0', nproc=3))
    job.wait("ended")
    assert job.ended == KeeperEnded(7, 0)
    assert job.report is not None
    assert (job.report.reason, job.report.cause) == (None, None)
    assert sorted((ended.rank, ended.code, ended.stopped) for ended in job.report.exits) == [
        (rank, 0, False) for rank in range(3)
    ]
    for rank in range(3):
        assert (tmp_path / f"rank_{rank}.log").read_text() == f"rank {rank} in {tmp_path}\n/dev/null\n"


@pytest.mark.parametrize(("fault", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("kill -SEGV $$", -11)])
def test_the_first_bad_exit_ends_the_group(link: SpawnerLink, tmp_path: Path, fault: str, code: int) -> None:
    """The rank that failed is the cause; the others get SIGTERM and are marked as stopped."""
    script = f"if [ $RANK = 1 ]; then {fault}; fi; trap 'echo told; exit 0' TERM; sleep 1000 & wait"
    job = Job(link, 0, spec(tmp_path, script))
    job.wait("ended")
    assert job.report is not None
    assert (job.report.reason, job.report.cause) == (StopReason.RANK_FAILED, 1)
    assert {ended.rank: (ended.code, ended.stopped) for ended in job.report.exits}[1] == (code, False)
    assert {ended.rank: ended.stopped for ended in job.report.exits}[0]


GRANDCHILDREN = {
    "child": "sleep 1000 & echo $!",
    "own session": "setsid sh -c 'echo $$; exec sleep 1000' &",
    "double fork": "(setsid sh -c 'sh -c \"echo \\$\\$; exec sleep 1000\" &' &)",
    "emptied environment": "env -i setsid /bin/sh -c 'echo $$; exec sleep 1000' &",
    "deaf": "setsid sh -c 'trap \"\" TERM INT HUP; echo $$; while :; do sleep 1; done' &",
}


def test_more_jobs_than_the_queue_holds(link: SpawnerLink) -> None:
    """A spawner that is asked for hundreds of keepers at once is not taken for a lost one."""
    channels = [Channel(link.start_keeper(number)) for number in range(300)]
    assert not link.disconnected
    for channel in channels:
        channel.close()
    ended: list[int] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(ended) < 300 and time.monotonic() < deadline:
        select.select([link], [], [], 0.1)
        ended += [one.job for one in link.receive()]
    assert sorted(ended) == list(range(300))


def test_no_process_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a keeper cannot be forked the job is answered with the reason, and the spawner serves on."""

    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    ours, spawners = socket.socketpair()
    with ours, spawners:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            socket.send_fds(ours, [struct.pack("!q", 7)], [theirs.fileno()])
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                socket.send_fds(ours, [struct.pack("!q", 8)], [theirs.fileno()])
            assert spawner._accept_job(spawners, {}, [], os.getpid())
            assert spawner._accept_job(spawners, {}, [], os.getpid())
            (report,) = Channel(mine).receive()
            assert report.reason is StopReason.START_FAILED
            assert "Resource temporarily unavailable" in report.detail
        assert [struct.unpack("!qi?", ours.recv(13)) for _ in range(2)] == [(7, 0, False), (8, 0, False)]


@pytest.mark.parametrize("script", GRANDCHILDREN.values(), ids=GRANDCHILDREN)
def test_nothing_outlives_its_job(link: SpawnerLink, tmp_path: Path, script: str) -> None:
    """What a rank left behind is gone when its job is over, however it hid."""
    job = Job(link, 0, spec(tmp_path, f"{{ {script}\n}} > pid; sleep 0.3", nproc=1))
    pid = int(wait_for_file(job, tmp_path / "pid"))
    assert is_alive(pid)
    job.wait("ended")
    assert not is_alive(pid)
    assert job.report is not None
    assert job.report.reason is None


def test_a_command_that_cannot_be_started(link: SpawnerLink, tmp_path: Path) -> None:
    """The reason is the system's, and names the command."""
    job = Job(link, 0, spec(tmp_path, "", argv=("/nowhere/python", "x.py")))
    job.wait("ended")
    assert job.report is not None
    assert (job.report.reason, job.report.cause) == (StopReason.START_FAILED, 0)
    assert "/nowhere/python" in job.report.detail


def test_an_order_to_stop(link: SpawnerLink, tmp_path: Path) -> None:
    """A job that is told to stop ends, and says on whose order."""
    job = Job(link, 0, spec(tmp_path, "exec sleep 1000"))
    job.wait("started")
    job.channel.send(Stop(at_once=False, detail="SIGINT"))
    job.wait("ended")
    assert job.report is not None
    assert (job.report.reason, job.report.detail) == (StopReason.ORDERED, "SIGINT")
    assert [ended.code for ended in job.report.exits] == [-15, -15]


def test_a_killed_keeper_takes_its_job_with_it(link: SpawnerLink, tmp_path: Path) -> None:
    """Its end is reported when what it left, ranks and hidden grandchildren, is gone; other jobs go on."""
    other = Job(link, 1, spec(tmp_path, "exec sleep 1000", nproc=1))
    other.wait("started")
    script = "if [ $RANK = 0 ]; then { env -i setsid /bin/sh -c 'echo $$; exec sleep 1000' & } > pid; fi; sleep 1000"
    job = Job(link, 0, spec(tmp_path, script))
    hidden = int(wait_for_file(job, tmp_path / "pid"))
    job.wait("started")
    assert job.started is not None
    os.kill(job.started.keeper, signal.SIGKILL)
    job.wait("ended")
    assert job.ended == KeeperEnded(0, -9)
    assert job.report is None
    assert [pid for pid in (*job.started.ranks, hidden) if is_alive(pid)] == []
    assert other.started is not None
    assert is_alive(other.started.ranks[0])
    other.channel.send(Stop(at_once=True))
    other.wait("ended")


def test_a_killed_spawner_leaves_its_jobs_running(tmp_path: Path) -> None:
    """A job goes on without its spawner, and still reports."""
    link = SpawnerLink()
    job = Job(link, 0, spec(tmp_path, "while [ ! -e go ]; do sleep 0.05; done; exit 5", nproc=1))
    job.wait("started")
    link.kill()
    deadline = time.monotonic() + PATIENCE_S
    while not link.disconnected:
        assert time.monotonic() < deadline
        job.hear()
    (tmp_path / "go").touch()
    job.wait("report")
    assert job.report is not None
    assert [ended.code for ended in job.report.exits] == [5]
    job.channel.close()
    link.close()


class _Refusing:
    """Raises when it is unpickled, as what an earlier version of this package sends may."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_a_keeper_that_fails_says_of_what(link: SpawnerLink) -> None:
    """The report has the keeper's error, and the spawner tells its exit code; other jobs go on."""
    channel = Channel(link.start_keeper(0))
    channel.send(_Refusing())
    reports: list[object] = []
    ended: list[KeeperEnded] = []
    deadline = time.monotonic() + PATIENCE_S
    while not (reports and ended) and time.monotonic() < deadline:
        select.select([link, *([] if channel.disconnected else [channel])], [], [], 0.1)
        reports += channel.receive()
        ended += link.receive()
    (report,) = reports
    assert isinstance(report, GroupReport) and report.reason is StopReason.KEEPER_LOST
    assert "no number" in report.detail
    assert ended == [KeeperEnded(0, 1)]
    channel.close()


def test_a_spawner_without_room_for_descriptors(link: SpawnerLink, tmp_path: Path) -> None:
    """A low limit of open files costs the job alone that does not fit, and is named."""
    job = Job(link, 0, spec(tmp_path, "while [ ! -e go ]; do sleep 0.02; done", nproc=1))
    job.wait("started")
    pid = link._process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    free = next(number for number in range(soft) if not os.path.lexists(f"/proc/{pid}/fd/{number}"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + 1, hard))
    with open(os.devnull) as held:
        refused = Job(link, 1, spec(tmp_path, "true", nproc=1), [held.fileno()] * 3)
    refused.wait("ended")
    assert refused.report is not None and refused.report.reason is StopReason.START_FAILED
    assert "ulimit -n" in refused.report.detail
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, hard))
    unheard = Channel(link.start_keeper(2))
    deadline = time.monotonic() + PATIENCE_S
    ended: list[int] = []
    while not ended and time.monotonic() < deadline:
        select.select([link], [], [], 0.1)
        ended += [one.job for one in link.receive()]
    assert ended == [2] and "ulimit -n" in link.ending
    unheard.close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    (tmp_path / "go").touch()
    job.wait("ended")
    assert job.report is not None and job.report.reason is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('cannot be imported')", ["exit code 1", "cannot be imported"]),
        ("import os; os.kill(os.getpid(), 9)", ["SIGKILL"]),
    ],
)
def test_how_a_spawner_ended_that_could_not_serve(code: str, words: list[str]) -> None:
    """Its exit code or signal is told, and the last line that it wrote."""

    def start(descriptor: int, errors: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], pass_fds=[descriptor], stderr=errors)

    link = SpawnerLink(start)
    deadline = time.monotonic() + PATIENCE_S
    while not link.disconnected and time.monotonic() < deadline:
        select.select([link], [], [], 0.1)
        link.receive()
    link.close()
    assert link.disconnected and all(word in link.ending for word in words), link.ending


def test_a_lost_launcher_ends_its_jobs(tmp_path: Path) -> None:
    """When the launching process is killed, ranks and spawner go, although what it forked holds its sockets."""
    code = f"""
import os, signal, sys, time
sys.path[:0] = {sys.path!r}
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from support.spawning import Job, SpawnerLink, spec
link = SpawnerLink()
job = Job(link, 0, spec(Path({str(tmp_path)!r}), "exec sleep 1000"))
job.wait("started")
if os.fork() == 0:
    time.sleep(1000)
print(*job.started.ranks, link._process.pid, flush=True)
time.sleep(1000)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert launcher.stdout is not None
    try:
        ranks = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(ranks) == 2 + 1
        assert all(map(is_alive, ranks))
        launcher.kill()
        deadline = time.monotonic() + PATIENCE_S
        while any(map(is_alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_alive, ranks))
    finally:
        # The fork that held the sockets is ours to end: it is alone in the launcher's session by now.
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.stdout.close()
        launcher.wait()
