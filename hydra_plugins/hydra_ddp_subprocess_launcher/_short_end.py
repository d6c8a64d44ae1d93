"""The end of a forked rank: as the interpreter's own, but what it shares with others is not taken apart.

That would copy all of it, only to throw it away. The preloader imports this module, so it imports the standard library
only.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import weakref
from collections.abc import Collection
from typing import Any


class ShortEnd:
    """Ends the process when the program, its threads and its `atexit` functions are done.

    Make it before anything else registers with `atexit`, as it has to be the last one. Where it would not be, the
    program ends by Ctrl-C or a daemon thread still runs, the interpreter goes the long way.

    Attributes:
        shared: Names of the modules that are left alone.
        code: Exit code of the process; None: not known.
    """

    def __init__(self) -> None:
        self.shared: Collection[str] = ()
        self.code: int | None = None
        # Such as coverage, which starts with the interpreter.
        others: int = vars(atexit)["_ncallbacks"]()
        if others == 0:
            atexit.register(self._end)
        else:
            atexit.register(gc.unfreeze)

    def note(self, error: BaseException | None) -> None:
        """Take note of what ended the program; None: it has come to its end."""
        if error is None:
            self.code = 0
        elif isinstance(error, SystemExit):
            code = error.code
            self.code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        elif not isinstance(error, KeyboardInterrupt):
            self.code = 1

    def _end(self) -> None:
        try:
            _flush()
        except Exception:  # noqa: BLE001  (a stream may be anything; the interpreter has an exit code for this)
            self.code = None
        # A thread that goes on would find its modules empty. The interpreter lets it have no turn any more.
        if self.code is None or len(sys._current_frames()) > 1:
            gc.unfreeze()
            return
        # All of them have been called; they know the program's names.
        vars(atexit)["_clear"]()
        _empty(self.shared)
        with contextlib.suppress(Exception):
            _flush()
        # What C code has printed.
        ctypes.CDLL(None).fflush(None)
        os._exit(self.code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _empty(shared: Collection[str]) -> None:
    """Let go of what the program's own modules hold, so that its files are written and its objects deleted."""
    # A traceback that was printed knows all names, too.
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    _write_files()
    modules = []
    for name in reversed(list(sys.modules)):
        if name == "__main__" or name not in shared:
            with contextlib.suppress(TypeError):
                modules.append(weakref.ref(sys.modules.pop(name)))
    # As the interpreter does it: first what is in reach of nobody else, all at once and with its globals in place,
    gc.collect()
    # then what is, a name at a time.
    for reference in modules:
        module = reference()
        if module is not None:
            _clear(vars(module))
            del module
    gc.collect()


def _write_files() -> None:
    """Write what is buffered for files: the collector may close one before its buffer is written."""
    for found in gc.get_objects():
        if issubclass(type(found), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(Exception):
                found.flush()


def _clear(space: dict[str, Any]) -> None:
    for private in (True, False):
        for key in list(space):
            if key != "__builtins__" and (key[:1] == "_" and key[1:2] != "_") == private:
                space[key] = None
