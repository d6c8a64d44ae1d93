"""A program run as `__main__` in a process that has imported modules before: what the interpreter does itself in C.

The preloader imports this module, so it imports the standard library only.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType, TracebackType
from typing import Any


def own_path(program: Sequence[str], cwd: str) -> list[str]:
    """Return what the interpreter puts before `sys.path` for a program.

    Args:
        program: `-m` and a module, or a script, folder or archive; arguments may follow.
        cwd: Working directory at the start.
    """
    # A folder or archive is where its modules are: that also holds where the script's own folder is kept off.
    if program[0] != "-m" and _is_container(program[0]):
        return [program[0]]
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return []
    return [cwd if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))]


def prepare_main(program: Sequence[str]) -> None:
    """Make `__main__`, a new one, and `sys.argv` what they are before a program's first line."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    space = vars(main)
    space.update(__loader__=importlib.machinery.BuiltinImporter, __annotations__={}, __builtins__=builtins)
    _set_arguments(program)
    if program[0] != "-m" and not _is_container(program[0]):
        compiled = program[0].endswith(".pyc")
        loader = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
        space.update(__file__=program[0], __cached__=None, __loader__=loader("__main__", program[0]))


def _set_arguments(program: Sequence[str]) -> None:
    sys.argv[:] = ["-m", *program[2:]] if program[0] == "-m" else program


def run_main(program: Sequence[str], note: Callable[[BaseException | None], None]) -> None:
    """Run a program to its end in the `__main__` that was prepared, which modules may have got hold of.

    What it raises is left to the interpreter, which knows all about exit codes, SystemExit and Ctrl-C.

    Args:
        program: `-m` and a module, or a script, folder or archive, with its arguments.
        note: Is called with what has ended it, None: it has come to its end. Once more if its `sys.excepthook` exits.

    Raises:
        BaseException: whatever the program raises.
    """
    _set_arguments(program)
    run_module: Any = vars(runpy)["_run_module_as_main"]
    try:
        if program[0] == "-m":
            run_module(program[1])
        elif _is_container(program[0]):
            run_module("__main__", False)
        else:
            exec(_code(program[0]), vars(sys.modules["__main__"]))
    except SystemExit as error:
        note(error)
        raise
    except BaseException as error:
        note(error)
        if hasattr(sys, "excepthook"):
            sys.excepthook = _Hook(sys.excepthook, note)
        raise
    note(None)


class _Hook:
    """Show an exception that ends the program as if the program had been called by nobody.

    Args:
        hook: What the program has for it, or the interpreter's own.
        note: Is called with a SystemExit by which that ends the program instead.
    """

    def __init__(self, hook: Any, note: Callable[[BaseException | None], None]) -> None:
        self._hook = hook
        self._note = note

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Be `sys.excepthook`."""
        sys.excepthook = self._hook
        error.__traceback__ = _without_ours(error, trace)
        try:
            self._hook(kind, error, error.__traceback__)
        except SystemExit as exits:
            self._note(exits)
            raise


def _without_ours(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first call that is the program's."""
    ours = __name__.rpartition(".")[0]
    shown = trace
    while shown is not None:
        code = shown.tb_frame.f_code
        name = str(shown.tb_frame.f_globals.get("__name__"))
        if code.co_filename != "<string>" and not name.startswith(f"{ours}."):
            return shown
        shown = shown.tb_next
    # A script that is no Python has not run at all.
    return None if isinstance(error, SyntaxError) else trace


def _is_container(path: str) -> bool:
    return pkgutil.get_importer(path) is not None


def _code(path: str) -> CodeType:
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file) if path.endswith(".pyc") else None
            file.seek(0)
            source = file.read()
    except OSError as error:
        # The interpreter's words, and its exit code.
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    if code is None:
        code = compile(source, path, "exec", dont_inherit=True)
    assert isinstance(code, CodeType)
    return code
