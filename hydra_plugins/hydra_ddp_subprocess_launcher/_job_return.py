"""From a verdict to a JobReturn, which is what a sweeper gets of a job."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from hydra import version
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict, read_write

from ._results import Verdict
from ._spool import KeptConfig


def make_job_return(
    overrides: Sequence[str],
    config: DictConfig | None,
    run_dir: str,
    verdict: Verdict,
    kept: KeptConfig | None = None,
) -> JobReturn:
    """Build what the sweeper gets, from the launching process's own config and the verdict.

    Args:
        overrides: Of the job.
        config: Frozen config, which is used up; None: the job did not compose.
        run_dir: Run directory.
        verdict: How the job ended.
        kept: The config, if it was put by; None: that is done now.
    """
    if config is not None and kept is None:
        kept = KeptConfig.put_by(config)
    job_return = JobReturn() if kept is None else _KeptJobReturn.of(kept)
    job_return.overrides, job_return.task_name = list(overrides), JobRuntime.instance().get("name")
    job_return.status = JobStatus.COMPLETED if verdict.completed else JobStatus.FAILED
    job_return._return_value = verdict.value
    for name, value in verdict.remote:
        if hasattr(job_return, name):
            setattr(job_return, name, value)
    if config is not None:
        # Without those of Hydra's own options, as the basic launcher has it.
        task_overrides = OmegaConf.to_container(config.hydra.overrides.task)
        assert isinstance(task_overrides, list)
        job_return.overrides = task_overrides
        job_return.working_dir = run_dir if _changes_directory(config) else _working_dir(config)
        if kept is None:
            job_return.cfg, job_return.hydra_cfg = _apart(config)
    return job_return


class _KeptJobReturn(JobReturn):
    """A JobReturn whose configs are loaded when they are first looked at: live, those of 500 jobs would take 70 MB.

    Whoever pickles or copies it gets a plain one. `dataclasses.replace` makes one that has its configs at once.
    """

    _kept: KeptConfig

    @classmethod
    def of(cls, kept: KeptConfig) -> _KeptJobReturn:
        """Return one with this frozen config."""
        job_return = cls()
        job_return._kept = kept
        # Then they are looked for in the class.
        del job_return.cfg, job_return.hydra_cfg
        return job_return

    @functools.cached_property
    def cfg(self) -> DictConfig:  # type: ignore[override]
        """Config of the job without Hydra's part."""
        return self._configs[0]

    @functools.cached_property
    def hydra_cfg(self) -> DictConfig:  # type: ignore[override]
        """Hydra's part."""
        return self._configs[1]

    @functools.cached_property
    def _configs(self) -> tuple[DictConfig, DictConfig]:
        return _apart(self._kept.load())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Become what Hydra's own launcher returns."""
        plain = JobReturn(cfg=self.cfg, hydra_cfg=self.hydra_cfg)
        vars(plain).update({name: value for name, value in vars(self).items() if name not in ("_kept", "_configs")})
        # Pickle's own way to make a new object refuses to make one of another class.
        state = plain.__reduce_ex__(2)[2]
        return JobReturn, (), state


def _apart(config: DictConfig) -> tuple[DictConfig, DictConfig]:
    """Move Hydra's part of a config into one of its own, where it is read-only; return both.

    A copy of it, as Hydra makes, would take longer.
    """
    part = config.hydra
    OmegaConf.set_readonly(part, True)
    with read_write(config), open_dict(config):
        del config["hydra"]
    alone = OmegaConf.create()
    with flag_override(alone, "no_deepcopy_set_nodes", True):
        alone.hydra = part
    return config, alone


def _working_dir(config: DictConfig) -> str:
    try:
        return os.getcwd()
    except OSError:
        return str(config.hydra.runtime.cwd)  # Somebody deleted it.


def _changes_directory(config: DictConfig) -> bool:
    # Hydra's own rule: programs that say version_base 1.1 or nothing get the old default.
    chdir = config.hydra.job.chdir
    return bool(chdir) if chdir is not None else not version.base_at_least("1.2")
