"""What a rank finds in its environment, and what the launching process does with what it finds in its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.notes import BEHAVE, Notes, assert_one_clear_error, behave, behave_environment, notes_of, write_app

if TYPE_CHECKING:
    from support.runner import Runner

AT_ONCE = "hydra.launcher.max_parallel_jobs=2"
# Both jobs are inside their body at the same time.
OVERLAP = ["+j0.r0=[note:here0,wait:here1]", "+j1.r0=[note:here1,wait:here0]"]


# --- the variables


def files_with(runner: Runner, text: bytes) -> set[str]:
    """Return the names of the files of job 0 and of the sweep that have a text and may be read by others."""
    files = [path for path in (runner.cwd / "sweep").rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    return {path.name for path in files if text in path.read_bytes()}


def test_where_a_secret_shows(runner: Runner) -> None:
    """As docs/security.md has it: one of the shell nowhere, also when configs are compared; else in Hydra's files."""
    shell, _ = behave(
        runner,
        "+password='${oc.env:API_TOKEN}'",
        "hydra.launcher.check_config=error",
        "+all=return:1",
        env={"API_TOKEN": "hunter2"},
    )
    assert shell.returncode == 0, shell.output
    assert b"hunter2" in (runner.cwd / "sweep/0/.ddp/config_0.json").read_bytes()
    assert files_with(runner, b"hunter2") == set() and "hunter2" not in shell.output

    shutil.rmtree(runner.cwd / "notes")
    given, _ = behave(runner, "+hydra.job.env_set.API_TOKEN=hunter3", "+all=return:1")
    assert given.returncode == 0, given.output
    assert files_with(runner, b"hunter3") == {"multirun.yaml", "hydra.yaml"} and "hunter3" not in given.output

    shutil.rmtree(runner.cwd / "notes")
    typed, _ = behave(runner, "+api_key=hunter4", "+all=return:1")
    ours, hydras = {"results.csv", "journal.jsonl", "job.json"}, {"multirun.yaml", "overrides.yaml", "config.yaml"}
    assert files_with(runner, b"hunter4") == {*ours, *hydras, "hydra.yaml"} and "hunter4" in typed.output


@pytest.mark.sample
def test_a_rank_has_what_torchrun_sets(runner: Runner) -> None:
    """Every variable of torchrun is there with the value that torchrun would give it."""
    ran, notes = behave(runner, nproc=3)
    assert ran.returncode == 0, ran.output
    environments = [notes.environment(0, rank) for rank in range(3)]
    for rank, environment in enumerate(environments):
        wanted = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "ROLE_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "PYTHONUNBUFFERED": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        assert {name: environment.get(name) for name in wanted} == wanted
        assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
        assert any(name.startswith("HYDRA_DDP_") for name in environment)
        assert 1024 <= int(environment["MASTER_PORT"]) <= 65535
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"):
        assert len({environment[name] for environment in environments}) == 1
    assert environments[0]["TORCHELASTIC_RUN_ID"]
    assert len({environment["TORCHELASTIC_ERROR_FILE"] for environment in environments}) == 3


def test_the_rank_is_in_the_environment_only(runner: Runner) -> None:
    """No argument of a rank holds its rank, all ranks have one command line, and stdin is /dev/null."""
    _, notes = behave(runner)
    first, second = notes.ranks()
    assert first["orig_argv"] == second["orig_argv"]
    assert not any("rank=" in argument.lower() for argument in first["orig_argv"])
    assert first["stdin"] == second["stdin"] == "/dev/null"


def test_jobs_at_once_have_ports_of_their_own(runner: Runner) -> None:
    """Jobs that run at once have different ports, all ranks of one job the same one, and meet there."""
    meeting = [f"+j{job}.all=[note:here{job},wait:here{1 - job},meet]" for job in (0, 1)]
    ran, notes = behave(runner, "x=0,1", *meeting, AT_ONCE)
    assert ran.returncode == 0, ran.output
    ports = [[notes.environment(job, rank)["MASTER_PORT"] for rank in (0, 1)] for job in (0, 1)]
    assert ports[0][0] == ports[0][1] != ports[1][0] == ports[1][1]
    words = [[notes.read(f"end_{job}_{rank}")["value"] for rank in (0, 1)] for job in (0, 1)]
    assert words[0][0] == words[0][1] != words[1][0] == words[1][1]


def test_an_inherited_port_is_ignored_and_said(runner: Runner) -> None:
    """MASTER_ADDR and MASTER_PORT of the shell reach no rank, and one line says so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        shell = {"MASTER_PORT": port, "MASTER_ADDR": "unknown.invalid"}
        ran, notes = behave(runner, "x=0,1", *OVERLAP, AT_ONCE, env=shell)
    assert ran.returncode == 0, ran.output
    environments = [notes.environment(job, 0) for job in (0, 1)]
    assert len({port, *(environment["MASTER_PORT"] for environment in environments)}) == 3
    assert {environment["MASTER_ADDR"] for environment in environments} == {"127.0.0.1"}
    assert len([line for line in ran.output.splitlines() if "MASTER_PORT" in line]) == 1, ran.output


def test_a_fixed_port_is_used(runner: Runner) -> None:
    """`master_port` and `master_addr` of the options are what every rank gets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ran, notes = behave(
        runner, "x=0,1", f"hydra.launcher.master_port={port}", "hydra.launcher.master_addr=127.0.0.2", "+all=meet"
    )
    assert ran.returncode == 0, ran.output
    for job, rank in notes.places():
        environment = notes.environment(job, rank)
        assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.2", str(port))


@pytest.mark.sample
def test_stale_rank_variables_are_taken_out(runner: Runner) -> None:
    """What an earlier launcher, a scheduler or an image left behind reaches no rank; the rest does."""
    stale = {
        "NODE_RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "5",
        "GROUP_RANK": "4",
        "ROLE_NAME": "old",
        "TORCHELASTIC_RESTART_COUNT": "7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    gone = {
        "SLURM_STEP_NUM_TASKS": "1",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "MV2_COMM_WORLD_RANK": "0",
        "JSM_NAMESPACE_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "PL_SOMETHING": "1",
    }
    ran, notes = behave(runner, env={**stale, **gone, "SLURM_JOB_ID": "1", "MY_OWN": "stays"})
    assert ran.returncode == 0, ran.output
    for rank in (0, 1):
        environment = notes.environment(0, rank)
        assert not gone.keys() & environment.keys()
        assert environment["LOCAL_RANK"] == environment["RANK"] == str(rank)
        assert (environment["NODE_RANK"], environment["WORLD_SIZE"]) == ("0", "2")
        assert (environment["GROUP_RANK"], environment["TORCHELASTIC_RESTART_COUNT"]) == ("0", "0")
        assert environment["ROLE_NAME"] != "old"
        assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
        assert environment["MY_OWN"] == "stays"


@pytest.mark.parametrize("start", [{}, {"PL_GLOBAL_SEED": "5"}], ids=["set-by-code", "from-the-shell"])
def test_a_seed_stays_only_from_the_start_environment(runner: Runner, start: dict[str, str]) -> None:
    """PL_GLOBAL_SEED reaches ranks as the shell gave it, never as code in the launching process left it."""
    # Lightning's seed_everything() stores it like this; a rank must not take it for the user's wish.
    app = write_app(runner, "import os\nos.environ.setdefault('PL_GLOBAL_SEED', '9')\n")
    ran = runner.sweep(app, env=behave_environment(runner, **start))
    assert ran.returncode == 0, ran.output
    notes = notes_of(runner)
    assert notes.places() == [(0, 0), (0, 1)]
    for rank in (0, 1):
        assert notes.environment(0, rank).get("PL_GLOBAL_SEED") == start.get("PL_GLOBAL_SEED")


@pytest.mark.sample
def test_env_set_and_env_copy_are_there_before_the_first_import(runner: Runner) -> None:
    """`hydra.job.env_set` of each composed job, and `env_copy`, are in what the process is started with."""
    ran, notes = behave(
        runner,
        "x=0,1",
        "+hydra.job.env_set.FOO=job${hydra:job.num}",
        "+hydra.job.env_set.OMP_NUM_THREADS=5",
        "hydra.job.env_copy=[COPIED]",
        env={"COPIED": "c", "FOO": "outside"},
    )
    assert ran.returncode == 0, ran.output
    for job, rank in notes.places():
        environment = notes.environment(job, rank)
        found = [environment.get(name) for name in ("FOO", "OMP_NUM_THREADS", "COPIED")]
        assert found == [f"job{job}", "5", "c"]


def test_the_launching_process_keeps_its_environment(runner: Runner) -> None:
    """`os.environ` of the launching process is the same before and after the sweep."""
    ran, notes = behave(runner, "x=0,1", "+hydra.job.env_set.FOO=bar", env={"MASTER_PORT": "29500"})
    assert ran.returncode == 0, ran.output
    assert [note["environment_is_as_before"] for note in notes.all("after")] == [True]


MEDDLING = """
import json, os, hydra
from hydra.experimental.callback import Callback

class Meddler(Callback):
    def on_job_start(self, config, **kwargs):
        os.environ["MASTER_ADDR"] = "nowhere.invalid"

FIRST = dict(os.environ)
NAMES = {names!r}
if "RANK" in FIRST:
    os.environ.update(MASTER_PORT="12355", WORLD_SIZE="1", SOME_VISIBLE_DEVICES="a,b,c,d")
    for name in ("LOCAL_RANK", "RANK", "HYDRA_DDP_PAYLOAD_SHA256", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    now = dict(os.environ)
    os.environ.clear()
    changed = [name for name in (*NAMES, "MASTER_ADDR") if now.get(name) != FIRST.get(name)]
    return [changed, now["SOME_VISIBLE_DEVICES"], now["RANK"]]

main()
"""


def test_a_program_that_changes_what_identifies_a_rank(runner: Runner) -> None:
    """Variables changed or removed at module level or by a callback are back in the function, which may clear all.

    The job's line says once which they were.
    """
    names = ["MASTER_PORT", "WORLD_SIZE", "SOME_VISIBLE_DEVICES", "LOCAL_RANK", "RANK", "TORCHELASTIC_RUN_ID"]
    app = runner.cwd / "app.py"
    app.write_text(MEDDLING.replace("{names!r}", repr(names)))
    devices = ["hydra.launcher.devices=[a,b,c,d]", "hydra.launcher.device_env_var=SOME_VISIBLE_DEVICES"]
    meddler = "+hydra.callbacks.meddler={_target_: __main__.Meddler}"
    ran = runner.sweep(app, "+x=1,2", *devices, meddler, "hydra.launcher.tee_ranks=all", nproc=2)
    assert ran.returncode == 0, ran.output
    lines = [line for line in ran.output.splitlines() if all(name in line for name in (*names, "MASTER_ADDR"))]
    assert len(lines) == 2, ran.output
    for devices_of_job in ("a,b", "c,d"):
        assert str([[], devices_of_job, "0"]) in ran.output, ran.output


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+hydra.job.env_set={RANK: 0, WORLD_SIZE: 1}", "RANK"),
        ("+hydra.job.env_set.MASTER_PORT=${hydra:job.num}", "MASTER_PORT"),
        ("+hydra.job.env_set.TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_USE_AGENT_STORE"),
        ("hydra.job.env_copy=[LOCAL_RANK]", "LOCAL_RANK"),
        ("+hydra.job.env_set.CUDA_VISIBLE_DEVICES=1", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_env_set_of_what_identifies_a_rank_is_refused(runner: Runner, override: str, named: str) -> None:
    """No job starts, and one error names the variable."""
    ran, notes = behave(runner, "x=0,1", override, "hydra.launcher.devices=[0,1]", env={"LOCAL_RANK": "0"})
    assert_one_clear_error(ran, named, "env_set")
    assert notes.all("body") == []


def test_a_job_alone_that_sets_what_identifies_a_rank(runner: Runner) -> None:
    """If only the config of one job has such a variable, that job fails before its ranks start; the others run."""
    (runner.cwd / "e").mkdir()
    (runner.cwd / "e" / "good.yaml").write_text("# @package _global_\n{}\n")
    (runner.cwd / "e" / "bad.yaml").write_text("# @package _global_\nhydra:\n  job:\n    env_set:\n      RANK: 0\n")
    ran, notes = behave(runner, "+e=bad,good", f"hydra.searchpath=[file://{runner.cwd}]")
    assert ran.returncode != 0 and "env_set.RANK" in ran.output, ran.output
    assert notes.places() == [(1, 0), (1, 1)]


def test_submitits_job_environment_in_a_rank(runner: Runner) -> None:
    """Inside a job of the cluster, code that asks submitit or reads SLURM's variables finds this rank of its job."""
    app = runner.cwd / "app.py"
    app.write_text(
        "import os, hydra, submitit\n"
        "@hydra.main(version_base=None, config_path=None)\n"
        "def main(cfg):\n"
        "    job = submitit.JobEnvironment()\n"
        "    found = (job.global_rank, job.local_rank, job.num_tasks, job.num_nodes, job.node)\n"
        "    assert found == (int(os.environ['RANK']), int(os.environ['LOCAL_RANK']), 2, 1, 0), found\n"
        "main()\n"
    )
    stale = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SUBMITIT_EXECUTOR": "slurm", **stale}
    ran = runner.sweep(app, env=env, nproc=2)
    assert ran.returncode == 0, ran.output


def test_against_torchrun(runner: Runner) -> None:
    """Every variable that torchrun gives a rank is there with a value of the same shape, at every rank and start."""
    pytest.importorskip("torch")
    script = runner.cwd / "show.py"
    text = "import json, os; open(os.environ['SHOWN'] + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))"
    script.write_text(text)
    shown = str(runner.cwd / "torchrun_")
    torchrun = runner.python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, env={"SHOWN": shown}
    )
    assert torchrun.returncode == 0, torchrun.output
    ran, notes = behave(runner, "x=0,1")
    assert ran.returncode == 0, ran.output
    start = set(runner.environment()) | {"SHOWN"}
    # The agent's own signals and store: ranks here have no agent.
    agents = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE"}
    chosen = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS"}
    of_jobs = []
    for rank in (0, 1):
        theirs = json.loads(Path(f"{shown}{rank}").read_text())
        names = {name for name in theirs if name not in start and not name.startswith(("KMP_", "TORCHINDUCTOR"))}
        for job in (0, 1):
            ours = notes.environment(job, rank)
            assert names - agents <= set(ours)
            fixed = names - agents - chosen
            assert {name: ours[name] for name in fixed} == {name: theirs[name] for name in fixed}
            files = [Path(one["TORCHELASTIC_ERROR_FILE"]) for one in (ours, theirs)]
            assert files[0].parts[-3:] == files[1].parts[-3:] == ("attempt_0", str(rank), "error.json")
            for one, file in zip((ours, theirs), files, strict=True):
                # A folder of this start alone, the same for all ranks, in which libraries put files of their own.
                assert file.parents[2].name.startswith(one["TORCHELASTIC_RUN_ID"])
            assert files[0].parent.is_dir()
            of_jobs.append((job, files[0].parents[2]))
    assert len(set(of_jobs)) == len({folder for _, folder in of_jobs}) == 2


# --- OMP_NUM_THREADS


def threads(notes: Notes) -> int:
    """Return the one value that all ranks have."""
    (value,) = {note["environment"]["OMP_NUM_THREADS"] for note in notes.ranks()}
    return int(value)


def test_the_cores_are_shared_by_the_ranks_that_run_at_once(runner: Runner) -> None:
    """OMP_NUM_THREADS is cores over the ranks that can run at once, at least 1, and is printed."""
    cores = len(os.sched_getaffinity(0))
    ran, notes = behave(runner, nproc=1)
    alone = threads(notes)
    assert 1 <= alone <= cores  # A cgroup may allow less than the affinity does.
    assert re.search(rf"OMP_NUM_THREADS\W+{alone}\b", ran.output), ran.output
    shutil.rmtree(notes.folder)
    behave(runner, nproc=2)
    assert threads(notes) == max(1, alone // 2)
    shutil.rmtree(notes.folder)
    behave(runner, "x=0,1", AT_ONCE, nproc=2)
    assert threads(notes) == max(1, alone // 4)


def test_the_users_number_of_threads_is_left_alone(runner: Runner) -> None:
    """A value in the shell stays, and `omp_num_threads` of the options is used as it is."""
    _, notes = behave(runner, env={"OMP_NUM_THREADS": "7"})
    assert threads(notes) == 7
    shutil.rmtree(notes.folder)
    behave(runner, "hydra.launcher.omp_num_threads=3")
    assert threads(notes) == 3


def test_the_affinity_bounds_the_number_of_threads(runner: Runner) -> None:
    """Under `taskset` to one core a single rank gets one thread."""
    if shutil.which("taskset") is None:
        pytest.skip("needs taskset")
    core = str(min(os.sched_getaffinity(0)))
    argv = ["taskset", "-c", core, sys.executable, str(BEHAVE), "-m", "hydra/launcher=ddp_subprocess"]
    options = ["hydra.launcher.nproc_per_node=1", f"hydra.sweep.dir={runner.cwd / 'sweep'}"]
    ran = runner.run(*argv, *options, env=behave_environment(runner))
    assert ran.returncode == 0, ran.output
    assert threads(notes_of(runner)) == 1


# --- who may sweep


@pytest.mark.sample("rank")
@pytest.mark.parametrize(
    "started_as",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    ],
    ids=["rank", "torchrun", "mpirun", "srun"],
)
def test_one_of_several_ranks_may_not_sweep(runner: Runner, started_as: dict[str, str]) -> None:
    """Started by another launcher, the sweep stops with a sentence that names the variables; no child starts."""
    ran, notes = behave(runner, "x=0,1", env=started_as)
    named = [name for name in started_as if name in ran.output]
    assert len(named) >= 1, ran.output
    assert_one_clear_error(ran, "python", *named, most_lines=3)
    assert notes.all("body") == []
    assert len(notes.all("process")) == 1
    assert not (runner.cwd / "sweep" / "0").exists()


@pytest.mark.parametrize(
    "started_as",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
        },
        {"RANK": "1", "WORLD_SIZE": "2", "ALLOWED": "yes"},
    ],
    ids=["a-world-of-one", "sbatch", "srun-of-one", "allow_nested"],
)
def test_a_single_process_may_sweep(runner: Runner, started_as: dict[str, str]) -> None:
    """A world of one, an sbatch script and a step of one task are single launchers; `allow_nested` is a wish."""
    allowed = ["hydra.launcher.allow_nested=true"] if "ALLOWED" in started_as else []
    ran, notes = behave(runner, *allowed, env=started_as)
    assert ran.returncode == 0, ran.output
    assert notes.places() == [(0, 0), (0, 1)]


def test_a_rank_may_not_sweep(runner: Runner) -> None:
    """The launcher inside a rank, even of a world of one, is one clear error and no fork bomb."""
    ran, notes = behave(runner, "+all=sweep:inner", nproc=1)
    assert ran.returncode == 0, ran.output
    inner = notes.read("inner")
    assert inner["code"] not in (0, None)
    assert "Traceback" not in inner["output"]
    assert "rank" in inner["output"].lower()
    # The launching process, the rank, and the program that was refused.
    assert len(notes.all("process")) == 3


def test_multirun_mode_of_the_config_sweeps_once(runner: Runner) -> None:
    """With `hydra.mode: MULTIRUN` and the launcher in the config, a plain start runs jobs x ranks."""
    (runner.cwd / "config.yaml").write_text(
        "defaults:\n  - override hydra/launcher: ddp_subprocess\n  - _self_\n"
        "x: 0\n"
        "hydra:\n  mode: MULTIRUN\n  launcher:\n    nproc_per_node: 2\n  sweeper:\n    params:\n      x: 1,2\n"
    )
    app = write_app(runner, config="config_path='.', config_name='config'")
    ran = runner.python(app, f"hydra.sweep.dir={runner.cwd / 'sweep'}", env=behave_environment(runner))
    assert ran.returncode == 0, ran.output
    notes = notes_of(runner)
    assert [(note["job"], note["rank"], note["x"]) for note in notes.all("body")] == [
        (0, 0, 1),
        (0, 1, 1),
        (1, 0, 2),
        (1, 1, 2),
    ]
    assert len(notes.ranks()) == 4


def test_without_multirun_one_line_says_that_the_launcher_is_not_used(runner: Runner) -> None:
    """Hydra ignores launchers without `-m`: the program runs as one process, and one line says why."""
    argv = (BEHAVE, "hydra/launcher=ddp_subprocess", f"hydra.run.dir={runner.cwd / 'run'}")
    ran = runner.python(*argv, env=behave_environment(runner))
    assert ran.returncode == 0, ran.output
    notes = notes_of(runner)
    assert len(notes.all("body")) == len(notes.all("process")) == 1
    hints = [line for line in ran.output.splitlines() if "ddp_subprocess" in line]
    assert len(hints) == 1, ran.output
    assert re.search(r"(^|\W)-m\b|--multirun", hints[0])


def test_a_sweep_of_one_job_gives_no_hint(runner: Runner) -> None:
    """`-m` without any sweep is one job on all ranks, and says nothing of a missing `-m`."""
    ran, notes = behave(runner)
    assert notes.places() == [(0, 0), (0, 1)]
    assert not re.search(r"(^|\W)-m\b|--multirun", ran.output), ran.output


# --- output and start of a rank


def test_the_last_line_before_a_crash_is_in_the_log(runner: Runner) -> None:
    """A rank that prints a line and is gone by `os._exit` has its line in its own log file."""
    behave(runner, "+r1=[print:last_words,exit:1]", "hydra.launcher.grace_period_s=1")
    assert "last_words" in (runner.cwd / "sweep" / "0" / ".ddp" / "rank_1.log").read_text()


@pytest.mark.parametrize(("tee_ranks", "shown"), [("null", [0]), ("[1]", [1]), ("all", [0, 1]), ("[]", [])], ids=str)
def test_tee_ranks_says_whose_output_is_shown(runner: Runner, tee_ranks: str, shown: list[int]) -> None:
    """By default rank 0's output is on the terminal, `tee_ranks` picks others, every log has its own."""
    options = [] if tee_ranks == "null" else [f"hydra.launcher.tee_ranks={tee_ranks}"]
    ran, _ = behave(runner, "+r0=print:from_0", "+r1=print:from_1", *options)
    assert ran.returncode == 0, ran.output
    # The overrides are printed, too; what a rank printed stands at the end of its line.
    seen = [rank for rank in (0, 1) if re.search(rf"(?<!:)from_{rank}$", ran.stdout, re.MULTILINE)]
    assert seen == shown, ran.stdout
    for rank in (0, 1):
        assert f"from_{rank}" in (runner.cwd / "sweep" / "0" / ".ddp" / f"rank_{rank}.log").read_text()


@pytest.mark.sample
def test_each_job_can_have_its_own_number_of_ranks(runner: Runner) -> None:
    """An interpolation in `nproc_per_node` is read from each job's own config, `WORLD_SIZE` follows."""
    # The interpolation has to have a usable value in the sweep's own config, too.
    app = write_app(
        runner,
        "from hydra.core.config_store import ConfigStore\nConfigStore.instance().store(name='sized', node={'x': 1})\n",
        config="config_path=None, config_name='sized'",
    )
    ran = runner.sweep(app, "x=1,3", "hydra.launcher.nproc_per_node=${x}", env=behave_environment(runner))
    notes = notes_of(runner)
    assert ran.returncode == 0, ran.output
    assert notes.places() == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert [notes.environment(job, 0)["WORLD_SIZE"] for job in (0, 1)] == ["1", "3"]


def test_a_wrapper_stands_before_every_rank(runner: Runner) -> None:
    """`wrapper` is an argv prefix of each rank's own command."""
    ran, notes = behave(runner, 'hydra.launcher.wrapper=[env,"WRAPPED=it is"]')
    assert ran.returncode == 0, ran.output
    assert [note["environment"].get("WRAPPED") for note in notes.ranks()] == ["it is"] * 2


def test_devices_are_visible_to_all_ranks_of_a_job(runner: Runner) -> None:
    """All ranks of a job see its whole set under the variable that `device_env_var` names, unchanged."""
    options = ["hydra.launcher.devices=[GPU-a,GPU-b,4,6]", "hydra.launcher.device_env_var=SOME_VISIBLE_DEVICES"]
    ran, notes = behave(runner, "x=0,1", *OVERLAP, *options)
    assert ran.returncode == 0, ran.output
    seen = [[notes.environment(job, rank)["SOME_VISIBLE_DEVICES"] for rank in (0, 1)] for job in (0, 1)]
    assert seen[0][0] == seen[0][1]
    assert seen[1][0] == seen[1][1]
    assert sorted([seen[0][0], seen[1][0]]) == ["4,6", "GPU-a,GPU-b"]


def test_environments_are_fresh_for_every_job(runner: Runner) -> None:
    """Each rank of each job is a process of its own that starts from the same environment."""
    ran, notes = behave(runner, "x=0,1")
    assert ran.returncode == 0, ran.output
    assert len({note["pid"] for note in notes.ranks()}) == 4
    names = [set(notes.environment(job, 0)) for job in (0, 1)]
    assert names[0] == names[1]


def test_the_command_line_shows_the_job(runner: Runner) -> None:
    """`ps` shows which job a rank belongs to: its run directory and its overrides stand readable."""
    _, notes = behave(runner, "x=0,1")
    for job in (0, 1):
        pid = notes.read(f"body_{job}_1")["pid"]
        line = " ".join(notes.read(f"process_{pid}")["orig_argv"])
        assert f"x={job}" in line
        assert str(Path(runner.cwd, "sweep", str(job))) in line


def test_one_writer_of_hydras_files(runner: Runner) -> None:
    """Sixteen ranks that start together: `.hydra` is rank 0's alone, whole, and what the basic launcher writes."""
    ran, _ = behave(runner, "x=0,1,2", nproc=16)
    assert ran.returncode == 0, ran.output
    basic = runner.python(
        BEHAVE,
        "-m",
        "x=0,1,2",
        f"hydra.sweep.dir={runner.cwd / 'basic'}",
        env=behave_environment(runner, BEHAVE_AGAIN="1"),
    )
    assert basic.returncode == 0
    for job in range(3):
        ours, theirs = (runner.cwd / name / str(job) for name in ("sweep", "basic"))
        assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()} | {".ddp"}
        for name in ("config.yaml", "overrides.yaml"):
            assert (ours / ".hydra" / name).read_text() == (theirs / ".hydra" / name).read_text()
        assert (ours / ".hydra" / "hydra.yaml").read_text().count("ddp_subprocess") > 0


OF_RANKS = """
import os
from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", -1))

@dataclass
class Config:
    resolved: int = "${oc.env:LOCAL_RANK,-1}"
    imported: int = LOCAL_RANK

ConfigStore.instance().store(name="config", node=Config)

@hydra.main(version_base=None, config_path=None, config_name="config")
def main(cfg):
    print("rank", os.environ["RANK"], "of", LOCAL_RANK, cfg.resolved, cfg.imported)

if __name__ == "__main__":
    main()
"""


def test_what_is_read_at_import(runner: Runner) -> None:
    """The program's own names are each rank's; of a config's field that is made from them, the line is named."""
    (runner.cwd / "app.py").write_text(OF_RANKS)
    ran = runner.sweep(runner.cwd / "app.py", "hydra.launcher.tee_ranks=all")
    assert ran.returncode == 0, ran.output
    for rank in (0, 1):
        assert f"rank {rank} of {rank} {rank} -1" in ran.stdout
    assert f"{runner.cwd / 'app.py'}:13: Config.imported is made from LOCAL_RANK" in ran.output
    assert "${oc.env:LOCAL_RANK}" in ran.output
    assert "Config.resolved" not in ran.output
