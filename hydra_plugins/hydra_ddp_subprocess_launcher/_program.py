"""How the user's program was started, and the command that starts it again as a rank. Pure."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ._encoded import encode, encode_overrides
from ._errors import StartError


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
        main_has_task: Whether the job function is of that `__main__`, which then is the program's and not a tool's.
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
    main_has_task: bool = False


@dataclass(frozen=True)
class Program:
    """A command that runs the program again.

    Attributes:
        command: Interpreter, flags, script or `-m` module, and the arguments that the script takes for itself.
        cwd: Directory in which to run it.
        main_script: The file that holds the program, for messages.
        overrides: Those of the arguments that the script takes for itself that look like overrides, at their end.
    """

    command: tuple[str, ...]
    cwd: str
    main_script: str
    overrides: tuple[str, ...] = ()


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
    if start.main_file in (None, "<stdin>"):
        return "the program is no file (`python -c`, standard input)"
    if not hydra_main:
        return "the sweep was started by a call that is not `hydra.main`, such as hydra_zen.launch"
    return None


def find_program(start: ProcessStart) -> Program:
    """Find the command that runs this process's program again.

    Raises:
        StartError: when the script cannot be found.
    """
    module = _module(start)
    script = _script(start)
    cwd = _start_directory(start, module, script)
    if module is not None:
        where: tuple[str, ...] = ("-m", module)
    else:
        if not os.path.exists(script):
            raise StartError(
                f"The program cannot be run again in a rank: there is no {script}. Start it by its absolute "
                "path, or set hydra.launcher.entry=function to hand the job function to the ranks by pickle."
            )
        where = (script,)
    own = _own_arguments(start, _script_position(start, module, script))
    count = len(own) - _trailing_overrides(own)
    command = (start.executable, *start.interpreter_flags, *where, *own[:count])
    return Program(command, cwd, start.spec_origin or script if module is not None else script, tuple(own[count:]))


def typed_command(start: ProcessStart, found: str | None, program: Program) -> tuple[str, ...]:
    """Return the command of a program for a person to type: interpreter, flags and script as they were typed.

    Args:
        start: How this process was started.
        found: Where a shell finds the interpreter that was typed; None: nowhere.
        program: What its ranks run.
    """
    module = _module(start)
    position = _script_position(start, module, _script(start))
    if position is None or found != start.executable:
        return program.command
    own = _own_arguments(start, position)
    return (*start.orig_argv[: position + 1], *own[: len(own) - len(program.overrides)])


def _module(start: ProcessStart) -> str | None:
    # Under cProfile, trace or a debugger the spec is the tool's. A directory or zip has the spec name `__main__`.
    name, origin, file = start.spec_name, start.spec_origin, start.main_file
    if name is None or origin is None or file is None or name == "__main__" or _is_run_by_tool(start):
        return None
    if os.path.realpath(os.path.join(start.cwd, file)) != os.path.realpath(origin):
        return None
    return name.removesuffix(".__main__")


def _script(start: ProcessStart) -> str:
    """Return the path of the script, folder or archive, absolute.

    By `__main__`, as a program may write anything into `sys.argv[0]`.
    """
    file = start.argv[0] if start.main_file is None or _is_run_by_tool(start) else start.main_file
    if file == start.main_file and start.spec_name == "__main__":
        file = os.path.dirname(file)
    # A start in `/` gives two slashes.
    return os.path.join(start.cwd, file.replace("//", "/", 1) if file.startswith("//") else file)


def _is_run_by_tool(start: ProcessStart) -> bool:
    """Return whether `__main__` is that of a tool, such as a profiler, which has put the program into `sys.argv[0]`."""
    if start.main_has_task or start.main_file is None or not start.argv:
        return False
    file, main = (os.path.realpath(os.path.join(start.cwd, path)) for path in (start.argv[0], start.main_file))
    return file != main and os.path.isfile(file)


def _start_directory(start: ProcessStart, module: str | None, script: str) -> str:
    """Return the directory in which the process was started, which a `chdir` of the program has hidden."""
    if module is not None:
        # `python -m` puts it on sys.path, unless -P or -I keeps it off. Where it is gone from there, or never was,
        # the folder in which the module was found is the next best.
        root = start.spec_origin or ""
        for _ in (start.spec_name or "").split("."):
            root = os.path.dirname(root)
        kept_off = {"-P", "-I"} & set(start.interpreter_flags)
        return start.cwd if kept_off or start.cwd in start.sys_path or root not in start.sys_path else root
    # Python makes `__main__.__file__` absolute at the start, by putting the directory before what was typed.
    position = _script_position(start, None, script)
    if position is None or os.path.isabs(start.orig_argv[position]):
        return start.cwd
    return script[: -len(start.orig_argv[position].rstrip(os.sep)) - 1] or os.sep


def _own_arguments(start: ProcessStart, position: int | None) -> list[str]:
    """Return the arguments that the script took out of `sys.argv`, in order."""
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
    return taken


def refuse_additions(start: ProcessStart, parser: argparse.ArgumentParser) -> None:
    """Refuse what the program added to `sys.argv` if a rank, which adds it as well, would not know its command then.

    Overrides do no harm: a rank takes those of its own command alone.

    Args:
        start: How this process was started.
        parser: Hydra's own argument parser.

    Raises:
        StartError: when it added flags that its ranks cannot have.
    """
    typed = Counter(start.orig_argv)
    before: list[str] = []
    behind: list[str] = []
    # Where nothing of the command line is left, it was most likely appended.
    added = before if any(typed[argument] > 0 for argument in start.argv[1:]) else behind
    for argument in start.argv[1:]:
        if typed[argument] > 0:
            typed[argument] -= 1
            added = behind
        else:
            added.append(argument)
    args, left = parser.parse_known_args([*before, "--config-name", "ddp_rank", "hydra.sweeper.run_dir=x", *behind])
    if left or args.config_name != "ddp_rank":
        raise StartError(
            f"The program added {' '.join([*before, *behind])} to sys.argv. A rank runs the program again, which adds "
            "it again, and the rank's own command cannot be read then. Put it into the config or on the command line, "
            "or set hydra.launcher.entry=function to hand the job function to the ranks by pickle."
        )


def _trailing_overrides(own: Sequence[str]) -> int:
    """Return how many of a script's own arguments at the end Hydra could take for overrides.

    They must stand with the rank's: Hydra's parser refuses overrides before and behind a flag. Where the script has
    flags of its own, they can be values of those.
    """
    count = 0
    if not any(argument.startswith("-") for argument in own):
        while count < len(own) and ("=" in own[-1 - count] or own[-1 - count].startswith("~")):
            count += 1
    return count


def _script_position(start: ProcessStart, module: str | None, script: str) -> int | None:
    """Return the place of the script's own element in the command line; None when it is not there."""
    typed = start.orig_argv
    for position in range(1, len(typed)):
        if module is not None:
            found = typed[position] == f"-m{module}" or (typed[position] == module and typed[position - 1] == "-m")
        else:
            given = typed[position].rstrip(os.sep)
            found = bool(given) and (script == given or script.endswith(os.sep + given))
        if found:
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
    command = [*wrapper, *program.command, *flags, "--config-name", "ddp_rank", *program.overrides]
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
