"""Signals: recorded for an event loop, reset after a fork, said in words, and one of our own that shows stacks.

The spawner and the keepers import this module, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# On this signal a rank writes its Python stacks into its log: one that no library is known to use.
STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
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


class RecordedSignals:
    """Signals that arrived, in order, for an event loop to act on.

    Attributes:
        wakeup: Descriptor that becomes readable when one arrives.
    """

    def __init__(self) -> None:
        self.wakeup, self._write = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write, False)
        self._arrived: list[int] = []

    def record(self, number: int, _frame: object) -> None:
        """Be the handler."""
        again = number in STOP_SIGNALS and any(earlier in STOP_SIGNALS for earlier in self._arrived)
        self._arrived.append(number)
        if again:
            # The loop has not taken the first one: it is stuck, as in a write to a terminal that nobody reads.
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def take(self) -> list[int]:
        """Return and forget what arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup, 512):
                pass
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Close both ends of the wake-up pipe."""
        os.close(self.wakeup)
        os.close(self._write)

    @property
    def write_end(self) -> int:
        """Descriptor for `signal.set_wakeup_fd`."""
        return self._write


@contextlib.contextmanager
def recorded_signals(numbers: Sequence[int]) -> Iterator[RecordedSignals]:
    """Record the signals while the block runs, then put the earlier handlers back.

    Outside the main thread, where Python allows no handlers, nothing is recorded. A signal that is ignored stays
    ignored: `nohup` and a shell's `&` mean it.
    """
    recorder = RecordedSignals()
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


def write_stacks_on_signal() -> None:
    """Let this process answer STACKS_SIGNAL with the Python stacks of all its threads, on stderr."""
    if STACKS_SIGNAL is not None and sys.__stderr__ is not None:
        faulthandler.register(STACKS_SIGNAL, file=sys.__stderr__, all_threads=True)


def dump_stacks(pids: Sequence[int]) -> None:
    """Send STACKS_SIGNAL to the processes that handle it; others it would end."""
    if STACKS_SIGNAL is not None:
        send_signal([pid for pid in pids if _handles(pid, STACKS_SIGNAL)], STACKS_SIGNAL)


def _handles(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
