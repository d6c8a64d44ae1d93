"""A rank that is a fork: made like a process that has just been started, but for the modules that are imported.

The preloader imports this module, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _machine, _native, _process
from ._importing import open_descriptors
from ._keeper import RankForked
from ._specs import GroupSpec

_CHUNK = 1 << 16
# As many bytes as multiprocessing takes for its key.
_KEY_BYTES = 32


@dataclass(frozen=True)
class RankStart:
    """What a forked rank is to become.

    Attributes:
        argv: Its command: interpreter, flags, and the program.
        program_at: Place in it at which the program begins.
        environment: All its variables.
        log: Descriptor of its log.
        keeper: Pid of its keeper.
        inherited: What it inherits.
    """

    argv: tuple[str, ...]
    program_at: int
    environment: Mapping[str, str]
    log: int
    keeper: int
    inherited: _process.Inherited

    @property
    def program(self) -> list[str]:
        """The program and its arguments."""
        return list(self.argv[self.program_at :])


class RankBegins(RankForked):
    """Raised in a rank that is to become a program.

    Attributes:
        start: What the rank is to become.
    """

    def __init__(self, start: RankStart) -> None:
        super().__init__()
        self.start = start


def fork_rank(spec: GroupSpec, environment: Mapping[str, str], log_file: str, inherited: _process.Inherited) -> int:
    """Start one rank as a fork of this process, and return its pid: as `_process.start_rank`, but for the exec.

    Args:
        spec: Its group; `program_at` is set.
        environment: All its variables.
        log_file: Is appended to.
        inherited: What it inherits besides; no terminal.

    Raises:
        OSError: when the log cannot be opened, no process can be made, or `cwd` cannot be used.
        RankBegins: in the rank.
    """
    assert spec.program_at is not None and not inherited.terminal
    # It says what is wrong with it, and in the keeper it does no harm.
    os.chdir(spec.cwd)
    log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    start = RankStart(spec.argv, spec.program_at, environment, log, os.getpid(), inherited)
    # One that is sent to the rank must not find the handlers of the keeper.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(log)
    if pid == 0:
        raise RankBegins(start)
    return pid


@dataclass(frozen=True)
class FreshState:
    """What a process is like after its imports, before it serves as a preloader.

    Attributes:
        descriptors: Those that are open.
        handlers: Of each signal; None: one that was not set from Python.
        actions: Of each signal, as C keeps them.
        mask: Signals that are blocked.
        variables: What the imports have set in the environment; None: removed.
    """

    descriptors: frozenset[int]
    handlers: Mapping[int, Callable[..., Any] | int | None]
    actions: Mapping[int, bytes]
    mask: frozenset[int]
    variables: Mapping[str, str | None]

    @classmethod
    def look(cls, earlier: Mapping[str, str], but: set[int]) -> FreshState:
        """Return what this process is like.

        Args:
            earlier: Environment before the imports.
            but: Descriptors that are for the preloader alone.
        """
        now = dict(os.environ)
        changed = {name: now.get(name) for name in {*earlier, *now} if now.get(name) != earlier.get(name)}
        handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        mask = frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return cls(frozenset(open_descriptors()) - but, handlers, _native.signal_actions(), mask, changed)


def become_rank(start: RankStart, state: FreshState, imports_said: int) -> None:
    """Make this process, a fork, what a new one would be.

    Args:
        start: What it is to become.
        state: What the preloader was like before it served.
        imports_said: Descriptor of the file with what the imports have printed.
    """
    _process.signal_at_parents_end(start.keeper, signal.SIGKILL)
    os.setsid()
    _turn_output(start.log, imports_said)
    _close_all_but({0, 1, 2, *state.descriptors, *start.inherited.held})
    for held in start.inherited.held:
        os.set_inheritable(held, True)
    variables = {**start.environment, **state.variables}
    _set_environment({name: value for name, value in variables.items() if value is not None})
    _machine.forked_with(start.environment)
    sys.orig_argv[:] = start.argv
    _forget_missing_folders()
    _process.name_process(os.path.basename(start.argv[0])[:15])
    _native.show_command(start.argv, start.environment)
    _begin_anew()
    _draw_new_randomness()
    _native.set_thread_counts(os.environ)
    _reset_signals(state, start.inherited.ignored)


def _turn_output(log: int, imports_said: int) -> None:
    """Let stdout and stderr lead to the log, which begins with what the imports have printed."""
    place = 0
    while chunk := os.pread(imports_said, _CHUNK, place):
        place += os.write(log, chunk)
    for descriptor in (1, 2):
        os.dup2(log, descriptor, inheritable=True)


def _close_all_but(kept: set[int]) -> None:
    for descriptor in open_descriptors():
        if descriptor not in kept:
            os.close(descriptor)


def _set_environment(environment: Mapping[str, str]) -> None:
    # By name, so that C's `getenv` finds the same.
    for name in list(os.environ):
        if name not in environment:
            del os.environ[name]
    os.environ.update(environment)


def _forget_missing_folders() -> None:
    """Look again for folders of `sys.path` that were not there at the imports."""
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:
            del sys.path_importer_cache[path]


def _begin_anew() -> None:
    """Let modules know that this is another process, which has just begun."""
    thread, logging = threading.main_thread(), sys.modules.get("logging")
    if hasattr(thread, "_set_native_id"):
        # Before 3.13 only a thread that starts has it set.
        thread._set_native_id()
    began = getattr(logging, "_startTime", None)
    if began is not None:
        # For `%(relativeCreated)d`: seconds, and since 3.13 nanoseconds.
        vars(logging)["_startTime"] = time.time_ns() if isinstance(began, int) else time.time()


def _draw_new_randomness() -> None:
    """Let this process have random states of its own; Python's `random` sees to itself."""
    torch, numpy, processes = (sys.modules.get(name) for name in ("torch", "numpy.random", "multiprocessing.process"))
    if torch is not None:
        # Not `torch.seed()`: it would leave the same seed for every CUDA device.
        torch.default_generator.seed()
    if numpy is not None:
        numpy.seed()
    if processes is not None:
        processes.current_process().authkey = os.urandom(_KEY_BYTES)


def _reset_signals(state: FreshState, ignored: tuple[int, ...]) -> None:
    for number, handler in state.handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, handler)
    _native.restore_signal_actions(state.actions)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, state.mask)
