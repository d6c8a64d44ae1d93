"""One batch of a sweep, top to bottom."""

from __future__ import annotations

import signal
from pathlib import Path

from hydra.core.utils import JobReturn, setup_globals
from omegaconf import DictConfig, OmegaConf

from ._debug import debug_session
from ._dry_run import show_batch
from ._dry_submission import show_submission
from ._follower import Follower
from ._gathering import why_it_ends
from ._jobs import Batch
from ._log_files import log_as_sweep
from ._setup import Sweep
from ._signals import InsistedError
from ._submitted import SubmittedBatch


def run_sweep(sweep: Sweep, job_overrides: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
    """Run one batch of jobs and return one JobReturn a job, in order, whatever failed.

    Args:
        sweep: What `prepare_sweep` returned.
        job_overrides: One list of override strings a job.
        initial_job_idx: Number of the first job.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when every rank is gone.
        SystemExit: after SIGTERM or SIGHUP, likewise; after a dry run's first batch of a sweeper that needs values.
    """
    sweep.spool.stop()
    setup_globals()
    log_as_sweep(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose, sweep.context)
    try:
        if sweep.footprint is not None:
            show = show_batch if sweep.cluster is None else show_submission
            return show(sweep, sweep.footprint, job_overrides, initial_job_idx)
        _make_sweep_dir(sweep.config)
        if sweep.follows:
            return Follower(sweep, job_overrides, initial_job_idx).run()
        try:
            if sweep.cluster is not None:
                return SubmittedBatch(sweep, job_overrides, initial_job_idx).run()
            with debug_session(sweep.settings, len(job_overrides)) as debugging:
                return Batch(sweep, job_overrides, initial_job_idx, debugging).run()
        except InsistedError as error:
            if error.number == signal.SIGINT:
                raise
            raise SystemExit(128 + error.number) from None
    except BaseException as error:
        if sweep.gathering is not None:
            sweep.gathering.leave(why_it_ends(error))
        raise
    finally:
        sweep.spool.clear()
        sweep.spool.record()


def _make_sweep_dir(config: DictConfig) -> None:
    sweep_dir = Path(str(config.hydra.sweep.dir))
    sweep_dir.mkdir(parents=True, exist_ok=True)
    # Not in Hydra's schema, but honoured by its joblib and submitit launchers, too.
    mode = OmegaConf.select(config, "hydra.sweep.mode")
    if mode is not None:
        sweep_dir.chmod(int(str(mode), base=8))
