"""Options of the launchers that go through submitit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from . import config as _config
from ._choices import OnInterrupt
from ._errors import OptionError
from ._schedule import JobSize, asked_options
from ._settings import LaunchSettings, check_names, count, read_settings, whole
from ._words import counted
from .config import DDPOptions, DDPSubprocessLauncherConf

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
                f"{counted(self.gpus, 'GPU')} on each node. Ask for fewer ranks, or set hydra.launcher.gpus_per_node."
            )
        return size


def read_cluster(options: Mapping[str, Any], executor: str) -> tuple[LaunchSettings, Cluster]:
    """Turn the resolved options of `hydra.launcher` into settings.

    Args:
        options: The options.
        executor: `slurm` or `local`.

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
