"""A person at a terminal: a program under a pseudo-terminal, and what its screen shows."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pexpect
import pyte
import pytest

from support.runner import PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Runner


class Person:
    """What somebody sees who runs a program in a terminal of `columns` x `lines`."""

    def __init__(self, child: pexpect.spawn, columns: int, lines: int) -> None:
        self.child = child
        self.screen = pyte.HistoryScreen(columns, lines, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    def look(self) -> None:
        """Take what the program has written by now."""
        while select.select([self.child.child_fd], [], [], 0)[0]:
            try:
                data = os.read(self.child.child_fd, 65536)
            except OSError:
                return  # It has ended.
            if not data:
                return
            self.feed(data)

    def feed(self, data: bytes) -> None:
        """Show what the program, or somebody else, has written."""
        self.raw += data
        self._stream.feed(data)

    @property
    def shown(self) -> list[str]:
        """Lines on the screen, without empty ones at its end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def scrolled(self) -> list[str]:
        """Lines that have left the screen at its top."""
        columns = self.screen.columns
        return ["".join(line[place].data for place in range(columns)).rstrip() for line in self.screen.history.top]

    @property
    def all_lines(self) -> list[str]:
        return self.scrolled + self.shown

    def sees(self, *words: str) -> bool:
        self.look()
        text = "\n".join(self.shown)
        return all(word in text for word in words)

    def wait_until(self, holds: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.look()
            if holds():
                return
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not come true in {timeout_s} s; the screen shows:\n" + "\n".join(self.shown))
            time.sleep(0.02)

    def wait_to_see(self, *words: str, timeout_s: float = PATIENCE_S) -> None:
        self.wait_until(lambda: self.sees(*words), f"to see {words}", timeout_s)

    def resize(self, columns: int, lines: int) -> None:
        self.look()
        self.screen.resize(lines, columns)
        self.child.setwinsize(lines, columns)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until the program has ended; return its exit code as a shell shows it."""
        deadline = time.monotonic() + timeout_s
        while self.child.isalive():
            self.look()
            if time.monotonic() > deadline:
                pytest.fail("it did not end; the screen shows:\n" + "\n".join(self.shown))
            time.sleep(0.02)
        self.look()
        return 128 + self.child.signalstatus if self.child.exitstatus is None else self.child.exitstatus


@contextmanager
def at_terminal(
    runner: Runner,
    argv: Sequence[str | Path],
    *,
    columns: int = 80,
    lines: int = 24,
    env: dict[str, str] | None = None,
) -> Iterator[Person]:
    """Run `python argv…` in a terminal."""
    environment = {**runner.environment(), "TERM": "xterm-256color", **(env or {})}
    child = pexpect.spawn(
        sys.executable,
        [str(part) for part in argv],
        cwd=str(runner.cwd),
        env=environment,
        dimensions=(lines, columns),
        timeout=30,
    )
    try:
        yield Person(child, columns, lines)
    finally:
        if child.isalive():
            child.kill(signal.SIGKILL)
        child.close(force=True)
