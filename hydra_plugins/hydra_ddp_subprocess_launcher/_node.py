"""One node's groups of a job, one after the other: signals, waiting for the first node, and a keeper for each start.

It is what runs in a launching process that follows another node's, and in a job of a cluster.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from . import _orders, _signals
from ._errors import StartError
from ._gathering import Gathering
from ._hub import Hub
from ._nodes import tell_for_keeper
from ._peers import refresh_names
from ._running import LEFT, RunningJob, who_is_left
from ._start import Attempt, JobStart, Place, group_spec

_log = logging.getLogger(__name__)
# Seconds between two looks at files of the first node, and at a keeper that may have stopped answering.
_FILES_INTERVAL_S = 0.2
_INSIST_INTERVAL_S = 1.0
_ORPHANED = "the cluster's process that had started it here is gone"


class Node:
    """Run groups in the main thread, and obey signals.

    Args:
        number: Of this node.
        gathering: The processes like this one on the job's other nodes; None: there are none.
        preempted_by: Signal by which a cluster tells that the job will be interrupted and started again; None: none.
        parent: Process without which nobody could end this one any more; None: there is none.

    Attributes:
        stopped_by: Signal that has stopped this node; None: none has.
        preempted: Whether `preempted_by` has come.
        orphaned: Whether the parent is gone.
    """

    def __init__(
        self, number: int, gathering: Gathering | None, preempted_by: int | None = None, parent: int | None = None
    ) -> None:
        self.number = number
        self._parent = parent
        self.orphaned = False
        self._gathering = gathering
        self._preempted_by = preempted_by
        self.stopped_by: int | None = None
        self._stopped_at = 0.0
        self.preempted = False
        self._job: RunningJob | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to signals while the block runs."""
        heard = (*_signals.STOP_SIGNALS, *_signals.FORWARDED_SIGNALS)
        with _signals.recorded_signals(heard) as self._arrived, selectors.DefaultSelector() as selector:
            self._hub = Hub(selector)
            selector.register(self._arrived.wakeup, selectors.EVENT_READ)
            try:
                yield
            finally:
                self._hub.close()
            self._obey()

    @property
    def stopping(self) -> bool:
        """Whether no group shall be started any more."""
        return self.stopped_by is not None or self.preempted or self.orphaned

    def wait_until(self, ready: Callable[[], bool]) -> bool:
        """Wait for what other processes write; return False where a signal came first.

        Raises:
            StartError: when another node takes no further part.
        """
        while not self.stopping:
            gone = self._gone()
            # What another node wrote before it went counts.
            if ready():
                return True
            if gone:
                raise StartError(f"Node {self.number} cannot go on: {gone}.")
            self.pause()
        return False

    def is_stopped_within(self, seconds: float) -> bool:
        """Wait for so long for a signal that stops this node, and return whether there is one."""
        until = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < until:
            self.pause()
        return self.stopping

    def pause(self) -> None:
        """Wait for a moment, or for a signal."""
        self._hub.wait(_FILES_INTERVAL_S)
        self._obey()

    def leave(self, why: str = "") -> None:
        """Tell the other nodes that this one takes no further part.

        Args:
            why: One line.
        """
        if self._gathering is not None:
            self._gathering.leave(why)

    def _gone(self) -> str:
        return "" if self._gathering is None else self._gathering.look()

    def run_group(
        self, start: JobStart, base: Mapping[str, str], place: Place, attempt: Attempt, held: Sequence[int] = ()
    ) -> RunningJob:
        """Run this node's group of one start until nothing of it is left, and return what became of it.

        Args:
            start: The start.
            base: What ranks on this node start from.
            place: What it holds here.
            attempt: Which start of the job it is.
            held: Descriptors that its keeper holds until it is over.

        Raises:
            OSError: when there can be no keeper.
            StartError: when the job's environment contradicts its devices.
        """
        spec = group_spec(start, base, self.number)
        refresh_names(start.paths.folder)
        link, channel = self._hub.ask_for_keeper(start.number, held)
        channel.send(spec)
        self._job = job = RunningJob(start, place, attempt, link, channel, [], self.number)
        self._hub.add(job)
        if self.stopped_by is not None:
            job.stop(signal.Signals(self.stopped_by).name)
        elif self.preempted and self._preempted_by is not None:
            channel.send(_orders.Preempt(self._preempted_by))
        elif self.orphaned:
            job.stop(_ORPHANED)
        while not job.over:
            self._hub.wait(_INSIST_INTERVAL_S)
            self._obey()
            if job.end_by is None and (gone := self._gone()):
                job.stop(gone)
            job.insist(time.monotonic())
        left = job.end_leftovers()
        if job.left:
            _log.warning(LEFT, start.number, who_is_left(left))
        self._hub.remove(job)
        self._job = None
        tell_for_keeper(start, self.number, job.report)
        if self._gathering is not None:
            self._gathering.learn(job.report)
        return job

    def _obey(self) -> None:
        if self._parent is not None and os.getppid() != self._parent and not self.orphaned:
            self.orphaned = True
            if self._job is not None:
                self._job.stop(_ORPHANED)
        for number in self._arrived.take():
            if number == self._preempted_by:
                self.preempted = True
                self._send(_orders.Preempt(number))
            elif number in _signals.FORWARDED_SIGNALS:
                self._send(_orders.Forward(number))
            else:
                self._stop(number)

    def _stop(self, number: int) -> None:
        now = time.monotonic()
        again = self.stopped_by is not None
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = number, now
        elif now - self._stopped_at < _signals.ONE_ORDER_S:
            return
        if self._job is not None:
            name = signal.Signals(number).name
            how = "killing" if again else "stopping"
            _log.warning("%s: %s the running job%s", name, how, "" if again else " (once more: kill at once)")
            self._job.stop(name, at_once=again)

    def _send(self, message: object) -> None:
        if self._job is not None:
            self._job.channel.send(message)
