"""The options of a sweep, all checked before anything starts, and the context that its batches share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.utils import JobRuntime
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from ..common.choices import Entry, OnCodeChange, OnConfigDifference, Resume, ShowProgress
from ..common.errors import OptionError
from ..common.files import SweepPaths
from ..common.protocol import Limits, RankOptions
from ..common.quoting import GIVEN_JOBS
from ..config import DDPSubprocessLauncherConf
from .frozen_config import program_namespace
from .program import FunctionEntry, ProgramEntry


@dataclass(frozen=True)
class LaunchSettings:
    """The options of one sweep. Names and meanings are those of DDPSubprocessLauncherConf.

    Attributes:
        nproc_per_node: Ranks per node in the sweep's own config, or None for `auto`. A job's own config overrides it.
        devices_per_rank: Likewise.
        devices: Ids of the devices, or None to detect them.
        tee_ranks: Ranks whose output is shown, or None for all.
        limits: The three time limits.
        rank_options: How the process of every rank is set up.
        preload: Modules to import once. None for `auto`, empty for none.
    """

    nproc_per_node: int | None
    devices_per_rank: int
    devices: tuple[str, ...] | None
    device_env_var: str
    jobs_per_device: int
    max_parallel_jobs: int | None
    lock_devices: bool
    min_free_memory_gb: float | None
    omp_num_threads: int | None
    master_addr: str | None
    master_port: int | None
    nnodes: int
    node_rank: int
    max_restarts: int
    limits: Limits
    rank_options: RankOptions
    wrapper: tuple[str, ...]
    preload: tuple[str, ...] | None
    entry: Entry
    tee_ranks: tuple[int, ...] | None
    progress: ShowProgress
    check_config: OnConfigDifference | None
    code_changed: OnCodeChange
    resume: Resume | None
    max_failures: int | None
    stop_running: bool
    allow_nested: bool
    debug: bool
    dry_run: bool


def read_settings(options: Mapping[str, Any]) -> LaunchSettings:
    """Turn the resolved options of `hydra.launcher` into settings.

    Raises:
        OptionError: for an unknown name or a value that cannot be used, naming the key and what is valid.
    """
    check_names(options, DDPSubprocessLauncherConf)
    debug, progress = options["debug"], options["progress"]
    for name in ("timeout_min", "exit_timeout_s"):
        if debug and options[name] is not None:
            raise OptionError(
                f"hydra.launcher.debug=true contradicts hydra.launcher.{name}={options[name]!r}: a job must not be "
                "ended while somebody looks at it. Leave out one of the two."
            )
    nnodes, node_rank = _nodes(options, debug)
    nproc_per_node, devices_per_rank = read_size(options["nproc_per_node"], options["devices_per_rank"])
    return LaunchSettings(
        nproc_per_node=nproc_per_node,
        devices_per_rank=devices_per_rank,
        devices=_ids(options["devices"]),
        device_env_var=_variable_name(options["device_env_var"]),
        jobs_per_device=count("jobs_per_device", options["jobs_per_device"], 1),
        # With several jobs at a time, the nodes could disagree about which one is next.
        max_parallel_jobs=(1 if nnodes > 1 else whole("max_parallel_jobs", options["max_parallel_jobs"], 1, "null")),
        lock_devices=options["lock_devices"],
        min_free_memory_gb=_amount("min_free_memory_gb", options["min_free_memory_gb"]),
        omp_num_threads=whole("omp_num_threads", options["omp_num_threads"], 1, "null"),
        master_addr=_text("master_addr", options["master_addr"]),
        master_port=whole("master_port", options["master_port"], 1, "null", most=65535),
        nnodes=nnodes,
        node_rank=node_rank,
        max_restarts=0 if debug else count("max_restarts", options["max_restarts"]),
        limits=Limits(
            grace_period_s=_amount("grace_period_s", options["grace_period_s"], zero=True) or 0.0,
            timeout_s=_minutes("timeout_min", options["timeout_min"]),
            exit_timeout_s=_amount("exit_timeout_s", options["exit_timeout_s"], zero=True),
        ),
        rank_options=RankOptions(),
        wrapper=_texts("wrapper", options["wrapper"]),
        preload=_modules(options["preload"]),
        entry=options["entry"],
        tee_ranks=_ranks(options["tee_ranks"]),
        # A board would overwrite what is typed.
        progress=ShowProgress.plain if debug and progress is not ShowProgress.none else progress,
        check_config=options["check_config"],
        code_changed=options["code_changed"],
        resume=options["resume"],
        max_failures=whole("max_failures", options["max_failures"], 1, "null"),
        stop_running=options["stop_running"],
        allow_nested=options["allow_nested"],
        debug=debug,
        dry_run=options["dry_run"],
    )


def check_names(options: Mapping[str, Any], conf: Any) -> None:
    """Check that the launcher has all of the given options.

    Args:
        conf: Dataclass of the launcher's options.

    Raises:
        OptionError: naming an unknown option and the valid ones.
    """
    valid = [field.name for field in fields(conf) if field.name != "_target_"]
    unknown = [name for name in options if name not in valid and name not in ("_target_", "_recursive_", "_convert_")]
    if unknown:
        raise OptionError(f"Unknown option hydra.launcher.{unknown[0]}. Valid options: {', '.join(sorted(valid))}.")


def _nodes(options: Mapping[str, Any], debug: bool) -> tuple[int, int]:
    nnodes, node_rank = count("nnodes", options["nnodes"], 1), count("node_rank", options["node_rank"])
    if node_rank >= nnodes:
        raise _bad("node_rank", node_rank, f"a whole number from 0 to nnodes - 1, which is {nnodes - 1}")
    if nnodes == 1:
        return nnodes, node_rank
    if options["master_addr"] is None:
        raise OptionError(
            f"hydra.launcher.nnodes={nnodes} needs hydra.launcher.master_addr. Set it to the name or address of the "
            "node with "
            "node_rank=0, as the other nodes know it."
        )
    if options["max_parallel_jobs"] not in (None, 1) or debug:
        name = "debug=true" if debug else f"max_parallel_jobs={options['max_parallel_jobs']}"
        raise OptionError(
            f"hydra.launcher.{name} contradicts hydra.launcher.nnodes={nnodes}: on several nodes one job runs at a "
            "time, without a terminal. Leave out one of the two."
        )
    return nnodes, node_rank


def read_size(nproc_per_node: Any, devices_per_rank: Any) -> tuple[int | None, int]:
    """Return the number of ranks (None for `auto`) and of devices per rank that a job asks for.

    Raises:
        OptionError: for anything but whole numbers from 1 up, or `auto` for ranks.
    """
    ranks = None if nproc_per_node == "auto" else whole("nproc_per_node", nproc_per_node, 1, "auto")
    return ranks, count("devices_per_rank", devices_per_rank, 1)


def _bad(name: str, value: Any, valid: str) -> OptionError:
    return OptionError(f"hydra.launcher.{name}={value!r} cannot be used. Valid: {valid}.")


def whole(name: str, value: Any, least: int, word: str, most: int | None = None) -> int | None:
    """Return a whole number, or None for `null` if `word` allows that.

    Args:
        least: Smallest valid number.
        word: The valid alternative to a number, for the message; `null` also allows None.
        most: Largest valid number, or None for no limit.

    Raises:
        OptionError: for any other value.
    """
    if value is None and word == "null":
        return None
    # An interpolation into the user's config may give the number as text.
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bound = f"from {least} to {most}" if most is not None else f"from {least} up"
        raise _bad(name, value, f"{word}, or a whole number {bound}")
    return value


def count(name: str, value: int, least: int = 0) -> int:
    """Return a whole number from `least` up.

    Raises:
        OptionError: if it is smaller.
    """
    if value < least:
        raise _bad(name, value, f"a whole number from {least} up")
    return value


def _amount(name: str, value: float | None, *, zero: bool = False) -> float | None:
    if value is not None and (not math.isfinite(value) or value < 0 or (value == 0 and not zero)):
        null = "" if name == "grace_period_s" else "null, or "
        raise _bad(name, value, f"{null}a number {'from' if zero else 'above'} 0")
    return value


def _minutes(name: str, value: float | None) -> float | None:
    minutes = _amount(name, value)
    return None if minutes is None else minutes * 60


def _text(name: str, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise _bad(name, value, "null, or an address")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(part, str) for part in value):
        raise _bad(name, value, "a list of strings")
    return tuple(value)


def _modules(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return ()
    if value == "auto":
        return None
    good = isinstance(value, Sequence) and not isinstance(value, str)
    if not good or not all(isinstance(name, str) and all(map(str.isidentifier, name.split("."))) for name in value):
        raise _bad("preload", value, "null, auto, or a list of modules such as [torch,hydra]")
    return tuple(dict.fromkeys(value))


def _ids(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _bad("devices", value, "null, or a list of ids such as [0,1]")
    ids = tuple(str(part).strip() for part in value)
    if any(not part or "," in part for part in ids):
        raise _bad("devices", value, "a list with one id an element")
    if len(set(ids)) < len(ids):
        raise _bad("devices", value, "a list in which no id stands twice")
    return ids


def _variable_name(value: str) -> str:
    if not value or "=" in value or "\0" in value:
        raise _bad("device_env_var", value, "the name of an environment variable")
    return value


def _ranks(value: Any) -> tuple[int, ...] | None:
    if value == "all":
        return None
    good = isinstance(value, Sequence) and not isinstance(value, str)
    if not good or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in value):
        raise _bad("tee_ranks", value, "all, or a list of ranks such as [0]")
    return tuple(sorted(set(value)))


BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True)
class SweepContext:
    """Everything that all jobs of a sweep share.

    Attributes:
        hydra_context: Hydra's context.
        task_function: The function that a job calls.
        config: The sweep's own config.
        settings: Options of the launcher.
        entry: What ranks run.
        paths: Files of the sweep.
    """

    hydra_context: HydraContext
    task_function: TaskFunction
    config: DictConfig
    settings: LaunchSettings
    entry: ProgramEntry | FunctionEntry
    paths: SweepPaths

    @property
    def main_namespace(self) -> Mapping[str, Any] | None:
        """Namespace of the program's `__main__` for the pickler, or None if ranks have a different `__main__`."""
        return program_namespace(self.task_function) if isinstance(self.entry, ProgramEntry) else None

    @property
    def task_name(self) -> str:
        """Hydra's name of the job function."""
        return str(JobRuntime.instance().get("name"))

    @property
    def task(self) -> str:
        """Name of the function that jobs run, as recorded in the journal."""
        if isinstance(self.entry, FunctionEntry):
            return self.task_name
        return f"{self.entry.task.module}.{self.entry.task.qualname}"

    @property
    def has_one_batch(self) -> bool:
        """Whether the sweeper passes all jobs to `launch()` at once."""
        sweeper = self.config.hydra.sweeper
        return bool(
            sweeper._target_ == GIVEN_JOBS or (sweeper._target_ == BASIC_SWEEPER and sweeper.max_batch_size is None)
        )

    @property
    def sweeper_name(self) -> str:
        """Name of the sweeper's class."""
        return str(self.config.hydra.sweeper._target_).rpartition(".")[2]

    @property
    def has_basic_sweeper(self) -> bool:
        """Whether the sweeper is Hydra's own, which knows all jobs in advance."""
        return self.config.hydra.sweeper._target_ in (BASIC_SWEEPER, GIVEN_JOBS)
