"""Signals: recorded for an event loop, reset after a fork, said in words, and one of our own that shows stacks.

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

# On this signal a rank writes its Python stacks into its log: one that no library is known to use.
STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
# Seconds within which signals are one order: service managers send SIGTERM and SIGHUP together, and a wrapper passes on
# the SIGINT that a terminal sends to all.
ONE_ORDER_S = 0.3
# Seconds after which an event loop that has not looked at a signal to stop is stuck.
_STUCK_S = 1.0
CONTINUED = (signal.SIGCONT,) if hasattr(signal, "SIGCONT") else ()
FORWARDED_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def reset_signals() -> None:
    """Forget handlers and mask that a fork or an exec handed down. Ignored signals (`nohup`) stay ignored.

    Not so SIGCHLD: where it is ignored the system reaps children, and nobody learns how they ended.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def send_signal(pids: Sequence[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        # PermissionError: it changed its user id, as by sudo.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def describe_exit(code: int) -> str:
    """Say an exit code in words: `exit code 3`, `signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"signal {-code} ({name})"


def describe_end(code: int) -> str:
    """Say how a process ended: `ended with exit code 3`, `was killed by signal 9 (SIGKILL)`."""
    return f"ended with {describe_exit(code)}" if code >= 0 else f"was killed by {describe_exit(code)}"


def advice_on_exit(code: int | None) -> str:
    """Return what to look at after an exit code that tells little; empty: nothing."""
    if code != -signal.SIGKILL:
        return ""
    return "Often this means out of memory: look at `dmesg` and at the memory limit of the container or allocation."


class RepeatedSignal(KeyboardInterrupt):
    """A signal to stop came while an earlier one has not been looked at for long.

    A KeyboardInterrupt, so that nobody takes it for an error of what he called.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class RecordedSignals:
    """Signals that arrived, in order, for an event loop to act on.

    Args:
        impatient: Let a signal to stop raise when an earlier one has waited for so long that the loop must be stuck.

    Attributes:
        wakeup: Descriptor that becomes readable when one arrives.
    """

    def __init__(self, *, impatient: bool) -> None:
        self._impatient = impatient
        self._waits_since: float | None = None
        self.wakeup, self._write = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write, False)
        self._arrived: list[int] = []

    def record(self, number: int, _frame: object) -> None:
        """Be the handler."""
        self._arrived.append(number)
        if number not in STOP_SIGNALS or not self._impatient:
            return
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since > _STUCK_S:
            # As in a write to a terminal that nobody reads.
            raise RepeatedSignal(number)

    def take(self) -> list[int]:
        """Return and forget what arrived since the last call."""
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
    """Record the signals while the block runs, then put the earlier handlers back.

    Outside the main thread, where Python allows no handlers, nothing is recorded. A signal that is ignored stays
    ignored: `nohup` and a shell's `&` mean it.
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
            # A handler that C code had set is not ours to restore: Python reports it as None.
            if handler is not None:
                signal.signal(number, handler)
        if wakeup is not None:
            signal.set_wakeup_fd(wakeup)
        recorder.close()


class Shutdown(Enum):
    """What a signal to stop asks for."""

    IGNORE = "it is the order that has come already"
    STOP = "end what runs, by SIGTERM first"
    KILL = "end it at once"


class ShutdownController:
    """What the signals to stop have asked for: the first one stops a process's jobs, a later one kills them.

    Attributes:
        stopped_by: Signal that has stopped them; None: none has.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._stopped_at = 0.0

    @property
    def stopped(self) -> bool:
        """Whether a signal has come."""
        return self.stopped_by is not None

    @property
    def name(self) -> str:
        """Name of the signal; empty: none has come."""
        return "" if self.stopped_by is None else signal.Signals(self.stopped_by).name

    def receive(self, number: int, now: float) -> Shutdown:
        """Return what a signal asks for that has arrived.

        Args:
            now: Monotonic seconds.
        """
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = number, now
            return Shutdown.STOP
        return Shutdown.IGNORE if now - self._stopped_at < ONE_ORDER_S else Shutdown.KILL

    def leave_if_stopped(self) -> None:
        """End this process as the signal asks, if one has come.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM or SIGHUP, unless a handler that was there before decides otherwise.
        """
        if self.stopped_by is not None:
            leave(self.stopped_by)


def write_stacks_on_signal(log_file: str) -> None:
    """Let this process answer STACKS_SIGNAL with the Python stacks of all its threads, in its log.

    Not on its stderr, which the program may have closed, detached or turned to somewhere else.
    """
    with contextlib.suppress(OSError):
        log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if STACKS_SIGNAL is not None:
            faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; False where the system does not tell."""
    try:
        # Its name may be cut within a character.
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


# Attribute of a KeyboardInterrupt that needs no traceback.
_SAID = "_hydra_ddp_has_said_why"


def leave(number: int) -> NoReturn:
    """End this process as a signal asks that has stopped a batch.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after SIGTERM or SIGHUP, unless a handler that was there before decides otherwise.
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
    """Let Python end without its traceback if nobody catches this one: why the sweep ends has been said already.

    Hydra lets it pass, and what was on the stack is Hydra's and ours. Who has a hook of his own keeps it.
    """
    if sys.excepthook is not sys.__excepthook__ or os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    # The hook does not hold the exception, which holds the sweep: whoever catches it may go on for long.
    vars(error)[_SAID] = True

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if _SAID not in vars(value):
            sys.__excepthook__(kind, value, trace)

    sys.excepthook = hook
