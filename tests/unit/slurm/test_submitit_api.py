"""Options of the launchers for clusters, the sbatch file, and what is asked of SLURM and submitit."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher import config
from hydra_plugins.hydra_ddp_subprocess_launcher.common.choices import OnInterrupt
from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import OptionError, StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobRecord, JobState
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm import submitit_api
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.submitit_api import Cluster, read_cluster, sbatch_text
from support.runner import PATIENCE_S

if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
    pytest.skip("needs the extra `submitit`", allow_module_level=True)
RECORDED = Path(__file__).parents[2] / "support/sbatch_recorded.sh"


def options(executor: str = "slurm", **changes: Any) -> dict[str, Any]:
    conf = config.DDPSubmititSlurmConf if executor == "slurm" else config.DDPSubmititLocalConf
    return {**dataclasses.asdict(conf(submitit_folder="/sweep/.submitit/%j", name="train")), **changes}


def cluster(executor: str = "slurm", **changes: Any) -> Cluster:
    return read_cluster(options(executor, **changes), executor)[1]


# --- options


def test_defaults() -> None:
    """Submitit's options go to submitit, ours do not; its defaults are those of its own launcher."""
    settings, read = read_cluster(options(), "slurm")
    assert (read.nodes, read.gpus, read.on_interrupt, read.max_parallel_jobs) == (1, None, OnInterrupt.cancel, None)
    assert (settings.nnodes, settings.nproc_per_node, settings.devices) == (1, None, ())
    assert submitit_api.executor_parameters(read) == {
        "timeout_min": 60,
        "tasks_per_node": 1,
        "nodes": 1,
        "name": "train",
        "stderr_to_stdout": False,
        "slurm_signal_delay_s": 120,
        "slurm_additional_parameters": {},
        "slurm_array_parallelism": 256,
    }


def test_minutes_are_the_clusters() -> None:
    """`timeout_min` is the time that is asked of the cluster, and no limit of ours."""
    settings, read = read_cluster(options(timeout_min=5), "slurm")
    assert settings.limits.timeout_s is None
    assert read.queue["timeout_min"] == 5


def test_every_option_of_submitits_launchers_is_there() -> None:
    from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf

    for ours, theirs in ((config.DDPSubmititSlurmConf, SlurmQueueConf), (config.DDPSubmititLocalConf, LocalQueueConf)):
        defaults = {field.name: getattr(theirs(), field.name) for field in dataclasses.fields(theirs)}
        del defaults["_target_"]
        assert {name: getattr(ours(), name) for name in defaults} == defaults


@pytest.mark.parametrize(
    ("executor", "changes", "words"),
    [
        ("slurm", {"tasks_per_node": 2}, ["tasks_per_node=2", "hydra.launcher.nproc_per_node=2"]),
        ("slurm", {"nodes": 0}, ["hydra.launcher.nodes=0", "from 1 up"]),
        ("slurm", {"gpus_per_node": -1}, ["hydra.launcher.gpus_per_node=-1"]),
        ("slurm", {"devices": [0]}, ["Unknown option hydra.launcher.devices", "gpus_per_node", "on_interrupt"]),
        ("slurm", {"nnodes": 2}, ["Unknown option hydra.launcher.nnodes"]),
        ("slurm", {"grace_period_s": -1}, ["hydra.launcher.grace_period_s=-1"]),
        ("local", {"nodes": 2}, ["hydra.launcher.nodes=2", "ddp_submitit_local"]),
        ("local", {"partition": "p"}, ["Unknown option hydra.launcher.partition"]),
        ("local", {"max_parallel_jobs": 0}, ["hydra.launcher.max_parallel_jobs=0"]),
    ],
)
def test_options_that_cannot_be(executor: str, changes: dict[str, Any], words: list[str]) -> None:
    """They are refused, by name, with what is valid."""
    with pytest.raises(OptionError) as raised:
        read_cluster(options(executor, **changes), executor)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, None),
        ({"gpus_per_node": 4}, 4),
        ({"gpus_per_task": 3}, 3),
        ({"gpus_per_node": 0}, None),
        ({"gres": "gpu"}, 1),
        ({"gres": "gpu:2"}, 2),
        ({"gres": "gpu:a100:8"}, 8),
        ({"gres": "gpu:a100"}, 1),
        ({"gres": "gpu:2(S:0-1)"}, 2),
        ({"gres": "nic:2,gpu:4"}, 4),
        ({"gres": "gpu:3,nic:2"}, 3),
        ({"gres": "nic:2"}, None),
        ({"gres": "vgpu:2"}, None),
        ({"gpus_per_node": 2, "gres": "gpu:4"}, 2),
        ({"additional_parameters": {"gpus_per_node": "a100:8"}}, 8),
        ({"additional_parameters": {"gpus-per-node": 4}}, 4),
        ({"additional_parameters": {"gpus-per-node": "a100"}}, 1),
        ({"additional_parameters": {"gres": "gpu:a100:2"}}, 2),
        ({"additional_parameters": {"mail-type": "BEGIN"}}, None),
    ],
)
def test_gpus(changes: dict[str, Any], gpus: int | None) -> None:
    """Whichever of submitit's options asks for GPUs, there is one rank a GPU unless something else is said."""
    read = cluster(**changes)
    assert read.gpus == gpus
    assert read.size(None).nproc == (gpus or 1)


def test_more_ranks_than_gpus() -> None:
    """They do not fit; fewer do, and without GPUs any number does."""
    assert cluster(gpus_per_node=4).size(2).nproc == 2
    assert cluster().size(16).nproc == 16
    with pytest.raises(OptionError, match="nproc_per_node=5 does not fit: the job asks for 4 GPUs"):
        cluster(gpus_per_node=4).size(5)


def test_several_devices_for_a_rank() -> None:
    """Ranks are as many as the GPUs do for, and a job that would need more is refused; without GPUs any number does."""
    assert cluster(gpus_per_node=8).size(None, 2).nproc == 4
    assert cluster(gpus_per_node=5).size(2, 2).devices == 4
    assert cluster().size(None, 4).nproc == 1
    with pytest.raises(OptionError, match=r"nproc_per_node=3 with .*devices_per_rank=2 does not fit: .* 4 GPUs"):
        cluster(gpus_per_node=4).size(3, 2)
    with pytest.raises(OptionError, match=r"devices_per_rank=2 does not fit: .* 1 GPU "):
        cluster(gpus_per_node=1).size(None, 2)


# --- what submitit is told


def test_the_file_for_sbatch() -> None:
    """It is the recorded one; that submitit writes the same, a test on a real cluster tells."""
    read = cluster(
        nodes=2,
        gpus_per_node=2,
        cpus_per_task=4,
        mem_gb=8,
        partition="long",
        comment="it's two words",
        setup=["module load cuda", "export A=1"],
        array_parallelism=2,
        timeout_min=90,
        signal_delay_s=60,
        additional_parameters={"nice": 7, "mail-type": "END"},
    )
    text = sbatch_text(read, 3).replace(shlex.quote(sys.executable), "python")
    assert text.strip() == RECORDED.read_text().strip()


def test_a_single_job_is_no_array() -> None:
    assert "--array" not in sbatch_text(cluster(), 1)
    assert "#SBATCH --array=0-1%2" in sbatch_text(cluster(), 2)


def test_parameters_that_submitit_refuses(tmp_path: Path) -> None:
    """Its words are those of the error."""
    read = cluster("local", submitit_folder=str(tmp_path / "%j"))
    broken = dataclasses.replace(read, queue={**read.queue, "mem_gb": 1, "visible_gpus": "x"})
    with pytest.raises(OptionError, match=r"submitit refuses the options of hydra.launcher"):
        submitit_api.make_executor(broken)


def test_outside_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is submitted from within a job does not inherit that job's variables; they are back afterwards."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with submitit_api.outside_allocation():
        assert "SLURM_JOB_ID" not in os.environ and "SLURM_NTASKS" not in os.environ
    assert os.environ["SLURM_NTASKS"] == "4"


# --- states


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED by 0", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"])
def test_states_of_the_end(state: str) -> None:
    assert submitit_api.has_ended(state)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "PREEMPTED", "UNKNOWN", "SUSPENDED"])
def test_states_before_the_end(state: str) -> None:
    """A job that was preempted may be queued again."""
    assert not submitit_api.has_ended(state)


def test_hints() -> None:
    """What the cluster has ended has advice; what failed by itself has its own words."""
    assert "mem_gb" in submitit_api.hint("OUT_OF_MEMORY")
    assert "timeout_min" in submitit_api.hint("TIMEOUT")
    assert "scancel" in submitit_api.hint("CANCELLED by 1000")
    assert submitit_api.hint("FAILED") == ""


class SlurmJob:
    """Stand in for submitit's, by whose name its kind is told."""

    def __init__(self, state: str) -> None:
        self.job_id = "7_1"
        self.watcher = SimpleNamespace(get_state=lambda job_id, mode: state, _finished={"7_1", "8"})


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes `squeue` print a text, or fail with it."""

    def says(text: str, code: int = 0) -> None:
        said = text if code else f"6_0 RUNNING\n7_1 {text}\n8 PENDING"
        script = tmp_path / "squeue"
        script.write_text(f"#!/bin/sh\necho {shlex.quote(said)} {'>&2' if code else ''}\nexit {code}\n")
        script.chmod(0o700)
        monkeypatch.setattr(submitit_api, "_QUEUE", submitit_api._Queue())

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return says


@pytest.mark.parametrize(
    ("accounting", "queue", "state"),
    [
        ("RUNNING", "unasked", "RUNNING"),
        ("NODE_FAIL", "PENDING", "PENDING"),
        ("PREEMPTED", "PENDING", "PENDING"),
        ("FAILED", "RUNNING", "RUNNING"),
        ("FAILED", "COMPLETING", "FAILED"),
        ("NODE_FAIL", "COMPLETING", "COMPLETING"),
        ("NODE_FAIL", "A_WORD_OF_A_LATER_SLURM", "A_WORD_OF_A_LATER_SLURM"),
        ("CANCELLED by 0", "CANCELLED", "CANCELLED by 0"),
        ("COMPLETED", "", "COMPLETED"),
    ],
)
def test_a_job_that_is_queued_again_has_not_ended(squeue: Any, accounting: str, queue: str, state: str) -> None:
    """Accounting tells of each run of a job; whether there will be another, the queue knows."""
    squeue(queue)
    job = SlurmJob(accounting)
    assert submitit_api.state_of(job) == state
    assert ("7_1" in job.watcher._finished) == (state == accounting)


def test_a_queue_that_does_not_answer_is_no_end(squeue: Any) -> None:
    """While a dead node's jobs are queued again SLURM is busy: its silence must not fail a job that will run again."""
    squeue("slurm_load_jobs error: Unable to contact slurm controller", 1)
    for accounting in ("NODE_FAIL", "PREEMPTED", "FAILED"):
        assert submitit_api.state_of(SlurmJob(accounting)) == "UNKNOWN"
    assert submitit_api.is_queued(SlurmJob("CANCELLED"))


def test_one_question_is_for_all_jobs(squeue: Any, tmp_path: Path) -> None:
    """However many jobs there are, the queue is asked once a second at most."""
    squeue("RUNNING")
    script = tmp_path / "squeue"
    script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\necho asked >> {tmp_path}/asked\n"))
    for _ in range(50):
        assert submitit_api.state_of(SlurmJob("NODE_FAIL")) == "RUNNING"
    assert (tmp_path / "asked").read_text().count("asked") <= 2


def record(**changes: Any) -> JobRecord:
    return dataclasses.replace(JobRecord(0, (), JobState.PENDING, job_id="7_1", executor="slurm"), **changes)


def test_jobs_that_were_left(squeue: Any) -> None:
    """Only what the queue has is still there; what it does not tell is not taken for gone."""
    squeue("RUNNING")
    assert submitit_api.still_there(record()) == "RUNNING"
    assert submitit_api.still_there(record(state=JobState.COMPLETED)) == ""
    assert submitit_api.still_there(record(job_id="")) == ""
    squeue("CANCELLED")
    assert submitit_api.still_there(record()) == ""
    squeue("slurm_load_jobs error: Unable to contact slurm controller", 1)
    with pytest.raises(StartError, match=r"7_1 is still on the cluster cannot be found out: .*Unable to contact"):
        submitit_api.still_there(record())


def test_a_number_that_another_process_has_by_now() -> None:
    """A local job's id is the number of its process: another process of that number is no job, and is not ended."""
    other = subprocess.Popen(["sleep", "100"])
    try:
        local, left = cluster("local"), record(job_id=str(other.pid), executor="local")
        assert submitit_api.still_there(left) == ""
        submitit_api.cancel([submitit_api.find_job(local, left.job_id)])
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_local_job_of_another_process(tmp_path: Path) -> None:
    """It is found by its process, and ended as submitit's own `cancel` does."""
    # Only its words count.
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); print(flush=True); time.sleep(100)"
    argv = [sys.executable, "-c", code, "submitit.local._local", str(tmp_path)]
    job = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None and job.stdout.readline()
        local, left = cluster("local"), record(job_id=str(job.pid), executor="local")
        assert submitit_api.still_there(left) == "RUNNING"
        submitit_api.cancel([submitit_api.find_job(local, left.job_id)])
        assert job.wait(PATIENCE_S) == -signal.SIGINT
        assert submitit_api.still_there(left) == ""
    finally:
        job.kill()
        job.communicate()


def test_scancel_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs are in one command, and what it complains of is returned."""
    script = tmp_path / "scancel"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\necho no controller >&2\nexit 1\n')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert submitit_api.cancel([SlurmJob("RUNNING"), SlurmJob("PENDING")]) == "no controller"
    assert (tmp_path / "args").read_text().split() == ["7_1", "7_1"]
    assert submitit_api.cancel([]) == ""


def test_jobs_that_are_gone(squeue: Any) -> None:
    """A job is gone when the queue says so, and not when it says nothing for another reason."""
    squeue("")
    assert submitit_api.is_gone(SlurmJob("UNKNOWN"))
    squeue("PENDING")
    assert not submitit_api.is_gone(SlurmJob("UNKNOWN"))
    squeue("slurm_load_jobs error: Unable to contact slurm controller", 1)
    assert not submitit_api.is_gone(SlurmJob("UNKNOWN"))
