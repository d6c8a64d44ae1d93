"""One start of a job as all its nodes have to know it, and the group of each of them. Free of Hydra."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import _commands
from ._environment import GroupEnvironment, group_environment, rank_environments
from ._files import JobPaths, write_private, write_text
from ._port import ReservedPort
from ._specs import GroupSpec, Limits, Meeting


@dataclass(frozen=True)
class Attempt:
    """Which start of a job this is.

    Attributes:
        number: Starts before this one, for whatever reason.
        restarts: Those of them that followed a failure (`max_restarts`).
        port_clash: Whether one of them followed a port that was taken.
        unanswered: Those of them that no spawner took up.
        why: Why this start follows another; empty for the first.
        since: The first start, monotonic seconds.
    """

    number: int = 0
    restarts: int = 0
    port_clash: bool = False
    unanswered: int = 0
    why: str = ""
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Place:
    """What a job holds while it runs.

    Attributes:
        devices: Ids of its devices; empty: none.
        port: Its rendezvous port.
    """

    devices: tuple[str, ...]
    port: ReservedPort


@dataclass(frozen=True)
class JobStart:
    """One start of a job.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        run_dir: Run directory, absolute.
        argv: Command of its ranks.
        cwd: Directory in which they start.
        env_set: `hydra.job.env_set`, into which Hydra has merged `env_copy`.
        group: What the variables of its ranks are made from.
        limits: Its time limits.
        terminal: Whether rank 0 has the terminal.
        devices_per_rank: Devices that each rank uses, if there are any.
        meeting: Folder in which its nodes meet, absolute; empty: it has one node.
        ignored: Signals that its ranks ignore unless they set a handler.
        hosts: Host names of its nodes on a cluster; empty: it is on none.
    """

    number: int
    overrides: tuple[str, ...]
    run_dir: str
    argv: tuple[str, ...]
    cwd: str
    env_set: Mapping[str, str]
    group: GroupEnvironment
    limits: Limits
    terminal: bool = False
    devices_per_rank: int = 1
    meeting: str = ""
    ignored: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def paths(self) -> JobPaths:
        """Its files."""
        return JobPaths(self.run_dir)

    @property
    def run_id(self) -> str:
        """Name of this start, which every process of it has in its environment."""
        return self.group.run_id


def group_spec(start: JobStart, base: Mapping[str, str], node: int = 0) -> GroupSpec:
    """Return what the keeper of one node needs.

    Args:
        start: The start.
        base: What ranks on that node start from.
        node: Number of the node.

    Raises:
        StartError: when the job's environment contradicts its devices.
    """
    group, paths = start.group, start.paths
    ranks = range(node * group.nproc, (node + 1) * group.nproc)
    return GroupSpec(
        argv=start.argv,
        cwd=start.cwd,
        environment=group_environment(base, start.env_set, group),
        rank_environments=rank_environments(group)[ranks.start : ranks.stop],
        log_files=tuple(map(paths.log, ranks)),
        outcome_files=tuple(map(paths.outcome, ranks)),
        failure_files=tuple(map(paths.failure, ranks)),
        limits=start.limits,
        terminal=start.terminal,
        first_rank=ranks.start,
        meeting=Meeting(start.meeting, node, group.nnodes) if start.meeting else None,
        ignored=start.ignored,
    )


def write_facts(start: JobStart, base: Mapping[str, str], config_yaml: str) -> None:
    """Write what people, and later runs of the sweep, want to know of a job into its folder.

    Args:
        start: Its start.
        base: What all ranks start from.
        config_yaml: Its own config, not resolved.

    Raises:
        OSError: when the folder cannot be written.
        StartError: when the job's environment contradicts its devices.
    """
    write_text(start.paths.facts, json.dumps(job_facts(start, base), indent=2) + "\n")
    write_private(start.paths.config, config_yaml.encode("utf-8", "surrogateescape"))


def job_facts(start: JobStart, base: Mapping[str, str]) -> dict[str, object]:
    """Return what `job.json` has: what is worth knowing about a job; of the environment, what differs from ours.

    Args:
        start: Its start.
        base: What all ranks start from.

    Raises:
        StartError: when the job's environment contradicts its devices.
    """
    ours = os.environ
    environment = group_environment(base, start.env_set, start.group)

    def shown(environment: Mapping[str, str]) -> dict[str, str]:
        changed = {name: value for name, value in environment.items() if ours.get(name) != value}
        return {name: f"${name}" if _commands.is_secret(name) else value for name, value in sorted(changed.items())}

    return {
        "job": start.number,
        "overrides": list(start.overrides),
        "run_dir": start.run_dir,
        "nproc": start.group.world_size,
        "argv": list(start.argv),
        "cwd": start.cwd,
        "environment": shown(environment),
        "environment_removed": sorted(name for name in ours if name not in environment),
        "rank_environments": [shown(own) for own in rank_environments(start.group)],
    }
