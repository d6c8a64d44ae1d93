"""The environment of a rank: torchrun's contract, made from what the launching process has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import LaunchSpec
from hydra_plugins.hydra_ddp_subprocess_launcher.job.environment import (
    RANK_VARIABLES,
    error_file,
    group_environment,
    identity,
    ignored_rendezvous,
    rank_environments,
    refuse_as_rank,
    scrub,
    with_omp_threads,
    with_terminal_size,
)
from support.starts import launch_spec


def words(text: str) -> list[str]:
    return text.split()


def start(**changes: Any) -> LaunchSpec:
    """Return a start of a job of two ranks without devices, some of it changed."""
    values: dict[str, Any] = {
        "number": 7,
        "sweep_dir": "/sweep",
        "nproc": 2,
        "master_port": 29511,
        "run_id": "run-1",
        "attempt": 2,
        "restart_count": 1,
        "max_restarts": 3,
        "payload_digest": "ab12",
    }
    return launch_spec("/run", **{**values, **changes})


def test_the_variables_of_a_group() -> None:
    """A job's ranks see what torchrun would set, our own variables, and what the launching process has."""
    assert group_environment({"PATH": "/bin", "OMP_NUM_THREADS": "4"}, start(env_set={"FOO": "job7"})) == {
        "PATH": "/bin",
        "FOO": "job7",
        "OMP_NUM_THREADS": "4",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RUN_ID": "run-1",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "HYDRA_DDP_PAYLOAD_SHA256": "ab12",
        "HYDRA_DDP_ATTEMPT": "2",
        "HYDRA_DDP_JOB_NUM": "7",
        "HYDRA_DDP_SWEEP_DIR": "/sweep",
    }


def test_the_variables_of_each_rank() -> None:
    """A rank's own variables are its numbers and its error file."""
    assert rank_environments({}, start()) == tuple(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "TORCHELASTIC_ERROR_FILE": f"/run/.ddp/run-1/attempt_1/{rank}/error.json",
        }
        for rank in (0, 1)
    )


def test_ranks_on_several_nodes() -> None:
    """Ranks count up over the nodes; local ranks begin anew on each, as torchrun has it."""
    made = start(nproc=3, nnodes=2)
    names = ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_ERROR_FILE")
    files = [error_file(made, rank) for rank in range(6)]
    assert [tuple(own[name] for name in names) for own in rank_environments({}, made)] == [
        ("0", "0", "0", "0", "0", files[0]),
        ("1", "1", "1", "0", "0", files[1]),
        ("2", "2", "2", "0", "0", files[2]),
        ("3", "0", "3", "1", "1", files[3]),
        ("4", "1", "4", "1", "1", files[4]),
        ("5", "2", "5", "1", "1", files[5]),
    ]
    common = group_environment({}, made)
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
    assert [common[name] for name in sizes] == ["6", "3", "2", "6"]


def test_together_they_are_torchruns_contract() -> None:
    """No variable that torchrun sets is missing, and the agent's store stays unset."""
    names = {*group_environment(with_omp_threads({}, None, 2, 2), start()), *rank_environments({}, start())[0]}
    assert names >= {
        *words(
            "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME "
            "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT "
            "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS "
            "PYTHONUNBUFFERED CUDA_DEVICE_ORDER"
        )
    }
    assert "TORCHELASTIC_USE_AGENT_STORE" not in names


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTHONUNBUFFERED", "CUDA_DEVICE_ORDER"]
)
def test_a_users_value_stays(name: str) -> None:
    """A default gives way to what the user exported, and that to the job's `env_set`."""
    base = {name: "mine"}
    assert group_environment(base, start())[name] == "mine"
    assert group_environment(base, start(env_set={name: "job's"}))[name] == "job's"


def test_the_size_of_a_terminal() -> None:
    """Ranks know it unless the user says otherwise; a terminal that has no size tells nothing."""
    size = os.terminal_size((133, 33))
    assert with_terminal_size({}, size) == {"COLUMNS": "133", "LINES": "33"}
    assert with_terminal_size({"COLUMNS": "20"}, size)["COLUMNS"] == "20"
    assert with_terminal_size({}, os.terminal_size((0, 0))) == with_terminal_size({}, None) == {}


def test_without_a_payload() -> None:
    """A rank that composes its own config has no digest to compare, and all the rest."""
    with_one, without = (group_environment({}, start(payload_digest=digest)) for digest in ("ab12", None))
    assert with_one == {**without, "HYDRA_DDP_PAYLOAD_SHA256": "ab12"}


@pytest.mark.parametrize("name", [*RANK_VARIABLES, "TORCHELASTIC_USE_AGENT_STORE", "HYDRA_DDP_ANYTHING"])
def test_env_set_of_the_launchers_own_variables_is_refused(name: str) -> None:
    """`env_set` cannot give a rank another identity: the error names the variable."""
    with pytest.raises(StartError, match=rf"env_set\.{name}='9'"):
        group_environment({}, start(env_set={"FREE": "1", name: "9"}))


@pytest.mark.parametrize("job_id", ["SLURM_JOB_ID", "SUBMITIT_LOCAL_JOB_ID"])
def test_a_scheduler_names_the_rank_only_inside_a_job_of_its_own(job_id: str) -> None:
    """With a scheduler's job id in the environment its names of rank and sizes are the rank's; without, absent."""
    prefix = job_id.removesuffix("JOB_ID")
    made = start(nproc=2, nnodes=2)
    base = {job_id: "12"}
    ranks = [{**group_environment(base, made), **own} for own in rank_environments(base, made)]
    rank = {"SLURM_": "SLURM_PROCID", "SUBMITIT_LOCAL_": "SUBMITIT_LOCAL_GLOBALID"}[prefix]
    names = (rank, f"{prefix}LOCALID", f"{prefix}NODEID", f"{prefix}NTASKS", f"{prefix}JOB_NUM_NODES")
    assert [tuple(one[name] for name in names) for one in ranks] == [
        ("0", "0", "0", "4", "2"),
        ("1", "1", "0", "4", "2"),
        ("2", "0", "1", "4", "2"),
        ("3", "1", "1", "4", "2"),
    ]
    outside = {**group_environment({}, made), **rank_environments({}, made)[0]}
    assert not any(name.startswith(("SLURM_", "SUBMITIT_")) for name in outside)


def test_the_identity_is_what_the_rank_was_started_with() -> None:
    """What the program has changed or removed since does not count; what is not the launcher's is left out."""
    made = start(devices=("4", "6"))
    started = {**group_environment({"PATH": "/bin"}, made), **rank_environments({}, made)[1]}
    found = identity({"RANK": "7", "CUDA_VISIBLE_DEVICES": "0"}, started)
    assert (found["RANK"], found["CUDA_VISIBLE_DEVICES"], found["MASTER_PORT"]) == ("1", "4,6", "29511")
    assert "PATH" not in found and "PYTHONUNBUFFERED" not in found
    # Overwritten by a process title, or not known.
    assert identity(started, {"rank": "title"}) == identity(started, None) == found


@pytest.mark.parametrize(
    ("devices", "variable", "shown"),
    [
        (("4", "6"), "CUDA_VISIBLE_DEVICES", "4,6"),
        (("GPU-1", "MIG-a/1/2"), "HIP_VISIBLE_DEVICES", "GPU-1,MIG-a/1/2"),
    ],
)
def test_devices(devices: tuple[str, ...], variable: str, shown: str) -> None:
    """All ranks of a job see its whole set, in order, ids unchanged."""
    job = start(devices=devices, device_env_var=variable)
    assert group_environment({variable: "0,1,2,3,4,5,6"}, job)[variable] == shown
    assert all(variable not in own for own in rank_environments({}, job))


def test_without_devices_the_variable_is_left_alone() -> None:
    """A job without devices keeps what the environment says, also where that is the job's own config."""
    assert "CUDA_VISIBLE_DEVICES" not in group_environment({}, start())
    base = {"CUDA_VISIBLE_DEVICES": ""}
    assert group_environment(base, start())["CUDA_VISIBLE_DEVICES"] == ""
    assert group_environment(base, start(env_set={"CUDA_VISIBLE_DEVICES": "3"}))["CUDA_VISIBLE_DEVICES"] == "3"


def test_env_set_and_the_pool_contradict() -> None:
    """Devices named by the job and given out by the launcher are one error with both values."""
    with pytest.raises(StartError, match=r"env_set\.CUDA_VISIBLE_DEVICES='5' contradicts .* devices 4,6 of its"):
        group_environment({}, start(env_set={"CUDA_VISIBLE_DEVICES": "5"}, devices=("4", "6")))


SCRUBBED = dict.fromkeys(
    words(
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE GROUP_RANK NODE_RANK "
        "GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NPROCS "
        "SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_STEP_NUM_TASKS SLURM_STEP_ID TORCHELASTIC_RUN_ID "
        "TORCHELASTIC_ERROR_FILE TORCHELASTIC_USE_AGENT_STORE PMI_RANK PMIX_NAMESPACE OMPI_COMM_WORLD_RANK "
        "PL_GLOBAL_SEED PL_TRAINER_GPUS HYDRA_DDP_PAYLOAD_SHA256 HYDRA_DDP_JOB_NUM"
    ),
    "stale",
)
KEPT = {
    "PATH": "/bin",
    "SLURM_JOB_ID": "12",
    "SLURM_CPUS_PER_TASK": "4",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "OMP_NUM_THREADS": "3",
    "NCCL_DEBUG": "INFO",
    "HYDRA_FULL_ERROR": "1",
    "MY_RANK": "1",
}


def test_scrub() -> None:
    """Traces of other launchers go, everything else stays, and the mapping that came in is not touched."""
    inherited = {**SCRUBBED, **KEPT}
    assert scrub(inherited, {}) == KEPT
    assert inherited == {**SCRUBBED, **KEPT}


@pytest.mark.parametrize(
    ("at_start", "kept"),
    [(None, None), ({}, None), ({"PL_GLOBAL_SEED": "42"}, "42")],
    ids=["unknown", "set by Lightning since", "exported by the user"],
)
def test_a_seed_is_kept_only_when_the_user_exported_it(at_start: Mapping[str, str] | None, kept: str | None) -> None:
    """Lightning's seed is the user's choice when it was there at the start, with the value that it had then."""
    assert scrub({"PL_GLOBAL_SEED": "7"}, at_start).get("PL_GLOBAL_SEED") == kept


@pytest.mark.parametrize(
    ("names", "ignored"), [((), []), (("MASTER_PORT",), ["MASTER_PORT"]), (("MASTER_PORT", "MASTER_ADDR"), None)]
)
def test_ignored_rendezvous(names: tuple[str, ...], ignored: list[str] | None) -> None:
    """An inherited address or port is named, so that its being without effect is no surprise."""
    expected = ["MASTER_ADDR", "MASTER_PORT"] if ignored is None else ignored
    assert ignored_rendezvous(dict.fromkeys(("PATH", *names), "x")) == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, ("RANK=1", "WORLD_SIZE=4", "one of 4", "plain `python`")),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, ("OMPI_COMM_WORLD_RANK=0",)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("PMI_RANK=0", "PMI_SIZE=2")),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, ("SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=8")),
        ({"HYDRA_DDP_PAYLOAD_SHA256": "ab"}, ("HYDRA_DDP_PAYLOAD_SHA256", "ranks of ranks")),
        ({"HYDRA_DDP_PAYLOAD_SHA256": ""}, ("HYDRA_DDP_PAYLOAD_SHA256",)),
        ({"HYDRA_DDP_JOB_NUM": "0"}, ("HYDRA_DDP_JOB_NUM", "ranks of ranks")),
    ],
)
def test_one_of_several_processes_is_refused(environ: dict[str, str], named: tuple[str, ...]) -> None:
    """Started as one of several, or within a rank, the error names the variables that tell and the way out."""
    with pytest.raises(StartError) as caught:
        refuse_as_rank(environ)
    for words in (*named, "hydra.launcher.allow_nested=true"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "", "WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "many"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "5"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"NODE_RANK": "3", "LOCAL_RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "0"},
    ],
)
def test_a_single_process_may_launch(environ: dict[str, str]) -> None:
    """Left-over variables, a world of one and an sbatch script are no reason to refuse."""
    refuse_as_rank(environ)


@pytest.mark.parametrize(
    ("inherited", "chosen", "cores", "ranks_at_once", "threads"),
    [
        (None, None, 16, 4, 4),
        (None, None, 4, 4, 1),
        (None, None, 2, 8, 1),
        (None, None, 7, 2, 3),
        (None, None, 8, 0, 8),
        (None, 5, 16, 4, 5),
        ("7", None, 16, 4, 7),
        ("7", 5, 16, 4, 5),
        ("2,2", None, 16, 4, "2,2"),
        ("", None, 16, 4, 4),
        ("2,2", 3, 16, 4, 3),
    ],
)
def test_omp_threads(
    inherited: str | None, chosen: int | None, cores: int, ranks_at_once: int, threads: int | str
) -> None:
    """The option wins over the user's variable, and that over an equal share of the cores; the rest stays."""
    base = {"PATH": "/bin"} if inherited is None else {"PATH": "/bin", "OMP_NUM_THREADS": inherited}
    before = dict(base)
    assert with_omp_threads(base, chosen, cores, ranks_at_once) == {"PATH": "/bin", "OMP_NUM_THREADS": str(threads)}
    assert base == before
