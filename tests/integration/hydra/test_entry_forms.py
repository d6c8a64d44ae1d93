"""Every way to start a program: its ranks run the same program, the same way, each once."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.notes import assert_one_clear_error

if TYPE_CHECKING:
    from support.runner import Ran, Runner

# What each program below does: note who it is. `LOCK` could not be pickled, and need not be; the two resolvers
# are there only where the whole script has run as `__main__`.
FACTS = """
import json, os, sys, threading
from pathlib import Path

import hydra
import omegaconf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

LOCK = threading.Lock()
FOLDER = Path(os.environ["FACTS_DIR"])
# Hydra 1.3 warns where version_base is missing, Hydra 1.4 where it is given.
BASE = {} if not hydra.__version__.startswith("1.3") else {"version_base": "1.3"}
# OmegaConf 2.4 warns of the old name, earlier ones have something else under the new name.
register = OmegaConf.register_new_resolver if omegaconf.__version__ < "2.4" else OmegaConf.register_resolver
register("top", lambda: "top")
ConfigStore.instance().store(name="facts", node={"x": 0, "top": "${top:}"})


def note(kind, **facts):
    facts = {
        "kind": kind,
        "rank": os.environ.get("RANK"),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "optimize": sys.flags.optimize,
        "isolated": sys.flags.isolated,
        "warnoptions": sys.warnoptions,
        "utf8": sys.flags.utf8_mode,
        "path": sys.path,
        **facts,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{kind}_{os.getpid()}_{len(list(FOLDER.iterdir()))}"
    path.write_text(json.dumps(facts, default=str))


def body(cfg, who="main"):
    with LOCK:
        hydra_config = HydraConfig.get()
        values = OmegaConf.to_container(cfg, resolve=True)
        note("body", who=who, job=hydra_config.job.num, name=hydra_config.job.name, cfg=values, cwd=os.getcwd())
        return values["x"]
"""

MAIN = """
@hydra.main(config_path=None, config_name="facts", **BASE)
def main(cfg):
    return body(cfg)
"""

RUN = """
if __name__ == "__main__":
    register("guarded", lambda: "guarded")
    main()
    note("after")
"""

PROGRAM = f"{FACTS}\n{MAIN}\n{RUN}"
# A function that is handed over takes its globals along, hence none that cannot be pickled.
PORTABLE_FACTS = FACTS.replace("threading.Lock()", "contextlib.nullcontext()")
PORTABLE_FACTS = PORTABLE_FACTS.replace("import json,", "import contextlib, json,")
PORTABLE = f"{PORTABLE_FACTS}\n{MAIN}\n{RUN}"
LAUNCH = ("-m", "hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=2")


class Program:
    """The notes of one test's program, and how to start it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.folder = runner.cwd / "facts"
        self.sweep_dir = runner.cwd / "sweep"
        self.environment = {"FACTS_DIR": str(self.folder)}

    def write(self, name: str, text: str = PROGRAM) -> Path:
        path = self.runner.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def start(self, *how: str | Path, overrides: tuple[str, ...] = ("x=1",), cwd: Path | None = None) -> Ran:
        """Run `how` and then a sweep's arguments."""
        arguments = (*LAUNCH, f"hydra.sweep.dir={self.sweep_dir}", *overrides)
        return self.runner.run(*how, *arguments, env=self.environment, cwd=cwd)

    def python(self, *how: str | Path, overrides: tuple[str, ...] = ("x=1",), cwd: Path | None = None) -> Ran:
        return self.start(sys.executable, *how, overrides=overrides, cwd=cwd)

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{kind}_*"))]

    def bodies(self) -> list[tuple[str, int, str, object]]:
        """Return who ran, job, rank and value of every body, sorted."""
        return sorted((note["who"], note["job"], note["rank"], note["cfg"]["x"]) for note in self.notes("body"))

    def assert_one_job_on_two_ranks(self, ran: Ran, after: int = 1) -> None:
        """Each rank ran the body once, and what comes after `main()` ran in the launching process alone.

        Inside the function `sys.argv` is the launching process's.
        """
        assert ran.returncode == 0, ran.output
        assert self.bodies() == [("main", 0, "0", 1), ("main", 0, "1", 1)], ran.output
        assert [note["rank"] for note in self.notes("after")] == [None] * after
        for launching in self.notes("after"):
            assert [note["argv"] for note in self.notes("body")] == [launching["argv"]] * 2
        assert {note["executable"] for note in self.notes("body")} == {sys.executable}


@pytest.fixture
def program(runner: Runner) -> Program:
    return Program(runner)


# --- scripts


@pytest.mark.sample
def test_two_jobs_of_a_script(program: Program) -> None:
    """Exactly jobs x ranks bodies run, each with its own job's values and number."""
    ran = program.python(program.write("app.py"), overrides=("x=5,6", "+g='${guarded:}'"))
    assert ran.returncode == 0, ran.output
    assert program.bodies() == [("main", job, rank, 5 + job) for job in (0, 1) for rank in ("0", "1")]
    assert len(program.notes("after")) == 1
    for note in program.notes("body"):
        assert (note["cfg"]["top"], note["cfg"]["g"]) == ("top", "guarded")
        assert note["name"] == "app"


@pytest.mark.parametrize(
    ("start_in", "path"),
    [
        pytest.param(".", "app.py", id="relative"),
        pytest.param(".", "./deep/../app.py", id="roundabout"),
        pytest.param("deep", "../app.py", id="from-a-sub-folder"),
        pytest.param("deep", "{cwd}/app.py", id="absolute-from-elsewhere"),
        pytest.param("deep", "../with space=1,'é.py", id="odd-name"),
        pytest.param("deep", "../link.py", id="symlink"),
    ],
)
def test_a_script_by_any_path(program: Program, runner: Runner, start_in: str, path: str) -> None:
    """A script runs by a relative, an absolute or an odd path, with the modules beside it."""
    program.write("sibling.py", "WORD = 'beside the script'\n")
    program.write("deep/empty.txt", "")
    for name in ("app.py", "with space=1,'é.py"):
        program.write(name, PROGRAM.replace("import hydra\n", "import hydra, sibling\n", 1))
    (runner.cwd / "link.py").symlink_to(runner.cwd / "app.py")
    program.assert_one_job_on_two_ranks(program.python(path.format(cwd=runner.cwd), cwd=runner.cwd / start_in))
    assert {note["cwd"] for note in program.notes("body")} == {str((runner.cwd / start_in).resolve())}


def test_a_module_level_chdir_does_not_lose_the_script(program: Program, runner: Runner) -> None:
    """A script given by a relative path that changes the directory before `main()` still has its ranks."""
    (runner.cwd / "elsewhere").mkdir()
    program.write("app.py", f"import os\nos.chdir('elsewhere')\n{PROGRAM}")
    program.assert_one_job_on_two_ranks(program.python("app.py"))
    assert {note["cwd"] for note in program.notes("body")} == {str((runner.cwd / "elsewhere").resolve())}


# --- modules, packages, folders, archives, console scripts


def write_package(program: Program) -> None:
    """Write a package with a relative import and its own config folder."""
    program.write("pkg/__init__.py", "")
    program.write("pkg/facts.py", FACTS)
    program.write("pkg/conf/__init__.py", "")
    program.write("pkg/conf/config.yaml", "x: 0\nfrom_file: true\n")
    text = "from .facts import *\n\n" + MAIN.replace(
        'config_path=None, config_name="facts"', 'config_path="conf", config_name="config"'
    )
    program.write("pkg/app.py", text + RUN)
    program.write("pkg/__main__.py", "from .facts import note\nfrom .app import main\n\nmain()\nnote('after')\n")


@pytest.mark.sample("pkg.app")
@pytest.mark.parametrize("name", ["pkg.app", "pkg"])
def test_a_module_of_a_package(program: Program, name: str) -> None:
    """`python -m pkg.app` and `python -m pkg` keep relative imports and the package's configs."""
    write_package(program)
    program.assert_one_job_on_two_ranks(program.python("-m", name))
    for note in program.notes("body"):
        assert note["cfg"]["from_file"] is True
        start = note["orig_argv"].index("-m")
        assert note["orig_argv"][start + 1] == name


def test_a_folder_with_a_main(program: Program, runner: Runner) -> None:
    """`python folder` runs the folder's `__main__.py` in every rank."""
    program.write("folder/__main__.py")
    program.assert_one_job_on_two_ranks(program.python("folder"))
    assert all(str(runner.cwd / "folder") in note["path"] for note in program.notes("body"))


def test_an_archive_with_a_main(program: Program, runner: Runner) -> None:
    """`python app.zip` runs the archive's `__main__.py` in every rank."""
    with zipfile.ZipFile(runner.cwd / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "from facts import *\n\n" + MAIN + RUN)
        archive.writestr("facts.py", FACTS)
    program.assert_one_job_on_two_ranks(program.python("app.zip"))


@pytest.mark.parametrize("direct", [True, False], ids=["executable", "by-the-interpreter"])
def test_a_console_script(program: Program, runner: Runner, direct: bool) -> None:
    """A wrapper as pip makes it works, started directly or by the interpreter, with `pkg://` configs."""
    write_package(program)
    text = (runner.cwd / "pkg" / "app.py").read_text().replace('"conf"', '"pkg://pkg.conf"')
    program.write("pkg/app.py", text)
    script = program.write(
        "bin/my-app",
        f"#!{sys.executable}\nimport sys\nfrom pkg.app import main\nif __name__ == '__main__':\n    sys.exit(main())\n",
    )
    script.chmod(0o755)
    program.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(runner.cwd), os.environ.get("PYTHONPATH")]))
    program.write("deep/empty.txt", "")
    how = [script] if direct else [sys.executable, script]
    program.assert_one_job_on_two_ranks(program.start(*how, cwd=runner.cwd / "deep"), after=0)
    assert all(note["cfg"]["from_file"] for note in program.notes("body"))


# --- interpreter flags and tools that run scripts


def test_interpreter_flags_reach_the_ranks(program: Program) -> None:
    """`-O`, `-W` and `-X` hold in every rank as in the launching process, and nothing of ours warns."""
    program.assert_one_job_on_two_ranks(program.python("-O", "-W", "error", "-X", "utf8", program.write("app.py")))
    (launching,) = program.notes("after")
    assert launching["optimize"] == 1
    assert launching["warnoptions"] == ["error"]
    for note in program.notes("body"):
        assert [note[key] for key in ("optimize", "warnoptions", "utf8")] == [1, ["error"], 1]


def test_an_isolated_interpreter_stays_isolated(program: Program) -> None:
    """`python -I` keeps the script's folder off the path in the ranks, too."""
    program.assert_one_job_on_two_ranks(program.python("-I", program.write("app.py")))
    assert {note["isolated"] for note in program.notes("body")} == {1}


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(["-m", "cProfile", "-o", "profile.out"], id="cProfile"),
        pytest.param(["-m", "trace", "--count", "--coverdir", "counts"], id="trace"),
        pytest.param(["-m", "coverage", "run"], id="coverage"),
    ],
)
def test_a_tool_that_runs_a_script(program: Program, tool: list[str]) -> None:
    """Under cProfile, trace and coverage the ranks run the user's script, not the tool's module."""
    if "coverage" in tool:
        pytest.importorskip("coverage")
    program.assert_one_job_on_two_ranks(program.python(*tool, program.write("app.py")))


def test_coverage_of_a_module(program: Program) -> None:
    """`coverage run -m pkg.app` runs the user's module in every rank."""
    pytest.importorskip("coverage")
    write_package(program)
    program.assert_one_job_on_two_ranks(program.python("-m", "coverage", "run", "-m", "pkg.app"))


def test_a_profiler_of_a_module(program: Program) -> None:
    """`cProfile -m pkg.app` runs the user's module in every rank."""
    write_package(program)
    program.assert_one_job_on_two_ranks(program.python("-m", "cProfile", "-o", "profile.out", "-m", "pkg.app"))


@pytest.mark.parametrize("how", [["app.py"], ["-m", "app"]], ids=["script", "module"])
def test_a_program_with_commands(program: Program, how: list[str]) -> None:
    """A program that takes a command, and writes what it likes into `sys.argv[0]`, is still found."""
    take = "command = sys.argv.pop(1)\nsys.argv[0] = 'group/' + command\nassert command == 'train', command\n"
    program.write("app.py", FACTS + take + MAIN + RUN)
    # A folder of that name is no program.
    (program.runner.cwd / "group" / "train").mkdir(parents=True)
    program.assert_one_job_on_two_ranks(program.python(*how, "train"))
    assert {note["argv"][0] for note in program.notes("body")} == {"group/train"}


# --- several mains, odd mains


def test_two_mains_of_one_script(program: Program) -> None:
    """Each function's ranks run only that function, and code after each `main()` runs once."""
    mains = "".join(
        "\n@hydra.main(config_path=None, config_name='facts', **BASE)\n"
        f"def {who}(cfg):\n    return body(cfg, {who!r})\n\n"
        for who in ("first", "second")
    )
    run = "if __name__ == '__main__':\n    first()\n    note('between')\n    second()\n    note('after')\n"
    ran = program.python(
        program.write("app.py", FACTS + mains + run), overrides=("x=1", "hydra.sweep.subdir=${now:%f}")
    )
    assert ran.returncode == 0, ran.output
    assert program.bodies() == [(who, 0, rank, 1) for who in ("first", "second") for rank in ("0", "1")]
    assert [note["rank"] for note in program.notes("after")] == [None]
    # The second one's ranks pass over the first one, and so come by here.
    assert sorted(str(note["rank"]) for note in program.notes("between")) == ["0", "1", "None"]


def test_two_mains_of_one_name(program: Program) -> None:
    """Two closures with one qualified name are told apart by the order of their sweeps."""
    make = (
        "\ndef make(who):\n    @hydra.main(config_path=None, config_name='facts', **BASE)\n"
        "    def task(cfg):\n        return body(cfg, who)\n    return task\n\n"
    )
    run = "if __name__ == '__main__':\n    for who in ('first', 'second'):\n        make(who)()\n    note('after')\n"
    ran = program.python(program.write("app.py", FACTS + make + run), overrides=("x=1", "hydra.sweep.subdir=${now:%f}"))
    assert ran.returncode == 0, ran.output
    assert program.bodies() == [(who, 0, rank, 1) for who in ("first", "second") for rank in ("0", "1")]
    assert len(program.notes("after")) == 1


def test_one_function_swept_twice(program: Program, runner: Runner) -> None:
    """Two sweeps of one function in a row are two sweeps, each with its own folder and jobs."""
    run = (
        "if __name__ == '__main__':\n    start = list(sys.argv)\n    for name in ('one', 'two'):\n"
        f"        sys.argv = [*start, 'hydra.sweep.dir={runner.cwd}/' + name]\n        main()\n    note('after')\n"
    )
    ran = program.python(program.write("app.py", FACTS + MAIN + run), overrides=("x=3,4",))
    assert ran.returncode == 0, ran.output
    wanted = [("main", job, rank, 3 + job) for job in (0, 1) for rank in ("0", "1")]
    assert program.bodies() == sorted(wanted * 2)
    assert len(program.notes("after")) == 1
    for name in ("one", "two"):
        assert (runner.cwd / name / "1" / ".hydra" / "config.yaml").exists()


def test_arguments_taken_out_by_the_script_reach_the_ranks(program: Program) -> None:
    """What `parse_known_args` took out of `sys.argv` is given to the ranks, in order."""
    take = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--word')\n"
        "parser.add_argument('--twice', action='append')\n"
        "known, rest = parser.parse_known_args()\nsys.argv = [sys.argv[0]] + rest\n"
        "note('known', word=known.word, twice=known.twice)\n"
    )
    script = program.write("app.py", FACTS + take + MAIN + RUN)
    program.assert_one_job_on_two_ranks(
        program.python(script, "--word", "a b=c", "--twice=1", overrides=("x=1", "--twice", "2"))
    )
    notes = program.notes("known")
    assert sorted(str(note["rank"]) for note in notes) == ["0", "1", "None"]
    assert all((note["word"], note["twice"]) == ("a b=c", ["1", "2"]) for note in notes)


def test_a_hydra_override_added_by_the_script_is_harmless(program: Program) -> None:
    """A `hydra.` override that the script adds to `sys.argv` is added in the ranks as well, and works."""
    script = program.write("app.py", FACTS + "sys.argv.append('hydra.job.name=renamed')\n" + MAIN + RUN)
    program.assert_one_job_on_two_ranks(program.python(script))
    assert {note["name"] for note in program.notes("body")} == {"renamed"}


def test_any_override_may_be_added_by_the_script(program: Program) -> None:
    """Overrides that the script adds are the sweep's: its ranks add them as well, to no effect."""
    added = ["+added=5", "known=7", "~gone", "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=1"]
    text = FACTS.replace('"top": "${top:}"', '"top": "${top:}", "known": 1, "gone": 1')
    program.assert_one_job_on_two_ranks(
        program.python(program.write("app.py", f"{text}\nsys.argv += {added}\n{MAIN}\n{RUN}"))
    )
    for note in program.notes("body"):
        assert note["cfg"] == {"x": 1, "top": "top", "known": 7, "added": 5}


def test_arguments_that_are_rewritten_between_two_mains(program: Program, runner: Runner) -> None:
    """A second sweep has another folder and loses an override of the first: its ranks run what it was given."""
    mains = "".join(
        "\n@hydra.main(config_path=None, config_name='facts', **BASE)\n"
        f"def {who}(cfg):\n    return body(cfg, {who!r})\n"
        for who in ("first", "second")
    )
    run = (
        "\nif __name__ == '__main__':\n    first()\n"
        "    sys.argv = [one for one in sys.argv if 'sweep.dir' not in one and 'once' not in one]\n"
        f"    sys.argv.append('hydra.sweep.dir={runner.cwd}/again')\n    second()\n    note('after')\n"
    )
    ran = program.python(program.write("app.py", FACTS + mains + run), overrides=("x=1", "+once=1"))
    assert ran.returncode == 0, ran.output
    assert program.bodies() == [(who, 0, rank, 1) for who in ("first", "second") for rank in ("0", "1")]
    assert {(note["who"], note["cfg"].get("once")) for note in program.notes("body")} == {
        ("first", 1),
        ("second", None),
    }


def test_a_flag_added_by_the_script_is_one_clear_error(program: Program) -> None:
    """What a rank would add to its own command, so that Hydra could not read it, is refused before any job."""
    added = "sys.argv += ['--config-name', 'facts']\n"
    ran = program.python(program.write("app.py", FACTS + added + MAIN + RUN))
    assert_one_clear_error(ran, "entry=function")
    assert program.notes("body") == []
    assert not (program.sweep_dir / "0").exists()


@pytest.mark.parametrize("how", ["=", "+="])
@pytest.mark.parametrize("entry", ["auto", "function"])
def test_a_whole_command_in_the_script(program: Program, entry: str, how: str) -> None:
    """A script that replaces its command line, or writes all of it, is told what to set, and that works."""
    arguments = (*LAUNCH, f"hydra.sweep.dir={program.sweep_dir}", f"hydra.launcher.entry={entry}", "x=1")
    replace = f"sys.argv[1:] {how} {arguments!r}\n"
    script = program.write("app.py", PORTABLE_FACTS + replace + MAIN + RUN)
    ran = program.runner.python(script, env=program.environment)
    if entry == "function":
        program.assert_one_job_on_two_ranks(ran)
    else:
        assert ran.returncode != 0
        assert "entry=function" in ran.output
        assert program.notes("body") == []


@pytest.mark.parametrize("entry", ["auto", "function"])
def test_a_script_that_reads_the_config_name_itself(program: Program, entry: str) -> None:
    """It would read the launcher's in a rank, so it is told what to set, and that works."""
    take = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--config-name', default='other')\n"
        "name = parser.parse_known_args()[0].config_name\n"
    )
    main = MAIN.replace('"facts"', "name").replace("    return", "    assert name == 'facts'\n    return")
    script = program.write("app.py", PORTABLE_FACTS + take + main + RUN)
    ran = program.runner.python(
        script, "--config-name", "facts", *LAUNCH, f"hydra.launcher.entry={entry}", "x=1", env=program.environment
    )
    if entry == "function":
        program.assert_one_job_on_two_ranks(ran)
    else:
        assert ran.returncode != 0
        assert "entry=function" in ran.output
        assert program.notes("body") == []


CALLBACK = """
import os, sys
from pathlib import Path

from hydra.experimental.callback import Callback

AT_TOP = list(sys.argv)


class Notes(Callback):
    def on_job_start(self, config, **kwargs):
        self.argv = list(sys.argv)

    def on_job_end(self, config, job_return, **kwargs):
        Path(os.environ["FACTS_DIR"], "callback").write_text(repr((AT_TOP, self.argv, sys.argv)))
"""


@pytest.mark.parametrize("options", [(), ("hydra.launcher.preload=auto",), ("hydra.launcher.entry=function",)])
def test_the_command_line_inside_the_job(program: Program, options: tuple[str, ...]) -> None:
    """The function, callbacks and modules that come with the job see the command as it was typed, in any rank."""
    program.write("notes_callback.py", CALLBACK)
    callback = "+hydra.callbacks.notes={_target_:notes_callback.Notes}"
    ran = program.python(program.write("app.py", PORTABLE), overrides=("x=1", callback, *options))
    program.assert_one_job_on_two_ranks(ran)
    (after,) = program.notes("after")
    assert (program.folder / "callback").read_text() == repr((after["argv"],) * 3)


# --- Hydra's own flags


def write_configs(program: Program) -> Path:
    """Write two configs, a group that only `--config-dir` finds, and a script that uses the first config."""
    program.write("conf/config.yaml", "x: 0\nfrom_file: config\n")
    program.write("conf/other.yaml", "x: 0\nfrom_file: other\n")
    program.write("alternative/config.yaml", "x: 0\nfrom_file: alternative\n")
    program.write("extra/group/choice.yaml", "chosen: true\n")
    main = MAIN.replace('config_path=None, config_name="facts"', 'config_path="conf", config_name="config"')
    return program.write("app.py", FACTS + main + RUN)


@pytest.mark.parametrize(
    ("flags", "from_file", "chosen"),
    [
        pytest.param(["--config-name", "other"], "other", None, id="name"),
        pytest.param(["+group=choice", "--config-name=other", "--config-dir", "extra"], "other", True, id="name-dir"),
        pytest.param(["+group=choice", "-cn", "other", "-cd", "extra"], "other", True, id="short"),
        pytest.param(["-cp", "alternative"], "alternative", None, id="path"),
        pytest.param(["--config-path", "{cwd}/alternative"], "alternative", None, id="absolute-path"),
        pytest.param(["hydra.searchpath=[file://{cwd}/extra]", "+group=choice"], "config", True, id="searchpath"),
    ],
)
def test_config_flags_reach_the_ranks(
    program: Program, runner: Runner, flags: list[str], from_file: str, chosen: bool | None
) -> None:
    """`--config-name`, `--config-path`, `--config-dir` and the search path give the ranks the same config."""
    script = write_configs(program)
    given = tuple(flag.format(cwd=runner.cwd) for flag in flags)
    program.assert_one_job_on_two_ranks(program.python(script, overrides=("x=1", *given)))
    for note in program.notes("body"):
        assert note["cfg"]["from_file"] == from_file
        assert note["cfg"].get("group", {}).get("chosen") == chosen


def test_compose_in_a_job_finds_the_users_groups(program: Program) -> None:
    """The command line's search path holds in a job: `compose()` finds a group of `--config-dir`."""
    script = write_configs(program)
    text = script.read_text().replace(
        "    return body(cfg)",
        "    composed = hydra.compose('config', overrides=['+group=choice'])\n"
        "    note('composed', chosen=composed.group.chosen, from_file=composed.from_file)\n    return body(cfg)",
    )
    script.write_text(text)
    program.assert_one_job_on_two_ranks(program.python(script, overrides=("x=1", "--config-dir", "extra")))
    assert [(note["chosen"], note["from_file"]) for note in program.notes("composed")] == [(True, "config")] * 2


def test_showing_the_config_starts_nothing(program: Program) -> None:
    """`--cfg job` with the launcher chosen prints the config and starts no rank."""
    script = program.write("app.py")
    ran = program.runner.python(script, "--cfg", "job", "hydra/launcher=ddp_subprocess", "x=1", env=program.environment)
    assert ran.returncode == 0, ran.output
    assert "x: 1" in ran.stdout
    assert program.notes("body") == []


# --- sweeps that no command line started


def test_zen_hydra_main(program: Program) -> None:
    """`zen(...).hydra_main` is a script like any other."""
    pytest.importorskip("hydra_zen")
    run = (
        "from hydra_zen import zen\n\n"
        "def task(x: int, top: str):\n    return body(OmegaConf.create({'x': x, 'top': top}))\n\n"
        "if __name__ == '__main__':\n    zen(task).hydra_main(config_name='facts', config_path=None, **BASE)\n"
        "    note('after')\n"
    )
    program.assert_one_job_on_two_ranks(program.python(program.write("app.py", FACTS + run)))


def test_hydra_zen_launch(program: Program) -> None:
    """`hydra_zen.launch` takes the function entry, and gives the values back."""
    pytest.importorskip("hydra_zen")
    options = {"hydra.launcher.nproc_per_node": 2, "hydra.sweep.dir": str(program.sweep_dir)}
    run = (
        "from hydra_zen import launch, make_config\n\n"
        "if __name__ == '__main__':\n"
        f"    overrides = {{'hydra/launcher': 'ddp_subprocess', **{options!r}, 'x': '1,2'}}\n"
        "    (jobs,) = launch(make_config(x=0), body, overrides=overrides, multirun=True, version_base='1.3')\n"
        "    note('after', values=[job.return_value for job in jobs])\n"
    )
    ran = program.runner.python(program.write("app.py", PORTABLE_FACTS + run), env=program.environment)
    assert ran.returncode == 0, ran.output
    assert program.bodies() == [("main", job, rank, 1 + job) for job in (0, 1) for rank in ("0", "1")]
    (after,) = program.notes("after")
    assert after["values"] == [1, 2]


def test_main_called_in_a_test(program: Program) -> None:
    """A test that calls `main()` with a patched `sys.argv` gets ranks, not a second run of pytest."""
    write_package(program)
    arguments = ["app.py", *LAUNCH, f"hydra.sweep.dir={program.sweep_dir}", "x=1"]
    program.write(
        "test_app.py",
        "from pkg.app import main, note\n\n\n"
        "def test_main(monkeypatch):\n"
        f"    monkeypatch.setattr('sys.argv', {arguments!r})\n    main()\n    note('after')\n",
    )
    ran = program.runner.python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir=.",
        "test_app.py",
        env=program.environment,
    )
    program.assert_one_job_on_two_ranks(ran)
    assert "1 passed" in ran.stdout


@pytest.mark.sample("-c")
@pytest.mark.parametrize("form", ["-c", "stdin"])
def test_programs_without_a_file(program: Program, form: str) -> None:
    """`python -c` and a program on stdin have nothing to run again, so the function itself is handed over."""
    if form == "-c":
        ran = program.python("-c", PORTABLE)
    else:
        script = program.write("on_stdin.py", PORTABLE)
        program.environment["PROGRAM"] = str(script)
        ran = program.start("sh", "-c", 'exec "$0" - "$@" < "$PROGRAM"', sys.executable)
    program.assert_one_job_on_two_ranks(ran)


@pytest.mark.parametrize("entry", ["script", "function"])
def test_the_entry_can_be_chosen(program: Program, entry: str) -> None:
    """`entry` forces either way for a script that both work for, and the job is the same."""
    ran = program.python(program.write("app.py", PORTABLE), overrides=("x=1", f"hydra.launcher.entry={entry}"))
    program.assert_one_job_on_two_ranks(ran)
    starts = [any(part.endswith("app.py") for part in note["orig_argv"]) for note in program.notes("body")]
    assert starts == [entry == "script"] * 2
