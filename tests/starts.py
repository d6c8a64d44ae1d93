"""A start of a job for tests that need one, but do not start it."""

from __future__ import annotations

from typing import Any

from hydra_plugins.hydra_ddp_subprocess_launcher._environment import GroupEnvironment
from hydra_plugins.hydra_ddp_subprocess_launcher._files import JobPaths
from hydra_plugins.hydra_ddp_subprocess_launcher._specs import Limits
from hydra_plugins.hydra_ddp_subprocess_launcher._start import JobStart


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
        error_files=tuple(map(JobPaths(run_dir).error, range(nproc))),
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
