"""`hydra/launcher=ddp_submitit_slurm` on a real SLURM with two nodes: see tests/support/slurm_cluster.sh."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobState
from support.notes import assert_one_clear_error, state_of
from support.runner import APPS, PATIENCE_S
from support.submitting import QUEUED, Submitting, finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.runner import Runner
    from support.slurm_cluster import SlurmCluster

pytest.importorskip("submitit")
ONE_AT_A_TIME = "hydra.launcher.array_parallelism=1"
TWO_NODES = "hydra.launcher.nodes=2"


def ranks(number: int) -> str:
    return f"hydra.launcher.nproc_per_node={number}"


@pytest.fixture
def sweeps(runner: Runner, slurm: SlurmCluster) -> Iterator[Submitting]:
    """Sweeps on the cluster; no process of them is left."""
    yield Submitting(runner, "slurm", slurm.interface)
    # SLURM takes its own processes away a moment after a job has ended.
    runner.wait_until(lambda: not runner.alive(), 20, f"the end of {runner.alive()}")


def sacct(job_id: str, *fields: str) -> list[str]:
    """Return what accounting knows of a job."""
    argv = ["sacct", "-X", "-n", "-P", "-o", ",".join(fields), "-j", job_id]
    lines: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while not lines and time.monotonic() < deadline:
        # It hears of an array's elements a moment late.
        lines = subprocess.check_output(argv, text=True).splitlines()
    return lines[0].split("|")


# --- running


@pytest.mark.sample
def test_jobs_on_two_nodes(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """Ranks of both nodes meet; each has its place, the job's id and a directory by it; values come in order."""
    ran = sweeps.run(
        "x=3,1",
        TWO_NODES,
        ranks(2),
        ONE_AT_A_TIME,
        "first=[meet]",
        "hydra.sweep.subdir='of_${hydra.job.id}'",
        "+hydra.job.env_set.OF_JOB='id ${hydra.job.id}'",
        "id='${hydra:job.id}'",
    )
    assert ran.returncode == 0, ran.output
    assert sweeps.values() == [[3, 0], [1, 0]]
    array = sweeps.jobs[0].job_id.partition("_")[0]
    assert f"Submitted 2 jobs of 4 ranks to slurm: {array}_[0,1]" in ran.output
    names = list(slurm.nodes)
    for number, job in sweeps.jobs.items():
        assert (job.job_id, job.nodes, job.nproc) == (f"{array}_{number}", tuple(names), 4)
        run_dir = sweeps.sweep_dir / f"of_{job.job_id}"
        assert job.run_dir == str(run_dir)
        notes = sorted(sweeps.notes("began", job=number), key=lambda note: note["rank"])
        for rank, note in enumerate(notes):
            own = note["environment"]
            assert (note["rank"], note["id"], note["said"], note["dir"]) == (rank, job.job_id, job.job_id, str(run_dir))
            if slurm.network == "netns":
                assert note["host"] == names[rank // 2]
            assert own["OF_JOB"] == f"id {job.job_id}"
            assert (own["LOCAL_RANK"], own["NODE_RANK"], own["WORLD_SIZE"]) == (str(rank % 2), str(rank // 2), "4")
            assert own["HYDRA_DDP_ATTEMPT"] == "0" and own["MASTER_ADDR"] == slurm.nodes[0]
            # The rank's own, not those of the one task a node that SLURM has started.
            names_of_rank = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES")
            assert [own[name] for name in names_of_rank] == [str(rank), str(rank % 2), str(rank // 2), "4", "2"]
            assert own["SLURM_JOB_ID"] and "SLURM_STEP_NUM_TASKS" not in own
            assert note["argv0"] == str(QUEUED) and note["sibling"] == "talk"
        assert (run_dir / ".ddp" / "job.json").exists()
    # One at a time.
    spans = [
        (min(note["at"] for note in sweeps.notes("began", job=number)), sweeps.notes("ended", job=number)[-1]["at"])
        for number in range(2)
    ]
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(sorted(spans)))
    assert not list(sweeps.sweep_dir.rglob("*hydra_ddp_job_id*"))


TORCH = """
    import os
    import hydra, torch, torch.distributed as dist

    @hydra.main(version_base=None, config_path=None)
    def main(cfg):
        dist.init_process_group("gloo")
        total = torch.tensor(float(cfg.x * (dist.get_rank() + 1)))
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    if __name__ == "__main__":
        main()
"""


@pytest.mark.torch
def test_torch_adds_up_over_two_nodes(sweeps: Submitting, runner: Runner) -> None:
    """3 jobs of 2 ranks on each of 2 nodes all-reduce with gloo; the values come in order."""
    pytest.importorskip("torch")
    app = runner.cwd / "train.py"
    app.write_text(dedent(TORCH))
    ran = sweeps.run("+x=5,1,2", TWO_NODES, ranks(2), ONE_AT_A_TIME, app=app)
    assert ran.returncode == 0, ran.output
    assert sweeps.values() == [50.0, 10.0, 20.0]


def test_gpus(sweeps: Submitting) -> None:
    """There is one rank a GPU that is asked for, and it sees what SLURM gave; `auto` is not needed for that."""
    ran = sweeps.run("x=1", "hydra.launcher.gpus_per_node=2")
    assert ran.returncode == 0, ran.output
    assert sweeps.ran() == [(0, 0, 0), (0, 1, 0)]
    assert {note["environment"]["CUDA_VISIBLE_DEVICES"] for note in sweeps.notes("began")} == {"0,1"}
    assert sorted(note["environment"]["LOCAL_RANK"] for note in sweeps.notes("began")) == ["0", "1"]


def test_submitits_options(sweeps: Submitting, runner: Runner, slurm: SlurmCluster) -> None:
    """They reach SLURM; the dry run shows the very file that submitit hands to sbatch."""
    overrides = (
        "x=1,2",
        "hydra.launcher.array_parallelism=2",
        "hydra.launcher.name=some_name",
        "hydra.launcher.partition=high",
        "hydra.launcher.timeout_min=17",
        "hydra.launcher.cpus_per_task=2",
        "hydra.launcher.mem_gb=1",
        "hydra.launcher.gres='gpu:1'",
        "hydra.launcher.comment='two words'",
        "hydra.launcher.stderr_to_stdout=true",
        "hydra.launcher.setup=['export OF_JOB=set_up']",
        "+hydra.launcher.additional_parameters.nice=7",
    )
    dry = sweeps.run(*overrides, "hydra.launcher.dry_run=true")
    assert dry.returncode == 0, dry.output
    assert not sweeps.sweep_dir.exists() and not list(runner.cwd.glob("*.jsonl"))
    ran = sweeps.run(*overrides)
    assert ran.returncode == 0, ran.output
    job_id = sweeps.jobs[0].job_id
    slurm.wait_for_state(job_id, "COMPLETED")
    fields = ("JobName", "Partition", "Timelimit", "ReqCPUS", "ReqMem", "State")
    assert sacct(job_id, *fields) == ["some_name", "high", "00:17:00", "2", "1G", "COMPLETED"]
    assert {note["environment"]["OF_JOB"] for note in sweeps.notes("began")} == {"set_up"}
    # GPUs by `gres`: one rank a GPU, as with gpus_per_node.
    assert len(sweeps.notes("began")) == 2 and all(
        "CUDA_VISIBLE_DEVICES" in note["environment"] for note in sweeps.notes("began")
    )
    logs = sorted(path.name for path in (sweeps.sweep_dir / ".submitit" / job_id).iterdir())
    assert f"{job_id}_0_log.out" in logs and f"{job_id}_0_log.err" not in logs
    (written,) = sweeps.sweep_dir.glob(".submitit/*/*submission.sh")
    text = written.read_text()
    assert "#SBATCH --nice=7" in text and "#SBATCH --comment='two words'" in text
    shown = dry.stdout.partition("The file that submitit would hand to sbatch:\n")[2]
    assert shown.strip() == text.strip()


def test_restarts_within_the_allocation(sweeps: Submitting) -> None:
    """`max_restarts` starts all nodes' ranks again on another port, in the same job of the cluster."""
    ran = sweeps.run("x=1", TWO_NODES, ranks(1), "hydra.launcher.max_restarts=1", "who=1", "first=[fail]", "then=[]")
    assert ran.returncode == 0, ran.output
    assert sweeps.values() == [[1, 1]]
    assert sweeps.ran() == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    began = sweeps.notes("began")
    assert len({note["id"] for note in began}) == 1 and len({note["environment"]["MASTER_PORT"] for note in began}) == 2
    assert not any("SLURM_RESTART_COUNT" in note["environment"] for note in began)
    assert sweeps.jobs[0].attempts == 2


def test_optuna(sweeps: Submitting) -> None:
    """A sweeper that launches several batches gets each value in its turn."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    ran = sweeps.run(
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "x=choice(1,2,3,4,5,6)"),
        app=_number_app(sweeps.runner),
    )
    assert ran.returncode == 0, ran.output
    assert len({job.job_id for job in sweeps.jobs.values()}) == 2
    values = [float(job.value) for job in sweeps.jobs.values()]
    best = re.search(r"best_value: ([\d.]+)", (sweeps.sweep_dir / "optimization_results.yaml").read_text())
    assert best is not None and float(best[1]) == min(values)


def _number_app(runner: Runner) -> Path:
    app = runner.cwd / "number.py"
    app.write_text(
        f"import sys\nsys.path.insert(0, {str(APPS)!r})\nimport hydra, queued\n\n"
        "@hydra.main(version_base=None, config_path=None, config_name='queued')\n"
        "def main(cfg):\n    return float(queued.main.__wrapped__(cfg)[0])\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    return app


# --- failures


def parents(pid: int) -> list[int]:
    """Return the processes above one, from below."""
    found = []
    while (pid := state_of(pid)[1]) > 1:
        found.append(pid)
    return found


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def test_a_rank_that_fails_on_the_second_node(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """No rank waits for it; the cause names rank and node; the array's other jobs go on; SLURM knows of it, too."""
    ran = sweeps.run("x=1,2", "xs=[1]", TWO_NODES, ranks(1), ONE_AT_A_TIME, "who=1", "first=[fail]")
    assert ran.returncode == 1, ran.output
    host = slurm.nodes[1] if slurm.network == "netns" else os.uname().nodename
    assert sweeps.values() == [JobState.FAILED, [2, 0]]
    failed = sweeps.jobs[0]
    assert failed.cause == f"rank 1 (node 1, {host}): ValueError: broken on {host}"
    assert f"rank 1 (node 1, {host}) failed with exit code 1; rank 0 was then ended by the launcher." in ran.output
    assert "in fail\n" in ran.output, "the traceback of the rank is shown"
    assert failed.attempts == 1
    slurm.wait_for_state(failed.job_id, "FAILED")
    slurm.wait_for_state(sweeps.jobs[1].job_id, "COMPLETED")


def test_one_job_of_an_array_is_lost(sweeps: Submitting, runner: Runner, slurm: SlurmCluster) -> None:
    """Its slurmstepd is killed, so that nothing tells of its end: it has failed, and the others return."""
    with sweeps.running("x=1,2,3", "xs=[2]", ranks(1), "first=[hang]") as process:
        lost = sweeps.id_of(1)
        sweeps.wait_for("began", job=1)
        (rank,) = sweeps.notes("began", job=1)
        steps = [pid for pid in parents(rank["pid"]) if name_of(pid).startswith("slurmstepd")]
        assert len(steps) == 1
        for pid in steps:
            os.kill(pid, signal.SIGKILL)
        code, output = finish(process)
    assert code == 1, output
    assert sweeps.values() == [[1, 0], JobState.FAILED, [3, 0]]
    assert "the cluster's process that had started it here is gone" in sweeps.jobs[1].cause
    # It does not keep its node.
    slurm.wait_for_state(lost, "CANCELLED")


def test_a_node_is_lost_to_the_cluster(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """Without its slurmstepd nobody could end a node's ranks: the job ends on all nodes, and says where it began."""
    with sweeps.running("x=1", TWO_NODES, ranks(1), "first=[hang]") as process:
        (second,) = [note["pid"] for note in sweeps.wait_for("began", 2) if note["rank"] == 1]
        (step,) = [pid for pid in parents(second) if name_of(pid).startswith("slurmstepd")]
        os.kill(step, signal.SIGKILL)
        code, output = finish(process, 90)
    assert code == 1, output
    cause = sweeps.jobs[0].cause
    assert "on node 1 (" in cause and "the cluster's process that had started it here is gone" in cause, output
    slurm.wait_for_state(sweeps.jobs[0].job_id, "CANCELLED", "FAILED")


def test_scancel(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """All ranks on all nodes end at once; the job has failed, and it is said who ended it."""
    with sweeps.running("x=1", TWO_NODES, ranks(2), "first=[hang]", "hydra.launcher.grace_period_s=30") as process:
        pids = [note["pid"] for note in sweeps.wait_for("began", 4)]
        job_id = sweeps.id_of(0)
        slurm.scancel(job_id)
        sweeps.runner.wait_until(lambda: not set(pids) & set(sweeps.runner.alive()), 10, "the end of the ranks")
        code, output = finish(process)
    assert code == 1, output
    assert sweeps.values() == [JobState.FAILED]
    assert sweeps.jobs[0].cause.startswith(f"SLURM ended job {job_id}: CANCELLED")
    assert "Somebody cancelled it" in output


def test_a_job_that_never_starts_is_cancelled(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """So it is with a job that still waits; where its directory depends on its id, it is named by that."""
    overrides = ("x=1,2", "xs=[1]", ONE_AT_A_TIME, ranks(1), "first=['wait:go']")
    with sweeps.running(*overrides, "hydra.sweep.subdir='of_${hydra.job.id}'") as process:
        sweeps.wait_for("began", job=0)
        job_id = sweeps.id_of(1)
        slurm.scancel(job_id)
        sweeps.runner.wait_until(lambda: sweeps.jobs[1].state is JobState.FAILED, what="the end of job 1")
        sweeps.go()
        code, output = finish(process)
    assert code == 1, output
    assert sweeps.values() == [[1, 0], JobState.FAILED]
    assert sweeps.jobs[1].cause.startswith(f"SLURM ended job {job_id}: CANCELLED")
    assert "hydra_ddp_job_id" not in output


def test_max_failures(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """Jobs that wait on the cluster when too many have failed are cancelled, and were not run."""
    ran = sweeps.run("x=1,2,3", "xs=[1]", ONE_AT_A_TIME, ranks(1), "first=[fail]", "hydra.launcher.max_failures=1")
    assert ran.returncode == 1, ran.output
    states = [job.state for job in sweeps.jobs.values()]
    # The second one may have been done by then.
    assert states[0] is JobState.FAILED and states[2] is JobState.NEVER_STARTED, ran.output
    assert sweeps.jobs[2].cause == "1 job failed before it (max_failures=1)"
    # Accounting has array elements that waited together under one number.
    assert sweeps.jobs[2].job_id not in slurm.squeue()
    assert not any(job == 2 for job, _, _ in sweeps.ran())


def test_what_sbatch_refuses(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """It is the failure of the jobs, in SLURM's words."""
    ran = sweeps.run("x=1,2", "hydra.launcher.partition=nowhere")
    assert ran.returncode == 1
    assert sweeps.values() == [JobState.FAILED] * 2
    assert "could not be submitted" in sweeps.jobs[0].cause and "nvalid partition" in sweeps.jobs[0].cause
    assert slurm.squeue(sweeps.runner.cwd) == {}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("hydra.launcher.tasks_per_node=2", ["tasks_per_node=2", "hydra.launcher.nproc_per_node=2"]),
        ("hydra.launcher.nodes=0", ["hydra.launcher.nodes=0 cannot be used", "from 1 up"]),
        ("+hydra.launcher.devices=[0]", ["Unknown option hydra.launcher.devices", "gpus_per_node"]),
        ("+hydra.launcher.additional_parameters=7", ["hydra.launcher"]),
    ],
)
def test_options_that_cannot_be(sweeps: Submitting, override: str, words: list[str]) -> None:
    """They are refused in one clear sentence, before anything is submitted."""
    ran = sweeps.run("x=1", override)
    assert_one_clear_error(ran, *words)
    assert not sweeps.jobs and not (sweeps.sweep_dir / ".submitit").exists()


# --- pre-emption and time limits


def _careless_app(runner: Runner) -> Path:
    """Return queued.py, but job 1 has no handler for SIGUSR2."""
    app = runner.cwd / "careless.py"
    app.write_text(
        f"import sys\nsys.path.insert(0, {str(APPS)!r})\nimport hydra, queued\n\n"
        "@hydra.main(version_base=None, config_path=None, config_name='queued')\n"
        "def main(cfg):\n"
        "    if cfg.x == 2:\n"
        "        cfg.first.remove('on:SIGUSR2!')\n"
        "    return queued.main.__wrapped__(cfg)\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    return app


def signals(sweeps: Submitting, job: int, name: str) -> list[tuple[int, int]]:
    """Return (rank, how often so far) of each time this signal came to a rank's handler."""
    return sorted((note["rank"], note["count"]) for note in sweeps.notes(name, job=job))


def scancel(job_id: str, name: str) -> None:
    subprocess.run(["scancel", f"--signal={name}", job_id], check=True)


def test_preempted_by_a_signal(sweeps: Submitting) -> None:
    """A rank that handles the signal hears of it once, and has time; another one gets SIGTERM. Both are run again.

    Each job keeps its directory and its id; whatever comes first, SIGTERM or the signal, and in one or both.
    """
    overrides = ("x=1,2,3", ranks(1), "hydra.launcher.timeout_min=60")
    with sweeps.running(
        *overrides, "first=['on:SIGUSR2!','on:SIGTERM!',hang]", app=_careless_app(sweeps.runner)
    ) as process:
        sweeps.wait_for("began", 3)
        for job in range(3):
            if job == 2:
                scancel(sweeps.id_of(job), "TERM")
                time.sleep(0.3)
            scancel(sweeps.id_of(job), "USR2")
        sweeps.wait_for("ended", 3)
        code, output = finish(process)
    assert code == 0, output
    assert sweeps.values() == [[1, 1], [2, 1], [3, 1]]
    # Job 0 handles it, and ends of it; job 1 does not.
    assert signals(sweeps, 0, "SIGUSR2") == [(0, 1)] and signals(sweeps, 0, "SIGTERM") == []
    assert signals(sweeps, 1, "SIGUSR2") == [] and signals(sweeps, 1, "SIGTERM") == [(0, 1)]
    assert len(signals(sweeps, 2, "SIGTERM")) >= 1
    for job in range(3):
        first, second = sweeps.notes("began", job=job)
        assert first["dir"] == second["dir"] and first["id"] == second["id"] == sweeps.jobs[job].job_id
        assert second["environment"]["SLURM_RESTART_COUNT"] == "1"
        assert sweeps.jobs[job].attempts == 2


def test_preempted_by_another_job(sweeps: Submitting, runner: Runner, slurm: SlurmCluster) -> None:
    """On two nodes, too, ranks are told first, and the job is run again when its nodes are free again.

    GPUs are what the two jobs cannot have at the same time.
    """
    overrides = ("x=1", TWO_NODES, "hydra.launcher.gpus_per_node=2", ranks(1), "hydra.launcher.partition=test")
    with sweeps.running(*overrides, "first=['on:SIGUSR2!',hang]") as process:
        sweeps.wait_for("began", 2)
        other = runner.run(
            *("sbatch", "--parsable", "--partition=high", "--nodes=2", "--gpus-per-node=2"), "--wrap", "true"
        )
        sweeps.wait_for("ended", 2)
        code, output = finish(process)
    assert code == 0, output
    slurm.wait_for_state(other.stdout.strip(), "COMPLETED")
    assert sweeps.values() == [[1, 1]]
    assert signals(sweeps, 0, "SIGUSR2") == [(0, 1), (1, 1)]
    assert sweeps.ran() == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]


def test_requeued_by_hand_and_out_of_time(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """After `scontrol requeue` the job is run again; with its time used up once more than allowed, it has failed.

    To submitit each signal to a job of less than ten minutes means that the time is up.
    """
    overrides = ("x=1", ranks(2), "hydra.launcher.timeout_min=5", "hydra.launcher.max_num_timeout=0")
    with sweeps.running(*overrides, "first=[hang]", "then=[hang]") as process:
        pids = [note["pid"] for note in sweeps.wait_for("began", 2)]
        job_id = sweeps.id_of(0)
        subprocess.run(["scontrol", "requeue", job_id], check=True)
        sweeps.wait_for("began", 2, attempt=1)
        assert not set(pids) & set(sweeps.runner.alive())
        scancel(job_id, "USR2")
        code, output = finish(process)
    assert code == 1, output
    assert sweeps.values() == [JobState.FAILED]
    assert "timed-out too many times" in sweeps.jobs[0].cause
    assert "max_num_timeout" in output
    slurm.wait_for_state(job_id, "FAILED")


def test_time_limits_are_counted(sweeps: Submitting) -> None:
    """`max_num_timeout=1` lets a job go on once after its time was up."""
    overrides = ("x=1", ranks(1), "hydra.launcher.timeout_min=5", "hydra.launcher.max_num_timeout=1")
    with sweeps.running(*overrides, "first=['on:SIGUSR2!',hang]") as process:
        sweeps.wait_for("began")
        scancel(sweeps.id_of(0), "USR2")
        code, output = finish(process)
    assert code == 0, output
    assert sweeps.values() == [[1, 1]]


def test_a_signal_that_comes_to_one_node_first(sweeps: Submitting, runner: Runner) -> None:
    """A node that hears of the end a moment before the other does not make a failure of it."""
    with sweeps.running("x=1", TWO_NODES, ranks(1), "first=[hang]") as process:
        second = next(note["pid"] for note in sweeps.wait_for("began", 2) if note["rank"] == 1)
        part = next(pid for pid in parents(second) if "submitit" in runner.alive().get(pid, ""))
        os.kill(part, signal.SIGUSR2)
        runner.wait_until(lambda: set(runner.alive()) & set(sweeps_pids(sweeps)) == set(), what="the end of the ranks")
        time.sleep(0.5)
        scancel(sweeps.id_of(0), "USR2")
        code, output = finish(process)
    assert code == 0, output
    assert sweeps.values() == [[1, 1]]


def sweeps_pids(sweeps: Submitting) -> list[int]:
    return [note["pid"] for note in sweeps.notes("began")]


# --- the launching process


def test_ctrl_c_cancels(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """Ctrl-C cancels the sweep's jobs, and no others; their ids are said."""
    bystander = sweeps.runner.run("sbatch", "--parsable", "--wrap", "sleep 100").stdout.strip()
    overrides = ("x=1,2", ONE_AT_A_TIME, ranks(2), "first=[hang]")
    with sweeps.running(*overrides) as process:
        sweeps.wait_for("began", 2)
        ids = [sweeps.id_of(job) for job in range(2)]
        array = ids[0].partition("_")[0]
        os.kill(process.pid, signal.SIGINT)
        code, output = finish(process)
    assert code in (130, 1, -signal.SIGINT), output
    assert f"SIGINT: cancelling 2 jobs: {array}_[0,1]" in output
    assert "Stopped by SIGINT: 2 of 2 jobs did not complete" in output
    for job_id in ids:
        slurm.wait_for_state(job_id, "CANCELLED")
    assert slurm.squeue()[bystander] in ("PENDING", "RUNNING")
    slurm.scancel(bystander)
    slurm.wait_for_state(bystander, "CANCELLED")
    assert sweeps.values() == [JobState.FAILED, JobState.NEVER_STARTED]
    assert "cancelled after SIGINT" in sweeps.jobs[0].cause


def test_left_and_found_again(sweeps: Submitting) -> None:
    """With `on_interrupt: leave` jobs go on without a launching process; a resumed sweep waits for them.

    One that would share their directories is refused: a new sweep there, or a job with another config.
    """
    overrides = ("x=1,2", ONE_AT_A_TIME, ranks(1), "first=['wait:go']")
    leave = "hydra.launcher.on_interrupt=leave"
    with sweeps.running(*overrides, leave) as process:
        sweeps.wait_for("began", 1)
        ids = [sweeps.id_of(job) for job in range(2)]
        os.kill(process.pid, signal.SIGINT)
        code, output = finish(process)
    assert code != 0
    array = ids[0].partition("_")[0]
    assert f"left on the cluster (on_interrupt=leave): 2 jobs, {array}_[0,1]" in output
    assert f"on the cluster they may go on ({ids[0]}, {ids[1]})" in sweeps.status()
    anew = sweeps.run(*overrides)
    assert_one_clear_error(anew, "Job 0 of an earlier run", ids[0], "hydra.launcher.resume=unfinished", "scancel")
    resumed = "hydra.launcher.resume=unfinished"
    changed = sweeps.run(*overrides, resumed, env={"QUEUED_ID": "another"})
    assert changed.returncode == 1
    assert f"It is on the cluster with another config ({ids[0]}" in changed.output
    # The first launching process may have been stopped before it saw the job run.
    seen = sweeps.events().count("JobStarted")
    with sweeps.running(*overrides, resumed) as process:
        sweeps.runner.wait_until(lambda: sweeps.events().count("JobStarted") > seen, what="the job to be found")
        assert f"{ids[0]}" in sweeps.status()
        sweeps.go()
        code, output = finish(process)
    assert code == 0, output
    assert f"is on the cluster already ({ids[0]}, " in output
    assert sweeps.values() == [[1, 0], [2, 0]]
    assert sweeps.ran() == [(0, 0, 0), (1, 0, 0)]
    assert [job.job_id for job in sweeps.jobs.values()] == ids


def test_a_killed_launcher(sweeps: Submitting, slurm: SlurmCluster) -> None:
    """What ended without it is not run again: its values, and failures, are found; a cancelled job is run."""
    overrides = ("x=1,2,3", "xs=[1,3]", ranks(1), "first=['wait:go']")
    with sweeps.running(*overrides) as process:
        sweeps.wait_for("ended", 1)
        sweeps.wait_for("began", 3)
        ids = [sweeps.id_of(job) for job in range(3)]
        process.kill()
        process.communicate()
    slurm.scancel(ids[2])
    slurm.wait_for_state(ids[2], "CANCELLED")
    sweeps.go()
    for job_id in ids[:2]:
        slurm.wait_for_state(job_id, "COMPLETED")
    assert f"on the cluster they may go on ({ids[0]}" in sweeps.status()
    resumed = sweeps.run(*overrides, "hydra.launcher.resume=unfinished")
    assert resumed.returncode == 0, resumed.output
    assert sweeps.values() == [[1, 0], [2, 0], [3, 1]]
    assert sweeps.ran() == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 0, 1)]


def test_a_launcher_that_was_killed_while_submitting(sweeps: Submitting) -> None:
    """Jobs whose ids it could not note any more are found, also one that waits, and run once."""
    overrides = ("x=1,2", ONE_AT_A_TIME, ranks(1), "first=['wait:go']", "hydra.sweep.subdir='of_${hydra.job.id}'")
    with sweeps.running(*overrides) as process:
        sweeps.wait_for("began", 1)
        ids = [sweeps.id_of(job) for job in range(2)]
        process.kill()
        process.communicate()
    sweeps.forget()
    with sweeps.running(*overrides, "hydra.launcher.resume=unfinished") as process:
        sweeps.runner.wait_until(lambda: "JobStarted" in sweeps.events(), what="the job to be found")
        sweeps.go()
        code, output = finish(process)
    assert code == 0, output
    for job in range(2):
        assert f"Job {job} of an earlier run was submitted as {ids[job]}, which nobody had noted" in output
        assert f"is on the cluster already ({ids[job]}, " in output
    assert sweeps.values() == [[1, 0], [2, 0]] and sweeps.ran() == [(0, 0, 0), (1, 0, 0)]
    assert [Path(job.run_dir).name for job in sweeps.jobs.values()] == [f"of_{job_id}" for job_id in ids]


def test_status(sweeps: Submitting) -> None:
    """While a sweep runs, `hydra-ddp status` shows what runs where, and what waits."""
    with sweeps.running("x=1,2", TWO_NODES, ranks(1), ONE_AT_A_TIME, "first=['wait:go']") as process:
        sweeps.wait_for("began", 2)
        sweeps.runner.wait_until(lambda: sweeps.jobs[0].state is JobState.RUNNING, what="job 0 runs")
        said = sweeps.status()
        sweeps.go()
        code, output = finish(process)
    assert code == 0, output
    job = sweeps.jobs[0]
    (row,) = [line for line in said.splitlines() if job.job_id in line]
    assert ",".join(job.nodes) in row and "x=1" in row
    assert "1 running, 1 pending" in said


# --- within an allocation


def test_one_of_several_tasks(runner: Runner, sweeps: Submitting) -> None:
    """A program that srun has started several times is refused: each would run the sweep."""
    argv = ["-m", "hydra/launcher=ddp_subprocess", "x=1"]
    ran = runner.run("srun", "-n2", sys.executable, QUEUED, *argv, env=sweeps.env)
    assert ran.returncode != 0
    assert "SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=2 are set" in ran.output
    assert "SLURM_PROCID=1 and SLURM_STEP_NUM_TASKS=2 are set" in ran.output
    assert sweeps.ran() == []


def test_a_packed_allocation(runner: Runner, sweeps: Submitting, slurm: SlurmCluster) -> None:
    """`ddp_subprocess` in the script of a job of several tasks uses the GPUs that SLURM gave. Another submits."""
    here = [str(QUEUED), "-m", "hydra/launcher=ddp_subprocess", "hydra.sweep.dir=here", "x=1"]
    there = sweeps.arguments("x=2", "hydra.launcher.nproc_per_node=1")
    script = "\n".join(["#!/bin/sh", *(f"{sys.executable} {' '.join(argv)}" for argv in (here, there))])
    (runner.cwd / "job.sh").write_text(script + "\n")
    ran = runner.run(
        *("sbatch", "--parsable", "--nodes=1", "--ntasks=2", "--gpus-per-node=1", "--output=said.txt", "job.sh"),
        env=sweeps.env,
    )
    slurm.wait_for_state(ran.stdout.strip(), "COMPLETED", "FAILED")
    said = (runner.cwd / "said.txt").read_text()
    assert sweeps.values() == [[2, 0]], said
    first, second = sweeps.notes("began")
    assert first["environment"]["CUDA_VISIBLE_DEVICES"] in ("0", "1") and first["environment"]["WORLD_SIZE"] == "1"
    assert first["environment"]["SLURM_JOB_ID"] == ran.stdout.strip() != second["id"]
    assert "CUDA_VISIBLE_DEVICES" not in second["environment"]
    assert second["environment"].get("SLURM_JOB_ID") == second["id"]
