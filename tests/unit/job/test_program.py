"""How a program was started becomes the command that starts it again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.utils import get_args_parser

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.job import program as program_module
from hydra_plugins.hydra_ddp_subprocess_launcher.job.program import ProcessStart, Program

PYTHON = "/usr/bin/python3"


def started(folder: Path, *typed: str, **changes: Any) -> ProcessStart:
    """Return the start of `python <typed>` in a folder; the first element is the script."""
    values: dict[str, Any] = {
        "executable": PYTHON,
        "interpreter_flags": (),
        "orig_argv": (PYTHON, *typed),
        "argv": typed,
        "main_file": os.path.join(folder, typed[0]) if typed else None,
        "spec_name": None,
        "spec_origin": None,
        "sys_path": (),
        "cwd": str(folder),
    }
    return ProcessStart(**{**values, **changes})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script, a package with a module and a `__main__`, and a folder that is a program."""
    for name in ("app.py", "sub/app.py", "pkg/__init__.py", "pkg/mod.py", "pkg/__main__.py", "dir/__main__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return tmp_path


def container(script: str) -> str | None:
    """Return the name in the spec of a script that is a folder."""
    return "__main__" if script.startswith("dir") else None


@pytest.mark.parametrize("script", ["app.py", "./app.py", "sub/app.py", "dir", "sub/../app.py"])
def test_a_script(project: Path, script: str) -> None:
    """A script or folder runs again by its absolute path, in the folder where it was started."""
    main_file = os.path.join(project, script, *(["__main__.py"] if script == "dir" else []))
    start = started(project, script, "-m", "lr=1", main_file=main_file, spec_name=container(script))
    path = os.path.join(project, script)
    assert program_module.find_program(start) == Program((PYTHON, path), str(project), path)


@pytest.mark.parametrize("script", ["app.py", "./app.py", "sub/app.py", "dir"])
def test_a_chdir_does_not_lose_the_script(project: Path, tmp_path_factory: pytest.TempPathFactory, script: str) -> None:
    """A program that changed its directory at import runs again in the one where it was started."""
    main_file = os.path.join(project, script, *(["__main__.py"] if script == "dir" else []))
    elsewhere = str(tmp_path_factory.mktemp("elsewhere"))
    start = started(project, script, main_file=main_file, spec_name=container(script), cwd=elsewhere)
    path = os.path.join(project, script)
    assert program_module.find_program(start) == Program((PYTHON, path), str(project), path)


@pytest.mark.parametrize(
    ("found", "typed", "again"),
    [
        (PYTHON, ("python", "-X", "dev", "app.py", "--own", "-m", "lr=1"), ("python", "-X", "dev", "app.py", "--own")),
        (None, ("python", "app.py", "lr=1"), None),
        ("/elsewhere/python", ("python", "app.py", "lr=1"), None),
    ],
    ids=["on the path", "not found", "another one"],
)
def test_the_command_as_it_was_typed(
    project: Path, found: str | None, typed: tuple[str, ...], again: tuple[str, ...] | None
) -> None:
    """A person reads what was typed, without flags that came from a variable, where a shell finds that interpreter."""
    argv = ("app.py", *(word for word in typed if word in ("-m", "lr=1")))
    start = started(project, "app.py", interpreter_flags=("-B", "-Xdev"), orig_argv=typed, argv=argv)
    program = program_module.find_program(start)
    assert program.command[:3] == (PYTHON, "-B", "-Xdev")
    assert program_module.command_as_typed(start, found, program) == (again or program.command)


def test_a_script_in_the_root_folder(project: Path) -> None:
    """A start in `/` is no special case."""
    script = str(project / "app.py").lstrip("/")
    start = started(Path("/"), script, main_file=f"//{script}", cwd=str(project))
    assert program_module.find_program(start) == Program((PYTHON, f"/{script}"), "/", f"/{script}")


def test_an_absolute_script(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An absolute path needs no folder; ranks then start where the process is."""
    elsewhere = str(tmp_path_factory.mktemp("elsewhere"))
    script = str(project / "app.py")
    start = started(project, script, cwd=elsewhere)
    assert program_module.find_program(start) == Program((PYTHON, script), elsewhere, script)


def test_interpreter_flags(project: Path) -> None:
    """The interpreter's flags are given again, before the script."""
    start = started(
        project,
        "app.py",
        interpreter_flags=("-O", "-Xdev"),
        orig_argv=(PYTHON, "-O", "-Xdev", "app.py", "lr=1"),
        argv=("app.py", "lr=1"),
    )
    assert program_module.find_program(start).command == (PYTHON, "-O", "-Xdev", str(project / "app.py"))


@pytest.mark.parametrize(
    ("typed", "spec_name", "file", "module"),
    [
        (("-m", "pkg.mod"), "pkg.mod", "pkg/mod.py", "pkg.mod"),
        (("-mpkg.mod",), "pkg.mod", "pkg/mod.py", "pkg.mod"),
        (("-m", "pkg"), "pkg.__main__", "pkg/__main__.py", "pkg"),
        (("-m", "app"), "app", "app.py", "app"),
    ],
)
@pytest.mark.parametrize("moved", [False, True])
def test_a_module(
    project: Path,
    tmp_path_factory: pytest.TempPathFactory,
    typed: tuple[str, ...],
    spec_name: str,
    file: str,
    module: str,
    moved: bool,
) -> None:
    """`-m name` runs again as `-m name`, in the folder that `-m` put on `sys.path`, also after a chdir."""
    path = str(project / file)
    start = started(
        project,
        orig_argv=(PYTHON, *typed, "-m", "lr=1"),
        argv=(path, "-m", "lr=1"),
        main_file=path,
        spec_name=spec_name,
        spec_origin=path,
        sys_path=(str(project),),
        cwd=str(tmp_path_factory.mktemp("elsewhere") if moved else project),
    )
    assert program_module.find_program(start) == Program((PYTHON, "-m", module), str(project), path)


@pytest.mark.parametrize(
    ("flags", "sys_path"),
    [(("-P",), "root"), (("-I",), "root"), ((), "cwd"), ((), None)],
    ids=["-P", "-I", "cwd on the path", "installed"],
)
def test_a_module_found_elsewhere(
    project: Path, tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...], sys_path: str | None
) -> None:
    """A module that `-m` did not find by the working directory leaves that directory as it is."""
    cwd = str(tmp_path_factory.mktemp("cwd"))
    path = str(project / "app.py")
    start = started(
        project,
        orig_argv=(PYTHON, *flags, "-m", "app"),
        argv=(path,),
        main_file=path,
        interpreter_flags=flags,
        spec_name="app",
        spec_origin=path,
        sys_path={"root": (str(project),), "cwd": (cwd, str(project)), None: ()}[sys_path],
        cwd=cwd,
    )
    assert program_module.find_program(start) == Program((PYTHON, *flags, "-m", "app"), cwd, path)


@pytest.mark.parametrize(
    ("spec_name", "origin"),
    [("cProfile", "/usr/lib/python3/cProfile.py"), ("__main__", "app.py"), ("app", None)],
    ids=["profiler", "folder or zip", "no origin"],
)
def test_a_spec_that_is_not_the_programs(project: Path, spec_name: str, origin: str | None) -> None:
    """Under a profiler, tracer or debugger, and for a zip, the script is run, not the module of `__spec__`."""
    start = started(
        project,
        "app.py",
        orig_argv=(PYTHON, "-m", "cProfile", "app.py", "lr=1"),
        argv=("app.py", "lr=1"),
        main_file="/usr/lib/python3/cProfile.py",
        spec_name=spec_name,
        spec_origin=origin and os.path.join(project, origin),
    )
    assert program_module.find_program(start).command == (PYTHON, str(project / "app.py"))


def test_a_module_reached_by_a_link(project: Path) -> None:
    """A program that was found through a symbolic link is still the module that it is."""
    link = project / "link"
    link.symlink_to(project / "pkg")
    start = started(
        project,
        orig_argv=(PYTHON, "-m", "pkg.mod"),
        argv=(str(link / "mod.py"),),
        main_file=str(link / "mod.py"),
        spec_name="pkg.mod",
        spec_origin=str(project / "pkg" / "mod.py"),
        sys_path=(str(project),),
    )
    assert program_module.find_program(start).command == (PYTHON, "-m", "pkg.mod")


def test_a_script_that_is_gone(project: Path) -> None:
    """A script that cannot be found is an error that names the path and the ways out."""
    with pytest.raises(StartError, match=rf"there is no {project}/gone\.py\..*entry=function"):
        program_module.find_program(started(project, "gone.py"))


@pytest.mark.parametrize(
    ("typed", "argv", "own"),
    [
        (("lr=1", "-m"), ("lr=1", "-m"), ()),
        (("--data", "/d", "lr=1"), ("lr=1",), ("--data", "/d")),
        (("lr=1", "--fast", "-m", "--seed=3"), ("lr=1", "-m"), ("--fast", "--seed=3")),
        (("a=1", "-v", "a=1", "-v"), ("a=1", "-v"), ("a=1", "-v")),
        (("lr=1",), ("lr=1", "--multirun"), ()),
        (("lr=1",), ("-m", "hydra.mode=MULTIRUN", "lr=1"), ()),
        (("lr=1",), ("lr=1", "hydra/launcher=ddp_subprocess", "+hydra.launcher.nproc_per_node=2"), ()),
        (("-m",), (), ("-m",)),
    ],
)
def test_arguments_of_the_script(project: Path, typed: tuple[str, ...], argv: tuple[str, ...], own: tuple[str]) -> None:
    """What the script took out of `sys.argv` is given to it again, in order; harmless additions are not."""
    start = started(project, "app.py", orig_argv=(PYTHON, "app.py", *typed), argv=("app.py", *argv))
    assert program_module.find_program(start).command == (PYTHON, str(project / "app.py"), *own)


@pytest.mark.parametrize(
    "argv0", ["app.py train", "train", "", "dir", "sub/app.py", "/usr/bin/env"], ids=lambda text: text or "nothing"
)
@pytest.mark.parametrize("module", [False, True])
def test_a_program_that_names_itself(project: Path, argv0: str, module: bool) -> None:
    """What the program writes into `sys.argv[0]` does not matter, be it a path of something else."""
    path = str(project / "app.py")
    start = started(
        project,
        orig_argv=(PYTHON, *(("-m", "app") if module else ("app.py",)), "train", "lr=1"),
        argv=(argv0, "lr=1"),
        main_file=path,
        spec_name="app" if module else None,
        spec_origin=path if module else None,
        main_has_task=True,
    )
    program = program_module.find_program(start)
    assert program == Program((PYTHON, *(("-m", "app") if module else (path,)), "train"), str(project), path)


@pytest.mark.parametrize(
    ("typed", "argv", "before", "behind"),
    [
        (("task=a", "lr=1"), ("lr=1",), (), ("task=a",)),
        (("train", "task=a", "~b"), (), ("train",), ("task=a", "~b")),
        (("--set", "task=a", "lr=1"), ("lr=1",), ("--set", "task=a"), ()),
    ],
)
def test_overrides_that_the_script_takes(
    project: Path, typed: tuple[str, ...], argv: tuple[str, ...], before: tuple[str, ...], behind: tuple[str, ...]
) -> None:
    """What looks like an override stands beside the rank's, as Hydra reads them in one piece."""
    start = started(project, "app.py", orig_argv=(PYTHON, "app.py", *typed), argv=("app.py", *argv))
    command = program_module.program_command((), program_module.find_program(start), (), "/run", ())
    place = command.index("--config-name")
    assert command[2:place] == before
    assert command[place + 2 : -2] == behind


@pytest.mark.parametrize(
    ("typed", "argv"),
    [
        (("lr=1",), ("lr=1", "lr=0.1", "+x=1", "db=mysql", "~y")),
        (("lr=1",), ("lr=1", "hydra.sweeper.n=3", "hydra/sweeper=basic", "hydra.mode=MULTIRUN")),
        (("lr=1",), ("-m", "lr=1")),
        (("lr=1",), ("lr=1", "--multirun")),
        (("lr=1",), ("--config-name=other", "lr=1")),
        (("lr=1",), ("lr=1", "--config-dir", "conf")),
        ((), ("lr=1",)),
        (("--lr", "1"), ("lr=1",)),
    ],
)
def test_arguments_that_the_script_may_add(project: Path, typed: tuple[str, ...], argv: tuple[str, ...]) -> None:
    """A rank can have what leaves its own command readable for Hydra: overrides above all."""
    start = started(project, "app.py", orig_argv=(PYTHON, "app.py", *typed), argv=("app.py", *argv))
    program_module.refuse_additions(start, get_args_parser())


@pytest.mark.parametrize(
    "added",
    [("--config-name", "x"), ("--config-name=x",), ("-cn", "x"), ("-m", "+x=1"), ("-cd", "a", "b=1")],
)
def test_arguments_that_the_script_may_not_add(project: Path, added: tuple[str, ...]) -> None:
    """What would hide a rank's own command is refused by name, with the way out."""
    for typed in ((), ("lr=1",)):
        argv = ("app.py", *typed, *added)
        start = started(project, "app.py", orig_argv=(PYTHON, "app.py", *typed), argv=argv)
        with pytest.raises(StartError, match="entry=function") as caught:
            program_module.refuse_additions(start, get_args_parser())
        assert " ".join(added) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"pytest": True}, "pytest"),
        ({"ipython": True}, "IPython"),
        ({"hydra_main": False}, "not `hydra.main`"),
        ({"main_file": None}, "python -c"),
        ({"main_file": "<stdin>"}, "standard input"),
    ],
)
def test_missing_program_reason(tmp_path: Path, changes: dict[str, Any], reason: str | None) -> None:
    """There is a program to run again unless the sweep came from a test, a notebook, a string or a plain call."""
    start = started(tmp_path, "app.py", main_file=changes.pop("main_file", str(tmp_path / "app.py")))
    found = program_module.missing_program_reason(
        start, **{"pytest": False, "ipython": False, "hydra_main": True, **changes}
    )
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(("length", "shown"), [(64 * 1024, True), (64 * 1024 + 1, False)])
def test_overrides_that_are_too_long(length: int, shown: bool) -> None:
    """Above 64 KiB the overrides are left out of both commands; the run directory stays."""
    overrides = ("x" * length,)
    start = started(Path("/"), "app.py")
    for command in (
        program_module.program_command((), Program((PYTHON,), "/", ""), (), "/run", overrides),
        program_module.function_command((), start, "pkg._rank", "/run", overrides),
    ):
        assert any("overrides=" in part for part in command) is shown
        assert any("run_dir=" in part and "/run" in part for part in command)


def test_the_command_of_a_program() -> None:
    """Wrapper, program, config flags, the rank's config and the two values stand in this order."""
    program = Program((PYTHON, "-O", "-m", "pkg", "--own"), "/start", "/start/pkg/__main__.py")
    assert program_module.program_command(
        ("nsys", "profile"), program, ("--config-dir", "/conf dir"), "/run dir/0", ["lr=0.1", "s='a b'"]
    ) == (
        *("nsys", "profile", PYTHON, "-O", "-m", "pkg", "--own", "--config-dir", "/conf dir"),
        *("--config-name", "ddp_rank"),
        "hydra.sweeper.run_dir='/run%20dir/0'",
        "hydra.sweeper.overrides='lr=0.1 s=%27a%20b%27'",
    )


def test_the_command_of_a_function() -> None:
    """Without a program, the rank module of this package runs under the same interpreter and flags."""
    start = started(Path("/"), "app.py", interpreter_flags=("-O",))
    assert program_module.function_command(("strace", "-f"), start, "pkg._rank", "/run dir", ["a=1", "b=2"]) == (
        *("strace", "-f", PYTHON, "-O", "-m", "pkg._rank"),
        "run_dir=/run%20dir",
        "overrides=a=1 b=2",
    )


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["-m", "lr=1,2"], []),
        (["-m", "--config-name", "other", "-cn", "third"], []),
        (["--config-dir", "conf dir", "lr=1"], ["--config-dir", "conf dir"]),
        (["--config-dir=conf"], ["--config-dir", "conf"]),
        (["-cd", "conf", "-cp", "../path"], ["--config-path", "../path", "--config-dir", "conf"]),
        (["-m", "--package", "x", "lr=1", "-cd", "late"], ["--config-dir", "late"]),
    ],
)
def test_config_flags(argv: list[str], flags: list[str]) -> None:
    """Where the user's configs lie is passed on; which primary config is not, as a rank has its own."""
    assert program_module.config_flags(argv, get_args_parser()) == flags
