"""The launching process's end of a spawner: start it, hand it jobs, and learn which keepers have ended."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ._signals import describe_end
from ._spawner import ENDED, JOB, MOST_DESCRIPTORS, NOTE, spawner_command

# Seconds for a spawner without keepers to end.
_END_S = 5.0
# Bytes of what a spawner wrote in which to look for its last line.
_MOST_WRITTEN = 1 << 16
# Descriptors that a keeper can hold: what one message passes, but for the keeper's socket.
MOST_HELD = MOST_DESCRIPTORS - 1


@dataclass(frozen=True)
class KeeperEnded:
    """A keeper ended, and nothing that it owned is alive, unless something is left.

    Attributes:
        job: Number of the job.
        code: The keeper's exit code; anything but 0 means that it was lost. A signal as its negative number.
        left: Whether a process of it could not be ended.
    """

    job: int
    code: int
    left: bool = False


def start_spawner(descriptor: int, errors: int) -> subprocess.Popen[bytes]:
    """Start a spawner that has jobs on one descriptor, and writes to another what goes wrong."""
    return subprocess.Popen(
        spawner_command(descriptor, os.getpid()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[descriptor],
        start_new_session=True,
    )


class SpawnerLink:
    """The launching process's end: start the spawner, hand it jobs, learn which keepers ended.

    Args:
        start: Starts it.

    Attributes:
        lost: Whether it is gone.
        ready_at: When it could serve, monotonic seconds; infinite: it cannot yet.
        ready_by: When it has to, likewise.
    """

    def __init__(self, start: Callable[[int, int], subprocess.Popen[bytes]] = start_spawner) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the spawner)
        try:
            with theirs:
                self._process = start(theirs.fileno(), self._errors.fileno())
        except OSError:
            ours.close()
            self._errors.close()
            raise
        self._killed = False
        self._ending = ""
        self._sock = ours
        self._sock.setblocking(False)
        self.lost = False
        self.ready_at = time.monotonic()
        self.ready_by = math.inf

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    def start_keeper(self, job: int, held: Sequence[int] = ()) -> socket.socket:
        """Ask for a keeper and return the socket to it.

        Args:
            job: Number of the job.
            held: Descriptors that shall be open as long as anything of the job is alive, such as locks; MOST_HELD of
                them at most.

        Raises:
            OSError: when the spawner is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # With hundreds of jobs at once its queue can be full for a moment.
            queue = select.poll()
            queue.register(self._sock, select.POLLOUT)
            queue.poll(_END_S * 1000)
            try:
                socket.send_fds(self._sock, [JOB.pack(job)], [theirs.fileno(), *held])
            except OSError:
                ours.close()
                self.lost = True
                raise
        return ours

    def receive(self) -> list[KeeperEnded]:
        """Return the reports that have arrived; sets `lost` when the spawner is gone."""
        reports = []
        # Also from one that is known to be gone: what it said last tells of what.
        while True:
            try:
                data = self._sock.recv(ENDED.size)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.lost = True
                break
            job, code, left = ENDED.unpack(data)
            if job == NOTE:
                # It was sent together with its length.
                self.hear_note(self._sock.recv(code))
            else:
                reports.append(KeeperEnded(job, code, left))
        return reports

    def hear_note(self, note: bytes) -> None:
        """Take what a spawner says of itself; a plain one says nothing."""

    def wake(self) -> None:
        """Continue the spawner if somebody stopped it."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End a spawner that does not answer. Its keepers go on."""
        self._killed = True
        self._process.kill()

    @property
    def ending(self) -> str:
        """How a spawner that is gone has ended, and the last line that it wrote."""
        if self._errors.closed:
            return self._ending
        code = self._process.poll()
        how = "did not answer, and was killed" if self._killed else "" if code is None else describe_end(code)
        written = os.pread(self._errors.fileno(), _MOST_WRITTEN, 0).decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(written) if line.strip()), "")
        return ": ".join(filter(None, (how or "could not take it", last)))

    def close(self) -> None:
        """Let the spawner end; it does so when its last keeper has. One that does not is killed: it owns nothing."""
        self._sock.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ending = self.ending
        self._errors.close()
