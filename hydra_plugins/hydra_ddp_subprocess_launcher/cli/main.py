"""The command `hydra-ddp`: arguments, and the commands that follow or stop a sweep."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .. import __version__
from ..common import processes, quoting
from ..common.files import JobPaths, SweepPaths
from ..common.text import pluralize
from ..records.events import JobRecord, JobState
from ..records.sweep_lock import LockOwner
from .sweep_view import (
    CommandError,
    SweepReader,
    SweepSnapshot,
    chosen_sweep,
    default_sweep,
    folder_of,
    in_words,
    numbers,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0; 1 if it failed; 2 for wrong usage or nothing there; 130 for Ctrl-C.

    Args:
        argv: Arguments, or None for those of the process.
    """
    arguments = _parser().parse_args(argv)
    if sys.stdout is None:
        return 0  # stdout was closed, so there is no reader.
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names and the output of ranks can hold any bytes.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except CommandError as error:
        sys.stderr.write(f"hydra-ddp {arguments.command}: {error}\n")
        return error.code
    except OSError as error:
        # Python would report the failed write again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # The reader, such as `head`, has read all it wants.
        sys.stderr.write(f"hydra-ddp {arguments.command}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hydra-ddp", description="Look at a sweep of hydra/launcher=ddp_subprocess, live or over."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "-d",
        "--dir",
        help="sweep directory (default: the current one if a sweep is in it, else the newest below ./multirun)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, words: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.", parents=[shared])

    command = add("status", "show what runs, what is done, and what has become of the sweep")
    command.add_argument("--watch", action="store_true", help="go on until the sweep is over")
    command.add_argument("-o", "--output", metavar="FILE.svg", help="write a picture instead")
    command = add("logs", "print what a rank has printed")
    command.add_argument("job", type=int, metavar="JOB", help="number of the job")
    command.add_argument("rank", type=_rank_or_all, nargs="?", default=0, metavar="RANK", help="a rank, or `all` (0)")
    command.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    command.add_argument("--attempt", type=int, metavar="N", help="an earlier start of the job: .ddp/earlier_N")
    command = add("command", "print the shell command that runs a rank of a job again")
    command.add_argument("job", type=int, metavar="JOB", help="number of the job")
    command.add_argument("rank", type=int, nargs="?", metavar="RANK", help="a rank (all, one a line)")
    command = add("stop", "ask the running sweep to end, as Ctrl-C would")
    command.add_argument("--now", action="store_true", help="kill its jobs at once")
    command = add("timeline", "draw which job had which devices when")
    command.add_argument(
        "-o", "--output", metavar="FILE", help=".svg, .png or .pdf (.ddp/timeline.svg in the sweep directory)"
    )
    command = add("results", "show the jobs that are over, with their values")
    command.add_argument("--sort", metavar="COLUMN", help="by this column, such as value or the key of an override")
    command.add_argument("--descending", action="store_true", help="the largest first")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="all columns, for a spreadsheet and for pandas")
    form.add_argument("--json", action="store_true", help="for programs")
    command = add("info", "print what a bug report needs")
    command.add_argument("--json", action="store_true", help="for programs")
    return parser


def _rank_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)


def _chosen(arguments: argparse.Namespace) -> SweepPaths:
    if arguments.dir is not None:
        return chosen_sweep(arguments.dir)
    found = default_sweep()
    if found is None:
        raise CommandError(
            f"There is no sweep in {os.getcwd()}, and none below its multirun/. Name the sweep directory: -d DIR", 2
        )
    sys.stderr.write(f"Sweep: {os.path.relpath(found.sweep_dir)}\n")
    return found


def _status(arguments: argparse.Namespace) -> None:
    from . import show as words  # Imports Hydra and rich.

    watch = SweepReader(_chosen(arguments))
    if arguments.watch and arguments.output:
        raise CommandError(
            "--watch and -o exclude each other, as a picture is of one moment. Leave out one of the two.", 2
        )
    if arguments.watch:
        words.watch_status(watch, sys.stdout)
    elif arguments.output:
        words.write_picture(watch.look(), arguments.output)
    else:
        sys.stdout.write(words.status(watch.look(), sys.stdout))


def _logs(arguments: argparse.Namespace) -> None:
    if arguments.follow and arguments.attempt is not None:
        raise CommandError(
            "-f and --attempt exclude each other, as nothing is added to an earlier log. Leave out one of the two.", 2
        )
    watch = SweepReader(_chosen(arguments))
    if arguments.follow:
        follow_logs(watch, arguments.job, arguments.rank, sys.stdout.buffer)
    else:
        job = watch.look().started_job(arguments.job)
        print_logs(job, arguments.rank, arguments.attempt, sys.stdout.buffer)


def _command(arguments: argparse.Namespace) -> None:
    job = SweepReader(_chosen(arguments)).look().started_job(arguments.job)
    ranks = chosen_ranks(job, arguments.rank)
    facts = _facts(job)
    for rank in ranks:
        # Bytes, as file names need not be valid text.
        sys.stdout.buffer.write(os.fsencode(quoting.rank_line(facts, rank)) + b"\n")


def _facts(job: JobRecord) -> dict[str, Any]:
    path = JobPaths(job.run_dir).facts
    folder = folder_of(job)
    if folder != os.path.dirname(path):
        raise CommandError(
            f"Job {job.number} cannot be run again by hand: a later job has the same run directory. What it has left "
            f"is in {folder}."
        )
    try:
        facts: dict[str, Any] = json.loads(Path(path).read_bytes())
        facts["argv"], facts["cwd"], facts["environment"], facts["rank_environments"], facts["environment_removed"]
    except OSError as error:
        raise CommandError(
            f"{path} cannot be read: {error.strerror}. It has the command of job {job.number}'s ranks; without it, "
            "start the job again in a sweep of its own."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CommandError(f"{path} is damaged. Start the job again in a sweep of its own.") from None
    return facts


def _stop(arguments: argparse.Namespace) -> None:
    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    stop_sweep(SweepReader(_chosen(arguments)), say, now=arguments.now)


def _timeline(arguments: argparse.Namespace) -> None:
    from .show import draw_timeline, make_timeline

    paths = _chosen(arguments)
    snapshot = SweepReader(paths).look()
    output = arguments.output or paths.timeline
    draw_timeline(make_timeline(snapshot.events, None if snapshot.live else _last_sign(snapshot), time.time()), output)
    sys.stdout.write(f"{output}\n")


def _results(arguments: argparse.Namespace) -> None:
    from ..display.tables import text_table
    from ..records import journal as results
    from ..records.events import JobState

    record = SweepReader(_chosen(arguments)).look().record
    over = record.in_state(JobState.COMPLETED, JobState.FAILED, JobState.NEVER_STARTED)
    jobs = {job.number: job for job in sorted(over, key=lambda job: job.number)}
    table = results.results_table(list(jobs.values()))
    if arguments.sort is not None or arguments.descending:
        column = arguments.sort or "job"
        try:
            table = results.sorted_table(table, column, descending=arguments.descending)
        except KeyError:
            raise CommandError(f"There is no column {column}. These are: {', '.join(table[0])}.", 2) from None
    if arguments.csv:
        sys.stdout.write(results.as_csv(table))
    elif arguments.json:
        sys.stdout.write(results.as_json(table, jobs))
    elif not jobs:
        sys.stdout.write("No job of this sweep is over yet.\n")
    else:
        header, *rows = table
        # Directories and attempts are for programs, and an empty column says nothing.
        chosen = [
            place
            for place, title in enumerate(header)
            if title in ("job", "status") or (title not in ("run_dir", "attempts") and any(row[place] for row in rows))
        ]
        cells = [[row[place] for place in chosen] for row in rows]
        sys.stdout.write(text_table([header[place] for place in chosen], cells, right=("job", "duration_s")) + "\n")


def _last_sign(snapshot: SweepSnapshot) -> float:
    """Return when a sweep that is over last wrote anything, as Unix time in seconds."""
    logs = [JobPaths(job.run_dir).log(0) for job in snapshot.record.jobs.values() if job.run_dir]
    written = [os.stat(path).st_mtime for path in [snapshot.paths.journal, *logs] if os.path.exists(path)]
    return max(written, default=0.0)


def _info(arguments: argparse.Namespace) -> None:
    from . import info as facts

    paths = default_sweep() if arguments.dir is None else chosen_sweep(arguments.dir)
    info = facts.collect(os.environ, None if paths is None else SweepReader(paths).look())
    sys.stdout.write(facts.as_json(info) if arguments.json else facts.as_text(info))


_COMMANDS = {
    "status": _status,
    "logs": _logs,
    "command": _command,
    "stop": _stop,
    "timeline": _timeline,
    "results": _results,
    "info": _info,
}


# Seconds for the launching process to act on a signal, which it cannot while it composes a job.
_NOTED_WITHIN_S = 5.0
# Seconds after which a second signal counts; within 0.3 s both are one order.
_APART_S = 0.5
_LOOK_INTERVAL_S = 0.05


def stop_sweep(watch: SweepReader, say: Callable[[str], object], *, now: bool) -> None:
    """Ask a running sweep to stop, and say what will happen.

    Args:
        say: Prints a line.
        now: Whether to kill its jobs at once.

    Raises:
        CommandError: if there is nothing to stop, or it cannot be stopped from here.
    """
    snapshot = watch.look()
    holder = _reachable(snapshot)
    stopping = bool(snapshot.record.stopped_by)
    if stopping and not now:
        say(
            f"It is being stopped already, after {snapshot.record.stopped_by}. `hydra-ddp stop --now` kills its jobs.\n"
        )
        return
    say(_what_happens(snapshot, now=now))
    if not stopping:
        _send(holder)
    if now and _waits_for_more(watch, holder):
        _send(holder)


def _reachable(snapshot: SweepSnapshot) -> LockOwner:
    """Return the launching process of a live sweep, if this process can send it a signal."""
    holder, where = snapshot.holder, snapshot.paths.sweep_dir
    if holder is None or not snapshot.live:
        raise CommandError(f"No sweep runs in {where}, so there is nothing to stop. {in_words(snapshot)}")
    if not holder.here:
        line = quoting.shell_words(["ssh", holder.host, "hydra-ddp", "stop", "-d", where])
        raise CommandError(f"The sweep runs on another host. Stop it there:\n{line}")
    if not _is_same(holder):
        raise CommandError(
            f"The sweep is held by process {holder.pid} on {holder.host}, but that process cannot be seen from here: "
            "it runs in another container, perhaps. Stop it there."
        )
    return holder


def _is_same(holder: LockOwner) -> bool:
    """Return whether a process is the recorded one, and not a later one with the same pid."""
    return holder.start == processes.process_start(holder.pid) and processes.is_running(holder.pid)


def _what_happens(snapshot: SweepSnapshot, *, now: bool) -> str:
    holder, record = snapshot.holder, snapshot.record
    assert holder is not None
    running = len(record.in_state(JobState.RUNNING, JobState.PAUSED))
    jobs = "no job runs" if not running else pluralize(running, "running job")
    grace = record.began.grace_period_s if record.began is not None else None
    patience = "hydra.launcher.grace_period_s" if grace is None else f"{grace:g} s (hydra.launcher.grace_period_s)"
    if any(job.job_id for job in record.jobs.values()):
        jobs = "its jobs on the cluster are cancelled, or left there (hydra.launcher.on_interrupt)"
    elif running:
        jobs += " will be killed at once" if now else f" will get SIGTERM, and SIGKILL after {patience}"
    return f"Sending SIGTERM to process {holder.pid}: {jobs}; no other job will start.\n"


def _send(holder: LockOwner) -> None:
    if not _is_same(holder):
        return  # It has just ended, as asked.
    try:
        os.kill(holder.pid, signal.SIGTERM)
        # A stopped process (Ctrl-Z) could not handle it.
        os.kill(holder.pid, signal.SIGCONT)
    except ProcessLookupError:
        return
    except PermissionError:
        raise CommandError(f"Process {holder.pid} is another user's. Only that user, or root, can stop it.") from None


def _waits_for_more(watch: SweepReader, holder: LockOwner) -> bool:
    """Wait until a second signal counts as one, and return whether the sweep still runs."""
    began = time.monotonic()
    while time.monotonic() - began < _NOTED_WITHIN_S:
        if not _is_same(holder):
            return False
        if watch.look().record.stopped_by:
            break
        time.sleep(_LOOK_INTERVAL_S)
    time.sleep(_APART_S)
    return True


_LOOK_INTERVAL_MS = 100
_PIECE_BYTES = 64 * 1024


class Tail:
    """Read one log, and the one that replaces it if the job is restarted.

    Args:
        prefix: Written before each whole line, in its last state; if empty, bytes pass unchanged.
    """

    def __init__(self, path: str, prefix: bytes = b"") -> None:
        self._path = path
        self._prefix = prefix
        self._file: BinaryIO | None = None
        self._rest = b""

    def pieces(self) -> Iterator[bytes]:
        """Yield what was written since the last call."""
        while True:
            yield from self._read()
            following = self._following()
            if following is None:
                return
            # What was written before the file was moved aside.
            yield from self._read()
            yield self.end()
            self._file = following

    def end(self) -> bytes:
        """Close the file, and return its last line if that has no end."""
        if self._file is not None:
            self._file.close()
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""

    def _read(self) -> Iterator[bytes]:
        while self._file is not None and (data := self._file.read(_PIECE_BYTES)):
            yield self._shown(data)

    def _following(self) -> BinaryIO | None:
        """Open the file that is there now, if it is not the open one."""
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
    """Return the chosen ranks of a job.

    Args:
        job: One that was started.
        rank: One of its ranks, or None for all.

    Raises:
        CommandError: if it has no such rank.
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
        attempt: Number of an earlier start, or None for the last one.

    Raises:
        CommandError: if there is none, or it cannot be read.
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


def follow_logs(watch: SweepReader, number: int, rank: int | None, out: BinaryIO) -> None:
    """Print logs as they grow, until the job ends.

    Args:
        number: Number of the job.

    Raises:
        CommandError: if there is no such job or rank, or the job was never started.
        BrokenPipeError: if the reader is gone.
    """
    tails: list[Tail] = []
    while True:
        snapshot = watch.look()
        job = snapshot.job(number)
        over = job.state not in (JobState.WAITING, JobState.PENDING, JobState.RUNNING, JobState.PAUSED)
        if over or job.run_dir:
            paths = JobPaths(snapshot.started_job(number).run_dir)
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
    # With no events requested, poll reports only that the reader is gone.
    reader.register(out, 0)
    if reader.poll(_LOOK_INTERVAL_MS):
        raise BrokenPipeError


def _prefix(job: JobRecord, rank: int, *, alone: bool) -> bytes:
    return b"" if alone else f"[job {job.number} rank {rank}] ".encode()


if __name__ == "__main__":
    sys.exit(main())
