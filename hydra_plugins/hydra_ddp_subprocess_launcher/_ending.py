"""What ends a batch before all of its jobs have run: a signal, or too many failures."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn

from . import _orders, _results, _signals
from ._debug import DebugSession
from ._line import Line
from ._progress import Progress
from ._results import Verdict
from ._running import RunningJob
from ._setup import Sweep
from ._words import counted

_log = logging.getLogger(__name__)
# Attribute of a KeyboardInterrupt that needs no traceback.
_SAID = "_hydra_ddp_has_said_why"
# What a batch listens to; to SIGCONT, as a shell may have written onto the board while this process was stopped.
HEARD = (*_signals.STOP_SIGNALS, *_signals.FORWARDED_SIGNALS, *_signals.CONTINUED)


class Ending:
    """Decide whether a batch ends early, and end its jobs.

    Args:
        sweep: The sweep.
        debugging: Knows which signals are for rank 0 alone.
        line: Jobs that wait.
        running: Jobs that have a keeper, by number.
        progress: Shows the batch.

    Attributes:
        gave_up: Whether too many jobs have failed.
    """

    def __init__(
        self,
        sweep: Sweep,
        debugging: DebugSession,
        line: Line,
        running: Mapping[int, RunningJob],
        progress: Progress,
    ) -> None:
        self._sweep = sweep
        self._debugging = debugging
        self._line = line
        self._running = running
        self._progress = progress
        self._stopped_by: int | None = None
        self._stopped_at = 0.0
        self.gave_up = False

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the batch."""
        return self._stopped_by is not None

    @property
    def starts_none(self) -> bool:
        """Whether no job shall be started any more, not even once more."""
        return self.stopped or (self.gave_up and self._sweep.settings.stop_running)

    # Signals

    def act_on(self, arrived: list[int]) -> None:
        """Do what signals ask for, in order."""
        for number in arrived:
            rank = self._debugging.receiver(number, time.monotonic()) if self._running else None
            if rank is not None or number in _signals.FORWARDED_SIGNALS:
                for job in self._running.values():
                    job.channel.send(_orders.Forward(number, rank))
            elif number in _signals.STOP_SIGNALS:
                self._stop(number)
            else:
                self._progress.resumed()

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        again = self._stopped_by is not None
        if self._stopped_by is None:
            self._stopped_by, self._stopped_at = number, now
            self._progress.stopped(signal.Signals(number).name)
        elif now - self._stopped_at < _signals.ONE_ORDER_S:
            return
        self._line.clear()
        if self._running:
            how = "killing" if again else "stopping"
            hint = "" if again else " (once more: kill at once)"
            running = counted(len(self._running), "running job")
            _log.warning("%s: %s %s%s", signal.Signals(number).name, how, running, hint)
        for job in self._running.values():
            job.stop(signal.Signals(number).name, at_once=again)

    def leave_if_stopped(self) -> None:
        """End this process as the signal asks that has stopped the batch, if one has.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM or SIGHUP, unless a handler that was there before decides otherwise.
        """
        if self._stopped_by is not None:
            leave(self._stopped_by)

    # Failures

    def give_up(self) -> list[int]:
        """End the batch once too many jobs have failed (`max_failures`); return who is sent out of the line by that."""
        settings, failures = self._sweep.settings, self._sweep.ledger.failures
        if settings.max_failures is None or failures < settings.max_failures or self.gave_up:
            return []
        self.gave_up = True
        count, most = counted(failures, "job"), settings.max_failures
        _log.error("%s failed (max_failures=%d): no more jobs are started", count, most)
        if settings.stop_running:
            for job in self._running.values():
                job.stop(f"max_failures={settings.max_failures} was reached")
        # Of a sweep that is resumed, those that wait may be done: that shows when they are composed.
        return self._line.clear() if self._sweep.earlier is None else self._line.drop_ready()

    def too_many_failures(self) -> Verdict:
        """Return how a job ends that was not started any more."""
        said = counted(self._sweep.ledger.failures, "job")
        return _results.skipped(f"{said} failed before it (max_failures={self._sweep.settings.max_failures})")


def leave(number: int) -> NoReturn:
    """End this process as a signal asks that has stopped a batch.

    Args:
        number: The signal.

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
