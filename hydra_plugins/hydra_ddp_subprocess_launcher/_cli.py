"""`hydra-ddp`: look at a sweep, stop it, and repeat what it did, from any terminal of its machine."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, _commands
from ._files import JobPaths, SweepPaths
from ._following import chosen_ranks, follow_logs, print_logs
from ._records import JobRecord
from ._stopping import stop_sweep
from ._watching import CommandError, Sight, Watch, chosen_sweep, default_sweep, folder_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0; 1, it did not work; 2, wrong usage or nothing there; 130, Ctrl-C.

    Args:
        argv: Arguments; None: those of the process.
    """
    arguments = _parser().parse_args(argv)
    if sys.stdout is None:
        return 0  # It was closed: nobody wants to know.
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names and what ranks print can be anything.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except CommandError as error:
        sys.stderr.write(f"hydra-ddp {arguments.command}: {error}\n")
        return error.code
    except OSError as error:
        # Python would complain again of what could not be written when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # Its reader, such as `head`, has what it wanted.
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
    from . import _status as words  # It brings Hydra and rich.

    watch = Watch(_chosen(arguments))
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
    watch = Watch(_chosen(arguments))
    if arguments.follow:
        follow_logs(watch, arguments.job, arguments.rank, sys.stdout.buffer)
    else:
        job = watch.look().started_job(arguments.job)
        print_logs(job, arguments.rank, arguments.attempt, sys.stdout.buffer)


def _command(arguments: argparse.Namespace) -> None:
    job = Watch(_chosen(arguments)).look().started_job(arguments.job)
    ranks = chosen_ranks(job, arguments.rank)
    facts = _facts(job)
    for rank in ranks:
        # Not as text: names of files need not be any.
        sys.stdout.buffer.write(os.fsencode(_commands.rank_line(facts, rank)) + b"\n")


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

    stop_sweep(Watch(_chosen(arguments)), say, now=arguments.now)


def _timeline(arguments: argparse.Namespace) -> None:
    from ._timeline import make_timeline
    from ._timeline_picture import draw_timeline

    paths = _chosen(arguments)
    sight = Watch(paths).look()
    output = arguments.output or paths.timeline
    draw_timeline(make_timeline(sight.events, None if sight.live else _last_sign(sight), time.time()), output)
    sys.stdout.write(f"{output}\n")


def _results(arguments: argparse.Namespace) -> None:
    from . import _results_csv as results  # It brings Hydra.
    from ._records import JobState
    from ._report import text_table

    record = Watch(_chosen(arguments)).look().record
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
        # Directories and attempts are for programs; a column without a word tells nothing.
        chosen = [
            place
            for place, title in enumerate(header)
            if title in ("job", "status") or (title not in ("run_dir", "attempts") and any(row[place] for row in rows))
        ]
        cells = [[row[place] for place in chosen] for row in rows]
        sys.stdout.write(text_table([header[place] for place in chosen], cells, right=("job", "duration_s")) + "\n")


def _last_sign(sight: Sight) -> float:
    """Return when something of a sweep that is over was last written, Unix time in seconds."""
    logs = [JobPaths(job.run_dir).log(0) for job in sight.record.jobs.values() if job.run_dir]
    written = [os.stat(path).st_mtime for path in [sight.paths.journal, *logs] if os.path.exists(path)]
    return max(written, default=0.0)


def _info(arguments: argparse.Namespace) -> None:
    from . import _info as facts

    paths = default_sweep() if arguments.dir is None else chosen_sweep(arguments.dir)
    info = facts.gather(os.environ, None if paths is None else Watch(paths).look())
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


if __name__ == "__main__":
    sys.exit(main())
