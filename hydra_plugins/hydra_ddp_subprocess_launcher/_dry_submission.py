"""A dry run of a batch of jobs for a cluster: what would be submitted, without submitting or leaving anything."""

from __future__ import annotations

import sys

from hydra.core.utils import JobReturn

from . import _results, _submitit
from ._commands import shell_comment, shell_words
from ._describe import describe_start
from ._footprint import Footprint
from ._plan import PlannedJob, compose_and_plan
from ._port import ReservedPort
from ._report import override_line, shown
from ._setup import Sweep
from ._specs import JOB_ID_TOKEN
from ._start import Place
from ._words import counted

_ENDS_HERE = "The dry run ends here: what the sweeper asks for next depends on the values of these jobs."
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
    lines, returns, submitted = [], [], 0
    try:
        for number, overrides in enumerate(job_overrides, start=initial_job_idx):
            shown_lines, job_return, is_submitted = _show(sweep, number, overrides)
            lines += shown_lines
            returns.append(job_return)
            submitted += is_submitted
        assert sweep.cluster is not None
        text = (
            _submitit.sbatch_text(sweep.cluster, submitted) if sweep.cluster.executor == "slurm" and submitted else ""
        )
    finally:
        footprint.restore()
    head = f"dry run: {counted(submitted, 'job')} for {sweep.cluster.executor}. Nothing is submitted."
    lines.insert(0, shell_comment(head))
    if text:
        lines += [shell_comment("The file that submitit would hand to sbatch:"), *text.splitlines()]
    if not sweep.has_basic_sweeper:
        lines.append(shell_comment(_ENDS_HERE))
    sys.stdout.write("".join(f"{shown(line)}\n" for line in lines))
    sys.stdout.flush()
    if not sweep.has_basic_sweeper:
        raise SystemExit(0)
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
                return [line], _job_return(sweep, plan, decision.verdict), False
        lines = _job_lines(sweep, plan)
    except Exception as error:  # noqa: BLE001  (a config may raise anything; it is this job's failure alone)
        verdict = _results.failed_before_start(error)
        line = shell_comment(f"{name}: cannot start: {verdict.cause}")
        return [line], _results.make_job_return(overrides, None, "", sweep.task_name, verdict), False
    return [shell_comment(name), *lines], _job_return(sweep, plan, _results.Verdict(completed=True, value=None)), True


def _job_return(sweep: Sweep, plan: PlannedJob, verdict: _results.Verdict) -> JobReturn:
    return _results.make_job_return(plan.overrides, plan.config, plan.run_dir, sweep.task_name, verdict)


def _job_lines(sweep: Sweep, plan: PlannedJob) -> list[str]:
    start = describe_start(sweep, plan, plan.first_attempt, Place((), ReservedPort("", 0, None)), "")
    where = f" on each of {counted(plan.nnodes, 'node')}" if plan.nnodes > 1 else ""
    lines = [
        f"  run directory: {plan.run_dir}",
        f"  ranks: {plan.nproc}{where}",
        f"  each of them runs, in {start.cwd}: {shell_words(start.argv)}",
    ]
    return [shell_comment(line.replace(JOB_ID_TOKEN, _JOB_ID)) for line in lines]
