"""Stop a sweep from outside its launching process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from . import _commands, _machine
from ._claim import Holder
from ._records import JobState
from ._watching import CommandError, Sight, Watch, in_words
from ._words import counted

# Seconds for the launching process to take note of a signal, which it cannot while it composes a job.
_NOTED_WITHIN_S = 5.0
# Seconds after which a second signal is one of its own; within 0.3 s both would be one order.
_APART_S = 0.5
_LOOK_INTERVAL_S = 0.05


def stop_sweep(watch: Watch, say: Callable[[str], object], *, now: bool) -> None:
    """Ask a running sweep to end, and say what will happen.

    Args:
        watch: On the sweep.
        say: Is given the lines.
        now: Kill its jobs at once.

    Raises:
        CommandError: when there is nothing to stop, or that cannot be done from here.
    """
    sight = watch.look()
    holder = _reachable(sight)
    stopping = bool(sight.record.stopped_by)
    if stopping and not now:
        say(f"It is being stopped already, after {sight.record.stopped_by}. `hydra-ddp stop --now` kills its jobs.\n")
        return
    say(_what_happens(sight, now=now))
    if not stopping:
        _send(holder)
    if now and _waits_for_more(watch, holder):
        _send(holder)


def _reachable(sight: Sight) -> Holder:
    """Return the launching process of a live sweep, if it can have a signal from here."""
    holder, where = sight.holder, sight.paths.sweep_dir
    if holder is None or not sight.live:
        raise CommandError(f"No sweep runs in {where}, so there is nothing to stop. {in_words(sight)}")
    if not holder.here:
        line = _commands.shell_words(["ssh", holder.host, "hydra-ddp", "stop", "-d", where])
        raise CommandError(f"The sweep runs on another host. Stop it there:\n{line}")
    if not _is_same(holder):
        raise CommandError(
            f"The sweep is held by process {holder.pid} on {holder.host}, but that process cannot be seen from here: "
            "it runs in another container, perhaps. Stop it there."
        )
    return holder


def _is_same(holder: Holder) -> bool:
    """Return whether a process is that one and not a later one with its number."""
    return holder.start == _machine.process_start(holder.pid) and _machine.is_running(holder.pid)


def _what_happens(sight: Sight, *, now: bool) -> str:
    holder, record = sight.holder, sight.record
    assert holder is not None
    running = len(record.in_state(JobState.RUNNING, JobState.PAUSED))
    jobs = "no job runs" if not running else counted(running, "running job")
    grace = record.began.grace_period_s if record.began is not None else None
    patience = "hydra.launcher.grace_period_s" if grace is None else f"{grace:g} s (hydra.launcher.grace_period_s)"
    if any(job.job_id for job in record.jobs.values()):
        jobs = "its jobs on the cluster are cancelled, or left there (hydra.launcher.on_interrupt)"
    elif running:
        jobs += " will be killed at once" if now else f" will get SIGTERM, and SIGKILL after {patience}"
    return f"Sending SIGTERM to process {holder.pid}: {jobs}; no other job will start.\n"


def _send(holder: Holder) -> None:
    if not _is_same(holder):
        return  # It has just ended, which is what was wanted.
    try:
        os.kill(holder.pid, signal.SIGTERM)
        # One that was stopped (Ctrl-Z) could not take it.
        os.kill(holder.pid, signal.SIGCONT)
    except ProcessLookupError:
        return
    except PermissionError:
        raise CommandError(f"Process {holder.pid} is another user's. Only that user, or root, can stop it.") from None


def _waits_for_more(watch: Watch, holder: Holder) -> bool:
    """Wait until a second signal counts; return whether the sweep still runs."""
    began = time.monotonic()
    while time.monotonic() - began < _NOTED_WITHIN_S:
        if not _is_same(holder):
            return False
        if watch.look().record.stopped_by:
            break
        time.sleep(_LOOK_INTERVAL_S)
    time.sleep(_APART_S)
    return True
