"""A dry run shows what a sweep would do, does none of it, and its commands do just that when they are pasted."""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from hydra_plugins.hydra_ddp_subprocess_launcher.common.quoting import rank_line
from hydra_plugins.hydra_ddp_subprocess_launcher.resources import devices
from support.notes import Notes, behave, behave_environment, job_folder, notes_of, write_app
from support.runner import APPS, PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Ran, Runner

DRY = "hydra.launcher.dry_run=true"
# In Hydra's grammar, and hostile to a shell, to percent-encoding, to lists of overrides and to lines.
NASTY = (
    "+quoted='it\\'s \"so\" `and` $HOME $(id) !'",
    "+spaced='  two  words=3, a,b '",
    "+line='one\ntwo'",
    "+percent='100% %20 é 日本'",
    "+several=[1,{a: 'b,c'}]",
    "+interpolated='${x} \\${not}'",
)


def commands(output: str) -> dict[int, list[str]]:
    """Return what is to be pasted, by the number of the job, and check that all else is a comment."""
    found: dict[int, list[str]] = {}
    number = -1
    for line in output.splitlines():
        header = re.match(r"# job (\d+): ", line)
        if header:
            number = int(header[1])
            found[number] = []
        elif not line.startswith(("# ", "[20")):  # Optuna's storage logs.
            assert line.startswith("cd "), line
            found[number].append(line)
    return found


def paste(runner: Runner, lines: list[str], **env: str) -> list[Ran]:
    """Run each line in a shell of its own, all at the same time."""
    from support.runner import Ran

    environment = behave_environment(runner, **env)
    shells = [runner.start("bash", "-c", line, env=environment) for line in lines]
    return [Ran(shell.wait(), *streams, 0.0) for shell in shells if (streams := shell.communicate(timeout=PATIENCE_S))]


def listing(folder: Path) -> dict[str, tuple[bytes, int] | None]:
    """Return every path below a folder but the notes, with content and time of the files."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.relative_to(folder).parts[0] != "notes"
    }


def assert_nothing_ran(runner: Runner) -> None:
    """Only the launching process was there, without a body."""
    notes = notes_of(runner)
    assert (notes.places(), len(notes.all("process"))) == ([], 1)
    assert runner.alive() == {}


# --- nothing is left behind


@pytest.mark.sample("sweep-one-batch")
@pytest.mark.parametrize("batches", ["null", "1"], ids=["one-batch", "three-batches"])
@pytest.mark.parametrize("where", ["sweep", "deep/er/sweep", "${now:%Y}/${hydra.job.name}", "."])
def test_nothing_is_left_of_a_new_directory(runner: Runner, where: str, batches: str) -> None:
    """Directories that Hydra made are gone, wherever they were, and every batch was shown."""
    arguments = (f"hydra.sweep.dir={where}", f"hydra.sweeper.max_batch_size={batches}", "x=1,2,3", DRY)
    runner.cwd.joinpath("mine").write_text("mine")
    before = listing(runner.cwd)
    ran, _ = behave(runner, *arguments)
    assert (ran.returncode, ran.stderr.count("Traceback")) == (0, 0), ran.output
    assert listing(runner.cwd) == before
    assert {number: len(lines) for number, lines in commands(ran.stdout).items()} == {0: 2, 1: 2, 2: 2}
    assert_nothing_ran(runner)


@pytest.mark.parametrize("batches", ["null", "1"], ids=["one-batch", "three-batches"])
def test_an_earlier_sweep_is_as_it_was(runner: Runner, batches: str) -> None:
    """The files of a sweep in the same directory have their content and time, those of its ranks, too."""
    behave(runner, "x=7")
    before = listing(runner.cwd)
    assert b"dry_run: false" in (runner.cwd / "sweep" / "multirun.yaml").read_bytes()
    for file in (runner.cwd / "notes").iterdir():
        file.unlink()
    ran, _ = behave(runner, f"hydra.sweeper.max_batch_size={batches}", "x=1,2,3", DRY)
    assert ran.returncode == 0, ran.output
    assert listing(runner.cwd) == before
    assert_nothing_ran(runner)


def test_nothing_is_left_where_a_job_does_not_compose(runner: Runner) -> None:
    """Where Hydra's own check stops the sweep, the launcher is not called: its directory goes all the same."""
    ran, _ = behave(runner, "nokey=1,2", DRY)
    assert ran.returncode == 1
    assert "nokey" in ran.stderr
    assert listing(runner.cwd) == {}


def test_no_device_is_locked(runner: Runner) -> None:
    """Locks are not even looked at: another sweep may have the device, or the folder be unusable."""
    device = f"dry-{uuid.uuid4().hex}"
    app = write_app(
        runner,
        "from hydra_plugins.hydra_ddp_subprocess_launcher.launcher import sweep as _prepare\n"
        "def refuse(*arguments): raise RuntimeError('locks')\n_prepare.DeviceLocks = refuse",
    )
    arguments = (f"hydra.launcher.devices=[{device}]", "hydra.launcher.device_env_var=MY_DEVICES", "x=1,2")
    env = behave_environment(runner)
    ran = runner.sweep(app, *arguments, DRY, nproc=1, env=env)
    assert ran.returncode == 0, ran.output
    assert ran.stdout.count(f"#   devices: {device}\n") == 2
    assert not Path(devices.FOLDER).exists() or device not in "".join(
        path.name for path in Path(devices.FOLDER).iterdir()
    )
    # Without the option the same program does want them.
    assert "locks" in runner.sweep(app, *arguments, nproc=1, env=env).output


def test_what_the_sweeper_gets(runner: Runner) -> None:
    """Jobs are completed without a value, their configs are there, and no socket is."""
    pytest.importorskip("hydra_zen")
    options = {"hydra.launcher.nproc_per_node": 2, "hydra.launcher.dry_run": True, "hydra.sweep.dir": "sweep"}
    app = runner.cwd / "app.py"
    app.write_text(
        "import json, os\nfrom hydra_zen import launch, make_config\n\n"
        "def links():\n"
        "    found = []\n"
        "    for name in os.listdir('/proc/self/fd'):\n"
        "        try:\n            found.append(os.readlink('/proc/self/fd/' + name))\n"
        "        except OSError:\n            pass\n"
        "    return found\n\n"
        "def body(cfg):\n    return 1\n\n"
        "if __name__ == '__main__':\n"
        f"    overrides = {{'hydra/launcher': 'ddp_subprocess', **{options!r}, 'x': '1,2'}}\n"
        "    (jobs,) = launch(make_config(x=0), body, overrides=overrides, multirun=True, version_base='1.3')\n"
        "    facts = [(job.status.name, job.return_value, job.cfg.x, job.overrides, job.hydra_cfg.hydra.job.num)"
        " for job in jobs]\n"
        "    print('#', json.dumps([facts, [link for link in links() if link.startswith('socket')]]))\n"
    )
    before = listing(runner.cwd)
    ran = runner.python("-B", app)
    assert ran.returncode == 0, ran.output
    assert listing(runner.cwd) == before
    facts, sockets = json.loads(ran.stdout.splitlines()[-1][2:])
    assert facts == [["COMPLETED", None, 1, ["x=1"], 0], ["COMPLETED", None, 2, ["x=2"], 1]]
    assert sockets == []
    # There is no program to run again.
    assert commands(ran.stdout) == {0: [], 1: []}
    assert ran.stdout.count("cannot be pasted") == 2
    assert len(re.findall(r"^#   cd .* RANK=[01] .*_rank", ran.stdout, re.MULTILINE)) == 4


# --- what is shown


def test_devices_are_given_out_in_turn(runner: Runner) -> None:
    """Each job has the devices that it would get if all took equally long; a job that fits passes one that does not."""
    ran, _ = behave(
        runner,
        "+n=3,2,1,2,1",
        "hydra.launcher.nproc_per_node=${oc.select:n,1}",
        "hydra.launcher.devices=[a,b,c,d]",
        "hydra.launcher.device_env_var=MY_DEVICES",
        DRY,
    )
    assert ran.returncode == 0, ran.output
    found = commands(ran.stdout)
    shown = [[re.findall(r" MY_DEVICES=(\S+) ", line)[0] for line in lines] for lines in found.values()]
    assert shown == [["a,b,c"] * 3, ["a,b"] * 2, ["d"], ["a,b"] * 2, ["c"]]
    assert [line.removeprefix("#   devices: ") for line in ran.stdout.splitlines() if "devices: " in line] == [
        *("a,b,c", "a,b", "d", "a,b", "c")
    ]
    ports = [{re.findall(r"MASTER_PORT=(\d+)", line)[0] for line in lines} for lines in found.values()]
    assert [len(port) for port in ports] == [1] * 5
    # These two run at once.
    assert ports[0] != ports[2]


def test_several_devices_for_a_rank(runner: Runner) -> None:
    """Each rank is shown with all devices of its job, and jobs that differ in them are given theirs in turn."""
    ran, _ = behave(
        runner,
        "+wide=2,3,1",
        "hydra.launcher.devices_per_rank=${oc.select:wide,1}",
        "hydra.launcher.devices=[a,b,c,d,e]",
        "hydra.launcher.device_env_var=MY_DEVICES",
        DRY,
        nproc=1,
    )
    assert ran.returncode == 0, ran.output
    shown = [[re.findall(r" MY_DEVICES=(\S+) ", line)[0] for line in lines] for lines in commands(ran.stdout).values()]
    assert shown == [["a,b"], ["c,d,e"], ["a"]]


def test_a_job_that_cannot_start(runner: Runner) -> None:
    """It is shown with the reason; the others are shown as usual."""
    ran, _ = behave(runner, "+n=1,two,3", "hydra.launcher.nproc_per_node=${oc.select:n,1}", DRY)
    assert ran.returncode == 1, ran.output
    assert re.search(r"^# job 1: \+n=two: cannot start: .*nproc_per_node='two'", ran.stdout, re.MULTILINE)
    assert {number: len(lines) for number, lines in commands(ran.stdout).items()} == {0: 1, 1: 0, 2: 3}
    assert listing(runner.cwd) == {}


def test_a_job_that_does_not_compose(runner: Runner) -> None:
    """With a sweeper that does not check first it is shown, and the dry run ends after this batch."""
    ran, _ = behave(runner, "hydra/sweeper=unchecked", DRY, env={"BEHAVE_OVERRIDES": "x=1;nokey=1"})
    assert ran.returncode == 0, ran.output
    assert re.search(r"^# job 1: nokey=1: cannot start: .*nokey", ran.stdout, re.MULTILINE)
    assert len(commands(ran.stdout)[0]) == 2
    assert not notes_of(runner).has("returns")


def test_one_port_for_jobs_at_once(runner: Runner) -> None:
    """What stops a sweep before its first job stops a dry run, too."""
    ran, _ = behave(runner, "x=1,2", "hydra.launcher.master_port=29501", "hydra.launcher.max_parallel_jobs=2", DRY)
    assert ran.returncode == 1
    assert "29501 is one port, but 2 jobs" in ran.stderr
    assert listing(runner.cwd) == {}


def test_optuna_ends_after_its_first_batch(runner: Runner) -> None:
    """What a sampler asks for next depends on values: one line says so, and the exit code is 0."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    ran, _ = behave(
        runner, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=2", "x=interval(0,1)", DRY
    )
    assert ran.returncode == 0, ran.output
    assert {number: len(lines) for number, lines in commands(ran.stdout).items()} == {0: 2, 1: 2}
    assert "depends on the values" in ran.stdout.splitlines()[-1]
    assert listing(runner.cwd) == {}


@pytest.mark.parametrize("which", ["job", "hydra"])
def test_overrides_that_are_too_long(runner: Runner, which: str) -> None:
    """What no command can hold is shown, and said to be no command."""
    long = "y" * 70_000
    ran, _ = behave(runner, "x=1", f"+long={long}" if which == "job" else f"+hydra.job.env_set.LONG={long}", DRY)
    assert ran.returncode == 0, ran.output
    assert commands(ran.stdout) == {0: []}
    assert "too long for a command" in ran.stdout


def test_the_function_entry_cannot_be_pasted(runner: Runner) -> None:
    """Also with a program that could be run again."""
    ran, _ = behave(runner, "x=1,2", "hydra.launcher.entry=function", DRY)
    assert ran.returncode == 0, ran.output
    assert commands(ran.stdout) == {0: [], 1: []}


# --- the commands run


def configs(folder: Path) -> dict[str, object]:
    """Return what rank 0 saved of its config, apart from what tells a rank that composes its own."""
    saved = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (folder / ".hydra").iterdir()}
    hydra = saved["hydra.yaml"]["hydra"]
    hydra["overrides"].pop("hydra")
    hydra["sweep"].pop("dir")
    hydra["launcher"].pop("dry_run")
    return saved


@pytest.mark.sample
def test_pasted_commands_do_what_the_sweep_does(runner: Runner) -> None:
    """Both ranks of each job meet, see the job's config, and save the files that a real sweep saves."""
    arguments = ("x=1,2", "+all=meet", *NASTY, "+hydra.job.env_set.GREETING='it\\'s $HOME'")
    dry, _ = behave(runner, *arguments, DRY)
    assert dry.returncode == 0, dry.output
    found = commands(dry.stdout)
    for number in (0, 1):
        for ran in paste(runner, found[number]):
            assert ran.returncode == 0, ran.output
    notes = notes_of(runner)
    assert notes.places() == [(job, rank) for job in (0, 1) for rank in (0, 1)]
    by_hand = {place: notes.read("body_{}_{}".format(*place)) for place in notes.places()}
    saved = [configs(runner.cwd / "sweep" / str(job)) for job in (0, 1)]
    for job, rank in notes.places():
        assert notes.environment(job, rank)["GREETING"] == "it's $HOME"
        assert Path(by_hand[job, rank]["output_dir"]) == runner.cwd / "sweep" / str(job)
    real, notes = behave(runner, *arguments, env={"BEHAVE_AGAIN": "yes"})
    assert real.returncode == 0, real.output
    for place, note in by_hand.items():
        again = notes.read("body_{}_{}".format(*place))
        assert again["pid"] != note["pid"]
        for fact in ("config", "x", "job", "output_dir", "cwd"):
            assert again[fact] == note[fact]
    assert [configs(runner.cwd / "sweep" / str(job)) for job in (0, 1)] == saved
    # What the ranks run by hand left there moved aside.
    assert (job_folder(runner, 0) / "earlier_0").is_dir()


def test_exit_codes_and_output_of_pasted_commands(runner: Runner) -> None:
    """A rank that fails says so by its exit code, and on its terminal; another one does not."""
    dry, _ = behave(runner, "x=1,2", "+r1=raise", "+j1.r1=leave:7", "+r0=print:hello", DRY)
    first, second = (paste(runner, lines) for lines in commands(dry.stdout).values())
    assert [ran.returncode for ran in (*first, *second)] == [0, 1, 0, 7]
    assert "hello" in first[0].stdout
    assert "broken: plain" in first[1].stderr
    assert not list((runner.cwd / "sweep").rglob("rank_?.log"))


def test_secrets_are_taken_from_the_shell(runner: Runner) -> None:
    """A secret is not in the output, and a rank has the one of the shell into which its command is pasted."""
    dry, _ = behave(runner, "x=1", "+hydra.job.env_set.MY_TOKEN=s3cret", "+hydra.job.env_set.PLAIN=open", DRY, nproc=1)
    assert dry.returncode == 0, dry.output
    assert "s3cret" not in dry.output
    (ran,) = paste(runner, commands(dry.stdout)[0], MY_TOKEN="it's $mine")
    assert ran.returncode == 0, ran.output
    environment = notes_of(runner).environment(0, 0)
    assert (environment["MY_TOKEN"], environment["PLAIN"]) == ("it's $mine", "open")


def pasted_programs(runner: Runner, program: str, *arguments: str) -> tuple[Ran, Notes]:
    """Dry-run app.py and run every command that it shows, those of one job at a time."""
    app = runner.cwd / "app.py"
    app.write_text(program, encoding="utf-8")
    launch = ("hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=2", DRY)
    dry = runner.python(app, "-m", *arguments, *launch, env=behave_environment(runner))
    assert dry.returncode == 0, dry.output
    lines = re.findall(r"^cd .*", dry.stdout, re.MULTILINE)
    for place in range(0, len(lines), 2):
        for ran in paste(runner, lines[place : place + 2], BEHAVE_AGAIN="yes"):
            assert ran.returncode == 0, ran.output
    return dry, notes_of(runner)


HEAD = f"import sys\nsys.path.insert(0, {str(APPS)!r})\nimport behave, hydra\nfrom dataclasses import dataclass\n\n"
DECORATED = "@hydra.main(version_base=None, config_path={path!r}, config_name={name!r})\n"
BODY = "def {function}(cfg):\n    behave.note(f'who_{function}_{{behave.RANK}}')\n    return behave.act(cfg)\n\n"


def test_no_primary_config(runner: Runner) -> None:
    """A program whose config is made on the command line alone."""
    program = HEAD + DECORATED.format(path=None, name=None) + BODY.format(function="main") + "main()\n"
    _, notes = pasted_programs(runner, program, "+x=1,2", "hydra.sweep.dir=out")
    assert [notes.read(f"body_{job}_{rank}")["x"] for job, rank in notes.places()] == [1, 1, 2, 2]


def test_a_schema(runner: Runner) -> None:
    """The rank's config has the types of the program's dataclass."""
    schema = "@dataclass\nclass Config:\n    x: int = 0\n\nbehave.ConfigStore.instance().store('typed', Config)\n\n"
    body = "def main(cfg):\n    assert behave.OmegaConf.get_type(cfg) is Config\n    return behave.act(cfg)\n\nmain()\n"
    program = HEAD + schema + DECORATED.format(path=None, name="typed") + body
    _, notes = pasted_programs(runner, program, "x=1", "hydra.sweep.dir=out")
    assert notes.places() == [(0, 0), (0, 1)]


def test_the_second_of_two_mains(runner: Runner) -> None:
    """Each command runs its own function, and nothing behind it."""
    both = "".join(DECORATED.format(path=None, name="behave") + BODY.format(function=name) for name in ("one", "two"))
    dry, notes = pasted_programs(runner, f"{HEAD}{both}one()\ntwo()\nbehave.note(f'end_{{behave.RANK}}')\n", "x=1")
    assert len(re.findall("^cd ", dry.stdout, re.MULTILINE)) == 4
    pids = [notes.read(f"who_{name}_{rank}")["pid"] for name in ("one", "two") for rank in (0, 1)]
    assert len(set(pids)) == 4
    assert notes.read("end_0")["pid"] not in pids
    assert not notes.has("end_1")


def test_config_flags_and_a_directory_by_the_clock(runner: Runner) -> None:
    """The config that was chosen on the command line, below a directory that the clock names."""
    folder = runner.cwd / "conf" / "sub"
    folder.mkdir(parents=True)
    (folder / "chosen one.yaml").write_text("# @package _global_\nx: 5\nwhen: ${now:%Y}\n")
    program = HEAD + DECORATED.format(path=None, name="behave") + BODY.format(function="main") + "main()\n"
    flags = ("--config-dir", str(runner.cwd / "conf"), "--config-name", "sub/chosen one")
    where = "hydra.sweep.dir='it\\'s ${now:%Y-%m-%d_%H-%M-%S-%f}'"
    dry, notes = pasted_programs(runner, program, *flags, where, "x=6,7", "hydra.sweep.subdir='${x} $x'")
    assert [notes.read(f"body_{job}_{rank}")["x"] for job, rank in notes.places()] == [6, 6, 7, 7]
    shown = re.findall(r"run directory: (.*)", dry.stdout)
    assert [notes.read(f"body_{job}_0")["output_dir"] for job in (0, 1)] == shown
    assert [Path(one).name for one in shown] == ["6 $x", "7 $x"]


def test_a_group_that_sets_options_of_the_launcher(runner: Runner) -> None:
    """A job's overrides may choose a file that has options of the launcher, if it is chosen for the whole sweep."""
    (runner.cwd / "conf" / "machine").mkdir(parents=True)
    (runner.cwd / "conf" / "app.yaml").write_text("x: 0\n")
    (runner.cwd / "conf" / "machine" / "big.yaml").write_text(
        "# @package _global_\nhydra:\n  launcher:\n    max_restarts: 2\n"
    )
    program = HEAD + DECORATED.format(path="conf", name="app") + BODY.format(function="main") + "main()\n"
    _, notes = pasted_programs(runner, program, "+machine=big", "x=1", "hydra.sweep.dir=out")
    assert notes.environment(0, 0)["TORCHELASTIC_MAX_RESTARTS"] == "2"


def test_a_rank_by_hand_does_not_launch(runner: Runner) -> None:
    """It knows that it is a rank, also where it is the only one."""
    dry, _ = behave(runner, "x=1", "+all=sweep:inner", DRY, nproc=1)
    (ran,) = paste(runner, commands(dry.stdout)[0])
    assert ran.returncode == 0, ran.output
    inner = notes_of(runner).read("inner")
    assert inner["code"] == 1
    assert "ranks of ranks" in inner["output"]


def test_a_command_without_its_environment(runner: Runner) -> None:
    """Half of a command is refused with what is missing."""
    dry, _ = behave(runner, "x=1", DRY, nproc=1)
    command = commands(dry.stdout)[0][0]
    (ran,) = paste(runner, [command[command.index(f" {sys.executable} ") :]])
    assert ran.returncode == 1
    assert "HYDRA_DDP_JOB_NUM is not set" in ran.stderr
    assert "dry_run=true prints it" in ran.stderr


# --- a rank of a real sweep


@pytest.mark.parametrize("fails", [False, True], ids=["completed", "failed"])
def test_a_job_of_a_real_sweep_is_run_again(runner: Runner, fails: bool) -> None:
    """The commands of job.json, pasted after the sweep, do in both ranks what was done before."""
    steps = ["+r0=[meet]", "+r1=[meet,leave:3]" if fails else "+r1=[meet]"]
    swept, notes = behave(runner, "x=1,2", *steps, *NASTY, "+hydra.job.env_set.MY_TOKEN=s3cret")
    assert swept.returncode == int(fails), swept.output
    before = {rank: notes.read(f"body_1_{rank}") for rank in (0, 1)}
    facts = json.loads((job_folder(runner, 1) / "job.json").read_text(encoding="utf-8"))
    lines = [rank_line(facts, rank) for rank in (0, 1)]
    assert "s3cret" not in "".join(lines)
    runs = paste(runner, lines, MY_TOKEN="the shell's", BEHAVE_AGAIN="yes")
    assert [ran.returncode for ran in runs] == [0, 3 if fails else 0], runs
    for rank, was in before.items():
        note = notes.read(f"body_1_{rank}")
        assert note["pid"] != was["pid"]
        for fact in ("config", "x", "job", "output_dir", "cwd"):
            assert note[fact] == was[fact]
        assert notes.environment(1, rank)["MY_TOKEN"] == "the shell's"
