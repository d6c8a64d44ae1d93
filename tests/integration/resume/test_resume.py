"""A sweep that goes on where an earlier run of it ended, and one that ends after too many failures."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.documented import ROOT
from support.notes import write_talk
from support.runner import APPS, PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Ran, Runner

TALK = APPS / "talk.py"


def arguments(*overrides: str, nproc: int = 1, at_once: int = 1, app: Path = TALK) -> list[str]:
    return [
        str(app),
        "-m",
        "hydra/launcher=ddp_subprocess",
        f"hydra.launcher.nproc_per_node={nproc}",
        f"hydra.launcher.max_parallel_jobs={at_once}",
        "hydra.sweep.dir=sweep",
        *overrides,
    ]


def sweep(runner: Runner, *overrides: str, **options: Any) -> Ran:
    return runner.python(*arguments(*overrides, **options), env={"TALK_DIR": str(runner.cwd)})


def resume(runner: Runner, *overrides: str, what: str = "unfinished", **options: Any) -> Ran:
    return sweep(runner, f"hydra.launcher.resume={what}", *overrides, **options)


def ran(runner: Runner) -> list[dict[str, Any]]:
    """Return what the jobs noted, in order."""
    path = runner.cwd / "ran.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def began(runner: Runner) -> list[int]:
    return [int(note["HYDRA_DDP_JOB_NUM"]) for note in ran(runner) if note["what"] == "began"]


def table(runner: Runner) -> list[dict[str, str]]:
    with (runner.cwd / "sweep" / ".ddp" / "results.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def decisions(result: Ran) -> dict[int, str]:
    """Return what was said about each job: whether it is run, and why."""
    found = re.findall(r"\t#(\d+) : .* : (is (?:not )?run: .*)$", result.stdout, re.MULTILINE)
    return {int(number): said for number, said in found}


@pytest.mark.sample
def test_what_is_done_is_not_run_again(runner: Runner) -> None:
    """Completed jobs give their values again, in order, and only the others run; it is said why of each."""
    first = sweep(runner, "x=1,2,3,4", "fail_once=true,false", "value=list")
    assert first.returncode == 1
    assert began(runner) == list(range(8))
    second = resume(runner, "x=1,2,3,4", "fail_once=true,false", "value=list")
    assert second.returncode == 0, second.output
    assert began(runner)[8:] == [0, 2, 4, 6]
    assert decisions(second) == {
        number: "is not run: done" if number % 2 else "is run: failed before (rank 0: ValueError: bad the first time)"
        for number in range(8)
    }
    assert [row["status"] for row in table(runner)] == ["COMPLETED"] * 8
    assert [float(row["value.1"]) for row in table(runner)] == [(number // 2 + 1) / 3 for number in range(8)]
    assert [row["attempts"] for row in table(runner)] == ["2", "1"] * 4
    again = [note for note in ran(runner)[12:] if note["what"] == "began"]
    assert all(note["HYDRA_DDP_ATTEMPT"] == "1" for note in again)
    third = resume(runner, "x=1,2,3,4", "fail_once=true,false", "value=list")
    assert third.returncode == 0 and len(began(runner)) == 12
    assert set(decisions(third).values()) == {"is not run: done"}


VALUES = """
class Thing:
    def __init__(self, x):
        self.x = x
    def __eq__(self, other):
        return type(other) is Thing and other.x == self.x

VALUES = [None, 3, 0.1, "text", (1, 2.5), {"a": [1]}, float("inf"), Thing(7)]
"""
CHECKED = """
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.sweep import Sweep
seen = []
launch = Sweep.launch
def wrapped(*args):
    returned = launch(*args)
    seen.extend((r.return_value, r.status.name, r.overrides, r.cfg.x, r.hydra_cfg.hydra.job.num) for r in returned)
    return returned
Sweep.launch = wrapped
main()
assert [one[0] for one in seen] == VALUES, seen
assert [type(one[0]) for one in seen] == [type(one) for one in VALUES], seen
assert [one[1:] for one in seen] == [("COMPLETED", [f"x={n}"], n, n) for n in range(8)], seen
print("all as they were")
"""


def write_returning(runner: Runner) -> Path:
    """Write a program whose jobs return values of many types, and which looks at what its sweeper gets."""
    return write_talk(runner, VALUES, body="talk.main.__wrapped__(cfg)\nreturn VALUES[cfg.x]", program=CHECKED)


def test_values_keep_their_types(runner: Runner) -> None:
    """Of a job that is not run the sweeper gets what it would have got else: value with its type, config, number."""
    app = write_returning(runner)
    first = sweep(runner, "x=0,1,2,3,4,5,6,7", app=app, at_once=3)
    assert "all as they were" in first.stdout, first.output
    second = resume(runner, "x=0,1,2,3,4,5,6,7", app=app)
    assert "all as they were" in second.stdout, second.output
    assert len(began(runner)) == 8


def test_a_value_whose_file_is_gone(runner: Runner) -> None:
    """Where the run directory was deleted the journal has the value, if JSON could hold it; else the job is run."""
    sweep(runner, "x=1,2")
    for number in (0, 1):
        for file in (runner.cwd / "sweep" / str(number) / ".ddp").glob("outcome*"):
            file.unlink()
    second = resume(runner, "x=1,2")
    assert second.returncode == 0 and began(runner) == [0, 1]
    assert [row["value"] for row in table(runner)] == ["0.5", "0.5"]


@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_moment(runner: Runner, seed: int) -> None:
    """After `kill -9` no job that had ended runs again, every other one does, and the table is as if nothing was."""
    choose = random.Random(seed)
    argv = arguments("x=range(12)", "value=list", "lines=1", "every_s=0.05", at_once=3)
    process = runner.start(sys.executable, *argv, env={"TALK_DIR": str(runner.cwd)})
    with process:
        runner.wait_until(lambda: ran(runner) or process.poll() is not None)
        time.sleep(choose.uniform(0, 2.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    runner.assert_nothing_left()
    journal = (runner.cwd / "sweep" / ".ddp" / "journal.jsonl").read_text().splitlines()
    ended = {json.loads(line)["job"] for line in journal if '"JobEnded"' in line}
    # What had ended though the launching process could not write it down any more.
    ended |= {int(file.parts[-3]) for file in (runner.cwd / "sweep").glob("*/.ddp/outcome_0.pkl")}
    before = began(runner)
    second = resume(runner, "x=range(12)", "value=list", "lines=1", "every_s=0.05", at_once=3)
    assert second.returncode == 0, second.output
    assert sorted(began(runner)[len(before) :]) == sorted(set(range(12)) - ended)
    rows = table(runner)
    assert [row["job"] for row in rows] == [str(number) for number in range(12)]
    assert [(float(row["value.0"]), float(row["value.1"])) for row in rows] == [(n, n / 3) for n in range(12)]
    assert {row["status"] for row in rows} == {"COMPLETED"}
    for number in range(12):
        spans = [note for note in ran(runner) if note["HYDRA_DDP_JOB_NUM"] == str(number)]
        assert all(a["what"] != b["what"] or a["pid"] != b["pid"] for a, b in pairwise(spans))
        pids = list(dict.fromkeys(note["pid"] for note in spans))
        # One after the other: nothing of a later start comes before the last of an earlier one.
        assert [note["pid"] for note in spans] == sorted((note["pid"] for note in spans), key=pids.index)
        assert len({note["output_dir"] for note in spans}) == 1


@pytest.mark.parametrize("kills", [3])
def test_killed_again_and_again(runner: Runner, kills: int) -> None:
    """What was done before an earlier kill is still known after a later one, also when that came at once."""
    for first in [True, *[False] * kills]:
        argv = arguments("x=range(6)", "hydra.launcher.resume=unfinished", "lines=1", "every_s=0.05")
        with runner.start(sys.executable, *argv, env={"TALK_DIR": str(runner.cwd)}) as process:
            journal = runner.cwd / "sweep" / ".ddp" / "journal.jsonl"
            runs = journal.read_text().count("JobsAdded") if journal.exists() else 0
            runner.wait_until(
                lambda journal=journal, runs=runs: journal.exists() and journal.read_text().count("JobsAdded") > runs
            )
            if first:
                runner.wait_until(lambda journal=journal: '"JobEnded"' in journal.read_text())
            process.kill()
            process.communicate()
        runner.assert_nothing_left()
    ended = {json.loads(line)["job"] for line in journal.read_text().splitlines() if '"JobEnded"' in line}
    assert ended
    before = len(began(runner))
    assert resume(runner, "x=range(6)", "lines=1", "every_s=0.05").returncode == 0
    assert not ended & set(began(runner)[before:])
    assert {row["status"] for row in table(runner)} == {"COMPLETED"}


def test_a_config_that_changed(runner: Runner) -> None:
    """A job whose own config is another one by now is run again in its directory, and it is said in which keys."""
    conf = runner.cwd / "conf"
    conf.mkdir()
    app = write_talk(runner, config="config_path='conf', config_name='config'")
    (conf / "config.yaml").write_text("defaults: [talk, _self_]\nnet: {width: 3, gone: 1}\nsame: ${x}\n")
    assert sweep(runner, "x=1,2", app=app).returncode == 0
    (conf / "config.yaml").write_text("same: ${x}\nnet: {gone: 1, width: 3}\ndefaults: [talk, _self_]\n")
    assert set(decisions(resume(runner, "x=1,2", app=app)).values()) == {"is not run: done"}
    (conf / "config.yaml").write_text("defaults: [talk, _self_]\nnet: {width: 4, new: [1, 2]}\nsame: ${x}\n")
    changed = resume(runner, "x=1,2", app=app)
    said = "config changed in net.gone: 1 → (absent), net.width: 3 → 4, net.new: (absent) → [1, 2]"
    assert decisions(changed) == {0: f"is run: {said}", 1: f"is run: {said}"}
    assert began(runner) == [0, 1, 0, 1]
    assert [row["attempts"] for row in table(runner)] == ["2", "2"]
    (conf / "config.yaml").write_text("defaults: [talk, _self_]\nnet: {width: 5, new: [1, 2]}\nsame: ${x}\n")
    failed = resume(runner, "x=1,2", app=app, what="failed")
    assert failed.returncode == 1 and len(began(runner)) == 4
    assert all(said.startswith("is not run: config changed in net.width: 4 → 5") for said in decisions(failed).values())


@pytest.mark.sample
def test_only_what_failed(runner: Runner) -> None:
    """`resume=failed` runs what has failed; what has completed gives its value, and what has never run is not run."""
    sweep(runner, "x=1,2,3", "fail_once=true,false", "hydra.launcher.max_failures=2")
    assert began(runner) == [0, 1, 2]
    second = resume(runner, "x=1,2,3", "fail_once=true,false", what="failed")
    assert second.returncode == 1
    assert began(runner)[3:] == [0, 2]
    said = decisions(second)
    assert said[1] == "is not run: done" and said[0].startswith("is run: failed before")
    assert all(said[number].startswith("is not run: new") for number in (3, 4, 5))
    assert [row["status"] for row in table(runner)] == ["COMPLETED"] * 3 + ["NEVER_STARTED"] * 3


def shown_command(output: str) -> str:
    """Return the one command below the table of results, above the line that says where these are."""
    *_, command, empty, results = output.rstrip().splitlines()
    assert empty == "" and results.startswith("Results: "), output
    return command


def test_the_command_that_is_shown(runner: Runner) -> None:
    """The command below the table runs what failed, and nothing else."""
    first = sweep(runner, "x=1,2,3", "fail_once=true,false")
    command = shown_command(first.stdout)
    assert "hydra.launcher.resume=failed" in command
    done = runner.run("bash", "-c", command, env={"TALK_DIR": str(runner.cwd)})
    assert done.returncode == 0, done.output
    assert began(runner)[6:] == [0, 2, 4]
    assert {row["status"] for row in table(runner)} == {"COMPLETED"}


@pytest.mark.parametrize(
    ("folder", "typed"),
    [
        ("plain", "hydra.sweep.dir={root}/plain"),
        ("lr=1", "\"hydra.sweep.dir='{root}/lr=1'\""),
        ("it's", "'hydra.sweep.dir='\"'\"'{root}/it\\'\"'\"'s'\"'\"''"),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_the_command_as_one_types_it(runner: Runner, shell: str, folder: str, typed: str) -> None:
    """What was started as `python train.py` is shown like that, quoted where a shell needs it, and runs like that."""
    shutil.copy(TALK, runner.cwd / "train.py")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"TALK_DIR": str(runner.cwd), "PYTHONPATH": str(APPS), "PYTHONDONTWRITEBYTECODE": "1", "PATH": path}
    given = shlex.quote("hydra.sweep.dir='" + folder.replace("'", "\\'") + "'")
    launcher = "hydra/launcher=ddp_subprocess hydra.launcher.nproc_per_node=1"
    first = runner.run(shell, "-c", f"python train.py -m {launcher} {given} x=1,2 fail_once=true", env=env)
    shown = shown_command(first.stdout)
    where = typed.format(root=runner.cwd)
    assert shown == f"python train.py -m {launcher} {where} hydra.launcher.resume=failed x=1,2 fail_once=true"
    done = runner.run(shell, "-c", shown, env=env)
    assert done.returncode == 0, done.output
    assert began(runner) == [0, 1, 0, 1]


def test_another_grid(runner: Runner) -> None:
    """With another grid jobs keep values and directories whatever their number is, and new ones overwrite none."""
    sweep(runner, "x=1,2,3", "value=list")
    (runner.cwd / "sweep" / "1" / "checkpoint").write_text("of x=2")
    second = resume(runner, "x=2,5,3", "value=list")
    assert second.returncode == 0
    assert decisions(second) == {0: "is not run: done", 1: "is run: new", 2: "is not run: done"}
    assert [(row["value.0"], Path(row["run_dir"]).name) for row in table(runner)] == [
        ("2", "1"),
        ("5", "1-2"),
        ("3", "2"),
    ]
    assert (runner.cwd / "sweep" / "1" / "checkpoint").read_text() == "of x=2"


def test_a_directory_with_an_earlier_sweep(runner: Runner) -> None:
    """Without `resume` what was recorded moves aside, never overwritten, and that is said in one line."""
    sweep(runner, "x=1,2")
    folder = runner.cwd / "sweep" / ".ddp"
    journal, results = (folder / "journal.jsonl").read_bytes(), (folder / "results.csv").read_bytes()
    second = sweep(runner, "x=3")
    assert second.stdout.count("What an earlier sweep recorded in this directory is now in") == 1
    assert (folder / "earlier_0" / "journal.jsonl").read_bytes() == journal
    assert (folder / "earlier_0" / "results.csv").read_bytes() == results
    assert [row["x"] for row in table(runner)] == ["3"]
    sweep(runner, "x=4")
    assert (folder / "earlier_1").exists()


def test_secrets_are_not_in_the_journal(runner: Runner) -> None:
    """What is typed for a variable or key that is named like a secret is in no file of ours that others can read."""
    secrets = ("+hydra.job.env_set.MY_TOKEN=hunter2", "+hydra.job.env_set={API_KEY: hunter3}")
    for secret in secrets:
        assert sweep(runner, "x=1", secret).returncode == 0
        for file in (runner.cwd / "sweep").rglob(".ddp/*"):
            if file.is_file() and file.stat().st_mode & 0o077:
                assert b"hunter" not in file.read_bytes(), file


def test_nothing_to_resume(runner: Runner) -> None:
    """`resume` in a new directory runs everything, and says that all is new, so that it can always be given."""
    first = resume(runner, "x=1,2")
    assert first.returncode == 0 and began(runner) == [0, 1]
    assert "There is nothing to resume" in first.stdout


@pytest.mark.sample("torn")
@pytest.mark.parametrize("damage", ["torn", "garbage", "later", "empty"])
def test_a_damaged_journal(runner: Runner, damage: str) -> None:
    """What can be read is used, what cannot is said, and the next resume reads all."""
    sweep(runner, "x=1,2,3")
    journal = runner.cwd / "sweep" / ".ddp" / "journal.jsonl"
    data = journal.read_bytes()
    content = {
        "torn": data[:-40],
        "garbage": data.replace(b'{"event": "JobEnded"', b"\xff\xfe", 1),
        "later": data.replace(b'"JobEnded"', b'"JobEndedDifferently"', 1),
        "empty": b"",
    }[damage]
    journal.write_bytes(content)
    second = resume(runner, "x=1,2,3")
    assert second.returncode == 0, second.output
    assert ("cannot be read: damaged, or of a later version" in second.stdout) == (damage != "empty")
    # What the journal does not tell any more, the outcomes of the ranks do, as long as it tells of the start.
    assert began(runner)[3:] == ([0, 1, 2] if damage == "empty" else [])
    third = resume(runner, "x=1,2,3")
    assert third.returncode == 0 and set(decisions(third).values()) == {"is not run: done"}


def test_optuna_with_a_seed(runner: Runner) -> None:
    """A study that is resumed with its seed takes what it proposes again from the journal, and goes on from there."""
    pytest.importorskip("optuna")
    study = (
        "hydra/sweeper=optuna",
        "hydra.sweeper.sampler.seed=3",
        "hydra.sweeper.direction=minimize",
        "hydra.sweeper.n_jobs=1",
        "x=interval(0.0,1.0)",
        "value=${x}",
    )
    first = sweep(runner, *study, "hydra.sweeper.n_trials=4")
    assert first.returncode == 0, first.output
    assert began(runner) == [0, 1, 2, 3]
    second = resume(runner, *study, "hydra.sweeper.n_trials=6")
    assert second.returncode == 0, second.output
    assert began(runner)[4:] == [4, 5]
    best = [re.search(r"best_value: (.*)", (runner.cwd / "sweep" / "optimization_results.yaml").read_text())]
    values = [float(row["value"]) for row in table(runner)]
    assert len(values) == 6 and best[0] is not None and float(best[0][1]) == min(values)


def test_another_study(runner: Runner) -> None:
    """With another seed the jobs do not match; that is said once, they run, and nothing is overwritten."""
    pytest.importorskip("optuna")
    study = (
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
        "x=interval(0.0,1.0)",
        "value=${x}",
    )
    assert sweep(runner, *study, "hydra.sweeper.sampler.seed=3").returncode == 0
    second = resume(runner, *study, "hydra.sweeper.sampler.seed=4")
    assert second.returncode == 0, second.output
    assert second.stdout.count("did not propose before are run as new ones") == 1
    assert len(began(runner)) == 6
    assert len({note["output_dir"] for note in ran(runner)}) == 6


# --- max_failures


@pytest.mark.parametrize("stop_running", [False, True])
def test_too_many_failures(runner: Runner, stop_running: bool) -> None:
    """After so many failed jobs no more are started; running ones finish, or are ended; the rest is not run."""
    overrides = ["x=range(8)", "until=go", "wait_x=[1]", "fail_x=[0,2]", "hydra.launcher.max_failures=2"]
    argv = arguments(*overrides, f"hydra.launcher.stop_running={str(stop_running).lower()}", at_once=2)
    with runner.start(sys.executable, *argv, env={"TALK_DIR": str(runner.cwd)}) as process:
        journal = runner.cwd / "sweep" / ".ddp" / "journal.jsonl"
        runner.wait_until(lambda: journal.exists() and "JobSkipped" in journal.read_text())
        if not stop_running:
            assert [row["status"] for row in table(runner)].count("FAILED") == 2
            (runner.cwd / "go").touch()
        stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert sorted(began(runner)) == [0, 1, 2]
    status = [row["status"] for row in table(runner)]
    assert status == ["FAILED", "FAILED" if stop_running else "COMPLETED", "FAILED", *["NEVER_STARTED"] * 5]
    assert stdout.count("2 jobs failed (max_failures=2): no more jobs are started") == 1
    assert all("2 jobs failed before it (max_failures=2)" in row["cause"] for row in table(runner)[3:])
    if stop_running:
        assert "max_failures=2 was reached" in table(runner)[1]["cause"]


def test_too_many_failures_with_restarts(runner: Runner) -> None:
    """A job counts as failed when its last start has; and with `stop_running` none is started once more."""
    ended = sweep(runner, "x=1,2,3", "fail_rank=0", "hydra.launcher.max_restarts=1", "hydra.launcher.max_failures=1")
    assert ended.returncode == 1 and began(runner) == [0, 0]


def test_too_many_failures_over_batches(runner: Runner) -> None:
    """Failures count over all batches of a sweep: a later batch is not run at all."""
    pytest.importorskip("optuna")
    study = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=2", "x=interval(0.0,1.0)")
    ended = sweep(runner, *study, "fail_rank=0", "hydra.launcher.max_failures=2", "hydra.sweeper.max_failure_rate=1.0")
    assert len(began(runner)) == 2, ended.output
    assert [row["status"] for row in table(runner)] == ["FAILED"] * 2 + ["NEVER_STARTED"] * 4


@pytest.mark.torch
def test_the_example_stopped_half_way(runner: Runner) -> None:
    """The example sweep, stopped by Ctrl-C half way and resumed, has the table of one that was not stopped."""
    app = ROOT / "example_app" / "train.py"
    overrides = ["lr=0.1,0.01", "model=mlp,cnn", "epochs=3"]
    whole = runner.python(*arguments(*overrides, "hydra.sweep.dir=whole", nproc=2, app=app))
    assert whole.returncode == 0, whole.output
    process = runner.start(sys.executable, *arguments(*overrides, nproc=2, app=app), start_new_session=True)
    with process:
        journal = runner.cwd / "sweep" / ".ddp" / "journal.jsonl"
        runner.wait_until(lambda: journal.exists() and journal.read_text().count('"JobEnded"') == 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (130, -signal.SIGINT)
    second = runner.python(*arguments(*overrides, "hydra.launcher.resume=unfinished", nproc=2, app=app))
    assert second.returncode == 0, second.output
    assert list(decisions(second).values())[:2] == ["is not run: done"] * 2

    def facts(folder: str) -> list[tuple[str, ...]]:
        with (runner.cwd / folder / ".ddp" / "results.csv").open() as file:
            return [(row["job"], row["lr"], row["model"], row["status"], row["value"]) for row in csv.DictReader(file)]

    assert facts("sweep") == facts("whole")


def test_a_dry_run_says_what_would_be_left(runner: Runner) -> None:
    """A dry run of a resumed sweep shows which jobs would not run, and changes nothing."""
    sweep(runner, "x=1,2", "fail_once=true,false")
    before = {path: path.read_bytes() for path in (runner.cwd / "sweep").rglob("*") if path.is_file()}
    shown = resume(runner, "x=1,2", "fail_once=true,false", "hydra.launcher.dry_run=true")
    assert shown.returncode == 0
    assert shown.stdout.count("is not run: done") == 2
    assert {path: path.read_bytes() for path in (runner.cwd / "sweep").rglob("*") if path.is_file()} == before


@pytest.mark.sample
def test_two_sweeps_in_one_directory(runner: Runner) -> None:
    """Of two sweeps that start together in one directory one runs, and the other names it and ends."""
    argv = arguments("x=1,2", "until=go")
    env = {"TALK_DIR": str(runner.cwd)}
    both: list[subprocess.Popen[str]] = [runner.start(sys.executable, *argv, env=env) for _ in range(2)]
    runner.wait_until(lambda: any(process.poll() is not None for process in both))
    (refused,) = [process for process in both if process.poll() is not None]
    (other,) = [process for process in both if process is not refused]
    stdout, stderr = refused.communicate()
    assert refused.returncode == 1
    assert f"is in use by process {other.pid} on" in stdout + stderr and "Traceback" not in stderr
    (runner.cwd / "go").touch()
    other.communicate(timeout=PATIENCE_S)
    assert other.returncode == 0
    assert [row["status"] for row in table(runner)] == ["COMPLETED"] * 2


# --- what is known is not lost


def test_a_failure_before_the_start_forgets_nothing(runner: Runner) -> None:
    """A job that could not even be composed in one run is known from the run before: its value, directory, attempts."""
    odd = ("hydra.sweep.subdir=${now:%S%f}_${hydra.job.num}", "+hydra.job.env_set.Q=${oc.env:NEEDED}")
    variables = {"TALK_DIR": str(runner.cwd)}
    argv = arguments("x=1,2", "fail_once=false,true", *odd)
    runner.python(*argv, env={**variables, "NEEDED": "1"})
    assert began(runner) == [0, 1, 2, 3]
    resumed = [*argv, "hydra.launcher.resume=unfinished"]
    assert runner.python(*resumed, env=variables).returncode == 1
    assert began(runner) == [0, 1, 2, 3]
    third = runner.python(*resumed, env={**variables, "NEEDED": "1"})
    assert third.returncode == 0, third.output
    assert began(runner)[4:] == [1, 3]
    notes = [note for note in ran(runner) if note["what"] == "began"]
    for number in (1, 3):
        assert notes[number]["output_dir"] == notes[4 + number // 2]["output_dir"]
        assert notes[4 + number // 2]["HYDRA_DDP_ATTEMPT"] == "1"


def test_what_failed_stays_failed(runner: Runner) -> None:
    """That a job has failed is known whatever came since: a run that was killed before it, or gave up before it."""
    sweep(runner, "x=1,2,3", "fail_x=[2,3]")
    argv = arguments("x=1,2,3", "fail_x=[2,3]", "hydra.launcher.resume=unfinished")
    journal = runner.cwd / "sweep" / ".ddp" / "journal.jsonl"
    with runner.start(sys.executable, *argv, env={"TALK_DIR": str(runner.cwd)}) as process:
        runner.wait_until(lambda: journal.read_text().count('"JobsAdded"') == 2)
        process.kill()
        process.communicate()
    resume(runner, "x=1,2,3", "fail_x=[2,3]", "hydra.launcher.max_failures=1")
    before = len(began(runner))
    last = resume(runner, "x=1,2,3", "fail_x=[2,3]", what="failed")
    assert began(runner)[before:] == [1, 2]
    assert decisions(last)[0] == "is not run: done"
    assert all(said.startswith("is run: failed before") for number, said in decisions(last).items() if number)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_resume_forgets_nothing(runner: Runner, how: signal.Signals) -> None:
    """While a resumed sweep has not come to them, and when it is stopped before, done jobs are in table and status."""
    sweep(runner, "x=range(4)", "until=go", "wait_x=[]", "fail_x=[0,1]")
    argv = arguments("x=range(4)", "until=go", "wait_x=[]", "fail_x=[0,1]", "hydra.launcher.resume=unfinished")
    before = len(began(runner))
    argv[argv.index("wait_x=[]")] = "wait_x=[]"
    slow = [*argv, "hydra.launcher.wrapper=[sh,-c,'sleep 60; exec \"$@\"',rank]"]
    with runner.start(sys.executable, *slow, env={"TALK_DIR": str(runner.cwd)}) as process:
        journal = runner.cwd / "sweep" / ".ddp" / "journal.jsonl"
        runner.wait_until(lambda: journal.read_text().count('"JobStarted"') == 5)
        process.send_signal(how)
        stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert len(began(runner)) == before
    status = runner.python("-m", "hydra_plugins.hydra_ddp_subprocess_launcher.cli.main", "status", "-d", "sweep")
    assert "2/4 done" in status.stdout
    assert [row["job"] for row in table(runner) if row["status"] == "COMPLETED"] == ["2", "3"]
    if how is signal.SIGTERM:
        assert "Stopped by SIGTERM: 2 of 4 jobs did not complete" in stdout


def test_too_many_failures_leave_done_jobs_alone(runner: Runner) -> None:
    """With `max_failures` a resumed sweep still gives the values of what was done, wherever in line it stands."""
    sweep(runner, "x=range(5)", "fail_x=[1,3]", "value=list")
    second = resume(runner, "x=range(5)", "fail_x=[1,3]", "value=list", "hydra.launcher.max_failures=1")
    assert [row["status"] for row in table(runner)] == [
        "COMPLETED",
        "FAILED",
        "COMPLETED",
        "NEVER_STARTED",
        "COMPLETED",
    ]
    assert decisions(second)[4] == "is not run: done"
    assert "resume=unfinished" in shown_command(second.stdout)
    assert "max_failures" not in shown_command(second.stdout)


@pytest.mark.parametrize("subdir", [".", "shared"])
def test_directories_that_are_shared_on_purpose(runner: Runner, subdir: str) -> None:
    """Jobs that have one run directory, one after the other, have it in a resumed sweep, too."""
    where = f"hydra.sweep.subdir={subdir}"
    sweep(runner, "x=1,2,3", where, "value=list", "hydra.launcher.max_failures=1", "fail_x=[1]")
    second = resume(runner, "x=1,2,3", where, "value=list", "fail_x=[1]")
    assert second.returncode == 1
    third = resume(runner, "x=1,2,3", where, "value=list", "fail_x=[1]")
    assert decisions(third)[1] == decisions(third)[2] == "is not run: done"
    assert len({note["output_dir"] for note in ran(runner)}) == 1
    assert [row["value.0"] for row in table(runner)[1:]] == ["2", "3"]


@pytest.mark.parametrize("copied", [True, False])
def test_a_directory_that_was_moved(runner: Runner, copied: bool) -> None:
    """A sweep that was moved, or copied, goes on where it is now, with all values, and leaves the other one alone."""
    app = write_returning(runner)
    first = sweep(runner, "x=0,1,2,3,4,5,6,7", app=app, at_once=3)
    assert "all as they were" in first.stdout, first.output
    (shutil.copytree if copied else shutil.move)(runner.cwd / "sweep", runner.cwd / "there")
    before = {path: path.stat().st_mtime_ns for path in (runner.cwd / "sweep").rglob("*")}
    for file in (runner.cwd / "there" / "7" / ".ddp").glob("outcome*"):
        file.unlink()
    second = resume(runner, "x=0,1,2,3,4,5,6,7", "hydra.sweep.dir=there", app=app)
    assert "all as they were" in second.stdout, second.output
    assert began(runner)[8:] == [7]
    assert Path(ran(runner)[-1]["output_dir"]) == runner.cwd / "there" / "7"
    assert {path: path.stat().st_mtime_ns for path in (runner.cwd / "sweep").rglob("*")} == before


def test_a_job_that_was_done_though_nobody_knew(runner: Runner) -> None:
    """A job whose ranks had all stored their outcome when the launching process was killed is not run again."""
    late = "if 'RANK' in os.environ and not os.path.exists('quick'):\n    atexit.register(time.sleep, 60)"
    app = write_talk(runner, f"import atexit, time\n{late}")
    argv = arguments("x=1,2", "value=list", nproc=2, app=app)
    with runner.start(sys.executable, *argv, env={"TALK_DIR": str(runner.cwd)}) as process:
        folder = runner.cwd / "sweep" / "0" / ".ddp"
        runner.wait_until(lambda: all((folder / f"outcome_{rank}.pkl").exists() for rank in (0, 1)))
        process.kill()
        process.communicate()
    (runner.cwd / "quick").touch()
    second = resume(runner, "x=1,2", "value=list", nproc=2, app=app)
    assert second.returncode == 0, second.output
    assert began(runner) == [0, 1] and decisions(second)[0] == "is not run: done"
    assert table(runner)[0]["value.0"] == "1"


def test_duplicates(runner: Runner) -> None:
    """Jobs with the same overrides are several jobs: each has a record and a directory of its own."""
    sweep(runner, "x=7", "fail_once=true")
    second = resume(runner, "x=7,7,7", "fail_once=true", at_once=3)
    third = resume(runner, "x=7,7,7", "fail_once=true", at_once=3)
    assert second.returncode == 1 and third.returncode == 0, third.output
    assert len({note["output_dir"] for note in ran(runner)}) == 3
    assert [row["status"] for row in table(runner)] == ["COMPLETED"] * 3


def test_two_tasks_in_one_directory(runner: Runner) -> None:
    """What one function of a program returned is not taken for what another one would with the same overrides."""
    train = (
        "@hydra.main(version_base=None, config_path=None, config_name='talk')\ndef train(cfg):\n    return 'trained'"
    )
    app = write_talk(runner, train, body="return 'checked'", program="train()\nmain()")
    for again in range(2):
        second = resume(runner, "x=1", app=app)
        assert second.returncode == 0
        assert second.stdout.count("is not run: done") == 2 * again
        assert table(runner)[0]["value"] == "checked"


def test_a_value_that_is_lost_stays_lost(runner: Runner) -> None:
    """A completed job whose value could not be pickled is not run for ever."""
    app = write_talk(runner, "import threading", body="talk.main.__wrapped__(cfg)\nreturn threading.Lock()")
    sweep(runner, "x=1", app=app)
    second = resume(runner, "x=1", app=app)
    assert second.returncode == 0 and decisions(second) == {0: "is not run: done"}


def test_no_job_runs_twice_at_once(runner: Runner) -> None:
    """A sweep that is resumed the moment its launching process was killed waits until the ranks of that are gone."""
    body = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "talk.note('began')\n"
        "while not os.path.exists('quick'):\n    talk.note('lives')\n    time.sleep(0.01)"
    )
    app = write_talk(runner, "import signal, time", body=body)
    argv = arguments("x=1", "hydra.launcher.resume=unfinished", app=app)
    for _ in range(3):
        with runner.start(sys.executable, *argv, env={"TALK_DIR": str(runner.cwd)}) as process:
            count = len(began(runner))
            runner.wait_until(lambda count=count: len(began(runner)) > count)
            process.kill()
            process.communicate()
    (runner.cwd / "quick").touch()
    last = runner.python(*argv, env={"TALK_DIR": str(runner.cwd)})
    assert last.returncode == 0, last.output
    pids = [note["pid"] for note in ran(runner)]
    assert len(set(pids)) == 4
    # Each has said its last word before the next one says its first.
    assert [pid for place, pid in enumerate(pids) if place == 0 or pids[place - 1] != pid] == list(dict.fromkeys(pids))


def test_keys_that_are_numbers(runner: Runner) -> None:
    """A key of the config that is a number counts like any other, and types do, too; a secret's value is not shown."""
    conf = runner.cwd / "conf"
    conf.mkdir()
    app = write_talk(runner, config="config_path='conf', config_name='config'")
    said = []
    for extra in ("1: 3", "1: 4", "1: '4'", "1: 4.0", "1: 4.0\napi_key: a", "1: 4.0\napi_key: b"):
        (conf / "config.yaml").write_text(f"defaults: [talk, _self_]\n{extra}\n")
        said.append(decisions(resume(runner, "x=1", app=app)).get(0, "").partition("in ")[2])
    assert said[1:] == [
        "1: 3 → 4",
        "1: 4 → '4'",
        "1: '4' → 4.0",
        "api_key: (absent) → (hidden)",
        "api_key: (hidden) → (hidden)",
    ]


def test_directories_of_several_jobs_with_the_same_overrides(runner: Runner) -> None:
    """A new job never runs in the directory of another one, not even of one with the same overrides."""
    sweep(runner, "x=1,7", "value=${x}")
    second = resume(runner, "x=7,7", "value=${x}", at_once=2)
    assert second.returncode == 0, second.output
    assert [Path(row["run_dir"]).name for row in table(runner)] == ["1", "1-2"]
    shutil.rmtree(runner.cwd / "sweep" / "1")
    third = resume(runner, "x=7,1", "value=${x}", "lines=4")
    assert third.returncode == 0
    assert len({row["run_dir"] for row in table(runner)}) == 2


def test_a_deleted_directory(runner: Runner) -> None:
    """A job whose run directory was deleted gets none that is another job's."""
    sweep(runner, "x=1,7", "fail_x=[7]")
    shutil.rmtree(runner.cwd / "sweep" / "1")
    resume(runner, "x=7,1", "fail_x=[7]")
    assert [Path(row["run_dir"]).name for row in table(runner)] == ["0-2", "0"]


def test_logs_of_jobs_that_share_a_directory(runner: Runner) -> None:
    """After a resume with other numbers, logs and commands are still those of the job that is asked for."""
    shared = ("hydra.sweep.subdir=shared", "lines=1", "say=x${x}")
    sweep(runner, "x=7,8", *shared)
    resume(runner, "x=8,7", *shared)
    for number, x in ((0, 8), (1, 7)):
        shown = runner.python(
            "-m", "hydra_plugins.hydra_ddp_subprocess_launcher.cli.main", "logs", "-d", "sweep", str(number)
        )
        assert shown.stdout.startswith(f"x{x} 0 of job"), shown.output


def test_attempts_count_all_starts(runner: Runner) -> None:
    """HYDRA_DDP_ATTEMPT counts every start of a job, whatever its config was in between."""
    conf = runner.cwd / "conf"
    conf.mkdir()
    app = write_talk(runner, config="config_path='conf', config_name='config'")
    for key in (0, 1, 0, 2):
        (conf / "config.yaml").write_text(f"defaults: [talk, _self_]\nkey: {key}\n")
        assert resume(runner, "x=1", app=app).returncode == 0
    attempts = [note["HYDRA_DDP_ATTEMPT"] for note in ran(runner) if note["what"] == "began"]
    assert attempts == ["0", "1", "2"]
    assert table(runner)[0]["attempts"] == "3"
