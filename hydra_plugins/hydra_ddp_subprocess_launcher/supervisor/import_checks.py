"""Import modules that ranks will share, and detect state that must not be copied into a rank.

The fork server imports this module, so it imports the standard library only.
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

# Modules of Hydra and of this package that every rank imports anyway. Not `job.rank`, which may be run by `python -m`,
# and not what Hydra's plugin scan executes, because it would be executed twice.
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
# Code that iterates over all variables looks for others; tqdm, which torch imports, does so.
_LISTING = (ItemsView.__iter__.__code__, ValuesView.__iter__.__code__)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Maximum characters of an error's message, of a list of thread names, and of a whole fault, so that a note can hold it.
_LONGEST_MESSAGE = 500
_LONGEST_NAMES = 100
_LONGEST_FAULT = 800
# Seconds until the system no longer lists threads that have been joined.
_JOINED_GONE_S = 0.5


def import_module(name: str, varying: Collection[str], program: Sequence[str]) -> str | None:
    """Import a module to share; return why it must not be shared, or None.

    After a fault, this process must not be used any further.

    Args:
        varying: Names of the environment variables whose value differs between ranks.
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
            # Remove it here: the exit handler that would do so is lost when the fork server restarts.
            shutil.rmtree(folder, ignore_errors=True)
    return fault


def _putting_back() -> Callable[[], None]:
    """Return a function that restores the inherited process state that a module may change."""
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
    """Return a change by the import that each rank must make for itself, or None."""
    for folder in filter(os.path.isdir, folders):
        return f"{_IMPORTING} makes the temporary folder {folder}, which would be shared"
    if os.getcwd() != cwd:
        return f"{_IMPORTING} changes the working directory"
    return None


def _program_fault(program: Sequence[str]) -> str | None:
    """Return a fault if the program is a module that is now imported, of which `python -m` warns; else None."""
    if program[0] != "-m":
        return None
    module = program[1]
    name = f"{module}.__main__" if hasattr(sys.modules.get(module), "__path__") else module
    return f"{_IMPORTING} imports the program itself ({name})" if name in sys.modules else None


def _message_of(error: BaseException) -> str:
    """Return the message of an error on one line that can be sent and shown."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  (the exception class is the module's)
        return "its message cannot be made"
    return one_line(message, _LONGEST_MESSAGE)


def one_line(text: str, longest: int = _LONGEST_FAULT) -> str:
    """Return a text on one line that can be sent and shown, cut to at most `longest` characters."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    # The launching process shows it on a stream with the same encoding.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    line = line.encode(encoding, "backslashreplace").decode(encoding)
    return line if len(line) <= longest else f"{line[:longest]}..."


def copied_fault(what: str, before: Collection[int]) -> str | None:
    """Return a fault if a fork of this process would lack or share some of its state, else None.

    Args:
        what: Name of the cause, for the message.
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
    """Return the number of threads, not counting those that are about to vanish, such as joined ones."""
    until = time.monotonic() + _JOINED_GONE_S
    while (count := processes.thread_count()) > threading.active_count() and time.monotonic() < until:
        time.sleep(0.001)
    return count


def _has_shared_memory() -> bool:
    """Return whether this process maps writable shared memory without a name, which only a fork would share."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
            if line.split()[1] == "rw-s" and line.endswith("(deleted)"):
                return True
    return False


def _has_state(descriptor: int) -> bool:
    """Return whether an open file has state, such as an offset, that processes sharing it would affect."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        # Appending to a log does not depend on the offset.
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
    """Return the open descriptors of this process."""
    # The list includes the descriptor of the folder itself, closed by now.
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _watched_environment(varying: Collection[str], readers: list[tuple[str, str]]) -> Iterator[None]:
    """Record reads of the `varying` variables while the block runs, as pairs of module and variable."""
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
    """Collect the temporary folders created while the block runs: their creators would remove them at exit."""
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
    """Return the innermost module that is being imported on the stack."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return "something"
