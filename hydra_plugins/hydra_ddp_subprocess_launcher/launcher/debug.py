"""A debug session: rank 0 of the one job has the terminal of the launching process, as if it had been started there.

It has a session of its own all the same, so that it is supervised like every rank. A terminal lets a process of another
session read, write and set its modes, but sends it no signals: those are passed on from here.
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
# Seconds after a Ctrl-C within which another one is for the sweep, and within which it is the same one: a wrapper such
# as `uv run` passes on the SIGINT that the terminal has sent to all.
_AGAIN_S = 1.0
_SAME_S = 0.1


class DebugSession:
    """What `debug` changes for a batch; without descriptors: nothing.

    Args:
        descriptors: Stdin, stdout and stderr for rank 0; empty: there is no session.

    Attributes:
        descriptors: As given.
        signals: To be recorded beside those of every batch. Ctrl-Z (SIGTSTP) is nobody's: a shell that came back would
            read what is typed for rank 0, which does not stop with us.
    """

    def __init__(self, descriptors: tuple[int, ...] = ()) -> None:
        self.descriptors = descriptors
        self.signals: tuple[int, ...] = (signal.SIGWINCH, signal.SIGTSTP) if descriptors else ()
        self._modes = _modes(descriptors[0]) if descriptors else None
        self._interrupted_at = -math.inf
        self._stopping = False

    def receiver(self, number: int, now: float) -> int | None:
        """Return the rank for which alone a signal is; None: it is for the sweep, or for nobody.

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
            # From now on Ctrl-C means what it always means to a sweep that is being stopped.
            self._stopping = True
        ours = number in (signal.SIGINT, signal.SIGWINCH)
        return 0 if ours and not self._stopping else None

    def restore_terminal(self) -> None:
        """Give the terminal back the modes that it had: rank 0 may have been killed at a prompt."""
        if self._modes is None or _modes(self.descriptors[0]) == self._modes:
            return
        # Set from the background, they would stop this process.
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
        return None  # No terminal, or none any more.


@contextlib.contextmanager
def debug_session(settings: LaunchSettings, jobs: int) -> Iterator[DebugSession]:
    """Have a session while the block runs, if `debug` is set.

    Args:
        settings: Options of the sweep.
        jobs: How many jobs are to run.

    Raises:
        OptionError: when there is not one job to debug, but several.
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
    """Return a copy of a standard descriptor, or of none if it was closed: then its number may be another file's."""
    if stream is not None and not stream.closed:
        with contextlib.suppress(OSError):
            return os.dup(number)
    return os.open(os.devnull, os.O_RDWR)
