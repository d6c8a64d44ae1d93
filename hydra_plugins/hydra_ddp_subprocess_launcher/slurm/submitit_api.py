"""What the launching process asks of submitit and SLURM. Only this and `jobs` know submitit's insides."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import config as _config
from ..common import processes, signals
from ..common.choices import OnInterrupt
from ..common.errors import OptionError, StartError
from ..common.text import pluralize
from ..config import DDPOptions, DDPSubprocessLauncherConf
from ..job.settings import LaunchSettings, check_names, count, read_settings, whole
from ..records.events import JobRecord
from ..resources.schedule import JobSize, asked_options

# Of a name and value that submitit's executors take when they are made, not with the other parameters.
_INIT_OPTIONS = ("submitit_folder", "max_num_timeout")
# Seconds for a command of SLURM; its own timeouts are shorter.
_COMMAND_S = 60.0
# Seconds for submitit's process to see that the task of a local job has ended, and to end itself.
_CONTROLLER_S = 10.0
# Seconds for the last processes of a job to go: SLURM's KillWait is 30, where nobody has changed it.
_COMPLETING_S = 90.0
_COMPLETING_INTERVAL_S = 0.5
# SLURM's words for a job that it will not run any more, and submitit's for one on this machine; PREEMPTED may be
# followed by another run. What is not known here may still be there.
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("REVOKED", "TIMEOUT", "GONE", "FINISHED", "INTERRUPTED", "NO PROCESS"),
)
# Seconds for which an answer of SLURM about its queue holds.
_QUEUE_AGE_S = 1.0
# SLURM's words for a job that has ended for good, beside those that submitit counts as such.
_HINTS = {
    "OUT_OF_MEMORY": "Ask for more memory (hydra.launcher.mem_gb).",
    "TIMEOUT": "Ask for more time (hydra.launcher.timeout_min), or let jobs be started again (max_num_timeout).",
    "NODE_FAIL": "A node failed: run it again (hydra.launcher.resume=failed).",
    "PREEMPTED": "It was preempted and not queued again: run it again (hydra.launcher.resume=failed).",
    "CANCELLED": "Somebody cancelled it, as by scancel.",
    "GONE": "SLURM's accounting (sacct) knows nothing of it, and it is not in the queue any more.",
}


def make_executor(cluster: Cluster) -> Any:
    """Return submitit's executor.

    Raises:
        OptionError: when it refuses the options, or is not available here.
    """
    import submitit

    folder = cluster.queue["submitit_folder"]
    init = {"slurm_max_num_timeout": cluster.queue["max_num_timeout"]} if cluster.executor == "slurm" else {}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster.executor, **init)
        executor.update_parameters(**executor_parameters(cluster))
    except (AssertionError, NameError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"submitit refuses the options of hydra.launcher: {error}") from error
    return executor


def folder_of(cluster: Cluster) -> str:
    """Return where submitit keeps its files, absolute, with its marks for a job's id."""
    return str(Path(cluster.queue["submitit_folder"]).expanduser().absolute())


def executor_parameters(cluster: Cluster) -> dict[str, Any]:
    """Return what submitit's AutoExecutor is to be told; what only one executor knows has its name before it."""
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

    shared = {field.name for field in fields(BaseQueueConf)}
    return {
        name if name in shared else f"{cluster.executor}_{name}": value
        for name, value in cluster.queue.items()
        if name not in _INIT_OPTIONS and value is not None
    }


def sbatch_text(cluster: Cluster, jobs: int) -> str:
    """Return the file that would be handed to sbatch, also where there is no SLURM.

    Args:
        jobs: How many there are.
    """
    from submitit.slurm import slurm

    # Past its __init__, which insists on `srun`.
    executor: Any = object.__new__(slurm.SlurmExecutor)
    executor.python = shlex.quote(sys.executable)
    executor.folder = Path(folder_of(cluster))
    parameters = {name.removeprefix("slurm_"): value for name, value in executor_parameters(cluster).items()}
    return str(
        slurm._make_sbatch_string(
            command=executor._submitit_command_str,
            folder=executor.folder,
            map_count=jobs if jobs > 1 else None,
            **executor._convert_parameters(parameters),
        )
    )


@contextlib.contextmanager
def outside_allocation() -> Iterator[None]:
    """Hide the variables of an allocation in which this process runs: a job submitted from it would inherit them."""
    import submitit

    if "SLURM_JOB_ID" not in os.environ and "SUBMITIT_EXECUTOR" not in os.environ:
        yield
        return
    with submitit.helpers.clean_env():
        yield


@contextlib.contextmanager
def undisturbed(cluster: Cluster) -> Iterator[None]:
    """Hold signals to stop back while jobs are submitted: `sbatch` would end, and nobody know what it has submitted."""
    if cluster.executor != "slurm":
        # Its jobs are started here, and would inherit that.
        yield
        return
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def cancel(jobs: Sequence[Any]) -> str:
    """Cancel submitit's jobs, those of SLURM by one command; return what went wrong, if anything did."""
    ids = []
    for job in jobs:
        if type(job).__name__ == "SlurmJob":
            ids.append(job.job_id)
        elif job._process is not None:
            job.cancel(check=False)
        elif _is_controller(job.job_id):
            # Another process started it. As submitit's own `cancel`.
            signals.send_signal([int(job.job_id)], signal.SIGINT)
    return scancel(*ids) if ids else ""


def scancel(*ids: str) -> str:
    """Cancel jobs of SLURM; return what went wrong, if anything did."""
    return _command("scancel", *ids)[1]


def is_of_a_command(error: Exception) -> bool:
    """Return whether a command that submitit has called has failed, and not submitit itself."""
    return isinstance(error, subprocess.SubprocessError)


def was_ended(error: Exception) -> bool:
    """Return whether that command was ended by a signal."""
    return isinstance(error, subprocess.CalledProcessError) and error.returncode < 0


def _command(*argv: str) -> tuple[str, str]:
    """Return what a command of SLURM has printed, and what went wrong, if anything did."""
    try:
        # In a session of its own: the second Ctrl-C at a terminal shall not end it.
        ran = subprocess.run(
            argv, check=False, capture_output=True, text=True, timeout=_COMMAND_S, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return ran.stdout, (ran.stderr.strip() or f"{argv[0]}: exit code {ran.returncode}") if ran.returncode else ""


def _is_controller(job_id: str) -> bool:
    """Return whether a local job of another process still has its process, and not another one has its number."""
    try:
        words = Path(f"/proc/{job_id}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return not Path("/proc/self").exists() and processes.is_running(int(job_id))
    # One that is a zombie has no words any more.
    return b"submitit.local._local" in words


def still_there(record: JobRecord) -> str:
    """Return the state of a job that an earlier launching process has submitted, if it has not ended; else empty.

    Raises:
        StartError: when the cluster does not say.
    """
    if not record.job_id or record.state.over:
        return ""
    if record.executor == "local":
        return "RUNNING" if _is_controller(record.job_id) else ""
    # Not accounting, which hears of a job late, and of none where it is off.
    said, wrong = _QUEUE.state_of(record.job_id)
    until = time.monotonic() + _COMPLETING_S
    while said == "COMPLETING" and time.monotonic() < until:
        # What is left of it has the run directory yet, but it does not run any more.
        time.sleep(_COMPLETING_INTERVAL_S)
        said, wrong = _QUEUE.state_of(record.job_id)
    if wrong:
        raise StartError(
            f"Whether job {record.job_id} is still on the cluster cannot be found out: {wrong}. Start the sweep where "
            "`squeue` works, or choose another hydra.sweep.dir."
        )
    return said


class _Queue:
    """What SLURM has of this user's jobs: asked for all at once, as there may be hundreds, and seldom."""

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._states: dict[str, str] = {}
        self._wrong = ""

    def state_of(self, job_id: str) -> tuple[str, str]:
        """Return the state of a job that waits or runs; empty: it does not; and what went wrong, if anything did."""
        if time.monotonic() > self._asked_at + _QUEUE_AGE_S:
            said, self._wrong = _command("squeue", "-h", "-r", "-u", str(os.getuid()), "-o", "%i %T")
            self._asked_at = time.monotonic()
            rows = (line.split() for line in said.splitlines())
            self._states = {row[0]: row[1] for row in rows if len(row) == 2 and not has_ended(row[1])}
        return self._states.get(job_id, ""), self._wrong


_QUEUE = _Queue()


def reap_controller(job: Any) -> None:
    """Wait for submitit's own process of a local job that is over, else it would outlive the job as a zombie."""
    if type(job).__name__ == "LocalJob" and job._process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job._process.wait(_CONTROLLER_S)


def find_job(cluster: Cluster, job_id: str) -> Any:
    """Return submitit's job with an id, of another process."""
    from submitit.local import local
    from submitit.slurm import slurm

    kind = slurm.SlurmJob if cluster.executor == "slurm" else local.LocalJob
    return kind(folder=cluster.queue["submitit_folder"], job_id=job_id, tasks=list(range(cluster.nodes)))


def state_of(job: Any, *, ask: bool = False) -> str:
    """Return the cluster's word for the state of submitit's job; `UNKNOWN` where it has none.

    Args:
        ask: Ask the cluster in any case, and not only when the last answer is old.
    """
    if type(job).__name__ == "LocalJob" and job._process is None:
        # Another process started it; its id is its pid.
        return "RUNNING" if _is_controller(job.job_id) else "FINISHED"
    if type(job).__name__ == "LocalJob":
        return str(job.state)
    state = str(job.watcher.get_state(job.job_id, mode="force" if ask else "standard"))
    if not has_ended(state) and not state.startswith("PREEMPTED"):
        return state
    # Accounting tells of each run of a job. Whether it is queued again after this one, the controller knows.
    queued, wrong = _QUEUE.state_of(job.job_id)
    if wrong:
        return "UNKNOWN"
    # One that a dead node has cost is put into the queue while its other nodes are still being cleaned.
    if not queued or (queued == "COMPLETING" and not state.startswith("NODE_FAIL")):
        return state
    job.watcher._finished.discard(job.job_id)
    return queued


def is_queued(job: Any) -> bool:
    """Return whether SLURM may still have a job, be it that its last processes are about to end."""
    return type(job).__name__ == "SlurmJob" and any(_QUEUE.state_of(job.job_id))


def is_gone(job: Any) -> bool:
    """Return whether SLURM has no job any more of which accounting knows nothing, as where it is off."""
    if type(job).__name__ == "LocalJob":
        return False
    return not any(_QUEUE.state_of(job.job_id))


def has_ended(state: str) -> bool:
    """Return whether the cluster will not run a job any more, by its state; not so for PREEMPTED, which may follow."""
    return state.startswith(_ENDED)


def how_to_cancel(record: JobRecord) -> str:
    """Return a sentence, without its end, on how to cancel a job."""
    command = "kill -INT" if record.executor == "local" else "scancel"
    return f"Cancel it with `{command} {record.job_id}`"


def hint(state: str) -> str:
    """Return what to do about a job that the cluster has ended; may be empty."""
    return next((words for name, words in _HINTS.items() if state.startswith(name)), "")


_GPUS = re.compile(r"(?:^|,)\s*gpu(?::[^:,(]+)*?(?::(\d+))?(?=[(,\s]|$)")


@dataclass(frozen=True)
class Cluster:
    """What jobs ask of submitit.

    Attributes:
        executor: Submitit's name of it: `slurm` or `local`.
        nodes: Nodes of a job.
        gpus: Devices of a job on each node; None: it asks for none.
        on_interrupt: That option.
        max_parallel_jobs: Most jobs that are submitted at a time; None: all.
        queue: Submitit's own options.
    """

    executor: str
    nodes: int
    gpus: int | None
    on_interrupt: OnInterrupt
    max_parallel_jobs: int | None
    queue: Mapping[str, Any]

    def size(self, nproc: int | None, devices_per_rank: int = 1) -> JobSize:
        """Return the size of a job on each node.

        Args:
            nproc: Ranks that it asks for; None: as many as the devices do for, 1 without devices.
            devices_per_rank: Devices for each of them.

        Raises:
            OptionError: when there would be fewer devices than the ranks use.
        """
        size = JobSize(nproc or max(1, (self.gpus or 1) // devices_per_rank), devices_per_rank)
        if self.gpus is not None and size.devices > self.gpus:
            raise OptionError(
                f"{asked_options(nproc, devices_per_rank)} does not fit: the job asks for "
                f"{pluralize(self.gpus, 'GPU')} on each node. Ask for fewer ranks, or set hydra.launcher.gpus_per_node."
            )
        return size


def read_cluster(options: Mapping[str, Any], executor: str) -> tuple[LaunchSettings, Cluster]:
    """Turn the resolved options of `hydra.launcher` into settings.

    Raises:
        OptionError: for an unknown name or a value that cannot be used, naming the key and what is valid.
    """
    conf = _config.DDPSubmititSlurmConf if executor == "slurm" else _config.DDPSubmititLocalConf
    check_names(options, conf)
    ours = {field.name for field in fields(DDPOptions)}
    defaults = vars(DDPSubprocessLauncherConf())
    shared = {name: value for name, value in options.items() if name in ours}
    settings = read_settings({**defaults, **shared, "devices": []})
    if options["tasks_per_node"] != 1:
        tasks = options["tasks_per_node"]
        raise OptionError(
            f"hydra.launcher.tasks_per_node={tasks!r} cannot be used: one task a node starts all ranks of that node. "
            f"Set hydra.launcher.nproc_per_node={tasks} instead."
        )
    nodes = count("nodes", options["nodes"], 1)
    if nodes > 1 and executor == "local":
        raise OptionError(
            f"hydra.launcher.nodes={nodes} cannot be used: hydra/launcher=ddp_submitit_local has this machine alone. "
            "Leave it out, or use hydra/launcher=ddp_submitit_slurm."
        )
    not_submitits = {*ours, "_target_", "_recursive_", "_convert_", "on_interrupt", "max_parallel_jobs"}
    cluster = Cluster(
        executor=executor,
        nodes=nodes,
        gpus=_gpus(options),
        on_interrupt=options["on_interrupt"],
        max_parallel_jobs=whole("max_parallel_jobs", options.get("max_parallel_jobs"), 1, "null"),
        queue={name: value for name, value in options.items() if name not in not_submitits},
    )
    return replace(settings, nnodes=nodes), cluster


def _gpus(options: Mapping[str, Any]) -> int | None:
    """Return the GPUs that a job gets on each node by submitit's options, of which several ask for some."""
    # A task is a node here.
    for name in ("gpus_per_node", "gpus_per_task"):
        if options.get(name):
            return count(name, options[name])
    more = {str(name).replace("-", "_"): value for name, value in (options.get("additional_parameters") or {}).items()}
    for name in ("gpus_per_node", "gpus_per_task"):
        if more.get(name):
            # Such as 8, or a100:8.
            number = str(more[name]).rpartition(":")[2]
            return int(number) if number.isdecimal() else 1
    found = _GPUS.search(str(options.get("gres") or more.get("gres") or ""))
    return None if found is None else int(found[1] or 1)
