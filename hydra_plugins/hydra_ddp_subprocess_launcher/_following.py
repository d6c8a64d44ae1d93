"""Logs of ranks on standard output, byte by byte, and what arrives in them."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from ._files import JobPaths
from ._records import JobRecord, JobState
from ._watching import CommandError, Watch, folder_of, numbers

_LOOK_INTERVAL_MS = 100
_PIECE_BYTES = 64 * 1024


class Tail:
    """Read one log, and what takes its place when the job is started again.

    Args:
        path: The log.
        prefix: Put before each line, which is then read as a whole and in its last state; empty: bytes as they are.
    """

    def __init__(self, path: str, prefix: bytes = b"") -> None:
        self._path = path
        self._prefix = prefix
        self._file: BinaryIO | None = None
        self._rest = b""

    def pieces(self) -> Iterator[bytes]:
        """Yield what has arrived since the last call."""
        while True:
            yield from self._read()
            following = self._following()
            if following is None:
                return
            # What was still written before the file was moved aside.
            yield from self._read()
            yield self.end()
            self._file = following

    def end(self) -> bytes:
        """Return a last line that was not ended, and close the file."""
        if self._file is not None:
            self._file.close()
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""

    def _read(self) -> Iterator[bytes]:
        while self._file is not None and (data := self._file.read(_PIECE_BYTES)):
            yield self._shown(data)

    def _following(self) -> BinaryIO | None:
        """Open the file that is there now, if it is another one."""
        try:
            same = self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
            return None if same else open(self._path, "rb")
        except FileNotFoundError:
            return None  # Not there yet, or between two starts.

    def _shown(self, data: bytes) -> bytes:
        if not self._prefix:
            return data
        *lines, rest = (self._rest + data).split(b"\n")
        # A progress bar would overwrite the prefix.
        self._rest = _last_state(rest)
        return b"".join(self._prefix + _last_state(line) + b"\n" for line in lines)


def _last_state(line: bytes) -> bytes:
    return line[line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1 :]


def chosen_ranks(job: JobRecord, rank: int | None) -> Sequence[int]:
    """Return the ranks of a job that are meant.

    Args:
        job: One that was started.
        rank: One of its ranks; None: all.

    Raises:
        CommandError: when it has no such rank.
    """
    if rank is None:
        return range(job.nproc)
    if rank not in range(job.nproc):
        has = f"its ranks are {numbers(range(job.nproc))}" if job.nproc > 1 else "it has rank 0 alone"
        raise CommandError(f"Job {job.number} has no rank {rank}: {has}.", 2)
    return [rank]


def print_logs(job: JobRecord, rank: int | None, attempt: int | None, out: BinaryIO) -> None:
    """Print logs as they are now.

    Args:
        job: One that was started.
        rank: As of `chosen_ranks`.
        attempt: Number of an earlier start; None: the last one.
        out: Where.

    Raises:
        CommandError: when there is none, or it cannot be read.
    """
    paths = _paths(job, attempt)
    ranks = chosen_ranks(job, rank)
    for one in ranks:
        tail = Tail(paths[one], _prefix(job, one, alone=rank is not None))
        try:
            open(paths[one], "rb").close()
            for piece in tail.pieces():
                out.write(piece)
        except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
            raise CommandError(_unreadable(job, one, attempt, error)) from None
        out.write(tail.end())


def _paths(job: JobRecord, attempt: int | None) -> list[str]:
    paths = JobPaths(job.run_dir)
    folder = folder_of(job) if attempt is None else paths.earlier(attempt)
    return [os.path.join(folder, os.path.basename(paths.log(rank))) for rank in range(job.nproc)]


def _unreadable(job: JobRecord, rank: int, attempt: int | None, error: OSError) -> str:
    paths = JobPaths(job.run_dir)
    if not isinstance(error, FileNotFoundError):
        return f"The log of rank {rank} of job {job.number} cannot be read: {error.strerror}: {error.filename}"
    if not os.path.isdir(paths.folder):
        return f"{paths.folder} is not there: the run directory of job {job.number} was moved or deleted."
    if attempt is None:
        return f"There is no log of rank {rank} of job {job.number} yet: {error.filename}"
    there = [name.removeprefix("earlier_") for name in os.listdir(paths.folder) if name.startswith("earlier_")]
    has = f"there are {numbers([int(name) for name in there])}" if there else "it was started once"
    return f"Job {job.number} has no earlier attempt {attempt} with a log of rank {rank}: {has}."


def follow_logs(watch: Watch, number: int, rank: int | None, out: BinaryIO) -> None:
    """Print logs as they grow, until the job is over.

    Args:
        watch: On the sweep.
        number: Number of the job.
        rank: As of `chosen_ranks`.
        out: Where.

    Raises:
        CommandError: when there is no such job or rank, or the job was never started.
        BrokenPipeError: when nobody reads any more.
    """
    tails: list[Tail] = []
    while True:
        sight = watch.look()
        job = sight.job(number)
        over = job.state not in (JobState.WAITING, JobState.PENDING, JobState.RUNNING, JobState.PAUSED)
        if over or job.run_dir:
            paths = JobPaths(sight.started_job(number).run_dir)
            ranks = chosen_ranks(job, rank)
            tails = tails or [Tail(paths.log(one), _prefix(job, one, alone=rank is not None)) for one in ranks]
        for tail in tails:
            out.writelines(tail.pieces())
        if over:
            out.writelines(tail.end() for tail in tails)
            return
        out.flush()
        _wait(out)


def _wait(out: BinaryIO) -> None:
    reader = select.poll()
    # No event is asked for: only that the reader is gone is told, though nothing is written.
    reader.register(out, 0)
    if reader.poll(_LOOK_INTERVAL_MS):
        raise BrokenPipeError


def _prefix(job: JobRecord, rank: int, *, alone: bool) -> bytes:
    return b"" if alone else f"[job {job.number} rank {rank}] ".encode()
