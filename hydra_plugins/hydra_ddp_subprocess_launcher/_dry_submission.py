"""A dry run of a batch of jobs for a cluster: what would be submitted, without submitting or leaving anything."""

from __future__ import annotations

from hydra.core.utils import JobReturn

from . import _results, _submitit
from ._commands import shell_comment, shell_words
from ._describe import describe_start
from ._dry_run import print_dry_run
from ._footprint import Footprint
from ._job_return import make_job_return
from ._plan import PlannedJob, compose_and_plan
from ._port import ReservedPort
from ._report import override_line
from ._setup import Sweep
from ._specs import JOB_ID_TOKEN
from ._start import Place
from ._words import counted

_JOB_ID = "<job id>"


def show_submission(
    sweep: Sweep, footprint: Footprint, job_overrides: list[list[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Print what would be submitted of one batch of jobs, and take back what the sweeper has written.

    Args:
        sweep: What `prepare_sweep` returned.
        footprint: What was there before.
        job_overrides: One list of override strings a job.
        initial_job_idx: Number of the first job.

    Returns:
        One JobReturn a job, in order: completed with None, or failed where the job could not be submitted.

    Raises:
        SystemExit: with 0, where the sweeper would go on from values that there are not.
    """
    cluster = sweep.cluster
    assert cluster is not None
    lines, returns, submitted, text = [], [], 0, ""
    try:
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            shown_lines, job_return, is_submitted = _show(sweep, number, overrides)
            lines += shown_lines
            returns.append(job_return)
            submitted += is_submitted
        if submitted and cluster.executor == "slurm":
            text = _submitit.sbatch_text(cluster, submitted)
    finally:
        footprint.restore()
    head = f"dry run: {counted(submitted, 'job')} for {cluster.executor}. Nothing is submitted."
    lines.insert(0, shell_comment(head))
    if text:
        lines += [shell_comment("The file that submitit would hand to sbatch:"), *text.splitlines()]
    print_dry_run(sweep, lines)
    return returns


def _show(sweep: Sweep, number: int, overrides: list[str]) -> tuple[list[str], JobReturn, bool]:
    """Return the lines about one job, its JobReturn, and whether it would be submitted."""
    name = f"job {number}: {override_line(overrides)}"
    try:
        plan = compose_and_plan(sweep, number, overrides)
        if sweep.earlier is not None:
            decision = sweep.earlier.decide(plan.known, plan.config_yaml, plan.config_hash)
            if decision.verdict is not None:
                line = shell_comment(f"{name}: is not run: {decision.why}")
                return [line], make_job_return(plan.overrides, plan.config, plan.run_dir, decision.verdict), False
        lines = _job_lines(sweep, plan)
    except Exception as error:  # noqa: BLE001  (a config may raise anything; it is this job's failure alone)
        verdict = _results.failed_before_start(error)
        line = shell_comment(f"{name}: cannot start: {verdict.cause}")
        return [line], make_job_return(overrides, None, "", verdict), False
    verdict = _results.Verdict(completed=True, value=None)
    return [shell_comment(name), *lines], make_job_return(plan.overrides, plan.config, plan.run_dir, verdict), True


def _job_lines(sweep: Sweep, plan: PlannedJob) -> list[str]:
    start = describe_start(sweep, plan, plan.first_attempt, Place((), ReservedPort("", 0, None)), "")
    where = f" on each of {counted(plan.nnodes, 'node')}" if plan.nnodes > 1 else ""
    devices = f", {plan.size.devices_per_rank} devices each" if plan.size.devices_per_rank > 1 else ""
    lines = [
        f"  run directory: {plan.run_dir}",
        f"  ranks: {plan.size.nproc}{where}{devices}",
        f"  each of them runs, in {start.cwd}: {shell_words(start.argv)}",
    ]
    return [shell_comment(line.replace(JOB_ID_TOKEN, _JOB_ID)) for line in lines]
