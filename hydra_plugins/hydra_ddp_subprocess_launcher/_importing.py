"""Imports on behalf of many processes: what must not be copied into a rank is found out, and said.

The preloader imports this module, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

from . import _process
from ._words import counted

# What a rank imports of Hydra and of this package anyway. Not `_rank` itself, which may be run by `python -m`, and not
# what Hydra's plugin scan executes, as that would be executed twice.
_WITH_HYDRA = (
    "hydra._internal.hydra",
    "hydra._internal.callbacks",
    "hydra.core.override_parser.overrides_parser",
    *(f"{__package__}.{name}" for name in ("_files", "_freeze", "_outcome", "_pickling", "_program", "_tasks")),
)
_OPENS_CUDA = "nvidia-uvm"


def import_module(name: str, varying: Collection[str]) -> str | None:
    """Import a module that shall be shared; return what speaks against that, None: nothing.

    After a fault this process is not to be used any further.

    Args:
        name: Of the module.
        varying: Names of the variables that each rank has with a value of its own.
    """
    readers: list[tuple[str, str]] = []
    with _watched_environment(varying, readers):
        try:
            importlib.import_module(name)
            if name == "hydra":
                for part in _WITH_HYDRA:
                    importlib.import_module(part)
        except BaseException as error:  # noqa: BLE001  (a module may end the process, too)
            return f"importing it fails: {type(error).__name__}: {error}"
    if readers:
        module, variable = readers[0]
        return f"{module} reads {variable} when it is imported, which each rank has with a value of its own"
    return _copied_fault()


def _copied_fault() -> str | None:
    """Return what a fork of this process would lack, or share; None: nothing."""
    count = _process.thread_count()
    if count > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        which = f" ({', '.join(names)})" if names else ""
        return f"importing it starts {counted(count - 1, 'thread')}{which}, which a fork would not have"
    if _cuda_is_initialised():
        return "importing it initialises CUDA, which a fork could not use"
    if _process.has_children():
        return "importing it starts a process, which would be shared"
    return None


def _cuda_is_initialised() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    for entry in open_descriptors():
        with contextlib.suppress(OSError):
            if os.path.basename(os.readlink(f"/proc/self/fd/{entry}")) == _OPENS_CUDA:
                return True
    return False


def open_descriptors() -> list[int]:
    """Return the descriptors that this process has open."""
    # One of those that are listed was that of the folder.
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _watched_environment(varying: Collection[str], readers: list[tuple[str, str]]) -> Iterator[None]:
    """Note who reads one of these variables while the block runs: module and name."""
    plain: Any = type(os.environ)

    class Watched(plain):  # type: ignore[misc]
        def __getitem__(self, key: str) -> Any:
            if key in varying:
                readers.append((_importing_module(sys._getframe(1)), key))
            return super().__getitem__(key)

    environ: Any = os.environ
    environ.__class__ = Watched
    try:
        yield
    finally:
        environ.__class__ = plain


def _importing_module(frame: FrameType | None) -> str:
    """Return the module whose first lines are being run, innermost first."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return "something"
