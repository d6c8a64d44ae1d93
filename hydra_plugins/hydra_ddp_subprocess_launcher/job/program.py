"""Find what ranks run, the user's program or its pickled job function, and watch its source files for changes."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import logging
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction

from ..common import quoting
from ..common.choices import Entry, OnCodeChange
from ..common.errors import StartError
from ..common.protocol import TaskId
from ..common.quoting import encode, encode_overrides
from . import frozen_config, rank
from .environment import RANK_VARIABLES

_RANK_MODULE = f"{__package__}.rank"


@dataclass(frozen=True)
class ProgramEntry:
    """Ranks run the user's program again.

    Attributes:
        program: The command to run.
        flags: Config flags of the sweep's command line that a rank also needs.
        config_name: The flag that names the primary config, or empty if there was none.
        task: Which of the program's functions is the job.
        start: How this process was started, for the interpreter and its flags.
    """

    program: Program
    flags: tuple[str, ...]
    config_name: tuple[str, ...]
    task: TaskId
    start: ProcessStart


@dataclass(frozen=True)
class FunctionEntry:
    """Ranks unpickle the job function.

    Attributes:
        start: How this process was started, for the interpreter and its flags.
    """

    start: ProcessStart


def find_entry(chosen: Entry, task_function: TaskFunction) -> ProgramEntry | FunctionEntry:
    """Decide what the ranks run.

    Raises:
        StartError: if the program cannot be run again as a rank, or the function cannot be pickled.
    """
    start = _process_start(task_function)
    reason = missing_program_reason(
        start,
        # The variable alone only shows that a parent process is a test.
        pytest="pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ,
        ipython=_in_ipython(),
        hydra_main=_hydra_main_is_running(sys._getframe()),
    )
    if chosen is Entry.script and reason is not None:
        raise StartError(
            f"hydra.launcher.entry=script needs a program to run again, but {reason}. "
            "Use entry=auto, which hands the job function to the ranks by pickle then."
        )
    if chosen is Entry.function or reason is not None:
        _check_picklable(task_function, reason or "hydra.launcher.entry=function")
        return FunctionEntry(start)
    refuse_additions(start, get_args_parser())
    flags = config_flags(start.argv[1:], get_args_parser())
    config_name = config_name_flag(start.argv[1:], get_args_parser())
    task = rank.identify(task_function, rank.LAUNCHER_SWEEPS)
    return ProgramEntry(find_program(start), tuple(flags), tuple(config_name), task, start)


def typed_command(entry: ProgramEntry) -> tuple[str, ...]:
    """Return the command of this process's program as a user types it."""
    found = shutil.which(entry.start.orig_argv[0])
    return command_as_typed(entry.start, found and os.path.abspath(found), entry.program)


def _process_start(task_function: TaskFunction) -> ProcessStart:
    """Return how this process was started."""
    # A tool such as cProfile runs the program in a separate namespace, and is `__main__` in `sys.modules` itself.
    main = frozen_config.program_namespace(task_function)
    spec = main.get("__spec__")
    return ProcessStart(
        executable=sys.executable,
        # multiprocessing and test.support use it, too. It is the only list of flags that Python keeps up to date.
        interpreter_flags=(*subprocess._args_from_interpreter_flags(), *_pycache_flag()),  # type: ignore[attr-defined]
        orig_argv=tuple(sys.orig_argv),
        argv=tuple(sys.argv),
        main_file=main.get("__file__"),
        spec_name=getattr(spec, "name", None),
        spec_origin=getattr(spec, "origin", None),
        sys_path=tuple(sys.path),
        cwd=os.getcwd(),
        main_has_task=main is getattr(task_function, "__globals__", None),
    )


def _pycache_flag() -> tuple[str, ...]:
    """Return the flag that Python's own list omits, unless it comes from the environment, which ranks inherit."""
    prefix = sys._xoptions.get("pycache_prefix")
    return ("-X", f"pycache_prefix={prefix}") if isinstance(prefix, str) else ()


def _in_ipython() -> bool:
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def _hydra_main_is_running(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "decorated_main" and Path(code.co_filename).parts[-2:] == ("hydra", "main.py"):
            return True
        frame = frame.f_back
    return False


def _check_picklable(task_function: TaskFunction, reason: str) -> None:
    try:
        frozen_config.dumps(task_function, None)
    except Exception as error:
        name = getattr(task_function, "__qualname__", type(task_function).__name__)
        raise StartError(
            f"The job function {name} cannot be handed to the ranks: {reason}, so it has to be pickled, and "
            f"{type(error).__name__}: {error}. Put what cannot be pickled inside the function, or start the sweep "
            "from a script with hydra.main."
        ) from error


def function_body(task_function: TaskFunction, context: HydraContext) -> dict[str, bytes]:
    """Return the parts of a payload that replace the program."""
    return {
        # The callbacks are sent separately, as for a program.
        "task_function": frozen_config.dumps((task_function, replace(context, callbacks=Callbacks())), None),
        # The resolvers, which are the rest of the state, are sent separately, too.
        "singletons": frozen_config.dumps({"instances": Singleton.get_state()["instances"]}, None),
    }


def rank_command(
    entry: ProgramEntry | FunctionEntry,
    wrapper: tuple[str, ...],
    run_dir: str,
    overrides: tuple[str, ...],
    compose_args: quoting.ComposeArgs | None = None,
) -> tuple[tuple[str, ...], str]:
    """Return the command of a job's ranks and the directory in which they start.

    Args:
        wrapper: Command to put before it.
        run_dir: Run directory of the job.
        compose_args: How a rank of a program composes its config, or None if it reads a payload.
    """
    if isinstance(entry, FunctionEntry):
        return function_command(wrapper, entry.start, _RANK_MODULE, run_dir, overrides), entry.start.cwd
    command = program_command(wrapper, entry.program, entry.flags, run_dir, overrides)
    if compose_args is not None:
        command += quoting.compose_arguments(compose_args)
    return command, entry.program.cwd


@dataclass(frozen=True)
class ProcessStart:
    """How this process was started.

    Attributes:
        executable: The interpreter.
        interpreter_flags: Its flags, such as `-O`.
        orig_argv: The whole command line (`sys.orig_argv`).
        argv: The current `sys.argv`, which the program may have changed.
        main_file: `__main__.__file__`, or None.
        spec_name: Name in `__main__.__spec__`, or None.
        spec_origin: File in `__main__.__spec__`, or None.
        main_has_task: Whether the job function is from that `__main__`, which then is the program's and not a tool's.
        sys_path: `sys.path`.
        cwd: The current working directory.
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
        command: Interpreter, flags, script or `-m` module, and the script's own arguments.
        cwd: Directory in which to run it.
        main_script: The file that holds the program, for messages.
        overrides: The script's own arguments that look like overrides and come last; not part of `command`.
    """

    command: tuple[str, ...]
    cwd: str
    main_script: str
    overrides: tuple[str, ...] = ()


def missing_program_reason(start: ProcessStart, *, pytest: bool, ipython: bool, hydra_main: bool) -> str | None:
    """Return why there is no program to run again, or None if there is one.

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
        StartError: if the script cannot be found.
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


def command_as_typed(start: ProcessStart, found: str | None, program: Program) -> tuple[str, ...]:
    """Return the command of a program with interpreter, flags and script as the user typed them.

    Args:
        start: How this process was started.
        found: Where a shell finds the interpreter that was typed, or None if it does not.
    """
    module = _module(start)
    position = _script_position(start, module, _script(start))
    if position is None or found != start.executable:
        return program.command
    own = _own_arguments(start, position)
    return (*start.orig_argv[: position + 1], *own[: len(own) - len(program.overrides)])


def _module(start: ProcessStart) -> str | None:
    # Under cProfile, trace or a debugger, the spec is the tool's. A directory or zip has the spec name `__main__`.
    name, origin, file = start.spec_name, start.spec_origin, start.main_file
    if name is None or origin is None or file is None or name == "__main__" or _is_run_by_tool(start):
        return None
    if os.path.realpath(os.path.join(start.cwd, file)) != os.path.realpath(origin):
        return None
    return name.removesuffix(".__main__")


def _script(start: ProcessStart) -> str:
    """Return the path of the script, folder or archive, absolute.

    It is read from `__main__`, as a program may write anything into `sys.argv[0]`.
    """
    file = start.argv[0] if start.main_file is None or _is_run_by_tool(start) else start.main_file
    if file == start.main_file and start.spec_name == "__main__":
        file = os.path.dirname(file)
    # The path of a program started in `/` begins with two slashes.
    return os.path.join(start.cwd, file.replace("//", "/", 1) if file.startswith("//") else file)


def _is_run_by_tool(start: ProcessStart) -> bool:
    """Return whether `__main__` is a tool, such as a profiler, that has put the program into `sys.argv[0]`."""
    if start.main_has_task or start.main_file is None or not start.argv:
        return False
    file, main = (os.path.realpath(os.path.join(start.cwd, path)) for path in (start.argv[0], start.main_file))
    return file != main and os.path.isfile(file)


def _start_directory(start: ProcessStart, module: str | None, script: str) -> str:
    """Return the directory in which the process was started, even if the program has called `chdir`."""
    if module is not None:
        # `python -m` adds it to sys.path, unless -P or -I prevents that. If it is not there, the folder in which the
        # module was found is the best guess.
        root = start.spec_origin or ""
        for _ in (start.spec_name or "").split("."):
            root = os.path.dirname(root)
        kept_off = {"-P", "-I"} & set(start.interpreter_flags)
        return start.cwd if kept_off or start.cwd in start.sys_path or root not in start.sys_path else root
    # Python makes `__main__.__file__` absolute at startup, by joining the directory and the path that was typed.
    position = _script_position(start, None, script)
    if position is None or os.path.isabs(start.orig_argv[position]):
        return start.cwd
    return script[: -len(start.orig_argv[position].rstrip(os.sep)) - 1] or os.sep


def _own_arguments(start: ProcessStart, position: int | None) -> list[str]:
    """Return the arguments that the script has removed from `sys.argv`, in order."""
    if position is None:
        # A tool ran the program under another name, such as `trace --module`, so its own arguments are not known.
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
    """Refuse arguments that the program added to `sys.argv` if a rank, which adds them, too, could not be parsed.

    Added overrides are harmless, as a rank uses only those of its own command.

    Args:
        start: How this process was started.

    Raises:
        StartError: if the program added flags that break the command of its ranks.
    """
    typed = Counter(start.orig_argv)
    before: list[str] = []
    behind: list[str] = []
    # If nothing of the command line is left, the arguments were most likely appended.
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
    """Return how many of the last of a script's own arguments Hydra could parse as overrides.

    They must be next to the rank's overrides, as Hydra's parser refuses overrides on both sides of a flag. If the
    script has flags, the count is 0, as the arguments may be values of those.
    """
    count = 0
    if not any(argument.startswith("-") for argument in own):
        while count < len(own) and ("=" in own[-1 - count] or own[-1 - count].startswith("~")):
            count += 1
    return count


def _script_position(start: ProcessStart, module: str | None, script: str) -> int | None:
    """Return the index of the script or module in the command line, or None if it is not there."""
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
    """Return the config flags of a Hydra command line that a rank also needs.

    Args:
        argv: Arguments of the program, without its name.
    """
    args, _ = parser.parse_known_args(list(argv))
    flags = []
    for flag, value in (("--config-path", args.config_path), ("--config-dir", args.config_dir)):
        if value is not None:
            flags += [flag, value]
    return flags


def config_name_flag(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the flag of a Hydra command line that names the primary config, which a rank's command does not have.

    Args:
        argv: Arguments of the program, without its name.
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


_log = logging.getLogger(__name__)
Stamp = tuple[int, int]


class SourceWatch:
    """Detect changes to the program's source files since the sweep started.

    Args:
        main_script: The file that holds the program, or None.
    """

    def __init__(self, main_script: str | None) -> None:
        self._stamps = stamp_sources(main_script)
        self._said: set[str] = set()

    def check(self, rule: OnCodeChange, preloaded: bool = False) -> None:
        """Warn, once per file, about changed files.

        Args:
            preloaded: Whether ranks use modules that were imported earlier (`preload`).

        Raises:
            StartError: if a file changed and `rule` is `fail`.
        """
        if rule is OnCodeChange.ignore:
            return
        changed = changed_sources(self._stamps)
        if changed and rule is OnCodeChange.fail:
            raise StartError(
                f"The code changed since the sweep started: {', '.join(changed)}. Jobs would no longer run the same "
                "program (hydra.launcher.code_changed=fail). Start the "
                "sweep again; hydra.launcher.resume=unfinished runs what is left."
            )
        new = [file for file in changed if file not in self._said]
        if new:
            self._said.update(new)
            _log.warning(
                "The code changed since the sweep started: %s. Jobs that start from now on run the new code%s.",
                ", ".join(new),
                ", but for what hydra.launcher.preload names, which stays as it was" if preloaded else "",
            )


def stamp_sources(main_script: str | None) -> dict[str, Stamp]:
    """Return the size in bytes and the modification time in ns of the program's own source files.

    These are the main script and every imported file outside the standard library, site-packages and this package.
    """
    others = _installed_prefixes()
    # Read the namespaces, as getting an attribute of a lazy module would load it, and may raise anything.
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    spaces = [object.__getattribute__(module, "__dict__") for module in modules]
    files = {str(space.get("__file__") or "") for space in spaces}
    own = {file for file in files if file.endswith(".py") and not os.path.realpath(file).startswith(others)}
    if main_script is not None and os.path.isfile(main_script):
        own.add(main_script)
    return {file: stamp for file in own if (stamp := _stamp(file)) is not None}


def _installed_prefixes() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
    return tuple(os.path.realpath(path) + os.sep for path in paths if path)


def _stamp(file: str) -> Stamp | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def changed_sources(stamps: Mapping[str, Stamp]) -> list[str]:
    """Return the files whose stamp has changed, in order; a deleted file counts."""
    return sorted(file for file, stamp in stamps.items() if _stamp(file) != stamp)


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class ConfigValue:
    """A config value that is read from an environment variable when the config's class is imported.

    Attributes:
        place: File and line.
        name: Name of the field.
        variable: Name of the variable.
    """

    place: str
    name: str
    variable: str


@functools.cache
def _parsed(path: str) -> ast.Module | None:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return None  # A zip file, a notebook, or deleted.


def find_calls(path: str, function: str) -> list[int]:
    """Return the lines in which a file calls a function outside of any function."""
    tree = _parsed(path)
    nodes = _run_at_import(tree) if tree is not None else ()
    return sorted(node.lineno for node in nodes if isinstance(node, ast.Call) and _name(node.func) == function)


def config_values_from(cls: type, variables: Collection[str]) -> list[ConfigValue]:
    """Return the fields of a class whose defaults are read from one of these environment variables."""
    try:
        path = inspect.getsourcefile(cls)
    except TypeError:
        path = None
    tree = None if path is None else _parsed(path)
    if path is None or tree is None:
        return []
    found = []
    known = _variables_of_names(tree, variables)
    for definition in ast.walk(tree):
        if isinstance(definition, ast.ClassDef) and definition.name == cls.__name__:
            for statement in definition.body:
                variable = _read(getattr(statement, "value", None), variables, known)
                if variable is not None:
                    found.append(ConfigValue(f"{path}:{statement.lineno}", _target(statement), variable))
    return found


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function):
            yield child
            yield from _run_at_import(child)


def _variables_of_names(tree: ast.Module, variables: Collection[str]) -> dict[str, str]:
    """Return the names of the module that hold the value of a variable."""
    known: dict[str, str] = {}
    for node in _run_at_import(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            variable = _read(node.value, variables, known)
            if variable is not None:
                known[_target(node)] = variable
    return known


def _read(node: ast.AST | None, variables: Collection[str], known: dict[str, str]) -> str | None:
    """Return which of the variables an expression reads, or None."""
    # Lambdas count as well, as a default_factory is called in the process that composes the config.
    for part in ast.walk(node) if node is not None else ():
        key: ast.AST | None = None
        if isinstance(part, ast.Subscript) and _name(part.value) == "environ":
            key = part.slice
        elif isinstance(part, ast.Call) and part.args and _reads_environment(part.func):
            key = part.args[0]
        elif isinstance(part, ast.Name) and part.id in known:
            return known[part.id]
        if isinstance(key, ast.Constant) and key.value in variables:
            return str(key.value)
    return None


def _reads_environment(function: ast.AST) -> bool:
    if isinstance(function, ast.Attribute) and function.attr == "get":
        return _name(function.value) == "environ"
    return _name(function) == "getenv"


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _target(statement: ast.AST) -> str:
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else ""


def refuse_open_group() -> None:
    """Refuse to launch if the program has opened a process group, which only a rank should do.

    Raises:
        StartError: naming the lines that may have opened it.
    """
    torch = sys.modules.get("torch.distributed")
    if not getattr(torch, "is_initialized", bool)():
        return
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = find_calls(script, "init_process_group") if script else []
    place = f" ({script}:{', '.join(map(str, lines))})" if lines else ""
    raise StartError(
        f"A process group of torch.distributed is open in the launching process{place}, which "
        "is no rank of any job. Open it in the job's function, which runs in ranks alone, or only "
        'if "RANK" in os.environ; hydra.launcher.allow_nested=true allows it if it is meant.'
    )


def warn_of_rank_values() -> None:
    """Warn about config fields that are read from a rank's variable here, as all ranks would get the same value."""
    types = {
        kind: None for node in _stored(ConfigStore.instance().repo) for kind in frozen_config.structured_types(node)
    }
    for kind in types:
        for value in config_values_from(kind, RANK_VARIABLES):
            _log.warning(
                "%s: %s is made from %s in the launching process, which is no rank: every rank gets that one value. "
                'Write "${oc.env:%s}", which each rank resolves for itself, or read the variable in the function',
                value.place,
                f"{kind.__name__}.{value.name}",
                value.variable,
                value.variable,
            )


def _stored(repo: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the configs that programs have stored, in any group."""
    for entry in repo.values():
        if isinstance(entry, Mapping):
            yield from _stored(entry)
        elif not (entry.provider or "").startswith(("hydra", "ddp_")):
            yield entry.node
