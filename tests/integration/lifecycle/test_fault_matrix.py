"""The fault matrix: who is hit, how, and when, in one table; every row is a job that tests/apps/faults.py runs.

The rows of one sweep are its jobs: those that end by themselves run one after another beside a witness, a job that is
alive through all of them; those that wait for a time limit run side by side; what hits the launching process has a
sweep of its own.
"""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import read_stored
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Outcome
from support.notes import Notes, is_running, state_of
from support.runner import APPS, NOISE_S, PATIENCE_S, Runner

GRACE_S = 1
# Long enough for the start of all ranks that run side by side, on a busy machine, too.
LIMIT_S = 20
# From the limit to the end of a rank that obeys nothing: stacks, SIGTERM, SIGKILL.
HANG_S = LIMIT_S + 0.5 + GRACE_S
# A keeper or spawner that does not answer is woken after the first, and killed after the second.
WOKEN_S, REPLACED_S = 5, 10
# What happens at once.
SOON_S = 0.5
# In the launching process's own sweep the grace period shall not be what ends the ranks.
LONG_GRACE_S = 30
# A job whose processes have been gone for so long starts no other.
SETTLED_S = 1

RANKS = ("rank 0", "rank 1")
KEEPER = ("keeper",)
SPAWNER = ("spawner",)
LAUNCHER = ("launcher",)
GRANDCHILD = ("grandchild",)
BEFORE_OUTCOME = ("start", "import", "function", "store")
AFTER_OUTCOME = ("after", "thread")
HANGS = ("SIGSTOP", "blocks")
EVER = (*BEFORE_OUTCOME, *AFTER_OUTCOME)
# What the default lane runs of the cases with a sweep of their own.
ALONE_SAMPLES = (("SIGKILL", "function"), ("SIGTERM", "store"))


@dataclass(frozen=True)
class Row:
    """What must become of a job.

    Attributes:
        who: Who is hit; one job for each of `who`, `how` and `when`.
        how: What hits them.
        when: At which moment of a rank's life.
        status: Of the job's result; for the launching process's death its exit code as `exit <n>`.
        words: Patterns in the message of the failed job, or in the lines about the completed one.
        within_s: Seconds from the fault, and from the ranks' start where they go on, until no process of the job is
            alive.
        sweep: `beside` a witness, among those that hang and run `together`, or `alone`.
    """

    who: tuple[str, ...]
    how: tuple[str, ...]
    when: tuple[str, ...]
    status: str
    words: tuple[str, ...] = ()
    within_s: float = SOON_S
    sweep: str = "beside"


TABLE = [
    # A rank fails by itself: the job fails at once with that reason, until every rank's outcome is stored.
    Row(RANKS, ("exception",), BEFORE_OUTCOME, "FAILED", ("exit code 1", "RuntimeError: fault at {when}")),
    Row(RANKS, ("exception",), AFTER_OUTCOME, "COMPLETED"),
    Row(RANKS, ("exit",), BEFORE_OUTCOME, "FAILED", ("exit code 5",)),
    Row(RANKS, ("exit",), AFTER_OUTCOME, "COMPLETED", ("{who} ended with exit code 5", "results count")),
    Row(RANKS, ("SIGTERM",), BEFORE_OUTCOME, "FAILED", (r"signal 15 \(SIGTERM\)",)),
    Row(RANKS, ("SIGTERM",), AFTER_OUTCOME, "COMPLETED", ("{who} ended with signal 15", "results count")),
    Row(RANKS, ("SIGKILL",), BEFORE_OUTCOME, "FAILED", (r"signal 9 \(SIGKILL\)", "out of memory")),
    Row(RANKS, ("SIGKILL",), AFTER_OUTCOME, "COMPLETED", ("{who} ended with signal 9", "results count")),
    Row(RANKS, ("SIGSEGV",), BEFORE_OUTCOME, "FAILED", (r"signal 11 \(SIGSEGV\)",)),
    Row(RANKS, ("SIGSEGV",), AFTER_OUTCOME, "COMPLETED", ("{who} ended with signal 11", "results count")),
    # A rank stands still: only a limit can tell.
    Row(RANKS, HANGS, BEFORE_OUTCOME, "FAILED", ("timeout_min", "{who} still running"), HANG_S, "together"),
    Row(RANKS, ("blocks",), AFTER_OUTCOME, "COMPLETED", ("{who} was ended by",), HANG_S, "together"),
    # To show its stack it is continued, and then it ends by itself.
    Row(RANKS, ("SIGSTOP",), AFTER_OUTCOME, "COMPLETED", (), HANG_S, "together"),
    # A lost keeper takes its ranks with it, and costs this job; one that stands still is woken.
    Row(KEEPER, ("SIGKILL", "SIGSEGV"), EVER, "FAILED", ("The process that kept this job was killed",)),
    # SIGTERM, which may have been sent to all processes of an allocation, is obeyed.
    Row(KEEPER, ("SIGTERM",), BEFORE_OUTCOME, "FAILED", (r"its keeper got a signal \(SIGTERM\)",), GRACE_S),
    Row(KEEPER, ("SIGTERM",), AFTER_OUTCOME, "COMPLETED", (), GRACE_S),
    Row(KEEPER, ("SIGSTOP",), ("function", "after"), "COMPLETED", (), WOKEN_S, "alone"),
    # A lost spawner costs no job. One that stands still is woken.
    Row(SPAWNER, ("SIGTERM", "SIGKILL", "SIGSEGV"), EVER, "COMPLETED"),
    Row(SPAWNER, ("SIGSTOP",), ("start", "after"), "COMPLETED", (), WOKEN_S, "alone"),
    # Grandchildren are nobody's business while they fail, and end with the job when they do not.
    Row(GRANDCHILD, ("exception", "exit", "SIGTERM", "SIGKILL", "SIGSEGV"), ("function",), "COMPLETED"),
    Row(GRANDCHILD, ("SIGSTOP",), ("start", "import", "function", "after"), "COMPLETED"),
    Row(GRANDCHILD, ("blocks",), ("start", "import", "function", "after"), "COMPLETED", (), GRACE_S),
    # The launching process: everything ends with it, except that it may be stopped and continued.
    Row(LAUNCHER, ("SIGKILL",), ("start", "import", "function", "store", "after"), "exit -9", (), SOON_S, "alone"),
    Row(LAUNCHER, ("SIGSEGV",), ("function",), "exit -11", (), SOON_S, "alone"),
    Row(LAUNCHER, ("SIGTERM",), ("start", "function", "store"), "exit 143", ("SIGTERM",), SOON_S, "alone"),
    Row(LAUNCHER, ("SIGALRM",), ("function", "after"), "exit 1", ("fault in the launching",), SOON_S, "alone"),
    Row(LAUNCHER, ("SIGSTOP",), ("start", "function", "after"), "COMPLETED", (), SOON_S, "alone"),
    Row(LAUNCHER, ("blocks",), ("start",), "FAILED", ("RuntimeError: fault at function",), SOON_S, "alone"),
]


@dataclass(frozen=True)
class Case:
    """One job of the matrix."""

    who: str
    how: str
    when: str
    row: Row

    @property
    def name(self) -> str:
        return f"{self.who}-{self.how}-{self.when}".replace(" ", "")

    @property
    def key(self) -> str:
        """Return the name of its sweep."""
        return self.name if self.row.sweep == "alone" else self.row.sweep

    @property
    def plan(self) -> dict[str, Any]:
        """Return what fault_steps.py is told."""
        who, how, when = self.who, self.how, self.when
        by = int(who[-1]) if who in RANKS else 0
        if (who, how) == ("launcher", "blocks"):
            # It did so before the sweep; what is seen is whether its ranks can be ended all the same.
            who, how, when = "rank", "exception", "function"
        fails = self.row.status != "COMPLETED" and self.row.sweep != "together"
        return {
            "who": who.split()[0],
            "how": how,
            "when": when,
            "by": by,
            "peers": "hang" if fails and when in ("start", "import", "function") else "return",
            "children": when == "function" and self.who in ("keeper", "spawner", "launcher"),
        }


CASES = [Case(*one, row) for row in TABLE for one in product(row.who, row.how, row.when)]


def parameters() -> Iterator[Any]:
    """Name each case by its sweep, as tests/conftest.py wants; the samples have each `how` for each `who` once."""
    seen = set()
    for case in CASES:
        pair = (case.who.split()[0], case.how)
        sampled = pair not in seen and (case.row.sweep == "beside" or (case.how, case.when) in ALONE_SAMPLES)
        seen |= {pair} if sampled else set()
        yield pytest.param(case, marks=[pytest.mark.sample] if sampled else [], id=f"{case.row.sweep}/{case.name}")


WITNESS: dict[str, Any] = {"witness": True}


@dataclass
class Swept:
    """What came of one sweep.

    Attributes:
        runner: Which ran it.
        code: Exit code of the program.
        output: What it printed.
        jobs: Number of each case's job, by name of the case.
        others: Numbers of the jobs to which nothing happened.
        ended: When the last process of a job was gone, Unix time in seconds.
    """

    runner: Runner
    jobs: dict[str, int]
    others: list[int]
    code: int = 0
    output: str = ""
    ended: dict[int, float] = field(default_factory=dict)

    @property
    def notes(self) -> Notes:
        return Notes(self.runner.cwd / "notes")

    def pids(self, job: int) -> list[int]:
        return [note["pid"] for note in self.notes.all(f"pid_{job}")]

    def folder(self, job: int) -> Path:
        return self.runner.cwd / "sweep" / str(job) / ".ddp"

    def said_of(self, job: int) -> str:
        """Return what the launcher printed about a job; each of its messages begins with a time in brackets."""
        messages = re.split(r"^(?=\[\d{4}-)", self.output, flags=re.MULTILINE)
        return "".join(message for message in messages if f"#{job} : " in message)


def sweep(folder: Path, plans: list[dict[str, Any]], *options: str, **variables: str) -> Swept:
    """Run a plan a job, note when each job's last process is gone, and continue a stopped launching process."""
    runner = Runner(folder)
    (folder / "notes").mkdir()
    swept = Swept(runner, {}, [])
    plan = {str(job): plan for job, plan in enumerate(plans) if plan}
    jobs = [job for job, plan in enumerate(plans) if plan is not WITNESS]
    argv = [
        APPS / "faults.py",
        "-m",
        "hydra/launcher=ddp_subprocess",
        "hydra/sweeper=recording",
        "hydra.launcher.nproc_per_node=2",
        f"hydra.launcher.wrapper=[{sys.executable},-S,-E,{APPS / 'fault_wrapper.py'}]",
        f"hydra.sweep.dir={folder / 'sweep'}",
        f"x={','.join(map(str, range(len(plans))))}",
        *options,
    ]
    environment = {"BEHAVE_DIR": str(folder / "notes"), "FAULT_PLAN": json.dumps(plan), **variables}
    process = runner.start(sys.executable, *argv, env=environment, start_new_session=True)
    with process, ThreadPoolExecutor(1) as pool:
        said = pool.submit(process.communicate)
        try:
            _watch(swept, process, jobs)
            swept.output = "".join(said.result())
            swept.code = process.returncode
        finally:
            process.kill()
    return swept


def _watch(swept: Swept, process: subprocess.Popen[str], jobs: Sequence[int]) -> None:
    over, deadline = 0, 0.0
    while process.poll() is None:
        _look(swept, jobs)
        if len(swept.ended) != over or deadline == 0:
            over, deadline = len(swept.ended), time.monotonic() + PATIENCE_S
        assert time.monotonic() < deadline, "the sweep does not go on"
        if len(swept.ended) == len(jobs):
            (swept.notes.folder / "go.json").touch()
        if state_of(process.pid)[0] == "T" and any(job > 0 for job in swept.ended):
            # Job 1 had it stopped, and has come to its end meanwhile.
            process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    _look(swept, jobs)
    # What outlives the launching process has its time, too, but is waited for.
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(is_running(pid) for job in jobs for pid in swept.pids(job)):
        time.sleep(0.02)
    _look(swept, jobs)


def _look(swept: Swept, jobs: Sequence[int]) -> None:
    for job in jobs:
        # One rank may have ended before the other had begun, so that the end is certain only after a while.
        if time.time() - swept.ended.get(job, time.time()) > SETTLED_S:
            continue
        pids = swept.pids(job)
        if any(map(is_running, pids)):
            swept.ended.pop(job, None)
        elif pids:
            swept.ended.setdefault(job, time.time())


class Matrix:
    """The sweeps of some cases, each run when its first case is asked for."""

    def __init__(self, factory: pytest.TempPathFactory, cases: list[Case]) -> None:
        self._factory = factory
        self._cases = cases
        self._done: dict[str, Swept] = {}

    def of(self, case: Case) -> Swept:
        if case.key not in self._done:
            self._done[case.key] = getattr(self, f"_{case.row.sweep}")(self._factory.mktemp(case.key), case)
        return self._done[case.key]

    def _beside(self, folder: Path, _case: Case) -> Swept:
        cases = [case for case in self._cases if case.row.sweep == "beside"]
        plans = [WITNESS, *(case.plan for case in cases), {}]
        grace = f"hydra.launcher.grace_period_s={GRACE_S}"
        swept = sweep(folder, plans, "hydra.launcher.max_parallel_jobs=2", grace)
        swept.jobs = {case.name: number for number, case in enumerate(cases, start=1)}
        swept.others = [0, len(plans) - 1]
        return swept

    def _together(self, folder: Path, _case: Case) -> Swept:
        cases = [case for case in self._cases if case.row.sweep == "together"]
        half = len(cases) // 2
        plans = [{}, *(case.plan for case in cases[:half]), {}, *(case.plan for case in cases[half:]), {}]
        options = ("hydra.launcher.max_parallel_jobs=14", f"hydra.launcher.timeout_min={LIMIT_S / 60}")
        swept = sweep(folder, plans, *options, f"hydra.launcher.grace_period_s={GRACE_S}")
        swept.jobs = {case.name: number + (number > half) for number, case in enumerate(cases, start=1)}
        swept.others = [0, half + 1, len(plans) - 1]
        return swept

    def _alone(self, folder: Path, case: Case) -> Swept:
        grace = f"hydra.launcher.grace_period_s={LONG_GRACE_S if case.how == 'blocks' else GRACE_S}"
        swept = sweep(folder, [{}, case.plan, {}], grace, **({"FAULT_BLOCK": "1"} if case.how == "blocks" else {}))
        swept.jobs = {case.name: 1}
        swept.others = [0] if case.row.status.startswith("exit") else [0, 2]
        return swept


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """The cases of this session, so that one of them alone takes no longer than it must."""
    found = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    return Matrix(tmp_path_factory, [case for case in found if isinstance(case, Case)])


def assert_whole(folder: Path) -> list[Outcome]:
    """What is in a job's folder can be read, and what others could abuse is private."""
    json.loads((folder / "job.json").read_text())
    outcomes = []
    for path in sorted(folder.glob("outcome_?.pkl")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        outcomes.append(read_stored(str(path)))
    assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    return outcomes


@pytest.mark.parametrize("case", list(parameters()))
def test_a_fault_ends_as_the_table_says(matrix: Matrix, case: Case) -> None:
    """Whoever is hit, however, whenever: status, reason and time are as the table has them, nothing is left alive,
    files are whole, and the sweep's other jobs are as if nothing had happened."""
    swept = matrix.of(case)
    job = swept.jobs[case.name]
    fault = swept.notes.read(f"fault_{job}")

    # A launching process that is killed cannot wait for its spawner.
    swept.runner.wait_until(lambda: swept.runner.alive() == {}, what="the end of every process")
    assert [pid for pid in swept.pids(job) if is_running(pid)] == []
    for other in swept.others:
        assert [outcome.completed for outcome in assert_whole(swept.folder(other))] == [True, True]
    assert_whole(swept.folder(job))

    row = case.row
    if row.status.startswith("exit"):
        assert f"exit {swept.code}" == row.status, swept.output
        said = swept.output
        assert not swept.folder(2).exists()
    else:
        results = swept.notes.returns()
        assert [results[other]["status"] for other in swept.others] == ["COMPLETED"] * len(swept.others)
        assert [results[other]["value"] for other in swept.others] == [str(other) for other in swept.others]
        assert results[job]["status"] == row.status, results[job]["text"] + swept.said_of(job)
        assert results[job]["value"] == (str(job) if row.status == "COMPLETED" else "")
        said = results[job]["text"] + swept.said_of(job)
    if case.who in RANKS and row.status == "FAILED" and row.sweep == "beside":
        assert f"{case.who} " in said
    for words in row.words:
        assert re.search(words.format(who=case.who, when=case.when), said), said
    # A rank that goes on has to get to its function first.
    ready = swept.notes.all(f"ready_{job}") if row.status == "COMPLETED" else []
    assert swept.ended[job] - max(note["time"] for note in (fault, *ready)) < row.within_s + NOISE_S


@pytest.mark.sample
def test_the_table_has_no_row_twice() -> None:
    """Each fault stands once in the table, so that none hides another."""
    names = [case.name for case in CASES]
    assert sorted(names) == sorted(set(names))
    assert {case.who for case in CASES} == {*RANKS, *KEEPER, *SPAWNER, *LAUNCHER, *GRANDCHILD}
