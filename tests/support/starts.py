"""A start of a job, and a job for a cluster, for tests that need one, but do not start it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Limits, Payload
from hydra_plugins.hydra_ddp_subprocess_launcher.job.environment import GroupEnvironment
from hydra_plugins.hydra_ddp_subprocess_launcher.job.plan import JobStart
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.node_task import SubmittedJob


def job_start(run_dir: str, nproc: int, run_id: str = "run", **changes: Any) -> JobStart:
    """Return a start of a job.

    Args:
        run_dir: Run directory.
        nproc: Number of ranks.
        run_id: Name of the start.
        changes: Fields of JobStart.
    """
    group = GroupEnvironment(
        nproc=nproc,
        master_addr="127.0.0.1",
        master_port=29500,
        run_id=run_id,
        attempt=0,
        restart_count=0,
        max_restarts=0,
        devices=None,
        device_env_var="CUDA_VISIBLE_DEVICES",
        folder=JobPaths(run_dir).folder,
        payload_digest=None,
        job_num=0,
        sweep_dir=run_dir,
    )
    values: dict[str, Any] = {
        "number": 0,
        "overrides": (),
        "run_dir": run_dir,
        "argv": ("true",),
        "cwd": "/",
        "env_set": {},
        "group": group,
        "limits": Limits(1.0),
    }
    return JobStart(**{**values, **changes})


def submitted(folder: Path, run_dir: str = "", **changes: Any) -> SubmittedJob:
    """Return a job of one rank that is submitted.

    Args:
        folder: Where it meets, and has its run directory.
        run_dir: Another one.
        changes: Fields of SubmittedJob.
    """
    run_dir = run_dir or str(folder / "run")
    payload = Payload((), run_dir, None, "app", (), check_config=False, body=b"")
    values: dict[str, Any] = {
        "start": job_start(run_dir, 1),
        "payload": payload,
        "config_yaml": "",
        "folder": str(folder / "meeting"),
        "first_attempt": 0,
        "master_addr": None,
        "master_port": None,
        "omp_num_threads": None,
        "seed": None,
    }
    return SubmittedJob(**{**values, **changes})
