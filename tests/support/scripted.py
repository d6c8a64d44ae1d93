"""A sweep without processes: the launcher's own parts, with a monitor that plays what a script says.

Whenever the batch has nothing to do but wait, the next step of the script is taken. A script that is at its end while
jobs run, or that does not come to its end, fails the test.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobReturn, JobRuntime
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import JobPaths, SweepPaths, write_outcome
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import (
    GroupReport,
    GroupSpec,
    LaunchSpec,
    Outcome,
    Payload,
    RankExit,
    Stop,
    StopReason,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.config import DDPSubprocessLauncherConf
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.rendezvous import Rendezvous
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.running_job import RunningJob
from hydra_plugins.hydra_ddp_subprocess_launcher.job.frozen_config import CachedConfig, Frozen, dumps
from hydra_plugins.hydra_ddp_subprocess_launcher.job.plan import Allocation, Attempt, PlannedJob
from hydra_plugins.hydra_ddp_subprocess_launcher.job.settings import LaunchSettings, SweepContext, read_settings
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.batch import Batch, JobStarter
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.debug import DebugSession
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.job_queue import JobQueue
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.progress import Progress
from hydra_plugins.hydra_ddp_subprocess_launcher.launcher.resume import PreviousRuns
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import Event, JobRecord, SweepRecord
from hydra_plugins.hydra_ddp_subprocess_launcher.records.journal import SweepRecorder
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.devices import DeviceAllocator, Nvml
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.schedule import DevicePool, JobSize

Step = Callable[["ScriptedMonitor"], None]


def settings(**changes: Any) -> LaunchSettings:
    """Return the default options of a sweep, some of them changed; nothing is shown."""
    options: Any = OmegaConf.to_container(OmegaConf.structured(DDPSubprocessLauncherConf))
    values = {"progress": "none", "devices": [], **changes}
    return read_settings(options | OmegaConf.to_container(OmegaConf.structured(DDPSubprocessLauncherConf(**values))))  # type: ignore[operator, arg-type]


def make_context(sweep_dir: Path, **changes: Any) -> SweepContext:
    """Return a sweep of Hydra's own sweeper.

    Args:
        changes: Options of the launcher.
    """
    config = {
        "hydra": {
            "launcher": {"nproc_per_node": 1, "devices_per_rank": 1},
            "sweeper": {
                "_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
                "max_batch_size": None,
            },
        }
    }
    hydra_context: Any = SimpleNamespace(callbacks=Callbacks(), config_loader=None)
    entry: Any = SimpleNamespace(task=SimpleNamespace(module="app", qualname="main"))
    return SweepContext(
        hydra_context, _task, OmegaConf.create(config), settings(**changes), entry, SweepPaths(str(sweep_dir))
    )


def _task(_config: DictConfig) -> None:
    """Be what a job calls."""


def make_plan(
    sweep_dir: Path, number: int, overrides: Sequence[str] = (), nproc: int = 1, known: JobRecord | None = None
) -> PlannedJob:
    """Return a job that is ready to be started."""
    run_dir = str(sweep_dir / str(number))
    config = OmegaConf.create(
        {
            "x": number,
            "hydra": {
                "job": {"chdir": False, "id": str(number)},
                "overrides": {"task": list(overrides)},
                "runtime": {"cwd": "/"},
            },
        }
    )
    return PlannedJob(
        number=number,
        overrides=tuple(overrides),
        config=config,
        cached=CachedConfig.store(config),
        frozen=Frozen(str(sweep_dir), run_dir, {"MINE": "1"}, (nproc, 1)),
        size=JobSize(nproc),
        nnodes=1,
        argv=("python", "app.py", *overrides),
        cwd="/",
        payload=Payload(tuple(overrides), run_dir, None, "app", (), check_config=False, body=b""),
        config_yaml=f"x: {number}\n",
        config_hash=f"hash of x={number}",
        known=known,
    )


@dataclass
class ScriptedPlanner:
    """Composes and plans jobs in the way of JobPlanner.

    Attributes:
        sizes: Ranks of a job, by its number; of the others one.
        errors: What composing a job raises, by its number.
        early: Jobs that the sweeper has composed.
        calls: What was asked for.
    """

    sweep_dir: Path
    previous: PreviousRuns
    sizes: Mapping[int, int] = field(default_factory=dict)
    errors: Mapping[int, Exception] = field(default_factory=dict)
    early: Iterable[int] | None = None
    calls: list[tuple[str, int]] = field(default_factory=list)

    def take_cached(self, overrides: Sequence[str]) -> CachedConfig | None:
        number = _number(overrides)
        if number in self.errors or (self.early is not None and number not in self.early):
            return None
        return self._cached(number)

    def _cached(self, number: int) -> CachedConfig:
        launcher = {"nproc_per_node": self.sizes.get(number, 1), "devices_per_rank": 1}
        cached = CachedConfig.store(OmegaConf.create({"hydra": {"launcher": launcher}}))
        assert cached is not None
        return cached

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        number = _number(overrides)
        self.calls.append(("compose", number))
        if number in self.errors:
            raise self.errors[number]
        return self._cached(number).load()

    def plan(self, number: int, overrides: Sequence[str], config: DictConfig) -> PlannedJob:
        self.calls.append(("plan", number))
        known = self.previous.find(number, overrides, "app.main", f"hash of x={number}")
        return make_plan(self.sweep_dir, number, overrides, self.sizes.get(number, 1), known)


def _number(overrides: Sequence[str]) -> int:
    return int(overrides[0].removeprefix("x="))


class ScriptedChannel:
    """Keeps what is sent to a keeper."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.disconnected = False

    def send(self, message: object) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.disconnected = True


class ScriptedMonitor:
    """Stands in for JobMonitor: no keeper is started, and the script says what is heard of them.

    Attributes:
        script: What happens, one step whenever the batch waits.
        started: What was started, in order.
        sent: What was sent to the keeper of each start, by its place in `started`.
    """

    script: Sequence[Step] = ()

    def __init__(self, _selector: selectors.BaseSelector, _fork_server: object = None) -> None:
        self.running: dict[int, RunningJob] = {}
        self.started: list[RunningJob] = []
        self.groups: list[GroupSpec] = []
        self.most_at_once = 0
        self.steps: Iterator[Step] = iter(self.script)

    def start(
        self,
        spec: LaunchSpec,
        group: GroupSpec,
        allocation: Allocation,
        attempt: Attempt,
        held: Sequence[int] = (),
        tees: Sequence[Any] = (),
    ) -> RunningJob:
        link: Any = SimpleNamespace(ready_at=0.0, ending="was killed", disconnected=False)
        channel: Any = ScriptedChannel()
        job = RunningJob(spec, allocation, attempt, link, channel, list(tees))
        self.running[spec.number] = job
        self.started.append(job)
        self.groups.append(group)
        self.most_at_once = max(self.most_at_once, len(self.running))
        return job

    @property
    def sent(self) -> list[list[Any]]:
        return [job.channel.sent for job in self.started]  # type: ignore[attr-defined]

    def remove(self, job: RunningJob) -> None:
        job.close()
        del self.running[job.spec.number]

    def wait(self, timeout: float | None) -> None:
        if timeout:
            step = next(self.steps, None)
            assert step is not None, f"the script is over, but the batch waits for {list(self.running)}"
            step(self)

    def close(self) -> None:
        pass


# Steps of a script


def ends(number: int, value: object = None, error: Exception | None = None) -> Step:
    """Return how a job ends: every rank returns a value, or all have failed of an error."""

    def end(monitor: ScriptedMonitor) -> None:
        job = monitor.running[number]
        spec = job.spec
        for rank in range(spec.world_size):
            outcome = Outcome(completed=True, value=dumps(value, None), run_id=spec.run_id)
            if error is not None:
                pickled, text = dumps(error, None), f"{type(error).__name__}: {error}"
                outcome = Outcome(False, None, pickled, text, text, 1.0, run_id=spec.run_id)
            write_outcome(JobPaths(spec.run_dir), rank, outcome)
        code = 0 if error is None else 1
        exits = tuple(RankExit(rank, code, 1.0, stopped=False) for rank in range(spec.world_size))
        reason, cause = (None, None) if error is None else (StopReason.RANK_FAILED, 0)
        _over(job, GroupReport(exits, reason, cause))

    return end


def obeys(number: int) -> Step:
    """Return that a job has ended as it was ordered to."""

    def end(monitor: ScriptedMonitor) -> None:
        job = monitor.running[number]
        orders = [sent for sent in job.channel.sent if isinstance(sent, Stop)]  # type: ignore[attr-defined]
        assert orders, f"job {number} was not ordered to stop"
        _over(job, GroupReport((RankExit(0, -15, 1.0, stopped=True),), StopReason.ORDERED, None, orders[0].detail))

    return end


def is_lost(number: int) -> Step:
    """Return that nothing took a job up: its spawner was killed."""
    return lambda monitor: _over(monitor.running[number], None)


def _over(job: RunningJob, report: GroupReport | None) -> None:
    job.report, job.reaped, job.channel.disconnected = report, True, True


def arrives(signal_number: int) -> Step:
    """Return that a signal comes to the launching process."""
    return lambda _monitor: os.kill(os.getpid(), signal_number)


@dataclass
class ScriptedSweep:
    """One batch of jobs `x=0`, `x=1`, …

    Attributes:
        monitor: What was started, once it has run.
        events: What was recorded.
        returns: What the sweeper has got; None: the process was told to end.
        error: What it was told to end by.
    """

    batch: Batch
    monitor: ScriptedMonitor
    planner: ScriptedPlanner
    events: list[Event]
    returns: list[JobReturn] | None = None
    error: BaseException | None = None

    def run(self) -> ScriptedSweep:
        try:
            self.returns = self.batch.run()
        except (KeyboardInterrupt, SystemExit) as error:
            self.error = error
        assert next(self.monitor.steps, None) is None, "the batch is over, but the script is not"
        return self

    @property
    def starts(self) -> list[int]:
        """Numbers of the jobs that were started, in order."""
        return [job.spec.number for job in self.monitor.started]

    @property
    def what_happened(self) -> list[tuple[str, int]]:
        """Kinds of the events that concern a job, and its number, in order."""
        return [(type(event).__name__, event.job) for event in self.events if hasattr(event, "job")]


def scripted_sweep(
    sweep_dir: Path,
    jobs: int,
    *script: Step,
    pool: DevicePool | None = None,
    sizes: Mapping[int, int] | None = None,
    errors: Mapping[int, Exception] | None = None,
    early: Iterable[int] | None = None,
    previous: PreviousRuns | None = None,
    record: SweepRecord | None = None,
    refuses: Callable[[], None] = lambda: None,
    **options: Any,
) -> ScriptedSweep:
    """Return a batch that is ready to run.

    Args:
        script: What happens.
        sizes: Ranks of jobs, by number.
        errors: What composing jobs raises, by number.
        early: Jobs that the sweeper has composed; None: all.
        refuses: Raises why no job can be started now.
        options: Of the launcher.
    """
    context = make_context(sweep_dir, **options)
    pool = pool or DevicePool(max_jobs=context.settings.max_parallel_jobs)
    previous = previous or PreviousRuns()
    overrides = {number: [f"x={number}"] for number in range(jobs)}
    allocator = DeviceAllocator({}, Nvml("", {}), None, None)
    planner: Any = ScriptedPlanner(sweep_dir, previous, sizes or {}, errors or {}, early)
    queue = JobQueue(context, planner, pool, allocator, overrides)
    recorder = SweepRecorder(None, record)
    events: list[Event] = []
    keep = recorder.record

    def record_too(event: Event) -> None:
        events.append(event)
        keep(event)

    recorder.record = record_too  # type: ignore[method-assign]
    summary: Any = SimpleNamespace(show=lambda *_: None)
    progress = Progress(context, recorder, summary, overrides, queue.most_jobs)
    sources: Any = SimpleNamespace(check=lambda *_: refuses())
    starter = JobStarter(context, allocator, Rendezvous(), sources, (), ())
    batch = Batch(
        context,
        overrides,
        queue,
        starter,
        allocator,
        progress,
        previous,
        Rendezvous(),
        None,
        DebugSession(),
    )
    monitor = ScriptedMonitor(selectors.DefaultSelector())
    monitor.steps = iter(script)
    batch._monitor = monitor  # type: ignore[assignment]
    return ScriptedSweep(batch, monitor, planner, events)


@pytest.fixture
def task_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hydra have begun: a JobReturn has the name of its task."""
    monkeypatch.setattr(JobRuntime.instance(), "conf", OmegaConf.create({"name": "app"}))
