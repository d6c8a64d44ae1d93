"""The same program and overrides under the basic launcher and under ours: every rank must see what a plain job sees.

The apps in tests/apps/diff write down all they can see: each config node with its types and flags, Hydra's own node the
same way, folders, resolved values. Both launchers run **at the same path**, one after the other, so nothing has to be
normalised; what may differ all the same is in this file's `LAUNCHER`, `same_for_rank` and `Names`, and nowhere else.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from support.runner import APPS

if TYPE_CHECKING:
    from support.runner import Ran, Runner

PROJECT = APPS / "diff"
BASIC = ("hydra/launcher=basic",)
OURS = ("hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=2")
# LAUNCHER_TEST_PRELOAD=auto compares all programs with ranks that are forks; here some are always.
PRELOADED = (*OURS, "hydra.launcher.preload=auto")
BOTH_STARTS = pytest.mark.parametrize("launcher", [OURS, PRELOADED], ids=["new", "forked"])
# Keys of Hydra's node that name the launcher: the first documented difference. The lines are theirs in saved YAML.
LAUNCHER = re.compile(r"hydra\.launcher\b|hydra\.runtime\.choices\.hydra/launcher$")
LAUNCHER_LINES = re.compile(
    r"^  launcher:\n(?:    .*\n)*|^ +- hydra[/.]launcher.*\n|^ +hydra/launcher: .*\n", re.MULTILINE
)
LOG_FILE = r"\|hydra\|hydra\.job_logging\.handlers\.\w+\.filename\|"
LOG_TIME = re.compile(rb"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\]", re.MULTILINE)
ODD = "é 李=,'\"[]{}()%@#&;*~\\$ x"

Facts = dict[str, str]


def quote(text: str) -> str:
    """`text` in Hydra's single quotes: backslashes count only in front of a quote, so only those are doubled."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


def round_trips(text: str) -> bool:
    """Plain Hydra itself hands this value on unchanged (a `${` that is no interpolation is refused by OmegaConf)."""
    try:
        value = OverridesParser.create().parse_override(f"+v={quote(text)}").value()
        OmegaConf.create({"v": value})
    except (HydraException, OmegaConfBaseException):
        return False
    return value == text


@dataclass(frozen=True)
class Side:
    """What one launcher left behind: how the program ended, one dump for each job and rank, and the files."""

    ran: Ran
    dumps: dict[tuple[int, str], Facts]
    files: dict[str, bytes | None]
    """Each path below the base, folders (None) too, with its content; without our `.ddp` folders."""
    own: list[str]
    """The folders, below the base, that have a `.ddp`."""
    base: Path
    """Where all this was while the program ran."""
    root: Path
    """Where the base lies now."""

    def run_dirs(self) -> set[str]:
        return {os.path.relpath(facts["|output_dir"], self.base) for facts in self.dumps.values()}


def flat(value: object, prefix: str = "") -> Facts:
    """A dump as one table, so that a difference reads as a key and two texts."""
    if not isinstance(value, dict):
        return {prefix: str(value)}
    return {key: text for name, part in value.items() for key, text in flat(part, f"{prefix}|{name}").items()}


def read_dump(path: Path) -> Facts:
    """One dump without what names the launcher; its overrides are taken out and the others counted anew."""
    dump = json.loads(path.read_text())
    others = [
        node
        for key, node in dump["hydra"].items()
        if key.startswith("hydra.overrides.hydra[") and not re.search(r"['\"]hydra[/.]launcher", node["raw"])
    ]
    dump["hydra"] = {
        key: node
        for key, node in dump["hydra"].items()
        if not LAUNCHER.match(key) and not key.startswith("hydra.overrides.hydra[")
    }
    for number, node in enumerate(others):
        dump["hydra"][f"hydra.overrides.hydra[{number}]"] = {**node, "key": str(number)}
    return flat(dump)


def read_files(base: Path) -> tuple[dict[str, bytes | None], list[str]]:
    files: dict[str, bytes | None] = {}
    own = []
    for folder, folders, names in os.walk(base):
        here = Path(folder)
        if ".ddp" in folders:
            own.append(str(here.relative_to(base)))
        folders[:] = [name for name in folders if name not in (".ddp", "__pycache__", "dumps")]
        files.update({str((here / name).relative_to(base)) + "/": None for name in folders})
        for name in names:
            content = (here / name).read_bytes()
            if name in ("hydra.yaml", "multirun.yaml"):
                content = LAUNCHER_LINES.sub("", content.decode()).encode()
            elif name.endswith(".log"):
                content = LOG_TIME.sub(b"[time]", content)
            files[str((here / name).relative_to(base))] = content
    return files, own


@dataclass
class Case:
    """One program with its arguments, to be run by both launchers at one and the same path."""

    runner: Runner
    app: str
    """A script of the project, or a module if it has no suffix."""
    args: tuple[str, ...] = ()
    base: str = "here"
    cwd: str = "project"
    sweep_dir: str | None = "sweep"
    """Below the base; None: the arguments or the config say where."""
    multirun: bool = True
    env: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None

    @property
    def here(self) -> Path:
        return self.runner.cwd / self.base

    def run(self, launcher: tuple[str, ...]) -> Side:
        shutil.copytree(PROJECT, self.here / "project", ignore=shutil.ignore_patterns("__pycache__"))
        (self.here / "project" / "data.txt").write_text("some data\n")
        dumps = self.here / "dumps"
        dumps.mkdir()
        (self.here / self.cwd).mkdir(exist_ok=True)
        if self.prepare is not None:
            self.prepare(self.here)
        argv = ["-m", self.app]
        if self.app.endswith(".py"):
            argv = [os.path.relpath(self.here / "project" / self.app, self.here / self.cwd)]
        argv += ["-m"] * self.multirun + [*self.args, *launcher]
        if self.sweep_dir is not None:
            argv.append(f"hydra.sweep.dir={quote(str(self.here / self.sweep_dir))}")
        ran = self.runner.python(*argv, cwd=self.here / self.cwd, env={"DIFF_DUMP_DIR": str(dumps), **self.env})
        seen = {}
        for path in dumps.iterdir():
            job, rank = path.stem.removeprefix("job").split("_rank")
            seen[int(job), rank] = read_dump(path)
        files, own = read_files(self.here)
        # Out of the way: the other launcher gets the same path.
        root = self.runner.cwd / f"done_{len(os.listdir(self.runner.cwd))}"
        self.here.rename(root)
        return Side(ran, seen, files, own, self.here, root)

    def both(self, ours: tuple[str, ...] = OURS) -> tuple[Side, Side]:
        return self.run(BASIC), self.run(ours)


class Names:
    """What two runs cannot share: time and random names. Each gets the number of its first appearance instead.

    So the pattern is compared (which values are equal, inside a job and between jobs), only the values are not.
    """

    PATTERN = re.compile(r"\d{4}-\d\d-\d\d(?:[/_]\d\d-\d\d-\d\d(?:-\d{6})?)?|us\d{6}|rnd[0-9a-f]{12}|RND[0-9A-F]{12}")

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def list_numbers(self, text: str) -> str:
        def number(found: re.Match[str]) -> str:
            name = f"<{self.numbers.setdefault(found[0].lower(), len(self.numbers))}>"
            return f"UPPER{name}" if found[0].startswith("RND") else name

        return self.PATTERN.sub(number, text)

    @classmethod
    def of(cls, side: Side) -> tuple[dict[tuple[int, str], Facts], dict[str, bytes | None]]:
        names = cls()
        dumps = {
            (job, rank): {key: names.list_numbers(text) for key, text in side.dumps[job, rank].items()}
            for job, rank in sorted(side.dumps)
            if rank in ("basic", "0")
        }
        files = {
            names.list_numbers(name): content and names.list_numbers(content.decode("latin-1")).encode("latin-1")
            for name, content in side.files.items()
        }
        return dumps, files


def differing(left: Mapping[str, object], right: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    return {
        key: (left.get(key, "(absent)"), right.get(key, "(absent)"))
        for key in sorted({*left, *right})
        if left.get(key, "(absent)") != right.get(key, "(absent)")
    }


def same_for_rank(rank: int, first: Facts) -> Facts:
    """What rank k > 0 must see when rank 0 saw `first`: no `.hydra`, and log files of its own; all else is equal."""
    expected = dict(first)
    run_dir = Path(first["|output_dir"])
    none = {
        "type": "builtins.NoneType",
        "raw": "builtins.NoneType None",
        "resolved": "None",
        "interpolation": "False",
    }
    expected.update({f"|hydra|hydra.output_subdir|{fact}": text for fact, text in none.items()})
    for key in first:
        if re.fullmatch(f"{LOG_FILE}resolved", key):
            own = run_dir / ".ddp" / f"rank_{rank}.{Path(ast.literal_eval(first[key])).name}"
            expected[key] = repr(str(own))
    return expected


def assert_same(
    basic: Side,
    ours: Side,
    jobs: int,
    between_ranks: Iterable[str] = (),
) -> None:
    """Both programs ran `jobs` jobs to their end, and nothing but the documented list differs.

    `between_ranks` are keys that are drawn anew at each access, so that even two ranks differ.
    """
    codes = basic.ran.returncode, ours.ran.returncode
    assert codes == (0, 0), basic.ran.output[-3000:] + ours.ran.output[-3000:]
    assert sorted(basic.dumps) == [(job, "basic") for job in range(jobs)]
    assert sorted(ours.dumps) == [(job, rank) for job in range(jobs) for rank in "01"], ours.ran.output[-3000:]
    for job in range(jobs):
        found = differing(same_for_rank(1, ours.dumps[job, "0"]), ours.dumps[job, "1"])
        # How a log file's name is spelled in the config (literal or interpolation) is left open: its value is not.
        found = {
            key: texts
            for key, texts in found.items()
            if not re.fullmatch(rf"{LOG_FILE}(raw|interpolation)", key) and key not in between_ranks
        }
        assert found == {}, f"job {job}: rank 0 and rank 1"
    dumps, files = Names.of(basic)
    our_dumps, our_files = Names.of(ours)
    for job in range(jobs):
        found = differing(dumps[job, "basic"], our_dumps[job, "0"])
        assert found == {}, f"job {job}: basic and rank 0"
    assert differing(files, our_files) == {}
    assert not any("outputs" in Path(name).parts for name in ours.files)
    sweep_dirs = {os.path.dirname(name) for name in ours.files if os.path.basename(name) == "multirun.yaml"}
    assert set(ours.own) == ours.run_dirs() | sweep_dirs, "a `.ddp` where none belongs, or none"
    assert sweep_dirs == {folder for folder in ours.own if (ours.root / folder / ".ddp" / "results.csv").exists()}


def raw(side: Side, key: str, job: int = 0) -> str:
    """The stored value of one node of the user's config, so that a test can say what it is beside being equal."""
    return side.dumps[job, "0"][f"|cfg|{key}|raw"]


TYPED = ("kind=BLUE", "path='a/b=c.txt'", "pair=[2,3]", "inner.kind=BLUE", "inner.more=null", "optimizer=sgd")


def own_classes(side: Side) -> dict[str, str]:
    """What the app itself found about the identity of its classes."""
    dump = side.dumps[min(side.dumps)]
    return {key: text for key, text in dump.items() if key.startswith("|extra|") and key.endswith("_class")}


@pytest.mark.sample("usual")
@pytest.mark.parametrize(
    ("args", "jobs"), [(("needed=1,2",), 2), (("hydra.output_subdir=null",), 1)], ids=["usual", "no-output-subdir"]
)
def test_dataclasses_of_main_keep_their_types(runner: Runner, args: tuple[str, ...], jobs: int) -> None:
    """Classes, Enums and Paths of `__main__` are the very same in a rank, also without saved YAML."""
    basic, ours = Case(runner, "typed.py", (*TYPED, *args)).both()
    assert_same(basic, ours, jobs)
    assert set(own_classes(ours).values()) == {"True"}
    assert any(".hydra" in name for name in ours.files) == (jobs == 2)


@BOTH_STARTS
def test_classes_without_a_name_keep_their_types(runner: Runner, launcher: tuple[str, ...]) -> None:
    """Classes by `make_dataclass` and classes in functions arrive whole, with an Enum of `__main__` inside them."""
    args = ("branch.leaf.size=4,5", "local.color=CYAN", "one.first=3", "shape.side=RIGHT")
    basic, ours = Case(runner, "made.py", args).both(launcher)
    assert_same(basic, ours, jobs=2)
    assert set(own_classes(ours).values()) == {"True"}
    assert raw(ours, "branch.leaf.size", job=1) == "builtins.int 5"


def test_objects_in_the_config(runner: Runner) -> None:
    """Objects, functions and flags that OmegaConf keeps in a config survive."""
    basic, ours = Case(runner, "objects.py").both()
    assert_same(basic, ours, jobs=1)
    assert set(own_classes(ours).values()) == {"True"}


def test_read_only_config(runner: Runner) -> None:
    """A config that the job cannot write to is such a one in all ranks."""
    basic, ours = Case(runner, "read_only.py").both()
    assert_same(basic, ours, jobs=1)
    assert "ReadonlyConfigError" in ours.dumps[min(ours.dumps)]["|extra|written"]


@BOTH_STARTS
def test_module_of_a_package(runner: Runner, launcher: tuple[str, ...]) -> None:
    """`python -m`, configs as package data, an argument that the program takes for itself, one it adds."""
    basic, ours = Case(runner, "pkg.sub.app", ("--own", "given = é", "a=1,2")).both(launcher)
    assert_same(basic, ours, jobs=2)
    assert set(own_classes(ours).values()) == {"True"}
    assert ours.dumps[min(ours.dumps)]["|extra|own"] == "given = é"


def test_hydra_zen_configs_keep_their_types(runner: Runner) -> None:
    """Classes made by hydra-zen arrive whole and build the user's objects, through its `zen` wrapper."""
    pytest.importorskip("hydra_zen", reason="hydra-zen is not installed beside this Hydra version")
    basic, ours = Case(runner, "zen.py", ("net=small,large", "rate=0.25", "net.width=7")).both()
    assert_same(basic, ours, jobs=2)


OVERRIDES = (
    "t=1,2",
    '+s="${t}"',
    "+s2='${t} and ${lr}'",
    "+s3=${t}",
    "++lr=0.2",
    "~data@spare.inputs",
    "model=mlp",
    "model.kind='m,l=p'",
    "+experiment=long",
    "+list2=[1,'two, three',{a:null}]",
    "+dict2={a:1,b:['${t}']}",
    "+none=null",
    "+infinite=inf",
    "+text='1'",
    "+blank=",
    "+spaced=a b",
    "+backslashed=a\\,b\\=c",
    "+data@more.inputs=local",
    "+newline='a\nb'",
    "+hydra.job.env_set.FROM_JOB_A='é ${hydra:job.num} =,'",
    "+hydra.job.env_set.FROM_JOB_B=1",
    "hydra.job.env_copy=[FROM_JOB_COPY]",
    "hydra.sweep.subdir='${hydra:job.num}_${t}'",
    "+hydra.job_logging.handlers.second={class:logging.FileHandler,formatter:simple,"
    "filename:'${hydra.runtime.output_dir}/second.log'}",
    "hydra.job_logging.root.handlers=[console,file,second]",
    "hydra.verbose=[a.b]",
)


@pytest.mark.sample("new")
@BOTH_STARTS
def test_overrides_and_yaml(runner: Runner, launcher: tuple[str, ...]) -> None:
    """A config of YAML files with each kind of override and of interpolation."""
    basic, ours = Case(runner, "plain.py", OVERRIDES, env={"FROM_JOB_COPY": "copied"}).both(launcher)
    assert_same(basic, ours, jobs=2)
    assert raw(ours, "s") == "builtins.str '${t}'"
    for job, t in enumerate(("1", "2")):
        run_dir = ours.root / "sweep" / f"{job}_{t}"
        for log in ("plain.log", "second.log"):
            ranks = (run_dir / log, run_dir / ".ddp" / f"rank_1.{log}")
            first, second = (LOG_TIME.sub(b"", path.read_bytes()) for path in ranks)
            assert first == second != b""


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_folders(runner: Runner, chdir: str) -> None:
    """Started in a sub-folder, with a relative sweep folder, ranks see the same folders and log to them."""
    folders = ("hydra.sweep.dir=rel/a", "hydra.sweep.subdir=${hydra.job.override_dirname}")
    args = (f"hydra.job.chdir={chdir}", "hydra/job_logging=own", *folders, "t=1,2")
    basic, ours = Case(runner, "plain.py", args, cwd="project/sub", sweep_dir=None).both()
    assert_same(basic, ours, jobs=2)
    assert ours.dumps[1, "0"]["|cwd"].endswith("project/sub/rel/a/t=2" if chdir == "true" else "project/sub")


@pytest.mark.parametrize("version_base", ["1.1", "1.3"])
def test_program_that_leaves_its_folder(runner: Runner, version_base: str) -> None:
    """`os.chdir` at the top of the program, and the version base that decides about `chdir`."""
    if version_base == "1.1" and not hydra.__version__.startswith("1.3"):
        pytest.skip("Hydra 1.4 refuses version_base 1.1")
    args = ("--config-dir=added_conf", "hydra.sweep.dir=rel", "+group=added")
    env = {"DIFF_CHDIR": str(runner.cwd / "here" / "elsewhere"), "DIFF_VERSION_BASE": version_base}

    def prepare(here: Path) -> None:
        (here / "elsewhere" / "added_conf" / "group").mkdir(parents=True)
        (here / "elsewhere" / "added_conf" / "group" / "added.yaml").write_text("x: 1\n")

    basic, ours = Case(runner, "plain.py", args, sweep_dir=None, env=env, prepare=prepare).both()
    assert_same(basic, ours, jobs=1)
    assert "elsewhere/rel/0/artifact.txt" in ours.files


def test_default_sweep_folder(runner: Runner) -> None:
    """Without a sweep folder of the user's there is one `multirun/<day>/<time>/<job>` a job, and no `outputs`."""
    basic, ours = Case(runner, "plain.py", ("model=glob(*)",), sweep_dir=None).both()
    assert_same(basic, ours, jobs=2)
    runs = [name for name in ours.files if re.fullmatch(r"project/multirun/[^/]+/[^/]+/[^/]+/", name)]
    assert sorted(Path(name).name for name in runs) == ["0", "1"]


def test_mode_in_the_config(runner: Runner) -> None:
    """Mode and sweep in the config, no `-m`: the same jobs, two batches of them, and no rank sweeps again."""
    basic, ours = Case(runner, "plain.py", ("--config-name=sweeping",), multirun=False).both()
    assert_same(basic, ours, jobs=3)


@pytest.mark.parametrize(
    "args",
    [
        ("-cd", "../project/extra_conf", "-cn", "extra", "hydra.searchpath=[file://found_conf]", "model=found"),
        ("--config-path", "conf_other", "--config-name=base", "model=other,found"),
        ("-cp", "ABSOLUTE", "-cn", "base.yaml", "+model@second=found"),
    ],
    ids=["config-dir", "config-path", "absolute"],
)
def test_config_flags(runner: Runner, args: tuple[str, ...]) -> None:
    """The user's `--config-*` flags and `hydra.searchpath`, as seen by the job and by `compose()` inside it."""
    absolute = str(runner.cwd / "here" / "project" / "conf_other")
    args = tuple(absolute if arg == "ABSOLUTE" else arg for arg in args)
    basic, ours = Case(runner, "plain.py", args).both()
    assert_same(basic, ours, jobs=2 if "model=other,found" in args else 1)


def test_random_values_and_time(runner: Runner) -> None:
    """What is drawn once a job in plain Hydra is drawn once a job here, and all ranks see the same."""
    args = ("hydra.sweep.dir='sweep/${now:%Y-%m-%d_%H-%M-%S-%f}'", "hydra.sweep.subdir='${random:}'", "a=1,1")
    basic, ours = Case(runner, "resolving.py", args, sweep_dir=None).both()
    assert_same(basic, ours, jobs=2)
    first, second = (ours.dumps[job, "0"] for job in (0, 1))
    assert first["|extra|drawn|random"].strip("'") == first["|extra|subdir"]
    assert first["|extra|drawn|random"] != second["|extra|drawn|random"]


def test_random_run_folder(runner: Runner) -> None:
    """A run folder that plain Hydra draws anew at each look is drawn once a job, for all ranks."""
    args = ("hydra.sweep.subdir='${uncached:}-${random:}'", "a=1,2")
    basic, ours = Case(runner, "resolving.py", args).both()
    drawn = ("|hydra|hydra.sweep.subdir|resolved", "|hydra|hydra.overrides.hydra[0]|resolved")
    assert_same(basic, ours, jobs=2, between_ranks=drawn)
    assert len([name for name in ours.files if re.fullmatch(r"sweep/[^/]+/", name)]) == 2


def test_cached_value_of_the_jobs_environment(runner: Runner) -> None:
    """A cached resolver that reads a variable of `hydra.job.env_set` sees the job's value, not the sweep's."""
    args = ("+hydra.job.env_set.FROM_JOB_A=inner", "+from_env='${cached_env:FROM_JOB_A}'")
    basic, ours = Case(runner, "resolving.py", args, env={"FROM_JOB_A": "outer"}).both()
    assert_same(basic, ours, jobs=1)


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_odd_folders(runner: Runner, chdir: str) -> None:
    """Odd characters in the project's folder, in the sweep folder and in names made of overrides."""
    args = (
        f"hydra.job.chdir={chdir}",
        "hydra.sweep.subdir='${hydra:job.override_dirname}'",
        "lr='/nested/é =,','[a]{b}'",
        f"hydra.output_subdir={quote('.hydra é =')}",
        "+ckpt='\"epoch=9-step=3.ckpt\"'",
    )
    basic, ours = Case(runner, "plain.py", args, base=ODD, sweep_dir=f"sweep {ODD}").both()
    assert_same(basic, ours, jobs=2)


@pytest.mark.parametrize(
    ("subdir", "jobs"), [(".", 2), ("", 1), ("../beside/${hydra:job.num}", 1), ("ABSOLUTE/${hydra:job.num}", 1)]
)
def test_unusual_run_folders(runner: Runner, subdir: str, jobs: int) -> None:
    """All jobs in one folder, which is the sweep's, or a folder outside of the sweep's."""
    subdir = subdir.replace("ABSOLUTE", str(runner.cwd / "here" / "absolute"))
    args = ("+a=1,2" if jobs == 2 else "+a=1", f"hydra.sweep.subdir={quote(subdir)}")
    basic, ours = Case(runner, "values.py", args).both()
    assert_same(basic, ours, jobs)


@pytest.mark.parametrize("logging", ["none", "disabled", "stdout"])
def test_without_log_files(runner: Runner, logging: str) -> None:
    """A user who turned Hydra's log file off has none, in no rank."""
    basic, ours = Case(runner, "values.py", (f"hydra/job_logging={logging}",)).both()
    assert_same(basic, ours, jobs=1)


@pytest.mark.parametrize("name", ["a${t}", "a\\${t}", "a${hydra:job.num}b", "${no", "a\nb ", "\udcff"])
def test_folder_that_means_something_to_hydra(runner: Runner, name: str) -> None:
    """A sweep folder that Hydra reads as an interpolation, or cannot write down, gives what plain Hydra gives."""
    basic, ours = Case(runner, "plain.py", ("t=1",), sweep_dir=name).both()
    assert (basic.ran.returncode == 0) == (ours.ran.returncode == 0), ours.ran.output
    if basic.ran.returncode == 0:
        assert_same(basic, ours, jobs=1)
    else:
        assert (basic.dumps, ours.dumps) == ({}, {})


def test_c_locale_and_long_values(runner: Runner) -> None:
    """Non-ASCII values under `LC_ALL=C`, and a command line that is too long to be shown in a rank's."""
    args = (f"hydra.job.name={quote('é李')}", f"+long='{'x' * 70_000}'", f"+odd={quote(ODD)}", "+smile='😀'")
    basic, ours = Case(runner, "values.py", args, env={"LC_ALL": "C"}).both()
    assert_same(basic, ours, jobs=1)


PIECES = [*"=, '\"[]{}()%@#&;*~\\$:/|<>!?^`+-._\t\n", *"éa1李😀", "${t}", "\\${", "null", "true"]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
FOLDER = HOSTILE.map(lambda name: re.sub("[/$]", "", name)).filter(lambda name: name not in ("", ".", ".."))


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # Each try is two sweeps: an example is shown as it was drawn, not made smaller.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    values=st.lists(HOSTILE.filter(round_trips), min_size=40, max_size=40),
    in_yaml=st.lists(HOSTILE.filter(round_trips), min_size=5, max_size=20),
    folder=FOLDER,
)
def test_hostile_values(runner: Runner, values: list[str], in_yaml: list[str], folder: str) -> None:
    """Whatever plain Hydra takes as a value, or as a folder, arrives unchanged in every rank."""
    assert OverridesParser.create().parse_override(f"+v={quote(folder)}").value() == folder

    def prepare(here: Path) -> None:
        (here / "project" / "user").mkdir()
        content = {"t": 1, "in_yaml": in_yaml, "as_keys": {text: 1 for text in in_yaml if "${" not in text}}
        # JSON is YAML, and this way the file does not depend on how YAML would quote.
        text = json.dumps(content, ensure_ascii=False)
        (here / "project" / "user" / "config.yaml").write_text(text, encoding="utf-8")

    overrides = [f"+v{number}={quote(text)}" for number, text in enumerate(values[2:])]
    overrides.append(f"+swept={quote(values[0])},{quote(values[1])}")
    args = ("--config-dir=user", "--config-name=config", *overrides)
    basic, ours = Case(runner, "values.py", args, sweep_dir=folder, prepare=prepare).both()
    assert_same(basic, ours, jobs=2)
    for number, text in enumerate(values[2:]):
        assert raw(ours, f"v{number}") == f"builtins.str {text!r}"
