"""`hydra/launcher=ddp_submitit_local`: as on a cluster, through submitit's local executor, without SLURM."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobState
from support.notes import assert_one_clear_error, state_of
from support.runner import PATIENCE_S
from support.submitting import QUEUED, Submitting, finish

if TYPE_CHECKING:
    from support.runner import Runner

pytest.importorskip("submitit")


@pytest.fixture
def sweeps(runner: Runner) -> Submitting:
    return Submitting(runner, "local")


def ranks(number: int) -> str:
    return f"hydra.launcher.nproc_per_node={number}"


def part_of(sweeps: Submitting, job: int = 0) -> int:
    """Return the process of submitit's task that runs a job's part: the first one above a rank that submitit made."""
    pid = sweeps.wait_for("began", job=job)[-1]["pid"]
    while "submitit.core._submit" not in Path(f"/proc/{pid}/cmdline").read_text():
        pid = state_of(pid)[1]
    return pid


@pytest.mark.sample
def test_values(sweeps: Submitting) -> None:
    """Ranks meet; they run the program itself, beside its siblings; values come in order; directories go by the id."""
    ran = sweeps.run(
        "x=3,1,2", ranks(2), "first=[meet]", "hydra.sweep.subdir='of_${hydra.job.id}'", "id='${hydra:job.id}'"
    )
    assert ran.returncode == 0, ran.output
    assert sweeps.values() == [[3, 0], [1, 0], [2, 0]]
    for number, job in sweeps.jobs.items():
        assert job.run_dir == str(sweeps.sweep_dir / f"of_{job.job_id}")
        notes = sweeps.notes("began", job=number)
        assert sorted(note["rank"] for note in notes) == [0, 1]
        for note in notes:
            assert (note["id"], note["said"], note["dir"]) == (job.job_id, job.job_id, job.run_dir)
            assert note["argv0"] == str(QUEUED) and note["sibling"] == "talk"
            assert note["environment"]["WORLD_SIZE"] == "2"
    # max_parallel_jobs is 1 unless it is set.
    for before, after in ((0, 1), (1, 2)):
        assert sweeps.notes("ended", job=before)[-1]["at"] <= sweeps.notes("began", job=after)[0]["at"]


def test_several_at_a_time(sweeps: Submitting) -> None:
    """`max_parallel_jobs` of them run at a time, and no more."""
    with sweeps.running("x=1,2,3", ranks(1), "hydra.launcher.max_parallel_jobs=2", "first=['wait:go']") as process:
        sweeps.wait_for("began", 2)
        assert sweeps.jobs[2].state is JobState.WAITING
        sweeps.go()
        code, output = finish(process)
    assert code == 0, output
    assert sweeps.values() == [[1, 0], [2, 0], [3, 0]]
    first_end = min(note["at"] for note in sweeps.notes("ended"))
    assert sweeps.notes("began", job=2)[0]["at"] >= first_end


def test_a_failure(sweeps: Submitting) -> None:
    """The rank that failed is named with its error, the job's other ranks are ended, and other jobs go on."""
    ran = sweeps.run("x=1,2", "xs=[1]", ranks(2), "who=1", "first=[fail]", "hydra.launcher.max_restarts=0")
    assert ran.returncode == 1, ran.output
    assert sweeps.values() == [JobState.FAILED, [2, 0]]
    assert sweeps.jobs[0].cause.startswith("rank 1: ValueError: broken on ")
    assert "rank 0 was then ended by the launcher" in ran.output


def test_a_restart(sweeps: Submitting) -> None:
    ran = sweeps.run("x=1", ranks(1), "first=[fail]", "hydra.launcher.max_restarts=1")
    assert ran.returncode == 0, ran.output
    assert sweeps.values() == [[1, 1]]


@pytest.mark.sample
def test_ctrl_c(sweeps: Submitting) -> None:
    """Ctrl-C in the launching process ends the job that runs and starts no other; all processes go."""
    with sweeps.running("x=1,2", ranks(2), "first=[hang]") as process:
        sweeps.wait_for("began", 2)
        os.kill(process.pid, signal.SIGINT)
        code, output = finish(process)
    assert code != 0
    assert f"SIGINT: cancelling 1 job: {sweeps.jobs[0].job_id}" in output
    assert sweeps.jobs[0].state is JobState.FAILED and "cancelled after SIGINT" in sweeps.jobs[0].cause
    assert sweeps.ran() == [(0, 0, 0), (0, 1, 0)]
    sweeps.runner.assert_nothing_left(10)


def test_preempted(sweeps: Submitting) -> None:
    """Submitit's signal to the task reaches the ranks, and the job is run again in its directory."""
    with sweeps.running("x=1", ranks(2), "first=['on:SIGUSR2!',hang]") as process:
        sweeps.wait_for("began", 2)
        os.kill(part_of(sweeps), signal.SIGUSR2)
        code, output = finish(process)
    assert code == 0, output
    assert sweeps.values() == [[1, 1]]
    assert sweeps.ran() == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert sorted((note["rank"], note["count"]) for note in sweeps.notes("SIGUSR2")) == [(0, 1), (1, 1)]
    assert len({note["dir"] for note in sweeps.notes("began")}) == 1


def test_a_part_that_is_terminated(sweeps: Submitting) -> None:
    """SIGTERM to the task ends the ranks, and the job has failed: nothing follows, and nobody waits for that."""
    with sweeps.running("x=1", ranks(2), "first=[hang]") as process:
        sweeps.wait_for("began", 2)
        os.kill(part_of(sweeps), signal.SIGTERM)
        code, output = finish(process)
    assert code == 1, output
    assert sweeps.jobs[0].cause.startswith(f"submitit ended job {sweeps.jobs[0].job_id}: FINISHED")
    sweeps.runner.assert_nothing_left(10)


def test_a_lost_controller(sweeps: Submitting) -> None:
    """A task whose controller was killed ends its ranks, as nobody could end it any more, and tells so."""
    with sweeps.running("x=1", ranks(2), "first=[hang]") as process:
        sweeps.wait_for("began", 2)
        os.kill(int(sweeps.id_of(0)), signal.SIGKILL)
        code, output = finish(process)
    assert code == 1, output
    assert "the cluster's process that had started it here is gone" in sweeps.jobs[0].cause
    sweeps.runner.assert_nothing_left(10)


def test_resumed(sweeps: Submitting) -> None:
    """A job that goes on after its launching process was killed is waited for, or ended by Ctrl-C; none runs twice."""
    overrides = ("x=1,2", ranks(1), "first=['wait:go']")
    with sweeps.running(*overrides) as process:
        sweeps.wait_for("began")
        first = sweeps.id_of(0)
        process.kill()
        # Not to the end of its output, which submitit's processes have, too.
        process.wait(PATIENCE_S)
    refused = sweeps.run(*overrides)
    assert_one_clear_error(refused, "Job 0 of an earlier run", f"kill -INT {first}")
    resumed = "hydra.launcher.resume=unfinished"
    # The first launching process may have been stopped before it saw the job run.
    seen = sweeps.events().count("JobStarted")
    with sweeps.running(*overrides, resumed) as process:
        sweeps.runner.wait_until(lambda: sweeps.events().count("JobStarted") > seen, what="the job to be found")
        os.kill(process.pid, signal.SIGINT)
        _, output = finish(process)
    assert f"is on the cluster already ({first}, RUNNING): waiting for it" in output
    assert f"SIGINT: cancelling 1 job: {first}" in output
    sweeps.runner.assert_nothing_left(10)
    sweeps.go()
    last = sweeps.run(*overrides, resumed)
    assert last.returncode == 0, last.output
    assert sweeps.values() == [[1, 1], [2, 0]]


def test_resumed_although_nobody_had_noted_the_id(sweeps: Submitting) -> None:
    """A launching process that is killed between a job's start and its note of that leaves no job that runs twice."""
    overrides = ("x=1,2", ranks(1), "hydra.launcher.max_parallel_jobs=2", "first=['wait:go']")
    with sweeps.running(*overrides) as process:
        sweeps.wait_for("began", 2)
        ids = [sweeps.id_of(job) for job in range(2)]
        process.kill()
        process.wait(PATIENCE_S)
    sweeps.forget()
    assert "whether they are on the cluster, hydra.launcher.resume=unfinished finds out" in sweeps.status()
    refused = sweeps.run(*overrides)
    assert_one_clear_error(refused, "Job 0 of an earlier run", f"kill -INT {ids[0]}")
    with sweeps.running(*overrides, "hydra.launcher.resume=unfinished") as process:
        sweeps.runner.wait_until(lambda: "JobStarted" in sweeps.events(), what="the job to be found")
        sweeps.go()
        code, output = finish(process)
    assert code == 0, output
    for job in range(2):
        assert f"is on the cluster already ({ids[job]}, RUNNING): waiting for it" in output
    assert sweeps.values() == [[1, 0], [2, 0]] and sweeps.ran() == [(0, 0, 0), (1, 0, 0)]


def test_left_and_not_asked_for(sweeps: Submitting) -> None:
    """What another run has left there is named, keeps its directory, and no other launcher runs beside it."""
    both = ("hydra.launcher.max_parallel_jobs=2", ranks(1), "first=['wait:go']")
    with sweeps.running("x=1,2", *both) as process:
        sweeps.wait_for("began", 2)
        left = sweeps.id_of(1)
        process.kill()
        process.wait(PATIENCE_S)
    resumed = "hydra.launcher.resume=unfinished"
    for how in ((), (resumed,)):
        other = sweeps.runner.sweep(QUEUED, "x=1,2", *how, nproc=1, env=sweeps.env)
        assert_one_clear_error(other, "of an earlier run", "still on the cluster", "ddp_submitit_local", "kill -INT")
    with sweeps.running("x=1,3", *both, resumed) as process:
        sweeps.wait_for("began", 3)
        sweeps.go()
        code, output = finish(process)
    assert code == 0, output
    assert "Job 1 of an earlier run (x=2 " in output and f"({left}, RUNNING)" in output
    assert sweeps.values() == [[1, 0], [3, 0]]
    assert [job.run_dir for job in sweeps.jobs.values()] == [str(sweeps.sweep_dir / name) for name in ("0", "1-2")]
    sweeps.runner.assert_nothing_left(10)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hydra.launcher.nodes=2", ["hydra.launcher.nodes=2", "this machine alone"]),
        ("hydra.launcher.tasks_per_node=2", ["hydra.launcher.nproc_per_node=2"]),
        ("+hydra.launcher.partition=p", ["Unknown option hydra.launcher.partition", "max_parallel_jobs"]),
        ("hydra.launcher.max_parallel_jobs=0", ["hydra.launcher.max_parallel_jobs=0"]),
    ],
)
def test_options_that_cannot_be(sweeps: Submitting, override: str, words: list[str]) -> None:
    """They are refused in one clear sentence, before anything is started."""
    ran = sweeps.run("x=1", override)
    assert_one_clear_error(ran, *words)
    assert not (sweeps.sweep_dir / ".submitit").exists()


def test_more_ranks_than_gpus(sweeps: Submitting) -> None:
    """It is the failure of the job that asks for them, and others run."""
    ran = sweeps.run("x=1,2", "hydra.launcher.gpus_per_node=1", "hydra.launcher.nproc_per_node='${x}'")
    assert ran.returncode == 1
    assert sweeps.values() == [[1, 0], JobState.FAILED]
    assert "hydra.launcher.nproc_per_node=2 does not fit: the job asks for 1 GPU on" in sweeps.jobs[1].cause
