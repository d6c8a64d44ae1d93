"""Imports on behalf of many processes: what must not be copied into a rank is found out, and said.

The preloader imports this module, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Sequence, ValuesView
from pathlib import Path
from types import FrameType
from typing import Any

from ..common import processes
from ..common.text import pluralize

# What a rank imports of Hydra and of this package anyway. Not `job.rank`, which may be run by `python -m`, and not
# what Hydra's plugin scan executes, as that would be executed twice.
_PACKAGE = __name__.rsplit(".", 2)[0]
_WITH_HYDRA = (
    "hydra._internal.hydra",
    "hydra._internal.callbacks",
    "hydra.core.override_parser.overrides_parser",
    *(
        f"{_PACKAGE}.{name}"
        for name in (
            "common.files",
            "common.quoting",
            "job.environment",
            "job.frozen_config",
            "job.hydra_state",
            "job.outcome",
        )
    ),
)
_IMPORTING = "importing it"
_OPENS_CUDA = "nvidia-uvm"
# Who goes through all variables looks for others, as tqdm does, which torch imports.
_LISTING = (ItemsView.__iter__.__code__, ValuesView.__iter__.__code__)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Letters that are told of an error's message, of the names of threads, and of all that speaks against a module: a note
# takes no more.
_LONGEST_MESSAGE = 500
_LONGEST_NAMES = 100
_LONGEST_FAULT = 800
# Seconds for threads that have been joined to be gone for the system as well.
_JOINED_GONE_S = 0.5


def import_module(name: str, varying: Collection[str], program: Sequence[str]) -> str | None:
    """Import a module that shall be shared; return what speaks against that, None: nothing.

    After a fault this process is not to be used any further.

    Args:
        varying: Names of the variables that each rank has with a value of its own.
    """
    readers: list[tuple[str, str]] = []
    cwd, before, put_back = os.getcwd(), open_descriptors(), _putting_back()
    with _watched_environment(varying, readers), _watched_folders() as folders:
        try:
            importlib.import_module(name)
            if name == "hydra":
                for part in _WITH_HYDRA:
                    importlib.import_module(part)
        except BaseException as error:  # noqa: BLE001  (a module may end the process, too)
            fault: str | None = f"importing it fails: {type(error).__name__}: {_message_of(error)}"
        else:
            fault = _reader_fault(readers) or copied_fault(_IMPORTING, before)
            fault = fault or _changed_fault(cwd, folders) or _program_fault(program)
    if fault is not None:
        put_back()
        for folder in folders:
            # Who made it is not there any more at the end, to remove it.
            shutil.rmtree(folder, ignore_errors=True)
    return fault


def _putting_back() -> Callable[[], None]:
    """Return what puts back, of what a program inherits, all that a module may change."""
    cwd, umask = os.getcwd(), os.umask(0o77)
    os.umask(umask)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ignored = _ignored_signals()

    def put_back() -> None:
        os.chdir(cwd)
        os.umask(umask)
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for number in _ignored_signals() - ignored:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return put_back


def _ignored_signals() -> set[int]:
    return {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}


def _reader_fault(readers: Sequence[tuple[str, str]]) -> str | None:
    for module, variable in readers:
        return f"{module} reads {variable} when it is imported, which each rank has with a value of its own"
    return None


def _changed_fault(cwd: str, folders: Iterable[str]) -> str | None:
    """Return what each rank should do for itself; None: nothing."""
    for folder in filter(os.path.isdir, folders):
        return f"{_IMPORTING} makes the temporary folder {folder}, which would be shared"
    if os.getcwd() != cwd:
        return f"{_IMPORTING} changes the working directory"
    return None


def _program_fault(program: Sequence[str]) -> str | None:
    """Return whether the program is a module that is there now: `python -m` warns of that; None: it is not."""
    if program[0] != "-m":
        return None
    module = program[1]
    name = f"{module}.__main__" if hasattr(sys.modules.get(module), "__path__") else module
    return f"{_IMPORTING} imports the program itself ({name})" if name in sys.modules else None


def _message_of(error: BaseException) -> str:
    """Return its message in one line that can be sent and shown."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  (it is a module's own)
        return "its message cannot be made"
    return one_line(message, _LONGEST_MESSAGE)


def one_line(text: str, longest: int = _LONGEST_FAULT) -> str:
    """Return a text in one line that can be sent and shown, of so many letters at most."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    # The launching process shows it on a stream of the same encoding.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    line = line.encode(encoding, "backslashreplace").decode(encoding)
    return line if len(line) <= longest else f"{line[:longest]}..."


def copied_fault(what: str, before: Collection[int]) -> str | None:
    """Return what a fork of this process would lack, or share; None: nothing.

    Args:
        what: Has brought it about.
        before: Descriptors that were open before.
    """
    count = _lasting_threads()
    if count > 1:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        which = f" ({one_line(', '.join(names), _LONGEST_NAMES)})" if names else ""
        return f"{what} starts {pluralize(count - 1, 'thread')}{which}, which a fork would not have"
    if _cuda_is_initialised():
        return f"{what} initialises CUDA, which a fork could not use"
    if processes.has_children():
        return f"{what} starts a process, which would be shared"
    if any(signal.getitimer(timer)[0] for timer in _TIMERS):
        return f"{what} sets a timer, which a fork would not have"
    if _has_shared_memory():
        return f"{what} makes a lock of multiprocessing, or other shared memory, which all ranks would have in common"
    for descriptor in open_descriptors():
        if descriptor not in before and _has_state(descriptor):
            return f"{what} opens {_target_of(descriptor)}, which would be shared"
    return None


def _lasting_threads() -> int:
    """Return the number of threads, without those that are over but for a few instructions, as after a join."""
    until = time.monotonic() + _JOINED_GONE_S
    while (count := processes.thread_count()) > threading.active_count() and time.monotonic() < until:
        time.sleep(0.001)
    return count


def _has_shared_memory() -> bool:
    """Return whether there is memory that a fork can write to as well, and no other process can find."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
            if line.split()[1] == "rw-s" and line.endswith("(deleted)"):
                return True
    return False


def _has_state(descriptor: int) -> bool:
    """Return whether what one process does with an open file makes a difference to others that have it."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        # At the end of a log it makes none.
        appends = os.O_WRONLY | os.O_APPEND
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND) != appends
    return not stat.S_ISCHR(mode) and not stat.S_ISDIR(mode)


def _target_of(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return "a file"


def _cuda_is_initialised() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    return any(os.path.basename(_target_of(number)) == _OPENS_CUDA for number in open_descriptors())


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
        def __getitem__(self, key: Any) -> Any:
            name = os.fsdecode(key) if isinstance(key, bytes) else key
            reader = sys._getframe(1)
            if name in varying and reader.f_code not in _LISTING:
                readers.append((_importing_module(reader), name))
            return super().__getitem__(key)

    both: tuple[Any, ...] = (os.environ, os.environb)
    for environ in both:
        environ.__class__ = Watched
    try:
        yield
    finally:
        for environ in both:
            environ.__class__ = plain


@contextlib.contextmanager
def _watched_folders() -> Iterator[list[str]]:
    """Return the temporary folders that are made while the block runs: its maker removes one at the end."""
    folders: list[str] = []
    plain: Any = tempfile.mkdtemp

    @functools.wraps(plain)
    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        folders.append(plain(*args, **kwargs))
        return folders[-1]

    tempfile.mkdtemp = mkdtemp
    try:
        yield folders
    finally:
        tempfile.mkdtemp = plain


def _importing_module(frame: FrameType | None) -> str:
    """Return the module whose first lines are being run, innermost first."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return "something"
