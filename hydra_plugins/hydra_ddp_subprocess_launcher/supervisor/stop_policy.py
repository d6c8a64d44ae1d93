"""Rules for when a keeper ends its group: pure functions of events and a clock, without processes."""

from __future__ import annotations

from enum import Enum

from ..common.protocol import GroupReport, Limits, RankExit, StopReason
from ..common.text import list_numbers

# Seconds from SIGTERM to SIGKILL when the launching process is gone, because no process waits for the results.
LAUNCHER_LOST_GRACE_S = 0.5
# Seconds after the first rank's successful exit until a note names the ranks that still run.
STILL_RUNNING_NOTE_S = 60.0
# Seconds for a rank that stored an error to exit by itself; then the others, for which it may be waiting, are ended.
FAILED_RANK_HUNG_S = 1.0
# Seconds between the signal that makes ranks write their stacks into their logs and SIGTERM.
DUMP_STACKS_S = 0.5
# Seconds for processes that the ranks left behind to exit on SIGTERM, before a note says that they are waited for.
LEFTOVERS_NOTE_S = 0.5
# Seconds after the last outcome was stored until a note names the lingering ranks, and until the group is ended.
TEARDOWN_NOTE_S = 10.0
TEARDOWN_TIMEOUT_S = 300.0


class Action(Enum):
    """What a keeper does to all its descendants."""

    WAIT = "wait"
    DUMP_STACKS = "have the ranks write their stacks into their logs"
    TERMINATE = "send SIGTERM"
    KILL = "send SIGKILL"


# Stop reasons that imply a hang; dump stacks first.
_HANGS = (StopReason.TIMEOUT, StopReason.EXIT_TIMEOUT, StopReason.TEARDOWN_TIMEOUT)


class StopPolicy:
    """Decide when and how to end one group. All times are seconds of the same monotonic clock."""

    def __init__(self, ranks: range, limits: Limits, now: float) -> None:
        self._ranks = ranks
        self._limits = limits
        self._began = now
        self._exits: list[RankExit] = []
        self._last_exit: float | None = None
        self._stored: set[int] = set()
        self._all_stored_at: float | None = None
        self._finished = False
        self._first_good_exit: float | None = None
        self._reason: StopReason | None = None
        # A stop reason that came after all ranks had ended: the groups of other nodes may still run.
        self._late: tuple[StopReason, str] | None = None
        self._cause: int | None = None
        self._detail = ""
        self._failures: dict[int, float] = {}
        self._kill_at: float | None = None
        # When SIGTERM is due; None for at once, without a delay for stacks or a signal.
        self._term_at: float | None = None
        self._dumped = False
        # Whether the grace period was cut short.
        self._hurried = False
        self._termed = False
        self._noted: set[str] = set()

    @property
    def running(self) -> list[int]:
        """Ranks whose process has not exited."""
        ended = {ended.rank for ended in self._exits}
        return [rank for rank in self._ranks if rank not in ended]

    @property
    def failing(self) -> list[int]:
        """Ranks that have stored an error and still run: they are about to exit, and may be cleaning up."""
        return [rank for rank in self.running if rank in self._failures]

    def rank_exited(self, rank: int, code: int, now: float) -> None:
        """Record that the process of a rank exited."""
        stopped = self._kill_at is not None
        self._last_exit = now
        ended = RankExit(rank, code, now - self._began, stopped)
        self._exits.append(ended)
        # Exit code 0 without an outcome is a failure: the program exited before the job was done.
        if ended.reached_end and rank in self._stored and rank not in self._failures:
            if self._first_good_exit is None:
                self._first_good_exit = now
        elif not stopped:
            self._cause = rank
            self._stop(StopReason.RANK_FAILED, now, self._limits.grace_period_s)

    def outcome_stored(self, rank: int, now: float) -> None:
        """Record that a rank stored the outcome of its part of the job."""
        self._stored.add(rank)
        if len(self._stored) == len(self._ranks) and self._all_stored_at is None:
            self._all_stored_at = now

    def failure_stored(self, rank: int, now: float) -> None:
        """Record that a rank stored an error, after which it should exit."""
        self._failures.setdefault(rank, now)

    def start_failed(self, rank: int, detail: str, now: float) -> None:
        """Record that a rank, and therefore those after it, could not be started."""
        self._cause = rank
        self._ranks = range(self._ranks.start, rank)
        self._stop(StopReason.START_FAILED, now, self._limits.grace_period_s, detail)

    def begin(self, now: float) -> None:
        """Record that the ranks are started only now."""
        self._began = now

    def not_started(self) -> None:
        """Record that no rank was started, because the group was stopped before."""
        self._ranks = range(self._ranks.start, self._ranks.start)

    def stop_ordered(self, now: float, *, at_once: bool, detail: str = "") -> None:
        """Stop the group on the launcher's order: SIGTERM and the grace period, or SIGKILL at once."""
        self._stop(StopReason.ORDERED, now, 0.0 if at_once else self._limits.grace_period_s, detail)

    def signalled(self, detail: str, now: float) -> None:
        """Stop the group on a signal that was sent to the keeper alone, or to every process of an allocation.

        The ranks may already handle the same signal, so they get SIGTERM only after half of the grace period.
        """
        if self._kill_at is None:
            self._term_at = now + self._limits.grace_period_s / 2
        self._stop(StopReason.SIGNALLED, now, self._limits.grace_period_s, detail)

    def preempted(self, detail: str, now: float, *, warned: bool) -> None:
        """End the group because the cluster wants its nodes back.

        Args:
            detail: Name of the preemption signal.
            warned: Whether a rank handles that signal. It then gets one grace period before SIGTERM, and another after.
        """
        patience_s = self._limits.grace_period_s if warned else 0.0
        if self._kill_at is None:
            self._term_at = now + patience_s
        self._stop(StopReason.PREEMPTED, now, patience_s + self._limits.grace_period_s, detail)

    def launcher_lost(self, now: float) -> None:
        """Record that the launching process is gone."""
        self._stop(StopReason.LAUNCHER_LOST, now, min(LAUNCHER_LOST_GRACE_S, self._limits.grace_period_s))

    def node_ended(self, now: float) -> None:
        """Record that all ranks of another node of the job have exited successfully."""
        if self._first_good_exit is None:
            self._first_good_exit = now

    def node_failed(self, node: str, now: float) -> None:
        """Record that the group of another node of the job is being ended."""
        self._stop(StopReason.NODE_FAILED, now, self._limits.grace_period_s, node)

    def node_lost(self, detail: str, now: float) -> None:
        """Record that another node of the job has exceeded the heartbeat timeout."""
        self._stop(StopReason.NODE_LOST, now, self._limits.grace_period_s, detail)

    @property
    def stopped(self) -> StopReason | None:
        """Why the group is being ended, or None if it is not."""
        return self._reason

    @property
    def concerns_all(self) -> bool:
        """Whether the groups of the job's other nodes must be ended, too."""
        return self._reason not in (None, StopReason.TEARDOWN_TIMEOUT) or self._late is not None

    def _stop(self, reason: StopReason, now: float, grace_s: float, detail: str = "") -> None:
        # Keep the first reason; a later one can only bring SIGKILL forward.
        if self._kill_at is None:
            self._reason, self._detail, self._kill_at = reason, detail, now + grace_s
            # An outcome stored from now on may be incomplete because of our SIGTERM.
            self._finished = self._all_stored_at is not None
        else:
            self._hurried |= now + grace_s < self._kill_at
            self._kill_at = min(self._kill_at, now + grace_s)
            if self._reason is None and self._late is None:
                self._late = reason, detail

    def decide(self, now: float) -> Action:
        """Return the action that is due: stacks and SIGTERM once, SIGKILL at each call from the deadline on."""
        self._apply_limits(now)
        if not self.running and self._kill_at is None:
            # Processes that the ranks left behind are ended like a stopped group.
            self._kill_at = now + self._limits.grace_period_s
            self._finished = self._all_stored_at is not None
        if self._kill_at is None:
            return Action.WAIT
        if self._reason in _HANGS and not self._dumped:
            self._dumped = True
            self._term_at = now + DUMP_STACKS_S
            self._kill_at += DUMP_STACKS_S
            return Action.DUMP_STACKS
        if now >= self._kill_at:
            if self._reason is StopReason.RANK_FAILED and self._cause in self.failing and not self._hurried:
                # It was not just slow to exit: nothing held it up for the whole grace period.
                self._reason = StopReason.FAILED_RANK_HUNG
                self._kill_at += DUMP_STACKS_S
                return Action.DUMP_STACKS
            return Action.KILL
        if not self._termed and (self._term_at is None or now >= self._term_at):
            self._termed = True
            return Action.TERMINATE
        return Action.WAIT

    def _apply_limits(self, now: float) -> None:
        if self._kill_at is not None or not self.running:
            return
        for reason, due in self._limit_times():
            if due is not None and now >= due:
                detail = f"{list_numbers('rank', self.running)} still running"
                if reason is StopReason.RANK_FAILED:
                    self._cause, detail = self._first_lingering_failure(), ""
                self._stop(reason, now, self._limits.grace_period_s, detail)
                return

    def _first_lingering_failure(self) -> int | None:
        lingering = [rank for rank in self._failures if rank in self.running]
        return min(lingering, key=self._failures.__getitem__, default=None)

    def _limit_times(self) -> list[tuple[StopReason, float | None]]:
        def after(start: float | None, seconds: float | None) -> float | None:
            return None if start is None or seconds is None else start + seconds

        failed = self._first_lingering_failure()
        return [
            (StopReason.RANK_FAILED, after(None if failed is None else self._failures[failed], FAILED_RANK_HUNG_S)),
            (StopReason.TIMEOUT, after(self._began, self._limits.timeout_s)),
            (StopReason.EXIT_TIMEOUT, after(self._first_good_exit, self._limits.exit_timeout_s)),
            (StopReason.TEARDOWN_TIMEOUT, after(self._all_stored_at, TEARDOWN_TIMEOUT_S)),
        ]

    def notes(self, now: float) -> list[str]:
        """Return the notes for the user that are due, each once."""
        if self._kill_at is not None or not self.running:
            return []
        running = list_numbers("rank", self.running)
        unlimited = ", for which there is no limit (exit_timeout_s)" if self._limits.exit_timeout_s is None else ""
        left_s = TEARDOWN_TIMEOUT_S - TEARDOWN_NOTE_S
        does = "does" if len(self.running) == 1 else "do"
        due = {
            "lingering": (
                self._all_stored_at,
                TEARDOWN_NOTE_S,
                f"every rank has finished, but {running} {does} not exit: ended in {left_s:g} s, and the results count",
            ),
            "running": (
                self._first_good_exit,
                STILL_RUNNING_NOTE_S,
                f"{running} still running {STILL_RUNNING_NOTE_S:.0f} s after the first rank ended{unlimited}",
            ),
        }
        lines = []
        for key, (start, seconds, line) in due.items():
            if start is not None and now >= start + seconds and key not in self._noted:
                self._noted.add(key)
                lines.append(line)
        return lines

    def leftovers_due(self, now: float) -> float | None:
        """Return the seconds left to wait for processes that the ranks left behind, or None if no note is due."""
        last_exit = self._last_exit
        if self.running or last_exit is None or self._kill_at is None or not self._termed:
            return None
        left_s = self._kill_at - now
        return left_s if now >= last_exit + LEFTOVERS_NOTE_S and left_s > 0 else None

    def next_due(self) -> float | None:
        """Return when `decide` could next return something else without a new event, or None if never."""
        if self._kill_at is not None:
            waiting = self._term_at is not None and not self._termed
            return min(self._kill_at, self._term_at) if waiting else self._kill_at  # type: ignore[type-var]
        return min((due for _, due in self._limit_times() if due is not None), default=None)

    def report(self) -> GroupReport:
        """Return the final report, for when no process is left."""
        reason, detail = (self._reason, self._detail) if self._late is None else self._late
        return GroupReport(tuple(self._exits), reason, self._cause, detail, finished=self._finished)
