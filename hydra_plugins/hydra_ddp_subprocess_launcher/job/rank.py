"""A rank: load the payload, run the job, store the outcome, end the process.

This module must not import anything that only the launching process needs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobRuntime, run_job, setup_globals
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from ..common import files, processes, quoting, signals
from ..common.errors import LauncherError, StartError
from ..common.protocol import JOB_ID_TOKEN, Outcome, Payload, TaskId
from . import environment, frozen_config, hydra_state
from . import outcome as outcome_module
from .environment import JOB_NUM, PAYLOAD_DIGEST, RANK_PROCESS
from .outcome import GroupWatch, RankCallbacks


def run_program_rank(
    run_dir: str,
    overrides: str | None,
    compose_args: Mapping[str, str | None],
    task_function: TaskFunction,
    hydra_context: HydraContext,
) -> None:
    """Run a rank of the user's program. Return only if the job belongs to another `hydra.main` of the program.

    Args:
        run_dir: Run directory of the job, percent-encoded.
        overrides: Its overrides, percent-encoded, or None if they are too long for a command.
        compose_args: The options `config_name`, `hydra_overrides` and `task` of DDPRankSweeperConf.

    Raises:
        SystemExit: when the job has ended, with code 1 if it failed.
    """
    rank = _Rank(quoting.decode(run_dir), overrides, quoting.read_compose_args(**compose_args))
    if identify(task_function, RANK_SWEEPS) != rank.find_task():
        return
    rank.compose_missing(task_function, hydra_context)
    rank.run(task_function, hydra_context, frozen_config.program_namespace(task_function))


def run_function_rank(argv: list[str]) -> NoReturn:
    """Run a rank without a program: the payload holds the job function.

    Args:
        argv: `run_dir=…` and optionally `overrides=…`, percent-encoded.
    """
    arguments = dict(argument.split("=", 1) for argument in argv)
    rank = _Rank(quoting.decode(arguments["run_dir"]), arguments.get("overrides"))
    try:
        payload = rank.load_payload()
    except LauncherError as error:
        sys.exit(str(error))
    sys.path[:] = payload.sys_path
    rank.run(None, None, None)


class _Rank:
    """One rank's part of one job."""

    def __init__(self, run_dir: str, overrides: str | None, compose_args: quoting.ComposeArgs | None = None) -> None:
        needed = (PAYLOAD_DIGEST,) if compose_args is None else (JOB_NUM, "RANK", "TORCHELASTIC_RUN_ID")
        # Read it once: the program has changed the environment already, and the job's function may clear it.
        self._identity = environment.identity(os.environ, processes.start_environment())
        missing = [name for name in needed if name not in self._identity]
        if missing:
            raise StartError(
                f"{missing[0]} is not set: `ddp_rank` is what the launcher's own ranks run, and not for use by hand "
                "without their environment. <run dir>/.ddp/job.json has the full command of each rank, and "
                "hydra.launcher.dry_run=true prints it."
            )
        self._paths = files.JobPaths(run_dir)
        self._overrides = overrides
        # If there is a payload, it is used: it holds the job as the launcher froze it.
        self._compose_args = None if PAYLOAD_DIGEST in self._identity else compose_args
        self._rank = int(self._identity["RANK"])
        self._note = ""
        self._payload: Payload | None = None

    def find_task(self) -> TaskId | None:
        """Return the function of the program that the job runs.

        Raises:
            LauncherError: as `load_payload`.
        """
        return self._compose_args.task if self._compose_args is not None else self.load_payload().task

    def compose_missing(self, task_function: TaskFunction, hydra_context: HydraContext) -> None:
        """Build the payload that a dry run did not write, from the current config files.

        Raises:
            Exception: anything that composing raises.
        """
        if self._compose_args is None:
            return
        overrides = quoting.decode_overrides(self._overrides or "")
        # As `load_sweep_config` does, which needs the sweep's own config, as Hydra 1.4 compares the job's with it.
        config = hydra_context.config_loader.load_configuration(
            self._compose_args.config_name, [*self._compose_args.hydra_overrides, *overrides], RunMode.RUN
        )
        run_dir = self._paths.run_dir
        frozen_config.freeze(config, int(self._identity[JOB_NUM]), run_dir)
        os.makedirs(os.path.dirname(self._identity["TORCHELASTIC_ERROR_FILE"]), exist_ok=True)
        main_namespace = frozen_config.program_namespace(task_function)
        body = {"config": config, "callbacks": None, "resolvers": {}, "logging": hydra_state.sweep_logging(config)}
        self._payload = Payload(
            overrides=overrides,
            run_dir=run_dir,
            task=self._compose_args.task,
            task_name=str(JobRuntime.instance().get("name")),
            sys_path=(),
            # No launching process compares the ranks' configs.
            check_config=False,
            body=frozen_config.dumps(body, main_namespace),
        )

    def load_payload(self) -> Payload:
        """Read the payload and check that it belongs to this rank's command.

        Raises:
            LauncherError: if it is missing, damaged, or of another job.
        """
        payload = files.read_payload(self._paths, self._identity[PAYLOAD_DIGEST])
        if self._overrides is not None and quoting.decode_overrides(self._overrides) != payload.overrides:
            raise LauncherError(
                f"{self._paths.payload} belongs to a job with other overrides ({' '.join(payload.overrides)}): "
                "another job took over the run directory. Give each job one of its own (hydra.sweep.subdir)."
            )
        self._payload = payload
        return payload

    def run(
        self,
        task_function: TaskFunction | None,
        hydra_context: HydraContext | None,
        main_namespace: Mapping[str, Any] | None,
    ) -> NoReturn:
        """Run the job and end the process.

        A fork that leaves the job's function ends as well, without storing an outcome.

        Args:
            task_function: The program's function, or None if it is in the payload.
            hydra_context: The program's context, or None if it is in the payload.
            main_namespace: Namespace of the program's `__main__`, or None if there is no program.
        """
        process = os.getpid()
        self._claim(process)
        signals.write_stacks_on_signal(self._paths.log(self._rank))
        groups = GroupWatch()
        try:
            outcome, code = self._run_job(task_function, hydra_context, main_namespace)
        except BaseException as error:  # noqa: BLE001  (the user must see anything that ends this rank)
            outcome, code = outcome_module.failure(error, main_namespace), 1
        # Write to the log first, as nothing else may be writable. The program may have closed it.
        with contextlib.suppress(Exception):
            sys.stderr.write(outcome.traceback)
            sys.stderr.flush()
        if os.getpid() != process:
            raise SystemExit(code)
        outcome = outcome_module.as_stored(outcome, main_namespace)
        if outcome.traceback:
            with contextlib.suppress(OSError):
                self._write_error_file(outcome)
        self._store(replace(outcome, alone=groups.ran_alone))
        raise SystemExit(code)

    def _claim(self, process: int) -> None:
        """Mark this process as the rank, so that processes that it starts do not run the job again.

        Raises:
            SystemExit: if this process was started by the rank.
        """
        earlier = os.environ.get(RANK_PROCESS, str(process))
        if earlier != str(process):
            raise SystemExit(
                f"Process {earlier}, which started this one, runs the job as rank {self._rank} already. Start other "
                "programs without the arguments of a rank, and call main() only if __name__ == '__main__'."
            )
        os.environ[RANK_PROCESS] = str(process)

    def _store(self, outcome: Outcome) -> None:
        """Store the outcome or, if that fails, a short one that says so.

        Raises:
            SystemExit: if the outcome could not be stored.
        """
        run_id = self._identity["TORCHELASTIC_RUN_ID"]
        note = "; ".join(filter(None, (self._note, outcome.note)))
        try:
            files.write_outcome(self._paths, self._rank, replace(outcome, run_id=run_id, note=note))
        except OSError as error:
            why = f"its outcome cannot be stored: {error.strerror}: {self._paths.folder}"
            lost = Outcome(completed=False, summary=why, failed_at=time.time(), run_id=run_id)
            with contextlib.suppress(OSError):
                files.write_outcome(self._paths, self._rank, lost)
            # Goes to the log, which may have room for a line.
            raise SystemExit(f"rank {self._rank}: {why}") from None

    def _run_job(
        self,
        task_function: TaskFunction | None,
        hydra_context: HydraContext | None,
        main_namespace: Mapping[str, Any] | None,
    ) -> tuple[Outcome, int]:
        payload = self._payload
        assert payload is not None
        if payload.argv:
            # Before any of the user's code is unpickled.
            sys.argv[:] = payload.argv
        if main_namespace is not None and _config_name_of_main() == "ddp_rank":
            raise StartError(
                "The program reads --config-name from its command line itself, where a rank has the config of the "
                "launcher. Set hydra.launcher.entry=function to hand the job function to the ranks by pickle, or leave "
                "--config-name to Hydra, whose HydraConfig.get().job.config_name has it inside the function."
            )
        body = frozen_config.loads(payload.body)
        config = body["config"]
        if payload.job_id is not None:
            frozen_config.set_job_id(config, JOB_ID_TOKEN, payload.job_id, payload.run_dir)
        if task_function is None or hydra_context is None:
            task_function, hydra_context = _restore_hydra(body)
        _import_callbacks(config)
        hydra_state.restore_resolvers(
            body["resolvers"], lambda value: frozen_config.dumps(value, main_namespace), frozen_config.loads
        )
        JobRuntime.instance().set("name", payload.task_name)
        with contextlib.ExitStack() as stack:
            if self._rank == 0:
                hydra_context.callbacks = self._callbacks(config, body["callbacks"], main_namespace)
                _log_as_sweep(body["logging"], hydra_context, hydra_state.appended)
            else:
                own_files = hydra_state.OwnFiles(self._paths.folder, self._rank)
                _log_as_sweep(body["logging"], hydra_context, own_files)
                _keep_files_apart(config, own_files)
                stack.enter_context(hydra_state.redirected(own_files))
                stack.callback(self.restore_identity)
                hydra_context.callbacks = _WhenLogIsSetUp(stack.close)
            if payload.check_config:
                self._write_resolved_config(config)
            try:
                job_return = run_job(
                    hydra_context=hydra_context,
                    task_function=task_function,
                    config=config,
                    job_dir_key="hydra.runtime.output_dir",
                    job_subdir_key=None,
                )
            except SystemExit as stop:
                return outcome_module.after_exit(stop)
        return outcome_module.outcome_of(job_return, main_namespace, with_value=self._rank == 0)

    def restore_identity(self) -> None:
        """Restore the values of the launcher's own variables."""
        changed = [name for name, value in self._identity.items() if os.environ.get(name) != value]
        os.environ.update({name: self._identity[name] for name in changed})
        if changed:
            self._note = (
                f"the program or one of its imports had changed {', '.join(changed)}, which the launcher sets: the "
                "launcher's value was restored before the job's function ran. Leave the variable alone in ranks"
            )

    def _callbacks(
        self, config: DictConfig, pickled: bytes | None, main_namespace: Mapping[str, Any] | None
    ) -> Callbacks:
        """Return the sweep's callbacks for rank 0, so that each fires once per job."""
        callbacks = Callbacks(config) if pickled is None else frozen_config.loads(pickled)
        assert isinstance(callbacks, Callbacks)
        restarts, most = (int(self._identity[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        # Restore the variables after the callbacks, as these may change them, too.
        return RankCallbacks(callbacks, self._paths, main_namespace, self.restore_identity, can_restart=restarts < most)

    def _write_resolved_config(self, config: DictConfig) -> None:
        with frozen_config.hydra_config(config):
            resolved = frozen_config.resolved_values(config)
        # Private, as it contains resolved values of environment variables.
        files.write_private(self._paths.resolved_config(self._rank), json.dumps(resolved).encode())

    def _write_error_file(self, outcome: Outcome) -> None:
        # The format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, for tools that read it.
        message = {
            "message": outcome.summary,
            "extraInfo": {"py_callstack": outcome.traceback, "timestamp": str(int(outcome.failed_at or 0))},
        }
        files.write_text(self._identity["TORCHELASTIC_ERROR_FILE"], json.dumps({"message": message}))


class _WhenLogIsSetUp(Callbacks):
    """Run an action after Hydra sets up logging and before the job. A rank > 0 has no other callbacks."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self._action = action

    def on_job_start(self, config: DictConfig, **options: Any) -> None:
        """Run the action; called by `run_job`."""
        self._action()


def _config_name_of_main() -> str | None:
    """Return the `config_name` that the program passed to `hydra.main`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "decorated_main":
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("config_name")


def _import_callbacks(config: DictConfig) -> None:
    """Import the modules of the callbacks, which may register resolvers that the config needs."""
    with frozen_config.hydra_config(config):
        callbacks = OmegaConf.select(config, "hydra.callbacks") or {}
        for name in callbacks:
            try:
                _import_module_of(str(callbacks[name]._target_))
            except Exception as error:  # noqa: BLE001  (a module may raise anything; rank 0 fails with it below)
                sys.stderr.write(f"hydra.callbacks.{name}: {type(error).__name__}: {error}\n")


def _import_module_of(target: str) -> None:
    module, _, _ = target.rpartition(".")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        # The target is a nested class.
        if "." not in module or module.rpartition(".")[0] not in sys.modules:
            raise


def _log_as_sweep(
    logging: Mapping[str, Any], context: HydraContext, where: Callable[[str, str], tuple[str, str]]
) -> None:
    """Set up the launching process's logging; the job's own logging keeps what it does not set itself."""
    settings = OmegaConf.create(dict(logging))
    try:
        with hydra_state.redirected(where):
            hydra_state.log_as_sweep(settings.hydra_logging, settings.verbose, context)
    except Exception as error:  # noqa: BLE001  (a handler may raise anything, such as for a port in use)
        sys.stderr.write(f"hydra.hydra_logging cannot be set up in a rank: {type(error).__name__}: {error}\n")


def _keep_files_apart(config: DictConfig, own_files: hydra_state.OwnFiles) -> None:
    """Make Hydra skip its output files, and put the files that this rank logs to into the config."""
    with frozen_config.hydra_config(config):
        handlers = OmegaConf.select(config, "hydra.job_logging.handlers") or {}
        names = {name: handler.get("filename") for name, handler in handlers.items() if handler is not None}
        # A file name is relative to the directory of the job.
        folder = config.hydra.runtime.output_dir if hydra_state.changes_directory(config) else ""
    # The `hydra` node is read-only by now.
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.output_subdir = None
        for name, filename in names.items():
            if filename is not None:
                own, _ = own_files(os.path.abspath(os.path.join(folder, str(filename))), "a")
                config.hydra.job_logging.handlers[name].filename = quoting.escape_interpolations(own)


def _restore_hydra(body: Mapping[str, Any]) -> tuple[TaskFunction, HydraContext]:
    """Restore Hydra's state in this process as it was in the launching process."""
    from hydra.core.singleton import Singleton

    function, context = frozen_config.loads(body["task_function"])
    singletons = frozen_config.loads(body["singletons"])
    setup_globals()
    Singleton.set_state({**Singleton.get_state(), **singletons})
    return function, context


# Number of sweeps that began in this process, by function: those of the launcher, and those in a rank.
LAUNCHER_SWEEPS: Counter[tuple[str, str]] = Counter()
RANK_SWEEPS: Counter[tuple[str, str]] = Counter()


def identify(task_function: Any, sweeps: Counter[tuple[str, str]]) -> TaskId:
    """Identify the function of the sweep that begins now.

    Two functions can have the same name (a closure made twice), and one function can be swept twice, so the sweeps of
    each name are counted.

    Args:
        sweeps: Number of sweeps so far by name; updated in place.
    """
    function = inspect.unwrap(task_function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    # A callable object, such as hydra-zen's, is identified by its type.
    named = function if hasattr(function, "__qualname__") else type(function)
    name = (str(named.__module__), str(named.__qualname__))
    task = TaskId(*name, nth=sweeps[name])
    sweeps[name] += 1
    return task


if __name__ == "__main__":
    # Not this copy: what is pickled names the module, and there should be one of it.
    from hydra_plugins.hydra_ddp_subprocess_launcher.job import rank

    rank.run_function_rank(sys.argv[1:])
