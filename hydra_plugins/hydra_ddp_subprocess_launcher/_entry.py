"""What the ranks of a sweep run: the user's program again, or its pickled job function."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction

from . import _encoded, _pickling, _program, _tasks
from ._choices import Entry
from ._errors import StartError
from ._specs import TaskId

_RANK_MODULE = f"{__package__}._rank"


@dataclass(frozen=True)
class ProgramEntry:
    """Ranks run the user's program again.

    Attributes:
        program: How.
        flags: Config flags of the sweep's command line that a rank needs, too.
        config_name: The flag that names the primary config; empty: there was none.
        task: Which of the program's functions.
    """

    program: _program.Program
    flags: tuple[str, ...]
    config_name: tuple[str, ...]
    task: TaskId


@dataclass(frozen=True)
class FunctionEntry:
    """Ranks unpickle the job function.

    Attributes:
        start: How this process was started, for the interpreter and its flags.
    """

    start: _program.ProcessStart


def find_entry(chosen: Entry, task_function: TaskFunction) -> ProgramEntry | FunctionEntry:
    """Find out what the ranks can run.

    Args:
        chosen: The option `entry`.
        task_function: What a job calls.

    Raises:
        StartError: when the program cannot be run again, or the function cannot be pickled.
    """
    start = process_start()
    reason = _program.missing_program_reason(
        start,
        # The variable alone says only that some process above this one is a test.
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
    flags = _program.config_flags(start.argv[1:], get_args_parser())
    config_name = _program.config_name_flag(start.argv[1:], get_args_parser())
    task = _tasks.identify(task_function, _tasks.LAUNCHER_SWEEPS)
    return ProgramEntry(_program.find_program(start), tuple(flags), tuple(config_name), task)


def typed_command(program: _program.Program) -> tuple[str, ...]:
    """Return the command of the program of this process as a person types it."""
    start = process_start()
    found = shutil.which(start.orig_argv[0])
    return _program.typed_command(start, found and os.path.abspath(found), program)


def process_start() -> _program.ProcessStart:
    """Return how this process was started."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return _program.ProcessStart(
        executable=sys.executable,
        # multiprocessing and test.support use it, too: the one list of flags that is kept up with Python.
        interpreter_flags=(*subprocess._args_from_interpreter_flags(), *_pycache_flag()),  # type: ignore[attr-defined]
        orig_argv=tuple(sys.orig_argv),
        argv=tuple(sys.argv),
        main_file=getattr(main, "__file__", None),
        spec_name=getattr(spec, "name", None),
        spec_origin=getattr(spec, "origin", None),
        sys_path=tuple(sys.path),
        cwd=os.getcwd(),
    )


def _pycache_flag() -> tuple[str, ...]:
    """Return the flag that Python's own list leaves out, unless it comes from the environment."""
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
        _pickling.dumps(task_function, None)
    except Exception as error:
        name = getattr(task_function, "__qualname__", type(task_function).__name__)
        raise StartError(
            f"The job function {name} cannot be handed to the ranks: {reason}, so it has to be pickled, and "
            f"{type(error).__name__}: {error}. Put what cannot be pickled inside the function, or start the sweep "
            "from a script with hydra.main."
        ) from error


def function_body(task_function: TaskFunction, context: HydraContext) -> dict[str, bytes]:
    """Return the parts of a payload that stand in for the program."""
    return {
        # The callbacks travel on their own, as for a program.
        "task_function": _pickling.dumps((task_function, replace(context, callbacks=Callbacks())), None),
        "singletons": _pickling.dumps(Singleton.get_state(), None),
    }


def rank_command(
    entry: ProgramEntry | FunctionEntry,
    wrapper: tuple[str, ...],
    run_dir: str,
    overrides: tuple[str, ...],
    recipe: _encoded.Recipe | None = None,
) -> tuple[tuple[str, ...], str]:
    """Return the command of a job's ranks and the directory in which they start.

    Args:
        entry: What they run.
        wrapper: Command to put before it.
        run_dir: Run directory of the job.
        overrides: Its override strings.
        recipe: How a rank of a program composes its config; None: it reads a payload.
    """
    if isinstance(entry, FunctionEntry):
        return _program.function_command(wrapper, entry.start, _RANK_MODULE, run_dir, overrides), entry.start.cwd
    command = _program.program_command(wrapper, entry.program, entry.flags, run_dir, overrides)
    if recipe is not None:
        command += _encoded.recipe_arguments(recipe)
    return command, entry.program.cwd
