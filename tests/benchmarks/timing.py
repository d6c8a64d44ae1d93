"""What the benchmarks share: starting programs so that nothing of them stays, and figures as text."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
# Every process that a benchmark starts has this variable, with a value of its own.
MARKER = "BENCHMARK_MARKER"
# Seconds for a program to end after SIGTERM; a launcher gives its ranks 15 of them.
PATIENCE_S = 30.0
_SHOWN_LINES = 15


# Figures


@dataclass(frozen=True)
class Spread:
    """The least, the middle and the largest of some samples, in their unit."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Summarize samples, of which there must be one at least."""
        return cls(min(samples), statistics.median(samples), max(samples))

    def __str__(self) -> str:
        return " / ".join(map(significant, (self.least, self.median, self.most)))


def significant(value: float) -> str:
    """Return a figure with three significant digits, and with all of those before its point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def intervals(times: Sequence[float]) -> list[float]:
    """Return the seconds from each time to the next one."""
    return [after - before for before, after in itertools.pairwise(times)]


def rotated(items: Sequence[T], places: int) -> list[T]:
    """Return items in a cycle that begins so many places later."""
    start = places % len(items) if items else 0
    return [*items[start:], *items[:start]]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text with columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Wrap a function so that the seconds of each call are appended to `spent`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - began)

    return call


# Programs


@dataclass(frozen=True)
class Command:
    """A program to start.

    Attributes:
        argv: Its command.
        environment: Variables that it gets besides those of this process.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]


@contextlib.contextmanager
def started(commands: Sequence[Command], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run programs in a folder while the block does; what is left of them afterwards is ended, and all below them.

    Args:
        commands: The programs.
        folder: Is made, and is their working directory; their output goes there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    marker = uuid.uuid4().hex
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for place, command in enumerate(commands):
            with _output_file(folder, place).open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command.argv,
                        cwd=folder,
                        env={**os.environ, **command.environment, MARKER: marker},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        # Ctrl-C on the terminal is for this process, which then ends them.
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        end(processes)
        while left := marked(marker):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def run(commands: Sequence[Command], folder: Path) -> float:
    """Run programs together and return the seconds from their start to the end of the last one.

    Raises:
        RuntimeError: when one of them fails, with the end of its output.
    """
    began = time.perf_counter()
    with started(commands, folder) as processes:
        codes = [process.wait() for process in processes]
        took = time.perf_counter() - began
    for place, code in enumerate(codes):
        if code != 0:
            said = _output_file(folder, place).read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            raise RuntimeError("\n".join([f"exit code {code}: {' '.join(commands[place].argv)}", *said]))
    return took


def _output_file(folder: Path, place: int) -> Path:
    return folder / f"output_{place}.txt"


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes with SIGTERM, and those that do not obey with SIGKILL."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def marked(marker: str) -> list[int]:
    """Return the pids of processes that have a text in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # It ended meanwhile.
    return found


def resident_kib(pid: int) -> int | None:
    """Return the resident memory of a process in KiB; None when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return None
