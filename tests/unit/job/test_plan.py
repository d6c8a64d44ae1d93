"""From a plan to a start: pure, but for the files that are written."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths, read_payload
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import GroupSpec, LaunchSpec
from hydra_plugins.hydra_ddp_subprocess_launcher.job.plan import (
    Allocation,
    Attempt,
    PlannedJob,
    build_group_spec,
    build_launch_spec,
    refuse_shared_run_dir,
    start_error,
    write_job_files,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.port import ReservedPort
from support.scripted import make_plan, settings

ALLOCATION = Allocation(("4", "6"), ReservedPort("127.0.0.1", 29511, None), ("GPU-4", "GPU-6"))
ATTEMPT = Attempt(number=3, restarts=2)
BASE = {"PATH": "/bin", "OMP_NUM_THREADS": "4"}


@pytest.fixture
def plan(tmp_path: Path) -> PlannedJob:
    return make_plan(tmp_path, 7, ["x=1"], nproc=2)


def start(plan: PlannedJob, rendezvous_dir: str = "", **options: Any) -> LaunchSpec:
    return build_launch_spec(plan, ATTEMPT, ALLOCATION, settings(**options), rendezvous_dir=rendezvous_dir)


# --- the start of a job


def test_the_same_start_but_for_its_name(plan: PlannedJob, tmp_path: Path) -> None:
    """Nothing but the name differs between two starts that are described alike, and nothing is written."""
    first, second = start(plan), start(plan)
    assert first.run_id != second.run_id
    assert replace(first, run_id=second.run_id) == second
    assert list(tmp_path.iterdir()) == []


def test_what_a_start_has(plan: PlannedJob) -> None:
    """Of the plan, of the attempt, of what it was given, and of the options."""
    spec = start(plan, max_restarts=5, device_env_var="HIP_VISIBLE_DEVICES", grace_period_s=3.0, timeout_min=2.0)
    assert (spec.number, spec.overrides, spec.run_dir, spec.argv, spec.cwd) == (
        7,
        ("x=1",),
        plan.run_dir,
        plan.argv,
        plan.cwd,
    )
    assert (spec.nproc, spec.nnodes, spec.world_size, spec.env_set) == (2, 1, 2, {"MINE": "1"})
    assert (spec.attempt, spec.restart_count, spec.max_restarts) == (3, 2, 5)
    assert (spec.master_addr, spec.master_port) == ("127.0.0.1", 29511)
    assert (spec.devices, spec.device_env_var, spec.locked) == (("4", "6"), "HIP_VISIBLE_DEVICES", ("GPU-4", "GPU-6"))
    assert (spec.limits.grace_period_s, spec.limits.timeout_s) == (3.0, 120.0)
    assert spec.rendezvous_dir == ""


def test_a_start_without_devices(plan: PlannedJob) -> None:
    """None, and not an empty list, which would hide all devices from the ranks."""
    allocation = Allocation((), ReservedPort("127.0.0.1", 1, None))
    assert build_launch_spec(plan, ATTEMPT, allocation, settings()).devices is None


def test_each_start_meets_elsewhere(plan: PlannedJob) -> None:
    """On several nodes each start has a directory of its own, so that no node takes an earlier start for this one."""
    first, second = start(plan, "/nodes/7"), start(plan, "/nodes/7")
    assert first.rendezvous_dir == os.path.join("/nodes/7", first.run_id)
    assert first.rendezvous_dir != second.rendezvous_dir


# --- the group of a node


def test_the_group_of_a_node(plan: PlannedJob) -> None:
    """It is made of the start alone: the same again, with one file of each kind and one environment for each rank."""
    spec = start(plan)
    group = build_group_spec(spec, BASE)
    assert build_group_spec(spec, dict(BASE)) == group
    paths = JobPaths(plan.run_dir)
    assert list(group.ranks) == [0, 1]
    assert group.log_files == (paths.log(0), paths.log(1))
    assert group.outcome_files == (paths.outcome(0), paths.outcome(1))
    assert group.failure_files == (paths.failure(0), paths.failure(1))
    assert [own["RANK"] for own in group.rank_environments] == ["0", "1"]
    assert group.environment.items() >= {**BASE, "MINE": "1", "CUDA_VISIBLE_DEVICES": "4,6"}.items()
    assert group.rendezvous is None


def test_the_groups_of_several_nodes(plan: PlannedJob) -> None:
    """Each has its own part of the ranks, and together they have all; what is common to them is alike."""
    spec = start(replace(plan, nnodes=3), "/nodes/7")
    groups = [build_group_spec(spec, BASE, node) for node in range(3)]
    assert [list(group.ranks) for group in groups] == [[0, 1], [2, 3], [4, 5]]
    own = [environment for group in groups for environment in group.rank_environments]
    assert [one["RANK"] for one in own] == list("012345")
    assert [one["LOCAL_RANK"] for one in own] == list("010101")
    assert [one["GROUP_RANK"] for one in own] == list("001122")
    assert groups[0].environment == groups[1].environment == groups[2].environment
    assert groups[0].environment["WORLD_SIZE"] == "6"
    log_files = [path for group in groups for path in group.log_files]
    assert log_files == [JobPaths(plan.run_dir).log(rank) for rank in range(6)]
    met = [group.rendezvous for group in groups]
    assert [(one.folder, one.node, one.nnodes) for one in met if one] == [
        (spec.rendezvous_dir, node, 3) for node in range(3)
    ]


def test_the_process_of_a_rank(plan: PlannedJob) -> None:
    """What is common to the group, and on top of it what the rank has of its own."""
    group = build_group_spec(start(replace(plan, nnodes=2), "/nodes/7"), BASE, 1)
    rank = group.rank(3, (5,), ())
    assert (rank.argv, rank.cwd, rank.held, rank.log_file) == (plan.argv, plan.cwd, (5,), group.log_files[1])
    assert (rank.environment["RANK"], rank.environment["WORLD_SIZE"]) == ("3", "4")


# --- its files


@pytest.fixture
def written(plan: PlannedJob) -> tuple[LaunchSpec, GroupSpec]:
    spec = start(plan)
    group = build_group_spec(spec, {**BASE, "API_TOKEN": "secret"})
    write_job_files(spec, group, plan.payload, "x: 1\n")
    return spec, group


def test_the_payload_is_the_one_that_was_announced(plan: PlannedJob, written: tuple[LaunchSpec, GroupSpec]) -> None:
    """Its digest is the start's, and ranks read from it what was planned."""
    spec, _ = written
    paths = JobPaths(plan.run_dir)
    assert spec.payload_digest == hashlib.sha256(Path(paths.payload).read_bytes()).hexdigest()
    assert read_payload(paths, spec.payload_digest) == plan.payload
    assert Path(paths.payload).stat().st_mode & 0o777 == 0o600


def test_the_files_for_people(plan: PlannedJob, written: tuple[LaunchSpec, GroupSpec]) -> None:
    """The config as it was composed, and the facts of the job, without the values of secrets."""
    paths = JobPaths(plan.run_dir)
    assert Path(paths.config).read_text() == "x: 1\n"
    text = Path(paths.facts).read_text()
    facts = json.loads(text)
    assert (facts["job"], facts["overrides"], facts["argv"]) == (7, ["x=1"], list(plan.argv))
    assert [own["RANK"] for own in facts["rank_environments"]] == ["0", "1"]
    assert facts["environment"]["API_TOKEN"] == "$API_TOKEN"
    assert "secret" not in text


def test_what_an_earlier_start_left(plan: PlannedJob, written: tuple[LaunchSpec, GroupSpec]) -> None:
    """It moves aside: no outcome of it is taken for one of this start."""
    paths = JobPaths(plan.run_dir)
    Path(paths.outcome(0)).write_text("of the first start")
    spec, group = written
    write_job_files(spec, group, plan.payload, "x: 1\n")
    assert not os.path.exists(paths.outcome(0))
    assert (Path(paths.earlier(0)) / "outcome_0.pkl").read_text() == "of the first start"


# --- what cannot be started


def test_a_shared_run_directory(tmp_path: Path) -> None:
    """It is refused however its path is written, naming the job that has it; others are not."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    in_use = [(3, str(tmp_path / "other")), (5, str(tmp_path / "run"))]
    for path in ("run", "link", "other/../run", "run/"):
        with pytest.raises(StartError, match="in use by job 5"):
            refuse_shared_run_dir(str(tmp_path / path), in_use)
    refuse_shared_run_dir(str(tmp_path / "run2"), in_use)
    refuse_shared_run_dir(str(tmp_path / "run"), [])


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (
            PermissionError(13, "Permission denied", "/run/.ddp"),
            ["Permission denied", "/run/.ddp", "hydra.sweep.subdir"],
        ),
        (OSError(24, "Too many open files"), ["Too many open files"]),
        (ValueError("embedded null byte"), ["embedded null byte", "hydra.sweep.subdir"]),
    ],
)
def test_why_it_could_not_be_started(plan: PlannedJob, error: Exception, named: list[str]) -> None:
    """The error names the run directory, why, and what to do; one that says so already stays as it is."""
    found = start_error(error, plan)
    assert isinstance(found, StartError)
    assert all(word in str(found) for word in [*named, plan.run_dir])
    own = StartError("There is no port.")
    assert start_error(own, plan) is own
