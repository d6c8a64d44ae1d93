"""How the user's program was started, and the command that starts it again as a rank. Pure."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ._encoded import encode, encode_overrides
from ._errors import StartError

_HARMLESS_ARGUMENTS = ("-m", "--multirun", "hydra.mode=MULTIRUN")


@dataclass(frozen=True)
class ProcessStart:
    """How this process was started.

    Attributes:
        executable: The interpreter.
        interpreter_flags: Its flags, such as `-O`.
        orig_argv: The whole command line (`sys.orig_argv`).
        argv: What the program has by now (`sys.argv`).
        main_file: `__main__.__file__`; None: it has none.
        spec_name: Name in `__main__.__spec__`; None: it has none.
        spec_origin: File in `__main__.__spec__`.
        sys_path: `sys.path`.
        cwd: Working directory now.
    """

    executable: str
    interpreter_flags: tuple[str, ...]
    orig_argv: tuple[str, ...]
    argv: tuple[str, ...]
    main_file: str | None
    spec_name: str | None
    spec_origin: str | None
    sys_path: tuple[str, ...]
    cwd: str


@dataclass(frozen=True)
class Program:
    """A command that runs the program again.

    Attributes:
        command: Interpreter, flags, script or `-m` module, and the arguments that the script takes for itself.
        cwd: Directory in which to run it.
        main_script: The file that holds the program, for messages.
    """

    command: tuple[str, ...]
    cwd: str
    main_script: str


def missing_program_reason(start: ProcessStart, *, pytest: bool, ipython: bool, hydra_main: bool) -> str | None:
    """Return why there is no program to run again; None when there is one.

    Args:
        start: How this process was started.
        pytest: Whether a pytest test is running in this process.
        ipython: Whether this is an IPython session or notebook.
        hydra_main: Whether a function decorated with `hydra.main` is being called.
    """
    if pytest:
        return "the sweep was started by a test under pytest"
    if ipython:
        return "the sweep was started in IPython or a notebook"
    if not start.argv or start.argv[0] == "-c":
        return "the sweep was started by `python -c`"
    if start.argv[0] in ("", "-"):
        return "the program was read from standard input"
    if not hydra_main:
        return "the sweep was started by a call that is not `hydra.main`, such as hydra_zen.launch"
    return None


def find_program(start: ProcessStart) -> Program:
    """Find the command that runs this process's program again.

    Raises:
        StartError: when the script cannot be found, or added arguments of its own to `sys.argv`.
    """
    module = _module(start)
    cwd = _start_directory(start, module)
    if module is not None:
        where: tuple[str, ...] = ("-m", module)
        main_script = start.argv[0]
    else:
        main_script = os.path.join(cwd, start.argv[0])
        if not os.path.exists(main_script):
            raise StartError(
                f"The program cannot be run again in a rank: there is no {main_script}. Start it by its absolute "
                "path, or set hydra.launcher.entry=function to hand the job function to the ranks by pickle."
            )
        where = (main_script,)
    own = _own_arguments(start, module)
    return Program((start.executable, *start.interpreter_flags, *where, *own), cwd, main_script)


def typed_command(start: ProcessStart, found: str | None, program: Program) -> tuple[str, ...]:
    """Return the command of a program for a person to type: interpreter, flags and script as they were typed.

    Args:
        start: How this process was started.
        found: Where a shell finds the interpreter that was typed; None: nowhere.
        program: What its ranks run.
    """
    module = _module(start)
    position = _script_position(start, module)
    if position is None or found != start.executable:
        return program.command
    return (*start.orig_argv[: position + 1], *_own_arguments(start, module))


def _module(start: ProcessStart) -> str | None:
    # Under cProfile, trace or a debugger the spec is the tool's, and its origin is not the program's file. A
    # directory or zip has the spec name `__main__`.
    name, origin = start.spec_name, start.spec_origin
    if name is None or origin is None or name == "__main__":
        return None
    if os.path.realpath(os.path.join(start.cwd, start.argv[0])) != os.path.realpath(origin):
        return None
    return name.removesuffix(".__main__")


def _start_directory(start: ProcessStart, module: str | None) -> str:
    """Return the directory in which the process was started, which a `chdir` of the program has hidden."""
    if module is not None:
        # `python -m` puts it on sys.path, unless -P or -I keeps it off. Where it is gone from there, or never was,
        # the folder in which the module was found is the next best.
        root = start.spec_origin or ""
        for _ in (start.spec_name or "").split("."):
            root = os.path.dirname(root)
        kept_off = {"-P", "-I"} & set(start.interpreter_flags)
        return start.cwd if kept_off or start.cwd in start.sys_path or root not in start.sys_path else root
    script = start.argv[0]
    if os.path.isabs(script) or start.main_file is None:
        return start.cwd
    # Python makes `__main__.__file__` absolute at the start, by putting the directory before what was typed.
    for given in (script, os.path.join(script, "__main__.py")):
        if start.main_file.endswith(os.sep + given):
            return start.main_file[: -len(given) - 1] or os.sep
    return start.cwd


def _own_arguments(start: ProcessStart, module: str | None) -> list[str]:
    """Return the arguments that the script took out of `sys.argv`, in order; refuse those it added."""
    position = _script_position(start, module)
    if position is None:
        # A tool ran the program under another name, such as `trace --module`: what it took for itself is not known.
        typed = [argument for argument in start.orig_argv if argument in start.argv[1:]]
    else:
        typed = list(start.orig_argv[position + 1 :])
    kept = Counter(start.argv[1:])
    taken = []
    for argument in typed:
        if kept[argument] > 0:
            kept[argument] -= 1
        else:
            taken.append(argument)
    for argument in kept.elements():
        if not _harmless(argument):
            raise StartError(
                f"The program added {argument!r} to sys.argv. A rank runs the program again, which would add it "
                "again, to a command that is not the sweep's. Put it into the config or on the command line."
            )
    return taken


def _harmless(argument: str) -> bool:
    key = argument.lstrip("+~")
    return argument in _HARMLESS_ARGUMENTS or (
        key.startswith(("hydra.", "hydra/")) and not key.startswith(("hydra.sweeper", "hydra/sweeper", "hydra.mode"))
    )


def _script_position(start: ProcessStart, module: str | None) -> int | None:
    """Return the place of the script's own element in the command line; None when it is not there."""
    typed = start.orig_argv
    if module is not None:
        for position in range(1, len(typed)):
            if typed[position] == f"-m{module}" or (typed[position] == module and typed[position - 1] == "-m"):
                return position
    script = start.argv[0]
    for position in range(1, len(typed)):
        if typed[position] == script:
            return position
    return None


def config_flags(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the config flags of a Hydra command line that a rank needs, too.

    Args:
        argv: Arguments of the program, without its name.
        parser: Hydra's own argument parser.
    """
    args, _ = parser.parse_known_args(list(argv))
    flags = []
    for flag, value in (("--config-path", args.config_path), ("--config-dir", args.config_dir)):
        if value is not None:
            flags += [flag, value]
    return flags


def config_name_flag(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the flag of a Hydra command line that names the primary config, which a rank does not have.

    Args:
        argv: Arguments of the program, without its name.
        parser: Hydra's own argument parser.
    """
    args, _ = parser.parse_known_args(list(argv))
    return [] if args.config_name is None else ["--config-name", args.config_name]


def program_command(
    wrapper: Sequence[str], program: Program, flags: Sequence[str], run_dir: str, overrides: Sequence[str]
) -> tuple[str, ...]:
    """Return the command of every rank of a job that runs the user's program again."""
    encoded = encode_overrides(overrides)
    command = [*wrapper, *program.command, *flags, "--config-name", "ddp_rank"]
    command.append(f"hydra.sweeper.run_dir='{encode(run_dir)}'")
    if encoded is not None:
        command.append(f"hydra.sweeper.overrides='{encoded}'")
    return tuple(command)


def function_command(
    wrapper: Sequence[str], start: ProcessStart, module: str, run_dir: str, overrides: Sequence[str]
) -> tuple[str, ...]:
    """Return the command of every rank of a job whose function is pickled, run by `module` of this package."""
    encoded = encode_overrides(overrides)
    command = [*wrapper, start.executable, *start.interpreter_flags, "-m", module, f"run_dir={encode(run_dir)}"]
    if encoded is not None:
        command.append(f"overrides={encoded}")
    return tuple(command)
