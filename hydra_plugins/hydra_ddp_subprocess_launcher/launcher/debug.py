"""A debug session: rank 0 of a single job uses the terminal of the launching process, as if started there.

Rank 0 still runs in its own session, so that it is supervised like every rank. A terminal lets a process of another
session read, write and set its modes, but sends it no signals; this module forwards them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import termios
from collections.abc import Iterator
from typing import Any, TextIO

from ..common.errors import OptionError
from ..common.signals import STOP_SIGNALS
from ..common.text import pluralize
from ..job.settings import LaunchSettings

_log = logging.getLogger(__name__)
# Seconds after a Ctrl-C within which a second one stops the sweep, and within which it is the same one: a wrapper such
# as `uv run` forwards the SIGINT that the terminal has sent to every process.
_AGAIN_S = 1.0
_SAME_S = 0.1


class DebugSession:
    """Hold what `debug` changes for a batch. Without descriptors, it changes nothing.

    Args:
        descriptors: Stdin, stdout and stderr for rank 0. If empty, there is no session.

    Attributes:
        descriptors: As given.
        signals: Signals to record in addition to those of every batch. Ctrl-Z (SIGTSTP) is ignored: rank 0 would not
            stop, and the shell that returns would read what is typed for it.
    """

    def __init__(self, descriptors: tuple[int, ...] = ()) -> None:
        self.descriptors = descriptors
        self.signals: tuple[int, ...] = (signal.SIGWINCH, signal.SIGTSTP) if descriptors else ()
        self._modes = _modes(descriptors[0]) if descriptors else None
        self._interrupted_at = -math.inf
        self._stopping = False

    def receiver(self, number: int, now: float) -> int | None:
        """Return the only rank that a signal is for, or None if it is for the sweep or ignored.

        Args:
            now: Monotonic seconds.
        """
        if not self.descriptors or self._stopping:
            return None
        if number == signal.SIGINT:
            since = now - self._interrupted_at
            if since > _SAME_S:
                self._interrupted_at = now
                self._stopping = since <= _AGAIN_S
        elif number in STOP_SIGNALS:
            # From now on, Ctrl-C acts on the sweep, which is being stopped.
            self._stopping = True
        ours = number in (signal.SIGINT, signal.SIGWINCH)
        return 0 if ours and not self._stopping else None

    def restore_terminal(self) -> None:
        """Restore the modes of the terminal, as rank 0 may have been killed at a prompt."""
        if self._modes is None or _modes(self.descriptors[0]) == self._modes:
            return
        # Setting modes from the background would stop this process (SIGTTOU).
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.descriptors[0], termios.TCSANOW, self._modes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _modes(descriptor: int) -> list[Any] | None:
    try:
        return termios.tcgetattr(descriptor)
    except termios.error:
        return None  # Not a terminal, or hung up.


@contextlib.contextmanager
def debug_session(settings: LaunchSettings, jobs: int) -> Iterator[DebugSession]:
    """Open a debug session for the duration of the block, if `debug` is set.

    Args:
        settings: Options of the sweep.
        jobs: Number of jobs to run.

    Raises:
        OptionError: if `debug` is set and there is not exactly one job.
    """
    if not settings.debug:
        yield DebugSession()
        return
    if jobs != 1:
        raise OptionError(
            f"hydra.launcher.debug=true gives the terminal to rank 0 of one job, but there are "
            f"{pluralize(jobs, 'job')}. Choose one of them by its overrides, such as lr=0.1 instead of lr=0.1,0.01."
        )
    descriptors = tuple(
        _copied(number, stream) for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__))
    )
    session = DebugSession(descriptors)
    _log.info("Debugging: rank 0 has the terminal. Ctrl-C is for rank 0; twice within %g s stops the sweep", _AGAIN_S)
    try:
        yield session
    finally:
        session.restore_terminal()
        for descriptor in descriptors:
            os.close(descriptor)


def _copied(number: int, stream: TextIO | None) -> int:
    """Duplicate a standard descriptor. If it was closed, open /dev/null: its number may belong to another file."""
    if stream is not None and not stream.closed:
        with contextlib.suppress(OSError):
            return os.dup(number)
    return os.open(os.devnull, os.O_RDWR)
