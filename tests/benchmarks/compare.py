"""This launcher beside what people use instead, on the same work, in one run: ratios of medians, and their targets.

    python tests/benchmarks/compare.py --rounds 5
    python tests/benchmarks/compare.py --only cold preloaded --json figures.json

In every round each contender runs once, in an order that rotates, so that all meet the same machine. Absolute figures
are the machine's; the ratios are ours. Exit code 1: a target was missed. Needs torch; hydra-joblib-launcher if there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import death_to_end
import many_jobs
from timing import Command, Spread, intervals, resident_kib, rotated, run, significant, started, table

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import SweepPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import JobEnded, JobStarted
from hydra_plugins.hydra_ddp_subprocess_launcher.records.journal import read_events

HERE = Path(__file__).parent
TRAINING, TINY = str(HERE / "training_app.py"), str(HERE / "tiny_app.py")
# Jobs of a sweep, the first of which does not count, and turns of a loop that do as many.
TRAININGS = 4
TINY_JOBS = 10
# Jobs by which the launcher's own cost is measured, and those after which its memory is, first and last.
CHEAP_JOBS = 60
MEMORY_JOBS = (10, 500)
BARE_STARTS = 10
PRINTED_MB = 200
# What the launcher sets for a rank and torchrun does, too: threads would share the few cores with each other.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
OURS = ("-m", "hydra/launcher=ddp_subprocess", "hydra.launcher.devices=[]")


@dataclass(frozen=True)
class Contender:
    """Something that is run once a round.

    Attributes:
        series: Names of what it measures.
        measure: Given an empty folder, returns samples of each.
    """

    series: tuple[str, ...]
    measure: Callable[[Path], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Question:
    """A ratio of two medians.

    Attributes:
        name: For `--only`; several questions may share it.
        ours: Series above the line.
        against: Series below it.
        target: The most that the ratio may be; None: it is shown for information.
        unit: Of both series.
    """

    name: str
    ours: str
    against: str
    target: float | None = None
    unit: str = "s"


QUESTIONS = (
    Question("cold", "cold job", "two bare programs", 1.10),
    Question("cold", "cold job", "torchrun --standalone"),
    Question("cold", "cold job", "torchrun, static"),
    Question("preloaded", "preloaded job", "torchrun --standalone", 0.10),
    Question("entered", "preloaded, until entered", "import torch, hydra", 0.15),
    Question("own cost", "own cost", "python -c pass", 1.0),
    Question("own cost", "tiny job", "tiny job, basic"),
    Question("own cost", "tiny job", "tiny job, joblib"),
    Question("death", "rank death to end", "the same, torchrun", 0.5),
    Question("death", "the same, process busy", "the same, torchrun", 0.5),
    Question("output", "200 MB printed", "200 MB into a file", 1.10),
    Question("memory", "after 500 jobs", "after 10 jobs", 1.10, "MB"),
)


# A training on two ranks


def sweep(folder: Path, app: str, *overrides: str) -> list[tuple[JobStarted, JobEnded]]:
    """Sweep with this launcher, and return start and end of its jobs, in order."""
    argv = [sys.executable, app, *OURS, f"hydra.sweep.dir={folder / 'sweep'}", *overrides]
    run([Command(argv, {**ENVIRONMENT, "TINY_TIMES": str(folder / "times")})], folder)
    events = read_events(SweepPaths(str(folder / "sweep")).journal)
    starts = {event.job: event for event in events if isinstance(event, JobStarted)}
    ends = {event.job: event for event in events if isinstance(event, JobEnded)}
    return [(starts[job], ends[job]) for job in sorted(starts)]


def trained(folder: Path, *overrides: str) -> tuple[list[float], list[float]]:
    """Sweep over trainings; return seconds a job in steady state, and from a job's start to its function's."""
    jobs = sweep(folder, TRAINING, "hydra.launcher.nproc_per_node=2", f"job=range({TRAININGS})", *overrides)
    return intervals([end.at for _, end in jobs]), [end.value - start.at for start, end in jobs[1:]]


def cold(folder: Path) -> dict[str, list[float]]:
    seconds, until_entered = trained(folder)
    return {"cold job": seconds, "cold, until entered": until_entered}


def preloaded(folder: Path) -> dict[str, list[float]]:
    seconds, until_entered = trained(folder, "hydra.launcher.preload=auto")
    return {"preloaded job": seconds, "preloaded, until entered": until_entered}


def in_a_loop(folder: Path, commands: Callable[[str], list[Command]], turns: int = TRAININGS - 1) -> list[float]:
    """Return the seconds of each turn; `commands` are given a run directory."""
    return [run(commands(str(folder / f"run_{turn}")), folder / str(turn)) for turn in range(turns)]


def bare(folder: Path) -> dict[str, list[float]]:
    """Start both ranks by hand."""
    port = free_port()
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def commands(run_dir: str) -> list[Command]:
        # As rank 0 alone writes Hydra's files in a job of ours.
        options = {0: [], 1: ["hydra.output_subdir=null", "hydra/job_logging=none"]}
        return [
            Command(
                [sys.executable, TRAINING, f"hydra.run.dir={run_dir}", *options[rank]],
                {**ENVIRONMENT, **group, "PYTHONUNBUFFERED": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]

    return {"two bare programs": in_a_loop(folder, commands)}


def torchrun(folder: Path, name: str, *options: str) -> dict[str, list[float]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2"]

    def commands(run_dir: str) -> list[Command]:
        return [Command([*launcher, TRAINING, f"hydra.run.dir={run_dir}"], ENVIRONMENT)]

    return {name: in_a_loop(folder, commands)}


def torchrun_standalone(folder: Path) -> dict[str, list[float]]:
    return torchrun(folder, "torchrun --standalone", "--standalone")


def torchrun_static(folder: Path) -> dict[str, list[float]]:
    where = ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
    return torchrun(folder, "torchrun, static", "--nnodes=1", "--rdzv-backend=static", *where)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def imports(folder: Path) -> dict[str, list[float]]:
    def commands(run_dir: str) -> list[Command]:
        return [Command([sys.executable, "-c", "import torch, hydra"], ENVIRONMENT)]

    return {"import torch, hydra": in_a_loop(folder, commands)}


# Tiny jobs


def own_cost(folder: Path) -> dict[str, list[float]]:
    return {"own cost": [many_jobs.measure(CHEAP_JOBS)["launcher's own cost"] / 1000]}


def interpreter(folder: Path) -> dict[str, list[float]]:
    def commands(run_dir: str) -> list[Command]:
        return [Command([sys.executable, "-c", "pass"], {})]

    return {"python -c pass": in_a_loop(folder, commands, BARE_STARTS)}


def tiny_jobs(folder: Path, name: str, *overrides: str) -> dict[str, list[float]]:
    """Return the seconds from job to job, as the jobs note them themselves."""
    argv = [sys.executable, TINY, "-m", *overrides, f"hydra.sweep.dir={folder / 'sweep'}", f"job=range({TINY_JOBS})"]
    run([Command(argv, {**ENVIRONMENT, "TINY_TIMES": str(folder / "times")})], folder)
    return {name: intervals(sorted(map(float, (folder / "times").read_text().split())))}


def tiny_ours(folder: Path) -> dict[str, list[float]]:
    return tiny_jobs(folder, "tiny job", *OURS, "hydra.launcher.nproc_per_node=1")


def tiny_basic(folder: Path) -> dict[str, list[float]]:
    return tiny_jobs(folder, "tiny job, basic", "hydra/launcher=basic")


def tiny_joblib(folder: Path) -> dict[str, list[float]]:
    return tiny_jobs(folder, "tiny job, joblib", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")


def memory(folder: Path) -> dict[str, list[float]]:
    """Return the resident memory in MB of a launching process after its first jobs, and after its last one."""
    first, last = MEMORY_JOBS
    journal = Path(SweepPaths(str(folder / "sweep")).journal)
    measured: dict[bool, int] = {}
    argv = many_jobs.sweep_command(folder / "sweep", last, folder / "facts.json")
    with started([Command(argv, ENVIRONMENT)], folder) as (process,):
        while process.poll() is None:
            ended = journal.read_bytes().count(b'"JobEnded"') if journal.exists() else 0
            held = resident_kib(process.pid)
            if held is not None and (ended >= last or (ended >= first and False not in measured)):
                measured[ended >= last] = held
            time.sleep(0.05)
    return {f"after {jobs} jobs": [measured[jobs == last] * 1024 / 1e6] for jobs in MEMORY_JOBS}


# Deaths and output


def death(name: str, setting: death_to_end.Setting) -> Contender:
    return Contender((name,), lambda folder: {name: [death_to_end.death_to_end(setting)]})


def printed(folder: Path) -> dict[str, list[float]]:
    ((start, end),) = sweep(folder, TINY, "hydra.launcher.nproc_per_node=1", f"megabytes={PRINTED_MB}", "job=0")
    return {"200 MB printed": [end.at - start.at]}


def printed_into_a_file(folder: Path) -> dict[str, list[float]]:
    def commands(run_dir: str) -> list[Command]:
        argv = [sys.executable, TINY, f"hydra.run.dir={run_dir}", f"megabytes={PRINTED_MB}"]
        return [Command(argv, {**ENVIRONMENT, "PYTHONUNBUFFERED": "1", "TINY_TIMES": str(folder / "times")})]

    return {"200 MB into a file": in_a_loop(folder, commands, 1)}


CONTENDERS = (
    Contender(("cold job", "cold, until entered"), cold),
    Contender(("two bare programs",), bare),
    Contender(("preloaded job", "preloaded, until entered"), preloaded),
    Contender(("torchrun --standalone",), torchrun_standalone),
    Contender(("torchrun, static",), torchrun_static),
    Contender(("import torch, hydra",), imports),
    Contender(("own cost",), own_cost),
    Contender(("python -c pass",), interpreter),
    Contender(("tiny job",), tiny_ours),
    Contender(("tiny job, basic",), tiny_basic),
    Contender(("tiny job, joblib",), tiny_joblib),
    death("rank death to end", death_to_end.OURS),
    death("the same, process busy", death_to_end.OURS_BUSY),
    death("the same, torchrun", death_to_end.TORCHRUN),
    Contender(("200 MB printed",), printed),
    Contender(("200 MB into a file",), printed_into_a_file),
    Contender(("after 10 jobs", "after 500 jobs"), memory),
)


# All of them


def missing() -> dict[str, str]:
    """Return why contenders cannot run here, by the start of the names of their series."""
    reasons = {}
    if importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is None:
        reasons["tiny job, joblib"] = "hydra-joblib-launcher is not installed"
    return reasons


def answerable(questions: Sequence[Question], reasons: Mapping[str, str]) -> list[Question]:
    """Return the questions of which no series begins with the name of one that is missing."""
    return [one for one in questions if not any(side.startswith(tuple(reasons)) for side in (one.ours, one.against))]


def measure(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Return all samples of each series."""
    samples: dict[str, list[float]] = {name: [] for one in contenders for name in one.series}
    for turn in range(rounds):
        for contender in rotated(contenders, turn):
            print(f"round {turn + 1} of {rounds}: {contender.series[0]}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                for name, values in contender.measure(Path(folder)).items():
                    samples[name] += values
    return samples


@dataclass(frozen=True)
class Answer:
    """What came of a question: both spreads, and the ratio of their medians."""

    question: Question
    ours: Spread
    against: Spread

    @property
    def ratio(self) -> float:
        return self.ours.median / self.against.median

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None: there is none."""
        return None if self.question.target is None else self.ratio <= self.question.target

    @property
    def row(self) -> list[str]:
        """Its cells for the table, in the order of HEADER."""
        question = self.question
        target = "-" if question.target is None else f"<= {question.target:.2f}"
        met = {None: "", True: "met", False: "MISSED"}[self.met]
        sides = [question.ours, str(self.ours), question.against, str(self.against)]
        return [question.name, f"{self.ratio:.2f}", target, met, *sides, question.unit]


HEADER = ("", "ratio", "target", "", "ours", "min / median / max", "against", "min / median / max", "unit")


def answer(questions: Sequence[Question], samples: Mapping[str, Sequence[float]]) -> list[Answer]:
    """Return the answers to questions."""
    return [Answer(one, Spread.of(samples[one.ours]), Spread.of(samples[one.against])) for one in questions]


def report(answers: Sequence[Answer]) -> str:
    """Return answers as a table."""
    return table([HEADER, *(one.row for one in answers)])


def facts(answers: Sequence[Answer], samples: Mapping[str, Sequence[float]], rounds: int) -> dict[str, object]:
    """Return all figures for a file of JSON."""
    return {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "rounds": rounds,
        "answers": [{**dataclasses.asdict(one.question), "ratio": one.ratio, "met": one.met} for one in answers],
        "samples": samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(question.name for question in QUESTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples into this file, too")
    chosen = parser.parse_args()
    # Also where a shell's `&` had ignored Ctrl-C: whatever stops this run, what it started is ended.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    # Without it every start would compile again what lies beside its sources.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    reasons = missing()
    for name, why in reasons.items():
        print(f"left out: {name}: {why}")
    questions = answerable([question for question in QUESTIONS if question.name in chosen.only], reasons)
    wanted = {side for question in questions for side in (question.ours, question.against)}
    samples = measure([one for one in CONTENDERS if wanted & set(one.series)], chosen.rounds)
    answers = answer(questions, samples)
    if answers:
        print(report(answers))
    for name in samples.keys() - wanted:
        print(f"also: {name}: {significant(Spread.of(samples[name]).median)}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(facts(answers, samples, chosen.rounds), indent=2) + "\n")
    return 1 if any(one.met is False for one in answers) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
