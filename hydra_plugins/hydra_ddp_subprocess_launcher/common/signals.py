"""Signals: record them for an event loop, reset them after a fork, describe them, and dump stacks on one.

The spawner and the keepers import this module, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import NoReturn

# Signal on which a rank writes its Python stacks into its log; no library is known to use it.
STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
# Seconds within which signals count as one request: service managers send SIGTERM and SIGHUP together, and a wrapper
# forwards the SIGINT that a terminal sends to all processes.
ONE_ORDER_S = 0.3
# Seconds after which an event loop that has not taken a stop signal counts as stuck.
_STUCK_S = 1.0
CONTINUED = (signal.SIGCONT,) if hasattr(signal, "SIGCONT") else ()
FORWARDED_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def reset_signals() -> None:
    """Reset handlers and mask inherited by fork or exec. Ignored signals (`nohup`) stay ignored.

    SIGCHLD is reset even if ignored, because the system would then reap children and discard their exit codes.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def send_signal(pids: Sequence[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        # PermissionError: it changed its user id, for example by sudo.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def describe_exit(code: int) -> str:
    """Describe an exit code: `exit code 3`, `signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"signal {-code} ({name})"


def describe_end(code: int) -> str:
    """Describe how a process ended: `ended with exit code 3`, `was killed by signal 9 (SIGKILL)`."""
    return f"ended with {describe_exit(code)}" if code >= 0 else f"was killed by {describe_exit(code)}"


def advice_on_exit(code: int | None) -> str:
    """Return a hint for an exit code that is not self-explanatory, or an empty string."""
    if code != -signal.SIGKILL:
        return ""
    return "Often this means out of memory: look at `dmesg` and at the memory limit of the container or allocation."


class RepeatedSignal(KeyboardInterrupt):
    """A stop signal arrived while an earlier one has been waiting for too long.

    A KeyboardInterrupt, so that code that catches Exception does not swallow it.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class RecordedSignals:
    """Signals recorded in order of arrival, for an event loop.

    Args:
        impatient: Raise on a stop signal if an earlier one has waited for so long that the loop must be stuck.

    Attributes:
        wakeup: Descriptor that becomes readable when a signal arrives.
    """

    def __init__(self, *, impatient: bool) -> None:
        self._impatient = impatient
        self._waits_since: float | None = None
        self.wakeup, self._write = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write, False)
        self._arrived: list[int] = []

    def record(self, number: int, _frame: object) -> None:
        """Record a signal, as its handler."""
        self._arrived.append(number)
        if number not in STOP_SIGNALS or not self._impatient:
            return
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since > _STUCK_S:
            # For example in a write to a terminal that is not read.
            raise RepeatedSignal(number)

    def take(self) -> list[int]:
        """Return and clear the signals that arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup, 512):
                pass
        arrived, self._arrived = self._arrived, []
        self._waits_since = None
        return arrived

    def has(self, number: int) -> bool:
        """Return whether a signal has arrived since the last call of `take`."""
        return number in self._arrived

    def close(self) -> None:
        """Close both ends of the wake-up pipe."""
        os.close(self.wakeup)
        os.close(self._write)

    @property
    def write_end(self) -> int:
        """Descriptor for `signal.set_wakeup_fd`."""
        return self._write


@contextlib.contextmanager
def recorded_signals(numbers: Sequence[int], *, impatient: bool = False) -> Iterator[RecordedSignals]:
    """Record the signals while the block runs, then restore the earlier handlers.

    Outside the main thread, nothing is recorded, because Python allows no handlers there. An ignored signal stays
    ignored, as `nohup` and a shell's `&` intend.
    """
    recorder = RecordedSignals(impatient=impatient)
    earlier: dict[int, Callable[..., object] | int | None] = {}
    wakeup = None
    try:
        wakeup = signal.set_wakeup_fd(recorder.write_end, warn_on_full_buffer=False)
    except ValueError:
        numbers = ()
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                earlier[number] = signal.signal(number, recorder.record)
        yield recorder
    finally:
        for number, handler in earlier.items():
            # A handler set by C code cannot be restored: Python returns None for it.
            if handler is not None:
                signal.signal(number, handler)
        if wakeup is not None:
            signal.set_wakeup_fd(wakeup)
        recorder.close()


class Shutdown(Enum):
    """What a stop signal requests."""

    IGNORE = "it is the order that has come already"
    STOP = "end what runs, by SIGTERM first"
    KILL = "end it at once"


class ShutdownController:
    """Track stop signals: the first one stops the jobs of this process, a later one kills them.

    Attributes:
        stopped_by: Signal that stopped the jobs, or None.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._stopped_at = 0.0

    @property
    def stopped(self) -> bool:
        """Whether a stop signal has arrived."""
        return self.stopped_by is not None

    @property
    def name(self) -> str:
        """Name of the stop signal; empty if none has arrived."""
        return "" if self.stopped_by is None else signal.Signals(self.stopped_by).name

    def receive(self, number: int, now: float) -> Shutdown:
        """Return what a signal that has just arrived requests.

        Args:
            number: The signal.
            now: Monotonic seconds.
        """
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = number, now
            return Shutdown.STOP
        return Shutdown.IGNORE if now - self._stopped_at < ONE_ORDER_S else Shutdown.KILL

    def leave_if_stopped(self) -> None:
        """End this process as the stop signal requests, if one has arrived.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM or SIGHUP, unless an earlier handler decides otherwise.
        """
        if self.stopped_by is not None:
            leave(self.stopped_by)


def write_stacks_on_signal(log_file: str) -> None:
    """Write the Python stacks of all threads of this process to its log on STACKS_SIGNAL.

    Not to stderr, which the program may have closed, detached or redirected.
    """
    with contextlib.suppress(OSError):
        log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if STACKS_SIGNAL is not None:
            faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; False if the system does not say."""
    try:
        # The process name may be cut within a character.
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


# Attribute of a KeyboardInterrupt that needs no traceback.
_SAID = "_hydra_ddp_has_said_why"


def leave(number: int) -> NoReturn:
    """End this process as the signal that stopped a batch requests.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after SIGTERM or SIGHUP, unless an earlier handler decides otherwise.
    """
    handler = signal.getsignal(number)
    if callable(handler):
        try:
            handler(number, None)
        except KeyboardInterrupt as error:
            _end_without_traceback(error)
            raise
    raise SystemExit(128 + number)


def _end_without_traceback(error: KeyboardInterrupt) -> None:
    """Suppress the traceback of this exception if it is not caught: the reason has already been logged.

    Hydra does not handle it, and the stack would only show Hydra's frames and ours. A custom `sys.excepthook` is kept.
    """
    if sys.excepthook is not sys.__excepthook__ or os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    # The hook keeps no reference to the exception, which refers to the sweep: a program that catches it may run on.
    vars(error)[_SAID] = True

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if _SAID not in vars(value):
            sys.__excepthook__(kind, value, trace)

    sys.excepthook = hook
