"""A start of a job, and a job for a cluster, for tests that need one, but do not start it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import LaunchSpec, Limits, Payload
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.node_task import SubmittedJob


def launch_spec(run_dir: str, nproc: int, run_id: str = "run", **changes: Any) -> LaunchSpec:
    """Return a start of a job.

    Args:
        run_dir: Run directory.
        nproc: Number of ranks on each node.
        run_id: Name of the start.
        changes: Fields of LaunchSpec.
    """
    values: dict[str, Any] = {
        "number": 0,
        "overrides": (),
        "run_dir": run_dir,
        "sweep_dir": run_dir,
        "argv": ("true",),
        "cwd": "/",
        "env_set": {},
        "nproc": nproc,
        "devices_per_rank": 1,
        "nnodes": 1,
        "run_id": run_id,
        "attempt": 0,
        "restart_count": 0,
        "max_restarts": 0,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "devices": None,
        "device_env_var": "CUDA_VISIBLE_DEVICES",
        "locked": (),
        "payload_digest": None,
        "limits": Limits(1.0),
    }
    return LaunchSpec(**{**values, **changes})


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
        "spec": launch_spec(run_dir, 1),
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
