"""A rank: load the payload, run the job, store the outcome, end the process.

It must not import what only the launching process needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobRuntime, run_job, setup_globals
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from . import _callbacks, _encoded, _files, _freeze, _outcome, _pickling, _signals, _tasks
from ._environment import JOB_NUM, PAYLOAD_DIGEST, RANK_PROCESS
from ._errors import LauncherError, StartError
from ._process_groups import GroupWatch
from ._specs import JOB_ID_TOKEN, Outcome, Payload, TaskId


def run_program_rank(
    run_dir: str,
    overrides: str | None,
    recipe: Mapping[str, str | None],
    task_function: TaskFunction,
    hydra_context: HydraContext,
) -> None:
    """Be a rank that runs the user's program: return only where the job belongs to another `hydra.main` of it.

    Args:
        run_dir: Run directory of the job, percent-encoded.
        overrides: Its overrides, percent-encoded; None: they were too long for a command.
        recipe: The options `config_name`, `hydra_overrides` and `task` of DDPRankSweeperConf.
        task_function: What this `hydra.main` decorates.
        hydra_context: Hydra's.

    Raises:
        SystemExit: when the job has ended; code 1 where it failed.
    """
    rank = _Rank(_encoded.decode(run_dir), overrides, _encoded.read_recipe(**recipe))
    if _tasks.identify(task_function, _tasks.RANK_SWEEPS) != rank.find_task():
        return
    rank.compose_missing(task_function, hydra_context)
    rank.run(task_function, hydra_context, _pickling.program_namespace(task_function))


def run_function_rank(argv: list[str]) -> NoReturn:
    """Be a rank without a program: the payload holds the job function.

    Args:
        argv: `run_dir=…` and perhaps `overrides=…`, percent-encoded.
    """
    arguments = dict(argument.split("=", 1) for argument in argv)
    rank = _Rank(_encoded.decode(arguments["run_dir"]), arguments.get("overrides"))
    try:
        payload = rank.load_payload()
    except LauncherError as error:
        sys.exit(str(error))
    sys.path[:] = payload.sys_path
    rank.run(None, None, None)


class _Rank:
    """One rank's part of one job."""

    def __init__(self, run_dir: str, overrides: str | None, recipe: _encoded.Recipe | None = None) -> None:
        needed = (PAYLOAD_DIGEST,) if recipe is None else (JOB_NUM, "RANK", "TORCHELASTIC_RUN_ID")
        missing = [name for name in needed if name not in os.environ]
        if missing:
            raise StartError(
                f"{missing[0]} is not set: `ddp_rank` is what the launcher's own ranks run, and not for use by hand "
                "without their environment. <run dir>/.ddp/job.json has the full command of each rank, and "
                "hydra.launcher.dry_run=true prints it."
            )
        self._paths = _files.JobPaths(run_dir)
        self._overrides = overrides
        # A payload is the job as the launcher froze it, and has the last word.
        self._recipe = None if PAYLOAD_DIGEST in os.environ else recipe
        self._rank = int(os.environ["RANK"])
        self._payload: Payload | None = None

    def find_task(self) -> TaskId | None:
        """Return which function of the program the job runs.

        Raises:
            LauncherError: as `load_payload`.
        """
        return self._recipe.task if self._recipe is not None else self.load_payload().task

    def compose_missing(self, task_function: TaskFunction, hydra_context: HydraContext) -> None:
        """Make the payload that a dry run did not write, from the config files as they are now.

        Raises:
            Exception: whatever composing raises.
        """
        if self._recipe is None:
            return
        overrides = _encoded.decode_overrides(self._overrides or "")
        # As `load_sweep_config` does for a job. That wants the sweep's own config, to which Hydra 1.4 compares it.
        config = hydra_context.config_loader.load_configuration(
            self._recipe.config_name, [*self._recipe.hydra_overrides, *overrides], RunMode.RUN
        )
        run_dir = self._paths.run_dir
        _freeze.freeze(config, int(os.environ[JOB_NUM]), run_dir)
        os.makedirs(self._paths.folder, exist_ok=True)
        main = _pickling.program_namespace(task_function)
        self._payload = Payload(
            overrides=overrides,
            run_dir=run_dir,
            task=self._recipe.task,
            task_name=str(JobRuntime.instance().get("name")),
            sys_path=(),
            # Nobody is there to compare it with the others'.
            check_config=False,
            body=_pickling.dumps({"config": config, "callbacks": None}, main),
        )

    def load_payload(self) -> Payload:
        """Read the payload and check that it belongs to this rank's command.

        Raises:
            LauncherError: when it is missing, damaged, or another job's.
        """
        payload = _files.read_payload(self._paths, os.environ[PAYLOAD_DIGEST])
        if self._overrides is not None and _encoded.decode_overrides(self._overrides) != payload.overrides:
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
        main: Mapping[str, Any] | None,
    ) -> NoReturn:
        """Run the job and end the process.

        A fork of it that leaves the job's function ends as well, and says nothing about the job.

        Args:
            task_function: The program's; None: it is in the payload.
            hydra_context: The program's; None: as `task_function`.
            main: Namespace of the program's `__main__`; None: there is no program.
        """
        process = os.getpid()
        self._claim(process)
        _signals.write_stacks_on_signal(self._paths.log(self._rank))
        groups = GroupWatch()
        try:
            outcome, code = self._run_job(task_function, hydra_context, main)
        except BaseException as error:  # noqa: BLE001  (whatever ends this rank is what the user must see)
            outcome, code = _outcome.failure(error, main), 1
        # The log first, as it may be all that can still be written; a program may have closed it.
        with contextlib.suppress(Exception):
            sys.stderr.write(outcome.traceback)
            sys.stderr.flush()
        if os.getpid() != process:
            raise SystemExit(code)
        if outcome.traceback:
            with contextlib.suppress(OSError):
                self._write_error_file(outcome)
        self._store(replace(outcome, alone=groups.ran_alone))
        raise SystemExit(code)

    def _claim(self, process: int) -> None:
        """Let what this process starts know that the job has its rank.

        Raises:
            SystemExit: when this process was started by one that has it.
        """
        earlier = os.environ.get(RANK_PROCESS, str(process))
        if earlier != str(process):
            raise SystemExit(
                f"Process {earlier}, which started this one, runs the job as rank {self._rank} already. Start other "
                "programs without the arguments of a rank, and call main() only if __name__ == '__main__'."
            )
        os.environ[RANK_PROCESS] = str(process)

    def _store(self, outcome: Outcome) -> None:
        """Store the outcome; where there is no room for it, that there is none.

        Raises:
            SystemExit: when it could not be stored.
        """
        run_id = os.environ["TORCHELASTIC_RUN_ID"]
        try:
            _files.write_outcome(self._paths, self._rank, replace(outcome, run_id=run_id))
        except OSError as error:
            why = f"its outcome cannot be stored: {error.strerror}: {self._paths.folder}"
            lost = Outcome(completed=False, summary=why, failed_at=time.time(), run_id=run_id)
            with contextlib.suppress(OSError):
                _files.write_outcome(self._paths, self._rank, lost)
            # Into the log, where there may be room for a line.
            raise SystemExit(f"rank {self._rank}: {why}") from None

    def _run_job(
        self,
        task_function: TaskFunction | None,
        hydra_context: HydraContext | None,
        main: Mapping[str, Any] | None,
    ) -> tuple[Outcome, int]:
        payload = self._payload
        assert payload is not None
        body = _pickling.loads(payload.body)
        config = body["config"]
        if payload.job_id is not None:
            _freeze.set_job_id(config, JOB_ID_TOKEN, payload.job_id, payload.run_dir)
        if task_function is None or hydra_context is None:
            task_function, hydra_context = _restore_hydra(body)
        hydra_context.callbacks = self._callbacks(config, body["callbacks"], main)
        JobRuntime.instance().set("name", payload.task_name)
        if self._rank > 0:
            self._keep_files_apart(config)
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
            return _outcome.after_exit(stop)
        return _outcome.outcome_of(job_return, main, with_value=self._rank == 0)

    def _callbacks(self, config: DictConfig, pickled: bytes | None, main: Mapping[str, Any] | None) -> Callbacks:
        """Return the sweep's callbacks in rank 0, so that each fires once a job; none in the others."""
        if self._rank > 0:
            return Callbacks()
        callbacks = Callbacks(config) if pickled is None else _pickling.loads(pickled)
        assert isinstance(callbacks, Callbacks)
        restarts, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        can_restart = int(restarts) < int(most)
        return _callbacks.RankCallbacks(callbacks, self._paths, main, can_restart=can_restart)

    def _keep_files_apart(self, config: DictConfig) -> None:
        """Let rank 0 alone write Hydra's files; what this rank logs goes beside its output."""
        with _freeze.hydra_config(config):
            handlers = OmegaConf.select(config, "hydra.job_logging.handlers") or {}
            names = {name: handler.get("filename") for name, handler in handlers.items()}
        # Hydra has made its node read-only by now.
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.output_subdir = None
            for name, filename in names.items():
                if filename is not None:
                    own = os.path.join(self._paths.folder, f"rank_{self._rank}.{os.path.basename(str(filename))}")
                    config.hydra.job_logging.handlers[name].filename = _freeze.escape_interpolations(own)

    def _write_resolved_config(self, config: DictConfig) -> None:
        with _freeze.hydra_config(config):
            resolved = _freeze.resolved_values(config)
        # Private, as it has what interpolations of the environment come to.
        _files.write_private(self._paths.resolved_config(self._rank), json.dumps(resolved).encode())

    def _write_error_file(self, outcome: Outcome) -> None:
        # The format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, for whoever reads it.
        message = {
            "message": outcome.summary,
            "extraInfo": {"py_callstack": outcome.traceback, "timestamp": str(int(outcome.failed_at or 0))},
        }
        _files.write_text(self._paths.error(self._rank), json.dumps({"message": message}))


def _restore_hydra(body: Mapping[str, Any]) -> tuple[TaskFunction, HydraContext]:
    """Make this process look to the job like the one that launched it."""
    from hydra.core.singleton import Singleton

    # Both before the state is set: loading imports the user's modules, which may register resolvers that it has.
    function, context = _pickling.loads(body["task_function"])
    singletons = _pickling.loads(body["singletons"])
    setup_globals()
    Singleton.set_state(singletons)
    return function, context


if __name__ == "__main__":
    # Not this copy: what is pickled names the module, and there should be one of it.
    from hydra_plugins.hydra_ddp_subprocess_launcher import _rank

    _rank.run_function_rank(sys.argv[1:])
