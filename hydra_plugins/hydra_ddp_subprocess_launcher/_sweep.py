"""One sweep, top to bottom: check how it was started, run each batch of jobs, tell how it went."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.utils import get_args_parser
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobRuntime, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from . import _environment, _pickling, _process, _program, _tasks
from ._choices import Entry
from ._devices import DevicePool, find_devices
from ._errors import StartError
from ._freeze import ComposeSpool
from ._settings import LaunchSettings, read_settings
from ._sources import stamp_sources
from ._specs import TaskId

_log = logging.getLogger(__name__)
_RANK_MODULE = f"{__package__}._rank"


@dataclass(frozen=True)
class ProgramEntry:
    """Ranks run the user's program again.

    Attributes:
        program: How.
        flags: Config flags of the sweep's command line.
        task: Which of the program's functions.
    """

    program: _program.Program
    flags: tuple[str, ...]
    task: TaskId


@dataclass(frozen=True)
class FunctionEntry:
    """Ranks unpickle the job function.

    Attributes:
        start: How this process was started, for the interpreter and its flags.
    """

    start: _program.ProcessStart


@dataclass(frozen=True)
class Sweep:
    """What stays the same over all batches of a sweep.

    Attributes:
        context: Hydra's.
        task_function: What a job calls.
        config: The sweep's own config.
        settings: Options of the launcher.
        entry: What ranks run.
        pool: Devices of this process.
        spool: Configs that the sweeper composed.
        sources: Stamps of the program's source files, by path.
    """

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig
    settings: LaunchSettings
    entry: ProgramEntry | FunctionEntry
    pool: DevicePool
    spool: ComposeSpool
    sources: Mapping[str, tuple[int, int]]

    @property
    def main(self) -> Mapping[str, Any] | None:
        """Names of the program's `__main__`, for the pickler; None: ranks have another."""
        return _pickling.program_namespace(self.task_function) if isinstance(self.entry, ProgramEntry) else None

    @property
    def task_name(self) -> str:
        """Hydra's name of the job function."""
        return str(JobRuntime.instance().get("name"))


def prepare_sweep(context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Sweep:
    """Check all that can be checked before a job is known.

    Raises:
        LauncherError: for what the user can mend.
    """
    unsupported = _process.unsupported_reason()
    if unsupported is not None:
        raise StartError(unsupported)
    options = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(options, dict)
    settings = read_settings({str(name): value for name, value in options.items()})
    if not settings.allow_nested:
        _environment.refuse_as_rank(os.environ)
    ignored = _environment.ignored_rendezvous(os.environ)
    if ignored:
        _log.warning(
            "%s of the environment: ignored, each job gets a port of its own (hydra.launcher.master_addr, master_port)",
            ", ".join(ignored),
        )
    entry = _find_entry(settings, task_function)
    pool = DevicePool(find_devices(settings.devices, settings.device_env_var, os.environ))
    pool.nproc(settings.nproc_per_node)
    main_script = entry.program.main_script if isinstance(entry, ProgramEntry) else None
    spool = ComposeSpool(context.config_loader)
    spool.record()
    return Sweep(context, task_function, config, settings, entry, pool, spool, stamp_sources(main_script))


def _find_entry(settings: LaunchSettings, task_function: TaskFunction) -> ProgramEntry | FunctionEntry:
    start = process_start()
    reason = _program.missing_program_reason(
        start,
        # The variable alone says only that some process above this one is a test.
        pytest="pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ,
        ipython=_in_ipython(),
        hydra_main=_hydra_main_is_running(sys._getframe()),
    )
    if settings.entry is Entry.script and reason is not None:
        raise StartError(
            f"hydra.launcher.entry=script needs a program to run again, but {reason}. "
            "Use entry=auto, which hands the job function to the ranks by pickle then."
        )
    if settings.entry is Entry.function or reason is not None:
        _check_picklable(task_function, reason or "hydra.launcher.entry=function")
        return FunctionEntry(start)
    flags = _program.config_flags(start.argv[1:], get_args_parser())
    task = _tasks.identify(task_function, _tasks.LAUNCHER_SWEEPS)
    return ProgramEntry(_program.find_program(start), tuple(flags), task)


def process_start() -> _program.ProcessStart:
    """Return how this process was started."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return _program.ProcessStart(
        executable=sys.executable,
        # multiprocessing and test.support use it, too: the one list of flags that is kept up with Python.
        interpreter_flags=tuple(subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]
        orig_argv=tuple(sys.orig_argv),
        argv=tuple(sys.argv),
        main_file=getattr(main, "__file__", None),
        spec_name=getattr(spec, "name", None),
        spec_origin=getattr(spec, "origin", None),
        sys_path=tuple(sys.path),
        cwd=os.getcwd(),
    )


def _in_ipython() -> bool:
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def _hydra_main_is_running(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "decorated_main" and Path(code.co_filename).parts[-2:] == ("hydra", "main.py"):
            return True
        frame = frame.f_back
    return False


def _check_picklable(task_function: TaskFunction, reason: str) -> None:
    try:
        _pickling.dumps(task_function, None)
    except Exception as error:
        raise StartError(
            f"The job function cannot be handed to the ranks: {reason}, so it has to be pickled, and "
            f"{type(error).__name__}: {error}. Put what cannot be pickled inside the function, or start the sweep "
            "from a script with hydra.main."
        ) from error


def function_body(sweep: Sweep) -> dict[str, bytes]:
    """Return the parts of a payload that stand in for the program."""
    return {
        # The callbacks travel on their own, as for a program.
        "task_function": _pickling.dumps((sweep.task_function, replace(sweep.context, callbacks=Callbacks())), None),
        "singletons": _pickling.dumps(Singleton.get_state(), None),
    }


def rank_command(sweep: Sweep, run_dir: str, overrides: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the command of a job's ranks and the directory in which they start."""
    wrapper, entry = sweep.settings.wrapper, sweep.entry
    if isinstance(entry, FunctionEntry):
        return _program.function_command(wrapper, entry.start, _RANK_MODULE, run_dir, overrides), entry.start.cwd
    command = _program.program_command(wrapper, entry.program, entry.flags, run_dir, overrides)
    return command, entry.program.cwd


def run_sweep(sweep: Sweep, job_overrides: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
    """Run one batch of jobs and return one JobReturn a job, in order, whatever failed.

    Args:
        sweep: What `prepare_sweep` returned.
        job_overrides: One list of override strings a job.
        initial_job_idx: Number of the first job.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when every rank is gone.
        SystemExit: after SIGTERM or SIGHUP, likewise.
    """
    from ._jobs import Batch
    from ._report import results_table

    sweep.spool.stop()
    setup_globals()
    _configure_log(sweep)
    try:
        _make_sweep_dir(sweep.config)
        batch = Batch(sweep, job_overrides, initial_job_idx)
        results = batch.run()
        _log.info("\n%s", results_table(results))
        return [result.job_return for result in results]
    finally:
        sweep.spool.clear()
        sweep.spool.record()


def _configure_log(sweep: Sweep) -> None:
    whitelist = getattr(sweep.context, "execution_whitelist", None)
    extra = {} if whitelist is None else {"execution_whitelist": whitelist}
    configure_log(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose, **extra)


def _make_sweep_dir(config: DictConfig) -> None:
    sweep_dir = Path(str(config.hydra.sweep.dir))
    sweep_dir.mkdir(parents=True, exist_ok=True)
    # Not in Hydra's schema, but honoured by its joblib and submitit launchers, too.
    mode = OmegaConf.select(config, "hydra.sweep.mode")
    if mode is not None:
        sweep_dir.chmod(int(str(mode), base=8))
