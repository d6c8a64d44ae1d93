"""How a job ended, from its ranks' exits and outcomes: who failed first, what the user reads, what the sweeper gets."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common import files
from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import JobFailedError, LauncherError, RankTraceback
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import GroupReport, Outcome, RankExit, StopReason
from hydra_plugins.hydra_ddp_subprocess_launcher.job import environment, results
from hydra_plugins.hydra_ddp_subprocess_launcher.job.results import (
    JobResult,
    UnavailableValue,
    resolve_result,
    resolve_result_safely,
)
from support.starts import launch_spec

RUN = "run-1"
BEGAN = 1_000_000.0
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\nValueError: broken\n'
GOOD = Outcome(completed=True, value=pickle.dumps(0.5), run_id=RUN)
GOOD_ELSEWHERE = Outcome(completed=True, run_id=RUN)


def failed(after_s: float = 1.0, error: object = None, **changes: Any) -> Outcome:
    """Return the outcome of a rank whose function raised some time after the group's start."""
    values: dict[str, Any] = {
        "completed": False,
        "exception": pickle.dumps(error or ValueError("broken")),
        "summary": "ValueError: broken",
        "traceback": TRACEBACK,
        "failed_at": BEGAN + after_s,
        "run_id": RUN,
    }
    return Outcome(**{**values, **changes})


def report(
    *exits: tuple[int, int] | tuple[int, int, bool],
    reason: StopReason | None = None,
    cause: int | None = None,
    **rest: Any,
) -> GroupReport:
    """Return a report on ranks that ended one second after another: rank, exit code, stopped by us."""
    ended = tuple(
        RankExit(one[0], one[1], float(place + 1), stopped=len(one) > 2 and bool(one[-1]))
        for place, one in enumerate(exits)
    )
    return GroupReport(ended, reason, cause, began_at=BEGAN, **rest)


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    paths = JobPaths(str(tmp_path / "run"))
    files.make_job_folder(paths)
    files.write_private(paths.payload, b"")
    return paths


@pytest.fixture
def verdict(paths: JobPaths) -> Callable[..., JobResult]:
    """Judge a job of two ranks by its report and what its ranks stored; None: nothing."""

    def judge_it(report: GroupReport, *outcomes: Outcome | None) -> JobResult:
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                files.write_outcome(paths, rank, outcome)
        return resolve_result(report, launch_spec(paths.run_dir, len(outcomes), RUN))

    return judge_it


RANK_FAILED = StopReason.RANK_FAILED


def test_last_lines_of_a_job_that_is_debugged(paths: JobPaths) -> None:
    """What rank 0 wrote stands on the terminal; another rank's log is shown as always."""
    for rank in (0, 1):
        Path(paths.log(rank)).write_text(f"rank {rank} says\n")
    for rank, debug, shown in ((0, False, True), (0, True, False), (1, True, True)):
        ended = report((rank, 3), (1 - rank, -15, True), reason=RANK_FAILED, cause=rank)
        block = resolve_result(ended, launch_spec(paths.run_dir, 2, RUN, terminal=debug)).block
        assert f"rank {rank} failed with exit code 3" in block
        assert (f"Last lines of rank {rank}:\n  rank {rank} says" in block) == shown


@pytest.mark.parametrize(
    ("report", "outcomes", "warnings"),
    [
        pytest.param(report((0, 0), (1, 0)), (GOOD, GOOD_ELSEWHERE), (), id="all well"),
        pytest.param(
            report((0, 0), (1, -11), reason=RANK_FAILED, cause=1, finished=True),
            (GOOD, GOOD_ELSEWHERE),
            ("rank 1 ended with signal 11 (SIGSEGV) after every rank had finished its job: the results count",),
            id="crash in tear-down",
        ),
        pytest.param(
            report((1, 0), (0, -15, True), reason=StopReason.TEARDOWN_TIMEOUT, finished=True),
            (GOOD, GOOD_ELSEWHERE),
            ("rank 0 was ended by the launcher after every rank had finished its job: the results count",),
            id="lingering",
        ),
        pytest.param(
            report((1, 120), (0, 0)),
            (GOOD, GOOD_ELSEWHERE),
            (
                "rank 1 ended with exit code 120, as its last output could not be written, after it had finished its "
                "job: the results count",
            ),
            id="output that was lost",
        ),
        pytest.param(
            report((0, 0), (1, 0)),
            (Outcome(completed=True, note="the job called sys.exit(0): its value is None", run_id=RUN), GOOD_ELSEWHERE),
            ("the job called sys.exit(0): its value is None",),
            id="sys.exit(0)",
        ),
    ],
)
def test_a_completed_job(
    verdict: Callable[..., JobResult], report: GroupReport, outcomes: tuple[Outcome, ...], warnings: tuple[str, ...]
) -> None:
    """When every rank has stored a good outcome the job completed; how ranks ended after that is a warning."""
    value = 0.5 if outcomes[0].value else None
    assert verdict(report, *outcomes) == JobResult(completed=True, value=value, warnings=warnings)


SPAWNED = """Traceback (most recent call last):
  File "/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
"""


@pytest.mark.parametrize(
    ("words", "nproc", "said"),
    [
        ("code: -98, name: EADDRINUSE, message: address already in use", 2, True),
        ("RuntimeError: Connection reset by peer", 2, True),
        ("ValueError: the function's own", 2, False),
        ("code: -98, name: EADDRINUSE, message: address already in use", 1, False),
    ],
)
def test_ranks_that_spawn_ranks(verdict: Callable[..., JobResult], words: str, nproc: int, said: bool) -> None:
    """Where each of several ranks spawns ranks, the message says that they get in each other's way."""
    outcomes = [failed(traceback=f"{SPAWNED}{words}"), *[None] * (nproc - 1)]
    block = verdict(report((0, 1), reason=RANK_FAILED, cause=0), *outcomes).block
    assert ("use strategy=ddp" in block) == said


# In the table: rank 0 and rank 1; what is said, and which parts of the message must be there.
@pytest.mark.parametrize(
    ("report", "outcomes", "cause", "parts"),
    [
        pytest.param(
            report((1, 1), (0, -15, True), reason=RANK_FAILED, cause=1),
            (None, failed()),
            "rank 1: ValueError: broken",
            (
                "rank 1 failed with exit code 1; rank 0 was then ended by the launcher.",
                TRACEBACK.rstrip(),
                "rank_1.log",
            ),
            id="raised",
        ),
        pytest.param(
            report((1, 3), (0, -15, True), reason=RANK_FAILED, cause=1),
            (None, None),
            "rank 1 failed with exit code 3",
            ("rank 1 failed with exit code 3; rank 0 was then ended", "Last lines of rank 1:\n  rank 1 says\n  bye"),
            id="exit code",
        ),
        pytest.param(
            report((0, -9), (1, -9, True), reason=RANK_FAILED, cause=0),
            (None, None),
            "rank 0 was killed by signal 9 (SIGKILL)",
            ("rank 0 was killed by signal 9 (SIGKILL); rank 1 was then", "out of memory", "dmesg"),
            id="SIGKILL",
        ),
        pytest.param(
            report((0, -11), (1, -15, True), reason=RANK_FAILED, cause=0),
            (None, None),
            "rank 0 was killed by signal 11 (SIGSEGV)",
            ("Last lines of rank 0:\n  rank 0 says\n  bye",),
            id="SIGSEGV",
        ),
        pytest.param(
            report((0, 0), (1, 0)),
            (GOOD, None),
            "rank 1 ended with exit code 0 but did not finish the job",
            ("os._exit(0)", "hydra.main"),
            id="nothing stored",
        ),
        pytest.param(
            report((0, 5), (1, -15, True), reason=RANK_FAILED, cause=0),
            (GOOD, None),
            "rank 0 failed with exit code 5",
            ("rank 0 failed with exit code 5; rank 1 was then ended by the launcher.",),
            id="a bad exit beats a good outcome",
        ),
        pytest.param(
            report((0, 120), (1, -15, True), reason=RANK_FAILED, cause=0),
            (None, None),
            "rank 0 failed with exit code 120",
            ("rank 1 was then ended by the launcher.", "Its last output could not be written"),
            id="nothing stored, and output that was lost",
        ),
        pytest.param(
            report((0, 120), (1, 1), reason=RANK_FAILED, cause=1),
            (GOOD, failed()),
            "rank 1: ValueError: broken",
            (TRACEBACK.rstrip(),),
            id="output that was lost is not what failed first",
        ),
        pytest.param(
            report((0, 0), (1, 0)),
            (GOOD, failed()),
            "rank 1: ValueError: broken",
            (TRACEBACK.rstrip(),),
            id="a bad outcome beats a good exit",
        ),
        pytest.param(
            report((0, 1), (1, 1, True), reason=RANK_FAILED, cause=0),
            (failed(2.0, summary="RuntimeError: peer is gone"), failed(1.5)),
            "rank 1: ValueError: broken",
            (TRACEBACK.rstrip(), "rank_1.log"),
            id="the first to fail is not the first to exit",
        ),
        pytest.param(
            report((0, -15, True), (1, -15, True), reason=StopReason.TIMEOUT, detail="ranks 0, 1 still running"),
            (None, None),
            "the job was ended because the time limit (timeout_min) was reached (ranks 0, 1 still running)",
            ("The log of each rank is in",),
            id="timeout",
        ),
        pytest.param(
            report((1, 0), (0, -15, True), reason=StopReason.EXIT_TIMEOUT, detail="rank 0 still running"),
            (None, GOOD_ELSEWHERE),
            "the job was ended because ranks went on after the first had ended (exit_timeout_s) (rank 0 still running)",
            ("The log of each rank is in",),
            id="exit timeout",
        ),
        pytest.param(
            report((0, 1, True), (1, -15, True), reason=StopReason.ORDERED, detail="SIGINT"),
            (failed(summary="KeyboardInterrupt"), None),
            "the job was ended because the launcher ordered it (SIGINT)",
            ("The log of each rank is in",),
            id="ordered",
        ),
        pytest.param(
            report(reason=StopReason.START_FAILED, cause=0, detail="No such file or directory: nsys"),
            (None, None),
            "rank 0 could not be started: No such file or directory: nsys",
            ("rank 0 could not be started: No such file or directory: nsys.",),
            id="not started",
        ),
    ],
)
def test_a_failed_job(
    verdict: Callable[..., JobResult],
    paths: JobPaths,
    report: GroupReport,
    outcomes: tuple[Outcome | None, ...],
    cause: str,
    parts: tuple[str, ...],
) -> None:
    """A failed job names the rank that failed first and how, what it last said, where its log is, what to do."""
    for rank in (0, 1):
        Path(paths.log(rank)).write_text(f"rank {rank} says\nbye\n")
    judged = verdict(report, *outcomes)
    assert not judged.completed
    assert judged.cause == cause
    for part in parts:
        assert part in judged.block
    assert "\n" not in judged.cause
    assert isinstance(judged.value, Exception)
    assert paths.folder in judged.block


def test_the_users_own_exception(verdict: Callable[..., JobResult]) -> None:
    """The sweeper gets the user's exception, with the rank's traceback as its cause."""
    judged = verdict(report((0, 1), reason=RANK_FAILED, cause=0), failed(error=KeyError("mine")))
    assert type(judged.value) is KeyError and judged.value.args == ("mine",)
    assert isinstance(judged.value.__cause__, RankTraceback)
    assert TRACEBACK.rstrip() in str(judged.value.__cause__)


@pytest.mark.parametrize(
    "exception",
    [None, b"cno_such_module\nError\n.", b"damaged", pickle.dumps("no exception"), pickle.dumps(KeyboardInterrupt())],
    ids=["none", "unknown class", "damaged", "no exception", "no Exception"],
)
def test_an_exception_that_cannot_be_rebuilt(verdict: Callable[..., JobResult], exception: bytes | None) -> None:
    """Where the user's exception cannot be had, ours tells all that is known, as a message without our stack."""
    outcome = failed(exception=exception)
    judged = verdict(report((0, 1), reason=RANK_FAILED, cause=0), outcome)
    assert type(judged.value) is JobFailedError and isinstance(judged.value, LauncherError)
    assert str(judged.value) == judged.block
    assert TRACEBACK.rstrip() in judged.block


class ReadOnlyError(Exception):
    """An exception that refuses attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("read-only")


def test_an_exception_that_refuses_attributes(verdict: Callable[..., JobResult]) -> None:
    """Even an exception with a `__setattr__` that refuses has its cause."""
    judged = verdict(report((0, 1), reason=RANK_FAILED, cause=0), failed(error=ReadOnlyError("mine")))
    assert type(judged.value) is ReadOnlyError
    assert isinstance(judged.value.__cause__, RankTraceback)


def test_remote_fields(verdict: Callable[..., JobResult]) -> None:
    """With Hydra 1.4's fields the exception is left to Hydra, which gives it its frames back."""
    outcome = failed(remote={"_remote_traceback": "text"})
    judged = verdict(report((0, 1), reason=RANK_FAILED, cause=0), outcome)
    assert judged.remote == (("_remote_traceback", "text"),)
    assert judged.value.__cause__ is None


def test_a_long_traceback_is_shortened(verdict: Callable[..., JobResult]) -> None:
    """Of a long traceback the end is shown, and how much more there is in the log; the cause keeps all of it."""
    text = "".join(f"line {number}\n" for number in range(100))
    judged = verdict(report((0, 1), reason=RANK_FAILED, cause=0), failed(traceback=text))
    lines = judged.block.splitlines()
    assert "  … 75 lines more in the log" in lines
    assert "line 75" in lines and "line 99" in lines and "line 74" not in lines
    assert "line 0\n" in str(judged.value.__cause__)


def error_file(paths: JobPaths, rank: int) -> Path:
    path = Path(environment.error_file(launch_spec(paths.run_dir, 2, RUN), rank))
    path.parent.mkdir(parents=True)
    return path


def test_an_error_file_of_torch(verdict: Callable[..., JobResult], paths: JobPaths) -> None:
    """An error that a rank stored in torchrun's format, as torch's `record` does, tells where no outcome does."""
    message = {"message": "RuntimeError: nccl", "extraInfo": {"py_callstack": "the callstack", "timestamp": "1"}}
    error_file(paths, 1).write_text(json.dumps({"message": message}))
    judged = verdict(report((1, 1), (0, -15, True), reason=RANK_FAILED, cause=1), None, None)
    assert judged.cause == "rank 1: RuntimeError: nccl"
    assert "the callstack" in judged.block


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"message": 3}', '{"message": {}}', '{"message": {"message": "m", "extraInfo": 1}}']
)
def test_a_damaged_error_file(verdict: Callable[..., JobResult], paths: JobPaths, text: str) -> None:
    """An error file that cannot be read is as good as none."""
    error_file(paths, 0).write_text(text)
    judged = verdict(report((0, 4), reason=RANK_FAILED, cause=0), None)
    assert judged.cause == "rank 0 failed with exit code 4"


@pytest.mark.parametrize("data", [b"damaged", files.dump(failed(run_id="another"))], ids=["damaged", "another start's"])
def test_an_outcome_that_does_not_count(verdict: Callable[..., JobResult], paths: JobPaths, data: bytes) -> None:
    """An outcome that cannot be read, or is not of this start, is as good as none."""
    Path(paths.outcome(0)).write_bytes(data)
    judged = verdict(report((0, 0)), None)
    assert judged.cause == "rank 0 ended with exit code 0 but did not finish the job"


def test_an_outcome_of_another_version(paths: JobPaths) -> None:
    """It is not taken for none, and not for a defect: the job has failed of it, in words."""
    Path(paths.outcome(0)).write_bytes(pickle.dumps({"format": files.FORMAT + 1, "content": None}))
    judged = resolve_result_safely(report((0, 0)), launch_spec(paths.run_dir, 1, RUN))
    assert not judged.completed
    assert "another version of this package" in judged.cause


def test_a_run_directory_that_is_gone(verdict: Callable[..., JobResult], paths: JobPaths) -> None:
    """When nothing can be stored any more, the message says so instead of guessing."""
    shutil.rmtree(paths.folder)
    judged = verdict(report((0, 1), reason=RANK_FAILED, cause=0), None)
    assert f"The run directory {paths.run_dir} cannot be used any more: its files were deleted" in judged.block
    assert judged.cause.endswith("; its files were deleted while the job ran")


@pytest.mark.parametrize("reason", [StopReason.TIMEOUT, StopReason.EXIT_TIMEOUT, StopReason.ORDERED, RANK_FAILED])
def test_outcomes_that_came_too_late(verdict: Callable[..., JobResult], reason: StopReason) -> None:
    """What ranks store after they were told to stop is no result: they may have cut their work short for it."""
    ended = report((0, 0, True), (1, 0, True), reason=reason, cause=0 if reason is RANK_FAILED else None)
    judged = verdict(ended, GOOD, GOOD_ELSEWHERE)
    assert not judged.completed
    if reason is StopReason.TIMEOUT:
        assert "timeout_min" in judged.cause and "Python stacks" in judged.block


def test_a_value_that_cannot_be_loaded(verdict: Callable[..., JobResult]) -> None:
    """A value that this process cannot load, or that did not travel, is replaced by something that says why."""
    for outcome, words in (
        (
            Outcome(completed=True, value=b"cno_such_module\nX\n.", run_id=RUN),
            "cannot be loaded in the launching process",
        ),
        (Outcome(completed=True, lost="a lock that cannot be pickled", run_id=RUN), "a lock that cannot be pickled"),
    ):
        judged = verdict(report((0, 0)), outcome)
        assert judged.completed
        assert isinstance(judged.value, UnavailableValue) and words in judged.value.reason
        assert repr(judged.value) == f"<lost value: {judged.value.reason}>"
        assert len(judged.warnings) == 1 and words in judged.warnings[0]


def test_failed_before_start() -> None:
    """A job that never started has the error itself as its value, in one line and in full."""
    error = LauncherError("one\n  two")
    judged = results.failed_before_start(error)
    assert judged == JobResult(completed=False, value=error, cause="one two", block="LauncherError: one\n  two")


# --- several nodes

NODES: dict[str, Any] = {"hosts": ("a", "b")}


@pytest.mark.parametrize("first", [1, 3])
def test_the_node_that_failed_first(verdict: Callable[..., JobResult], first: int) -> None:
    """Clocks of nodes differ: what counts is who told first, and on that node the time."""
    late, early = failed(50.0, summary="ValueError: late"), failed(1.0, summary="ValueError: early")
    outcomes = [None, late if first == 1 else early, None, late if first == 3 else early]
    judged = verdict(
        report(
            (first, 1),
            (4 - first, 1),
            (0, -15, True),
            (2, -15, True),
            reason=RANK_FAILED,
            cause=first,
            first_node=first // 2,
            **NODES,
        ),
        *outcomes,
    )
    node, host = divmod(first, 2)[0], "ab"[first // 2]
    assert judged.cause == f"rank {first} (node {node}, {host}): ValueError: late"
    assert f"rank {first} (node {node}, {host}) failed with exit code 1" in judged.block
    assert judged.rank == first


def test_a_lost_peer_on_the_node_that_told_first(verdict: Callable[..., JobResult]) -> None:
    """The connection closes faster than the failure of the other node is told; it is not the cause all the same."""
    lost = failed(1.0, summary="RuntimeError: Connection closed by peer")
    cause = failed(2.0, summary="ValueError: broken")
    judged = verdict(
        report((0, 1), (3, 1), (1, -15, True), (2, -15, True), reason=RANK_FAILED, cause=0, first_node=0, **NODES),
        *(lost, None, None, cause),
    )
    assert judged.cause == "rank 3 (node 1, b): ValueError: broken"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (StopReason.NODE_LOST, "the job was ended because another node of it is silent (node 1 (b))"),
        (StopReason.KEEPER_LOST, "the job was ended because the process that kept it was lost (node 1"),
        (StopReason.ORDERED, "the job was ended because the launcher ordered it (node 1 (b))"),
    ],
)
def test_a_job_that_another_node_ended(verdict: Callable[..., JobResult], reason: StopReason, said: str) -> None:
    """No rank is blamed; the ranks of which nothing is known are not either."""
    judged = verdict(report((0, -15, True), (1, -15, True), reason=reason, detail="node 1 (b)", **NODES), *(None,) * 4)
    assert said in judged.block
    assert judged.rank is None


def test_a_node_that_did_not_come(verdict: Callable[..., JobResult]) -> None:
    """A host that is not known is called so."""
    ended = report(reason=StopReason.START_FAILED, cause=2, detail="on node 1 (): no such folder", hosts=("a", ""))
    assert "rank 2 (node 1, unknown host) could not be started" in verdict(ended, *(None,) * 4).block
