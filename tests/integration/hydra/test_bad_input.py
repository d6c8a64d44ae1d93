"""What cannot work says so in a few clear lines, before any process is started, and hurts nothing else."""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.notes import BEHAVE, Notes, assert_one_clear_error, behave, behave_environment, notes_of, write_app
from support.runner import APPS

if TYPE_CHECKING:
    from support.runner import Ran, Runner

RECORDING = "hydra/sweeper=recording"
UNCHECKED = "hydra/sweeper=unchecked"
AT_ONCE = "hydra.launcher.max_parallel_jobs=2"
# All options that a message about an unknown one has to list.
OPTIONS = [
    "nproc_per_node",
    "devices",
    "device_env_var",
    "max_parallel_jobs",
    "omp_num_threads",
    "master_addr",
    "master_port",
    "timeout_min",
    "exit_timeout_s",
    "grace_period_s",
    "entry",
    "tee_ranks",
    "check_config",
    "code_changed",
    "wrapper",
    "allow_nested",
]


def assert_nothing_started(runner: Runner, notes: Notes) -> None:
    """Only the launching process ever ran the program, and no job folder was made."""
    assert notes.ranks() == []
    assert notes.all("body") == []
    assert len(notes.all("process")) <= 1
    assert not (runner.cwd / "sweep" / "0" / ".ddp").exists()


# --- options


@pytest.mark.sample
def test_an_unknown_option_is_named_and_the_valid_ones_are_listed(runner: Runner) -> None:
    """`+hydra.launcher.bogus=1` passes Hydra, so the launcher itself refuses it."""
    ran, notes = behave(runner, "x=0,1", "+hydra.launcher.bogus=1")
    assert_one_clear_error(ran, "bogus", *OPTIONS)
    assert_nothing_started(runner, notes)


@pytest.mark.parametrize(
    "option",
    [
        "nproc_per_node=0",
        "nproc_per_node=-1",
        "nproc_per_node=many",
        "nproc_per_node=1.5",
        "nproc_per_node=true",
        "nproc_per_node=null",
        "devices=5",
        "devices=[0,0]",
        "max_parallel_jobs=0",
        "max_parallel_jobs=two",
        "omp_num_threads=0",
        "master_port=70000",
        "master_addr=''",
        "timeout_min=-1",
        "exit_timeout_s=-1",
        "grace_period_s=soon",
        "grace_period_s=-1",
        "entry=magic",
        "tee_ranks=some",
        "tee_ranks=[-1]",
        "check_config=maybe",
        "code_changed=perhaps",
        "wrapper=nsys",
        "allow_nested=perhaps",
    ],
)
def test_a_wrong_value_names_its_option(runner: Runner, option: str) -> None:
    """A value that cannot be used is an error that names the option and the value."""
    name, _, value = option.partition("=")
    ran, notes = behave(runner, "x=0,1", f"hydra.launcher.{option}")
    shown = {"''": "''", "true": "True", "null": "None", "[0,0]": "0", "[-1]": "-1"}.get(value, value)
    assert_one_clear_error(ran, name, shown)
    assert_nothing_started(runner, notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(["hydra.launcher.devices=[0]"], ["devices", "1", "2"], id="fewer-devices-than-ranks"),
        pytest.param(
            ["hydra.launcher.master_port=29400", AT_ONCE], ["master_port", "max_parallel_jobs"], id="one-port-two-jobs"
        ),
        pytest.param(
            ["hydra.launcher.devices=[0,1]", "+hydra.job.env_set.CUDA_VISIBLE_DEVICES='1'"],
            ["CUDA_VISIBLE_DEVICES", "env_set", "devices"],
            id="two-wishes-for-the-devices",
        ),
    ],
)
def test_options_that_contradict_each_other(runner: Runner, options: list[str], words: list[str]) -> None:
    """Options that cannot hold together are refused before the first job, both are named."""
    ran, notes = behave(runner, "x=0,1", *options)
    assert_one_clear_error(ran, *words, most_lines=12)
    assert notes.ranks() == []


def test_devices_must_be_visible_to_the_launching_process(runner: Runner) -> None:
    """`devices` outside the visible-devices variable of the shell is refused, with both lists."""
    ran, notes = behave(runner, "hydra.launcher.devices=[0,3]", env={"CUDA_VISIBLE_DEVICES": "3,5,7"})
    assert_one_clear_error(ran, "0", "3,5,7", "CUDA_VISIBLE_DEVICES")
    assert_nothing_started(runner, notes)


def test_a_sweep_over_the_launcher_itself_is_refused(runner: Runner) -> None:
    """Hydra makes a launcher once: a sweep over its options names the key and starts nothing."""
    ran, notes = behave(runner, "hydra.launcher.nproc_per_node=1,2")
    assert ran.returncode != 0
    assert "hydra.launcher.nproc_per_node" in ran.output
    assert_nothing_started(runner, notes)


@pytest.mark.sample
def test_a_wrapper_that_does_not_exist_fails_the_job(runner: Runner) -> None:
    """A command that cannot be started is that job's failure, and names the command."""
    ran, notes = behave(runner, "hydra.launcher.wrapper=[no-such-command]", RECORDING)
    assert_one_clear_error(ran, "no-such-command", most_lines=40)
    assert notes.ranks() == []


# --- folders


@pytest.mark.sample("sweep")
@pytest.mark.parametrize("in_the_way", ["sweep", "sweep/0"])
def test_a_run_directory_that_cannot_be_made(runner: Runner, in_the_way: str) -> None:
    """A file where the directory should be is named, and nothing starts."""
    path = runner.cwd / in_the_way
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    ran, notes = behave(runner)
    assert ran.returncode != 0
    assert str(path) in ran.output
    assert notes.ranks() == []
    assert path.read_text() == "in the way"


def test_one_job_without_a_folder_does_not_hurt_the_others(runner: Runner) -> None:
    """When only job 1's directory cannot be made, jobs 0 and 2 run, and job 1 is FAILED with the path."""
    (runner.cwd / "sweep").mkdir()
    (runner.cwd / "sweep" / "1").write_text("in the way")
    ran, notes = behave(runner, "x=0,1,2", RECORDING)
    assert notes.statuses() == ["COMPLETED", "FAILED", "COMPLETED"]
    assert str(runner.cwd / "sweep" / "1") in notes.returns()[1]["text"]
    assert notes.places() == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert ran.returncode != 0


def test_two_jobs_at_once_may_not_share_a_run_directory(runner: Runner) -> None:
    """The later of two jobs with one run directory at the same time is FAILED with that reason."""
    _, notes = behave(runner, "x=0,1", "hydra.sweep.subdir=same", "+j0.all=[note:running,sleep:2]", AT_ONCE, RECORDING)
    assert notes.statuses() == ["COMPLETED", "FAILED"]
    assert str(runner.cwd / "sweep" / "same") in notes.returns()[1]["text"]
    assert notes.places() == [(0, 0), (0, 1)]


def test_two_jobs_one_after_another_may_share_a_run_directory(runner: Runner) -> None:
    """One after another is allowed: both complete, and both jobs' payloads are still there."""
    ran, notes = behave(runner, "x=0,1", "hydra.sweep.subdir=same", RECORDING)
    assert ran.returncode == 0, ran.output
    assert notes.statuses() == ["COMPLETED", "COMPLETED"]
    assert notes.places("end") == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(list((runner.cwd / "sweep" / "same").rglob("payload.pkl"))) == 2


# --- configs and functions that cannot be handed over


def run_app(runner: Runner, app: Path, *overrides: str) -> tuple[Ran, Notes]:
    return runner.sweep(app, *overrides, env=behave_environment(runner)), notes_of(runner)


# Either makes `model.guard` something that cannot be pickled in the job with x=1 alone.
FROM_A_RESOLVER = """
import threading
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

OmegaConf.register_new_resolver("guard", lambda job: threading.Lock() if job else "none", use_cache=True)
ConfigStore.instance().store(name="guarded", node={"x": 0, "model": {"guard": "${guard:${x}}"}})
"""
FROM_A_CHOICE = """
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf


class Guard:
    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        # Protocol 2 is what Hydra's own YAML files take.
        if protocol > 2:
            raise TypeError("will not be pickled")
        return (str, ("guard",))


store = ConfigStore.instance().store
store(name="guarded", node={"defaults": ["_self_", {"model": "none"}], "x": 0})
store(group="model", name="none", node={"guard": "none"})
store(group="model", name="some", node=OmegaConf.create({"guard": Guard()}, flags={"allow_objects": True}))
"""


@pytest.mark.parametrize(
    ("before", "sweep"),
    [pytest.param(FROM_A_RESOLVER, "x=0,1", id="cached"), pytest.param(FROM_A_CHOICE, "model=none,some", id="value")],
)
def test_a_config_value_that_cannot_be_pickled_names_its_key(runner: Runner, before: str, sweep: str) -> None:
    """The job whose config holds such an object is FAILED, the error names the key, the other job runs."""
    app = write_app(runner, before, config="config_path=None, config_name='guarded'")
    ran, notes = run_app(runner, app, sweep, RECORDING)
    assert notes.statuses() == ["COMPLETED", "FAILED"], ran.output
    assert notes.places() == [(0, 0), (0, 1)]
    assert "model.guard" in notes.returns()[1]["text"]
    assert "model.guard" in ran.output
    assert "Traceback" not in ran.stderr, ran.stderr


def test_a_function_that_cannot_be_pickled_is_an_error_in_function_entry_only(runner: Runner) -> None:
    """A closure over a lock cannot be handed over, which one error says; with the script entry it runs."""
    app = runner.cwd / "app.py"
    app.write_text(
        f"import sys\nsys.path.insert(0, {str(APPS)!r})\nimport behave, hydra, threading\n\n"
        "def make():\n    guard = threading.Lock()\n\n"
        "    @hydra.main(version_base=None, config_path=None, config_name='behave')\n"
        "    def guarded(cfg):\n        with guard:\n            return behave.act(cfg)\n\n    return guarded\n\n"
        "if __name__ == '__main__':\n    make()()\n"
    )
    ran, notes = run_app(runner, app, "x=0,1", "hydra.launcher.entry=function")
    assert_one_clear_error(ran, "function", "pickle", "lock")
    assert_nothing_started(runner, notes)
    shutil.rmtree(notes.folder)
    ran, _ = run_app(runner, app)
    assert ran.returncode == 0, ran.output


def test_an_override_that_does_not_compose_fails_its_job_only(runner: Runner) -> None:
    """With a sweeper that does not check first, that job is FAILED in Hydra's own words, the others run."""
    ran, notes = behave(runner, UNCHECKED, env={"BEHAVE_OVERRIDES": "x=0;nokey=1;x=2"})
    assert notes.statuses() == ["COMPLETED", "FAILED", "COMPLETED"], ran.output
    assert "Could not override 'nokey'" in notes.returns()[1]["text"]
    assert notes.places() == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert [result["overrides"] for result in notes.returns()] == [["x=0"], ["nokey=1"], ["x=2"]]
    assert ran.returncode != 0


def test_a_job_that_chooses_other_launcher_options_is_refused(runner: Runner) -> None:
    """The launcher is made before the jobs: one whose config sets its options is FAILED, naming the key."""
    _, notes = behave(runner, UNCHECKED, env={"BEHAVE_OVERRIDES": "x=0;hydra.launcher.nproc_per_node=3"})
    assert notes.statuses() == ["COMPLETED", "FAILED"]
    assert "hydra.launcher" in notes.returns()[1]["text"]
    assert notes.places() == [(0, 0), (0, 1)]


def test_hydras_own_check_comes_first(runner: Runner) -> None:
    """With the basic sweeper an override that does not compose stops the sweep before any job."""
    ran, notes = behave(runner, "x=0,1", "nokey=1,2")
    assert_one_clear_error(ran, "nokey")
    assert_nothing_started(runner, notes)


# --- ranks started by hand


def start_rank_by_hand(runner: Runner, notes: Notes, job: int, rank: int) -> subprocess.CompletedProcess[str]:
    """Run a rank of an earlier sweep once more, as it was started by the launcher."""
    pid = notes.read(f"body_{job}_{rank}")["pid"]
    process = notes.read(f"process_{pid}")
    return subprocess.run(
        process["orig_argv"],
        env={**process["environment"], "BEHAVE_AGAIN": "yes"},
        cwd=process["cwd"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_rank_can_be_run_again_by_hand(runner: Runner) -> None:
    """With the same command, environment and directory a rank of a finished job runs its body again."""
    _, notes = behave(runner, "x=0,1", nproc=1)
    before = notes.read("body_1_0")
    done = start_rank_by_hand(runner, notes, 1, 0)
    assert done.returncode == 0, done.stderr
    after = notes.read("body_1_0")
    assert after["pid"] != before["pid"]
    assert (after["x"], after["job"], after["output_dir"]) == (before["x"], before["job"], before["output_dir"])


@pytest.mark.sample("missing")
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "swapped", "folder"])
def test_a_payload_that_is_not_the_announced_one_is_refused(runner: Runner, damage: str) -> None:
    """A payload that is missing, damaged or another job's is refused before it is unpickled."""
    _, notes = behave(runner, "x=0,1", nproc=1)
    payload = runner.cwd / "sweep" / "0" / ".ddp" / "payload.pkl"
    content = payload.read_bytes()
    payload.unlink()
    if damage == "cut":
        payload.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        payload.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    elif damage == "swapped":
        shutil.copy(runner.cwd / "sweep" / "1" / ".ddp" / "payload.pkl", payload)
    elif damage == "folder":
        payload.mkdir()
    before = notes.read("body_0_0")
    done = start_rank_by_hand(runner, notes, 0, 0)
    assert done.returncode != 0
    assert "payload" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert notes.read("body_0_0") == before


def test_a_hostile_payload_is_never_unpickled(runner: Runner) -> None:
    """A pickle that somebody put in the payload's place does not run its code."""
    _, notes = behave(runner, nproc=1)
    trap = runner.cwd / "sprung"
    payload = runner.cwd / "sweep" / "0" / ".ddp" / "payload.pkl"
    payload.unlink()
    payload.write_bytes(pickle.dumps(_Trap(str(trap))))
    assert start_rank_by_hand(runner, notes, 0, 0).returncode != 0
    assert not trap.exists()


class _Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_a_run_directory_that_cannot_be_named(runner: Runner) -> None:
    """A NUL in the name of a run directory fails that job, and no other."""
    app = write_app(runner, "from omegaconf import OmegaConf\nOmegaConf.register_new_resolver('nul', lambda: chr(0))")
    subdir = "hydra.sweep.subdir='${oc.select:sub,${hydra:job.num}}'"
    argv = [app, "-m", "hydra/launcher=ddp_subprocess", "hydra/sweeper=unchecked", subdir]
    overrides = "x=1;+sub='${nul:}';x=3"
    env = behave_environment(runner, BEHAVE_OVERRIDES=overrides, PYTHONPATH=str(BEHAVE.parent))
    runner.python(*argv, f"hydra.sweep.dir={runner.cwd / 'sweep'}", env=env)
    assert notes_of(runner).statuses() == ["COMPLETED", "FAILED", "COMPLETED"]


def test_payload_and_outcome_are_private(runner: Runner) -> None:
    """Pickles are readable and writable by their owner alone."""
    behave(runner, "+all=return:5")
    folder = runner.cwd / "sweep" / "0" / ".ddp"
    pickles = [path for path in folder.iterdir() if path.suffix in (".pkl", ".pickle")]
    assert len(pickles) >= 1
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in pickles} == {path.name: "0o600" for path in pickles}


# --- what changes while a sweep runs


def test_editing_a_config_changes_no_job(runner: Runner) -> None:
    """A YAML file that is edited in job 0 is as it was for jobs 1 and 2."""
    config = runner.cwd / "config.yaml"
    config.write_text("x: 0\nb: old\nr0: null\nj0: {}\n")
    app = write_app(runner, config="config_path='.', config_name='config'")
    ran, notes = run_app(runner, app, "x=0,1,2", f"+j0.r0='replace:{config}:old:new'")
    assert ran.returncode == 0, ran.output
    assert "new" in config.read_text()
    assert {(note["job"], note["config"]["b"]) for note in notes.all("body")} == {(0, "old"), (1, "old"), (2, "old")}


def write_editable_app(runner: Runner) -> Path:
    """Write a program with an imported module of its own; both can be edited while it is swept."""
    (runner.cwd / "own_module.py").write_text("WORD = 1\n")
    return write_app(runner, "import own_module\n")


@pytest.mark.sample("app.py")
@pytest.mark.parametrize("edited", ["app.py", "own_module.py"])
def test_edited_code_is_said_once(runner: Runner, edited: str) -> None:
    """Code is not frozen: when the script or its own module is edited, one line names the file, all jobs run."""
    app = write_editable_app(runner)
    ran, notes = run_app(runner, app, "x=0,1,2", f"+j0.r0='append:{runner.cwd / edited}'")
    assert ran.returncode == 0, ran.output
    assert notes.places("end") == [(job, rank) for job in range(3) for rank in (0, 1)]
    said = [line for line in ran.output.splitlines() if "changed" in line and edited in line and "append:" not in line]
    assert len(said) == 1, ran.output


@pytest.mark.parametrize("wish", ["fail", "ignore"])
def test_edited_code_can_fail_jobs_or_be_ignored(runner: Runner, wish: str) -> None:
    """`code_changed=fail` fails the jobs after the edit with the file as reason, `ignore` says nothing."""
    app = write_editable_app(runner)
    ran, notes = run_app(
        runner, app, "x=0,1", f"+j0.r0='append:{app}'", f"hydra.launcher.code_changed={wish}", RECORDING
    )
    if wish == "fail":
        assert notes.statuses() == ["COMPLETED", "FAILED"]
        assert "app.py" in notes.returns()[1]["text"]
        assert notes.places() == [(0, 0), (0, 1)]
    else:
        assert notes.statuses() == ["COMPLETED", "COMPLETED"]
        assert not re.search(r"\bchanged since\b", ran.output)


@pytest.mark.parametrize(("wish", "statuses"), [("warn", "COMPLETED"), ("error", "FAILED"), ("null", "COMPLETED")])
def test_configs_that_differ_between_ranks(runner: Runner, wish: str, statuses: str) -> None:
    """`check_config` names the key whose value differs over the ranks, as a warning or as the job's failure."""
    override = "+mine='${oc.env:RANK}'"
    ran, notes = behave(runner, override, f"hydra.launcher.check_config={wish}", RECORDING)
    assert notes.statuses() == [statuses], ran.output
    if wish == "error":
        assert "mine" in notes.returns()[0]["text"]
    elif wish == "warn":
        # The overrides are printed, too.
        assert [line for line in ran.output.splitlines() if re.search(r"\bmine\b", line) and override not in line]


def test_behave_itself_can_be_swept_with_the_basic_launcher(runner: Runner) -> None:
    """The program of these tests is an ordinary Hydra program (so that its failures are the launcher's)."""
    ran = runner.python(
        BEHAVE, "-m", "hydra/launcher=basic", "x=0,1", f"hydra.sweep.dir={runner.cwd}/s", env=behave_environment(runner)
    )
    assert ran.returncode == 0, ran.output
    assert notes_of(runner).places() == [(0, 0), (1, 0)]
