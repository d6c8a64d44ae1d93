"""A job before it has a place: composed and frozen."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from . import _freeze, _pickling
from ._entry import FunctionEntry, ProgramEntry, function_body
from ._errors import FreezeError
from ._records import JobRecord
from ._schedule import JobSize
from ._settings import read_size
from ._setup import Sweep
from ._specs import JOB_ID_TOKEN, Payload
from ._spool import KeptConfig
from ._start import Attempt

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedJob:
    """One job, ready to be started.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        config: Its final config.
        kept: The same, put by; None: it was not, or cannot be.
        frozen: What is resolved of it.
        size: How large it is on each node.
        nnodes: Number of nodes.
        payload: What its ranks will read.
        config_yaml: Its own config, not resolved.
        config_hash: SHA-256 of that, hexadecimal.
        known: What an earlier run of the sweep has recorded about it; None: nothing.
    """

    number: int
    overrides: tuple[str, ...]
    config: DictConfig
    kept: KeptConfig | None
    frozen: _freeze.Frozen
    size: JobSize
    nnodes: int
    payload: Payload
    config_yaml: str
    config_hash: str
    known: JobRecord | None = None

    @property
    def first_attempt(self) -> Attempt:
        """Its first start in this run of the sweep."""
        return Attempt(number=self.known.attempts if self.known is not None else 0)

    @property
    def run_dir(self) -> str:
        """Run directory, absolute."""
        return self.frozen.run_dir

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nnodes * self.size.nproc


def compose_job(sweep: Sweep, overrides: Sequence[str]) -> DictConfig:
    """Compose a job's config.

    Raises:
        Exception: whatever composing raises.
    """
    config: DictConfig = sweep.context.config_loader.load_sweep_config(sweep.config, list(overrides))
    return config


def compose_and_plan(sweep: Sweep, number: int, overrides: Sequence[str]) -> PlannedJob:
    """Compose a job's config, unless the sweeper has done so already, and freeze the job.

    Raises:
        Exception: whatever composing raises, and as `plan_job`.
    """
    kept = sweep.spool.take(overrides)
    config = kept.load() if kept is not None else compose_job(sweep, overrides)
    return plan_job(sweep, number, overrides, config)


def plan_job(sweep: Sweep, number: int, overrides: Sequence[str], config: DictConfig) -> PlannedJob:
    """Freeze a job.

    Args:
        sweep: The sweep.
        number: Number of the job.
        overrides: Its override strings.
        config: Composed from them; it is made final in place.

    Raises:
        FreezeError: for what cannot be handed to ranks.
        OptionError: for a size that cannot be.
    """
    _refuse_other_launcher(sweep.config, config)
    config_yaml = _freeze.own_yaml(config)
    config_hash = hashlib.sha256(config_yaml.encode("utf-8", "surrogateescape")).hexdigest()
    known = sweep.earlier.find(number, overrides, sweep.task, config_hash) if sweep.earlier is not None else None
    # Where its checkpoints are.
    run_dir = known.run_dir if known is not None and os.path.isdir(known.run_dir) else None
    # Of jobs on a cluster the id is known when they run.
    job_id = None if sweep.cluster is None else JOB_ID_TOKEN
    frozen = _freeze.freeze(config, number, run_dir, job_id)
    # Not where jobs share a directory on purpose.
    if sweep.earlier is not None and run_dir is None and OmegaConf.is_interpolation(config.hydra.sweep, "subdir"):
        frozen = _freeze.freeze(config, number, sweep.earlier.directory(frozen.run_dir, known), job_id)
    size = (sweep.cluster or sweep.pool).size(*read_size(*frozen.size))
    payload = Payload(
        overrides=tuple(overrides),
        run_dir=frozen.run_dir,
        task=sweep.entry.task if isinstance(sweep.entry, ProgramEntry) else None,
        task_name=sweep.task_name,
        sys_path=sweep.entry.start.sys_path if isinstance(sweep.entry, FunctionEntry) else (),
        check_config=sweep.settings.check_config is not None,
        body=_body(sweep, config),
    )
    nnodes = sweep.settings.nnodes
    # Now, where it costs no time between two jobs.
    kept = KeptConfig.put_by(config) if sweep.cluster is None else None
    return PlannedJob(
        number, tuple(overrides), config, kept, frozen, size, nnodes, payload, config_yaml, config_hash, known
    )


def _refuse_other_launcher(sweep_config: DictConfig, config: DictConfig) -> None:
    """Refuse a job that chose other launcher options, which came too late. Hydra 1.4 does so itself."""
    ours, theirs = (OmegaConf.to_container(one.hydra.launcher, resolve=False) for one in (sweep_config, config))
    assert isinstance(ours, dict) and isinstance(theirs, dict)
    for key in [*ours, *theirs]:
        if ours.get(key) != theirs.get(key):
            raise FreezeError(
                f"This job's config sets hydra.launcher.{key}={theirs.get(key)!r}, but the launcher was made before, "
                f"with {ours.get(key)!r}. Set it for the whole sweep; ranks alone can differ between jobs, by an "
                "interpolation such as hydra.launcher.nproc_per_node='${trainer.devices}'."
            )


def _body(sweep: Sweep, config: DictConfig) -> bytes:
    main = sweep.main
    content: dict[str, object] = {"config": config, "callbacks": _callbacks(sweep)}
    if isinstance(sweep.entry, FunctionEntry):
        content |= function_body(sweep.task_function, sweep.context)
    try:
        return _pickling.dumps(content, main)
    except Exception as error:
        key = _freeze.unpicklable_key(config, lambda value: _pickling.dumps(value, main))
        raise FreezeError(
            f"The job's config cannot be handed to its ranks: {key or error} cannot be pickled. Build such an object "
            "inside the job instead."
        ) from error


def _callbacks(sweep: Sweep) -> bytes | None:
    try:
        return _pickling.dumps(sweep.context.callbacks, sweep.main)
    except Exception as error:  # noqa: BLE001  (a pickle can fail with anything)
        _log.warning(
            "The callbacks cannot be pickled (%s: %s). Ranks make new ones from the config, without their state.",
            type(error).__name__,
            error,
        )
        return None
