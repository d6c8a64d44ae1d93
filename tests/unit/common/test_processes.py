"""Processes: started as ranks, found however they hide, held, reaped; and what the machine gives this one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common import processes, signals
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import RankSpec
from support.runner import PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Runner

PACKAGE = processes.__name__.rpartition(".")[0]
PRELUDE = f"""
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
from {PACKAGE} import processes
from {PACKAGE}.protocol import RankSpec
PATIENCE_S = {PATIENCE_S}
"""


def state(pid: int) -> str:
    """Return the state letter of a process; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def say(runner: Runner, code: str) -> Any:
    """Return what code prints as JSON in a process of its own."""
    ran = runner.python("-c", PRELUDE + textwrap.dedent(code), timeout_s=PATIENCE_S)
    assert ran.stderr == ""
    return json.loads(ran.stdout)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank.log"


@contextlib.contextmanager
def stdin_of_a_pipe() -> Iterator[None]:
    """Let this process's standard input be a pipe into which nobody writes, while the block runs."""
    kept = os.dup(0)
    ends = os.pipe()
    os.dup2(ends[0], 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, *ends):
            os.close(descriptor)


# --- starting a rank


def test_start_rank(runner: Runner, tmp_path: Path, log: Path) -> None:
    """A rank has its own session, no stdin, its own folder and log, and exactly the environment that it is given."""
    code = (
        "import json, os, sys\n"
        "own = [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getcwd()]\n"
        "print(json.dumps([*own, sys.stdin.read(), os.readlink('/proc/self/fd/0'), dict(os.environ)]), flush=True)\n"
        "print('err', file=sys.stderr)"
    )
    environment = {**runner.environment(), "LC_CTYPE": "C.UTF-8", "ODD": "ä\udcff=\n"}
    with stdin_of_a_pipe():
        rank = processes.start_rank(RankSpec((sys.executable, "-c", code), str(tmp_path), environment, str(log)))
    assert rank.wait(PATIENCE_S) == 0
    out, err = log.read_text().splitlines()
    assert json.loads(out) == [True, True, str(tmp_path), "", "/dev/null", environment]
    assert err == "err"


def test_a_log_is_appended_to(runner: Runner, tmp_path: Path, log: Path) -> None:
    """What stands in the log stays, and stdout and stderr keep their order."""
    log.write_text("before\n")
    script = "echo 1; echo 2 >&2; echo 3"
    spec = RankSpec(("sh", "-c", script), str(tmp_path), runner.environment(), str(log))
    assert processes.start_rank(spec).wait() == 0
    assert log.read_text() == "before\n1\n2\n3\n"


def test_no_descriptor_is_handed_down(runner: Runner, tmp_path: Path, log: Path) -> None:
    """A rank has three descriptors, also when the keeper holds one that is inheritable."""
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    try:
        spec = RankSpec(("ls", "/proc/self/fd"), str(tmp_path), runner.environment(), str(log))
        rank = processes.start_rank(spec)
        assert rank.wait() == 0
    finally:
        os.close(ours)
        os.close(theirs)
    # The fourth is the folder that `ls` reads.
    assert log.read_text().split() == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"argv": ["/nowhere/python"]}, FileNotFoundError, "/nowhere/python"),
        ({"argv": ["no-such-command-anywhere"]}, FileNotFoundError, "no-such-command-anywhere"),
        ({"argv": ["{tmp}/not_executable"]}, PermissionError, "not_executable"),
        ({"cwd": "{tmp}/gone"}, FileNotFoundError, "gone"),
        ({"log_file": "{tmp}/gone/rank.log"}, FileNotFoundError, "gone/rank.log"),
        ({"argv": ["true", "x" * (3 << 20)]}, OSError, "true"),
    ],
)
def test_a_rank_that_cannot_be_started(
    runner: Runner, tmp_path: Path, change: dict[str, Any], error: type[OSError], named: str
) -> None:
    """The error names what cannot be used: command, folder or log."""
    (tmp_path / "not_executable").touch(mode=stat.S_IRUSR)
    values = {"argv": ["true"], "cwd": "{tmp}", "log_file": "{tmp}/rank.log", **change}
    argv = tuple(part.replace("{tmp}", str(tmp_path)) for part in values["argv"])
    cwd, log_file = (str(values[name]).replace("{tmp}", str(tmp_path)) for name in ("cwd", "log_file"))
    with pytest.raises(error) as caught:
        processes.start_rank(RankSpec(argv, cwd, runner.environment(), log_file))
    assert named in str(caught.value.filename)


def test_a_rank_dies_with_its_parent(runner: Runner, tmp_path: Path) -> None:
    """When the process that started a rank is gone, however it went, the kernel kills the rank."""
    code = PRELUDE + textwrap.dedent("""
        rank = processes.start_rank(RankSpec(("sleep", "1000"), ".", os.environ, "rank.log"))
        print(rank.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    ran = runner.python("-c", code)
    assert ran.returncode == -signal.SIGKILL
    pid = int(ran.stdout)
    runner.wait_until(lambda: not is_alive(pid), 5, "the end of the rank")


def test_a_parent_that_is_gone_already(runner: Runner) -> None:
    """A rank whose parent ended before it could ask for the signal ends by itself."""
    code = """
        child = subprocess.Popen(
            [sys.executable, "-c", "from %s.processes import *; signal_at_parents_end(1 << 22, 9)" % sys.argv[1]]
        )
        print(child.wait())
    """
    ran = runner.python("-c", PRELUDE + textwrap.dedent(code), PACKAGE)
    assert ran.output == "-9\n"


# --- finding


def test_descendants(runner: Runner) -> None:
    """Everything below is found, parents before children: own sessions, double forks, emptied environments."""
    found = say(
        runner,
        """
        processes.become_subreaper()
        script = (
            "echo $$ > root;"
            "sh -c 'echo $$ > child; sleep 1000' &"
            "env -i setsid /bin/sh -c 'echo $$ > session; exec sleep 1000' &"
            "(setsid sh -c 'sh -c \\"echo \\\\$\\\\$ > orphan; exec sleep 1000\\" & exit' &);"
            "wait"
        )
        subprocess.Popen(["sh", "-c", script])
        names = ("root", "child", "session", "orphan")
        deadline = time.monotonic() + PATIENCE_S
        while not all(Path(name).exists() and Path(name).read_text() for name in names):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pids = {name: int(Path(name).read_text()) for name in names}
        # The orphan is handed to us when those between have ended.
        while pids["orphan"] not in processes.own_children():
            assert time.monotonic() < deadline
            _ = [pid for pid, _ in processes.reap()]
            time.sleep(0.01)
        found = processes.descendants(processes.own_children())
        below = processes.descendants([pids["root"]])
        grandchild = processes.descendants([pids["child"]])[1]
        print(json.dumps([
            [name for name, pid in pids.items() if pid not in found],
            found.index(pids["root"]) < found.index(pids["child"]) < found.index(grandchild),
            [pids[name] in below for name in names],
            len(found) == len(set(found)),
        ]))
        # Until there is none: one that was between fork and exec may be seen late.
        while processes.has_children():
            for pid in processes.descendants(processes.own_children()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            _ = list(processes.reap())
        """,
    )
    assert found == [[], True, [True, True, True, False], True]


def test_descendants_of_a_thread(runner: Runner) -> None:
    """A child that another thread started is found, too."""
    assert say(
        runner,
        """
        children, stop = [], threading.Event()
        thread = threading.Thread(target=lambda: (children.append(subprocess.Popen(["sleep", "1000"])), stop.wait()))
        thread.start()
        while not children:
            time.sleep(0.01)
        print(json.dumps(children[0].pid in processes.own_children()))
        children[0].kill()
        children[0].wait()
        stop.set()
        thread.join()
        """,
    )


def test_descendants_without_the_kernels_files(runner: Runner) -> None:
    """On a kernel without /proc's `children` files the same processes are found without `ps`."""
    lists = say(
        runner,
        """
        processes.become_subreaper()
        child = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"])
        while len(processes.descendants([child.pid])) < 3:
            time.sleep(0.01)
        fast = processes.descendants(processes.own_children())
        exists = os.path.exists
        os.path.exists = lambda path: not str(path).endswith("/children") and exists(path)
        os.environ["PATH"] = "/nowhere"
        slow = processes.descendants(processes.own_children())
        print(json.dumps([sorted(fast), sorted(slow)]))
        for pid in fast:
            os.kill(pid, signal.SIGKILL)
        """,
    )
    assert lists[0] == lists[1]
    assert len(lists[0]) == 3


def test_descendants_of_nobody() -> None:
    """A process that has ended has nothing below it, and is no error."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert processes.descendants([process.pid]) == [process.pid]
    assert processes.descendants([]) == []


# --- reaping


def test_reap(runner: Runner) -> None:
    """Every child that has ended is collected with its code, adopted ones too; the others are left alone."""
    assert say(
        runner,
        """
        processes.become_subreaper()
        expected = {"exit 0": 0, "exit 7": 7, "kill -9 $$": -9, "sh -c 'sleep 0.2; exit 5' & exit 6": 6}
        # Held, as Popen would reap those that are not.
        started = {script: subprocess.Popen(["sh", "-c", script]) for script in expected}
        alive = subprocess.Popen(["sleep", "1000"])
        codes = {}
        while len(codes) < 5:
            codes.update(processes.reap())
            time.sleep(0.01)
        left = [processes.has_children(), list(processes.reap())]
        alive.kill()
        while alive.pid not in codes:
            codes.update(processes.reap())
        print(json.dumps([
            all(codes[started[script].pid] == code for script, code in expected.items()),
            sorted(codes.values()), left, processes.has_children(), list(processes.reap()),
        ]))
        """,
    ) == [True, [-9, -9, 0, 5, 6, 7], [True, []], False, []]


def test_has_children_counts_the_dead(runner: Runner) -> None:
    """A child that has ended and was not reaped is still a child, with `waitid` or without."""
    assert say(
        runner,
        """
        child = subprocess.Popen(["true"])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        seen = [processes.has_children(), child.pid in processes.own_children()]
        del os.waitid
        seen.append(processes.has_children())
        list(processes.reap())
        print(json.dumps([*seen, processes.has_children()]))
        """,
    ) == [True, True, True, False]


# --- the rest


def test_names_and_threads(runner: Runner) -> None:
    """A process has the short name that it was given, and counts its threads."""
    assert say(
        runner,
        """
        processes.name_process("ddp-test")
        counts = [processes.thread_count()]
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        counts.append(processes.thread_count())
        stop.set()
        thread.join()
        print(json.dumps([Path("/proc/self/comm").read_text().strip(), counts]))
        """,
    ) == ["ddp-test", [1, 2]]


def test_a_handle(runner: Runner) -> None:
    """A held process is known to have ended, reaped or not; signals reach it, and nobody after it."""
    process = runner.start("sleep", "1000")
    handle = processes.ProcessHandle(process.pid)
    assert not handle.ended
    handle.send(signal.SIGSTOP)
    runner.wait_until(lambda: state(process.pid) == "T", 5, "the stop")
    handle.send(signal.SIGKILL)
    runner.wait_until(lambda: handle.ended, 5, "the end")
    assert state(process.pid) == "Z"
    process.communicate()
    assert handle.ended
    handle.send(signal.SIGKILL)
    handle.close()
    handle.close()


def test_a_handle_on_a_system_without_them(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no such descriptors, signals still arrive, and the end is not known."""
    monkeypatch.delattr("os.pidfd_open")
    process = runner.start("sleep", "1000")
    handle = processes.ProcessHandle(process.pid)
    handle.send(signal.SIGTERM)
    process.communicate()
    assert process.returncode == -signal.SIGTERM
    assert not handle.ended
    handle.send(signal.SIGTERM)
    handle.close()


def test_watching_a_process(runner: Runner) -> None:
    """A process that is gone cannot be watched, which is no error."""
    process = runner.start("true")
    process.communicate()
    assert processes.parent_watch(process.pid) is None


def test_kill_marked(runner: Runner, tmp_path: Path) -> None:
    """Every process with just these variables and values is killed, a fork of it, too; others live."""
    mark = {"HYDRA_DDP_TEST_MARK": runner.marker, "GROUP_RANK": "1"}
    script = "setsid sleep 1000 & echo ready; sleep 1000"
    marked = runner.start("sh", "-c", script, env=mark)
    differing = {"HYDRA_DDP_TEST_MARK": f"{runner.marker}2"}, {"GROUP_RANK": "0"}
    others = [runner.start("sleep", "1000", env={**mark, **one}) for one in differing]
    assert marked.stdout is not None and marked.stdout.readline() == "ready\n"
    assert processes.kill_marked(mark, 5) == []
    marked.communicate()
    assert marked.returncode == -signal.SIGKILL
    assert set(runner.alive()) == {other.pid for other in others}
    for other in others:
        assert other.poll() is None
        other.kill()
        other.communicate()


def test_a_name_cut_within_a_character(runner: Runner) -> None:
    """The kernel cuts names after 15 bytes: what it tells of such a process can be read."""
    code = (
        "import time; open('/proc/self/comm', 'wb').write(b'abc\\xc3)('); print('named', flush=True); time.sleep(1000)"
    )
    named = runner.start(sys.executable, "-c", code)
    assert named.stdout is not None and named.stdout.readline() == "named\n"
    handle = processes.ProcessHandle(named.pid)
    try:
        assert not handle.stopped
        assert processes.process_start(named.pid)
        assert signals.handles(named.pid, signal.SIGINT)
        named.send_signal(signal.SIGSTOP)
        runner.wait_until(lambda: handle.stopped, what="the stop")
    finally:
        handle.close()
        named.kill()
        named.communicate()


# --- the machine

CORES = f"from {processes.__name__} import usable_cores; print(usable_cores())"


@pytest.fixture
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)


@pytest.mark.usefixtures("outside_slurm")
def test_usable_cores() -> None:
    """There is at least one core, and no more than the affinity allows."""
    assert 1 <= processes.usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("outside_slurm")
@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_cores_under_taskset(runner: Runner) -> None:
    """A process that is held to one core counts one."""
    core = min(os.sched_getaffinity(0))
    assert runner.run("taskset", "-c", str(core), sys.executable, "-c", CORES).output == "1\n"


@pytest.mark.usefixtures("outside_slurm")
@pytest.mark.parametrize(
    ("quota", "affinity", "cores"),
    [
        ("max 100000", 8, 8),
        ("400000 100000", 8, 4),
        ("150000 100000", 8, 1),
        ("50000 100000", 8, 1),
        ("900000 100000", 8, 8),
    ],
)
def test_cores_by_the_quota_of_a_cgroup(monkeypatch: pytest.MonkeyPatch, quota: str, affinity: int, cores: int) -> None:
    """A container's quota counts in whole cores, at least one, and never adds to the affinity."""
    files = {"/proc/self/cgroup": "12:cpu:/old\n0::/box\n", "/sys/fs/cgroup/box/cpu.max": f"{quota}\n"}
    fake_files(monkeypatch, files)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(affinity)))
    assert processes.usable_cores() == cores


@pytest.mark.usefixtures("outside_slurm")
@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 2), ("10000", 1)])
def test_cores_by_the_quota_of_an_old_cgroup(monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    """cgroup v1 says the same in two files."""
    folder = "/sys/fs/cgroup/cpu"
    files = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    fake_files(monkeypatch, files)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert processes.usable_cores() == cores


@pytest.mark.usefixtures("outside_slurm")
def test_cores_without_any_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not tell of quotas, the affinity counts."""
    fake_files(monkeypatch, {})
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert processes.usable_cores() == 3


def fake_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let these be the only files that can be read as text."""

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)


def test_the_first_environment(runner: Runner) -> None:
    """What the program does to its environment later does not show; odd values are read as Python shows them."""
    code = f"""
import os
from {processes.__name__} import start_environment
os.environ["KEPT"] = "changed"
os.environ["ADDED"] = "new"
del os.environ["GONE"]
found = start_environment()
print(ascii([found.get(name) for name in ("KEPT", "ADDED", "GONE", "ODD", "EMPTY")]))
"""
    env = {"KEPT": "first", "GONE": "there", "ODD": "a=b\n\udcff", "EMPTY": ""}
    ran = runner.python("-c", code, env=env)
    assert ran.output == ascii(["first", None, "there", "a=b\n\udcff", ""]) + "\n"


@pytest.mark.parametrize(("name", "supported"), [("posix", True), ("nt", False)])
def test_unsupported_systems(monkeypatch: pytest.MonkeyPatch, name: str, supported: bool) -> None:
    """On Windows the reason says what to use instead."""
    with monkeypatch.context() as patch:
        patch.setattr("os.name", name)
        reason = processes.unsupported_reason()
    assert reason is None if supported else "WSL 2" in (reason or "")


@pytest.mark.usefixtures("outside_slurm")
def test_cores_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM need not bind a job to its cores: what it says bounds them, and what is no number does not."""
    all_of_them = processes.usable_cores()
    for said, cores in (("1", 1), ("100000", all_of_them), ("", all_of_them), ("4(x2)", all_of_them)):
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", said)
        assert processes.usable_cores() == cores
