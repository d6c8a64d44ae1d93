"""When a keeper ends its group, played as written histories of events on a clock of our own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import (
    OUTPUT_LOST,
    GroupReport,
    Limits,
    RankExit,
    StopReason,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor.stop_policy import (
    DUMP_STACKS_S,
    FAILED_RANK_HUNG_S,
    LAUNCHER_LOST_GRACE_S,
    LEFTOVERS_NOTE_S,
    STILL_RUNNING_NOTE_S,
    TEARDOWN_NOTE_S,
    TEARDOWN_TIMEOUT_S,
    Action,
    StopPolicy,
)

BEGAN = 1000.0
GRACE_S = 15.0
LIMITS = Limits(GRACE_S)


@dataclass
class Played:
    """A group's rules on a clock that the test moves, as the keeper's loop asks them.

    Attributes:
        nproc: Number of ranks.
        limits: The job's limits.
        actions: What was asked for, with the seconds since the start.
        notes: The lines for the user, likewise.
    """

    nproc: int = 2
    limits: Limits = LIMITS
    actions: list[tuple[float, Action]] = field(default_factory=list)
    notes: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rules = StopPolicy(range(self.nproc), self.limits, BEGAN)

    def look(self, after_s: float) -> Action:
        """Ask at a time, and keep what is not WAIT."""
        action = self.rules.decide(BEGAN + after_s)
        if action is not Action.WAIT:
            self.actions.append((after_s, action))
        self.notes += [(after_s, line) for line in self.rules.notes(BEGAN + after_s)]
        return action

    def exit(self, after_s: float, rank: int, code: int) -> Action:
        self.rules.rank_exited(rank, code, BEGAN + after_s)
        return self.look(after_s)

    def end_well(self, after_s: float, rank: int) -> Action:
        self.rules.outcome_stored(rank, BEGAN + after_s)
        return self.exit(after_s, rank, 0)

    def stored(self, after_s: float, *ranks: int) -> Action:
        for rank in ranks:
            self.rules.outcome_stored(rank, BEGAN + after_s)
        return self.look(after_s)

    def stop(self, after_s: float, *, at_once: bool = False, detail: str = "") -> Action:
        self.rules.stop_ordered(BEGAN + after_s, at_once=at_once, detail=detail)
        return self.look(after_s)

    def lost(self, after_s: float) -> Action:
        self.rules.launcher_lost(BEGAN + after_s)
        return self.look(after_s)

    @property
    def due(self) -> float | None:
        """Seconds after the start at which the rules want to be asked again."""
        due = self.rules.next_due()
        return None if due is None else due - BEGAN

    @property
    def report(self) -> GroupReport:
        return self.rules.report()


# --- every order of events

EVENTS = ("exit", "stored", "deadline", "stop", "lost")
ORDERS = list(itertools.permutations(EVENTS))
# Closer together than any grace period, so that each event meets the group in the state that the earlier ones left.
STEP_S = 0.0625


def first_stop(order: Sequence[str], code: int) -> str:
    """Return the event that ends the group."""
    bad = code not in (0, OUTPUT_LOST) or order.index("exit") < order.index("stored")
    return next(event for event in order if event in ("deadline", "stop", "lost") or (event == "exit" and bad))


@pytest.mark.parametrize("code", [0, OUTPUT_LOST, 3, -9])
def test_every_order_of_events(code: int) -> None:
    """The first event that ends the group is its reason; later ones only bring the SIGKILL nearer."""
    for order in ORDERS:
        check_order(order, code)


def check_order(order: Sequence[str], code: int) -> None:
    """Play one order of the five events, with rank 1 exiting with `code`, and rank 0 killed at the end."""
    times = {event: STEP_S * (place + 1) for place, event in enumerate(order)}
    played = Played(limits=Limits(GRACE_S, timeout_s=times["deadline"]))
    for event in order:
        now = times[event]
        if event == "exit":
            played.exit(now, 1, code)
        elif event == "stored":
            played.stored(now, 0, 1)
        elif event == "deadline":
            played.look(now)
        elif event == "stop":
            played.stop(now, detail="SIGINT")
        else:
            played.lost(now)

    first = first_stop(order, code)
    kill_at = times["lost"] + LAUNCHER_LOST_GRACE_S
    if first == "deadline":
        # Who hangs shows its stacks first.
        term_at = times[first] + DUMP_STACKS_S
        assert played.due == term_at
        played.look(term_at)
        assert played.actions == [(times[first], Action.DUMP_STACKS), (term_at, Action.TERMINATE)], order
    else:
        assert played.actions == [(times[first], Action.TERMINATE)], order
    assert played.due == kill_at
    assert played.look(kill_at - 0.001) is Action.WAIT
    assert played.look(kill_at) is Action.KILL
    assert played.look(kill_at + 0.001) is Action.KILL
    played.exit(kill_at + 0.002, 0, -9)

    reasons = {
        "exit": (StopReason.RANK_FAILED, 1, ""),
        "stop": (StopReason.ORDERED, None, "SIGINT"),
        "lost": (StopReason.LAUNCHER_LOST, None, ""),
    }
    running = "rank 0" if times["exit"] < times["deadline"] else "ranks 0, 1"
    reason, cause, detail = reasons.get(first, (StopReason.TIMEOUT, None, f"{running} still running"))
    stopped = times[first] < times["exit"]
    exits = (RankExit(1, code, times["exit"], stopped), RankExit(0, -9, kill_at + 0.002, stopped=True))
    assert [(found.rank, found.code, found.stopped) for found in played.report.exits] == [
        (found.rank, found.code, found.stopped) for found in exits
    ]
    assert [found.after_s for found in played.report.exits] == pytest.approx([found.after_s for found in exits])
    assert (played.report.reason, played.report.cause, played.report.detail) == (reason, cause, detail)


# --- single rules


def test_a_good_end() -> None:
    """Ranks that all exit with 0 end the job without a reason; what they left gets SIGTERM, then SIGKILL."""
    played = Played()
    assert played.look(0) is Action.WAIT
    assert played.due is None
    assert played.end_well(3, 1) is Action.WAIT
    assert played.rules.running == [0]
    assert played.end_well(4, 0) is Action.TERMINATE
    assert played.due == 4 + GRACE_S
    assert played.look(5) is Action.WAIT
    assert played.look(4 + GRACE_S) is Action.KILL
    ended = (RankExit(1, 0, 3.0, False), RankExit(0, 0, 4.0, False))
    assert played.report == GroupReport(ended, None, None, finished=True)


def test_the_first_bad_exit_is_the_cause() -> None:
    """Of several bad exits the earliest is the cause; the others were stopped by us."""
    played = Played(nproc=3)
    played.exit(1, 2, 1)
    played.exit(2, 0, 7)
    played.exit(3, 1, -15)
    assert played.report == GroupReport(
        (RankExit(2, 1, 1.0, False), RankExit(0, 7, 2.0, True), RankExit(1, -15, 3.0, True)), StopReason.RANK_FAILED, 2
    )
    assert played.actions == [(1, Action.TERMINATE)]


def test_a_good_exit_without_an_outcome() -> None:
    """A program that leaves before the job is done has failed, also with exit code 0: the others would wait for it."""
    played = Played()
    assert played.exit(1, 1, 0) is Action.TERMINATE
    assert (played.report.reason, played.report.cause) == (StopReason.RANK_FAILED, 1)


def test_output_that_was_lost_at_the_end() -> None:
    """A rank that had stored its outcome and could not write its last output has ended well; the others go on."""
    played = Played()
    played.stored(1, 1)
    assert played.exit(2, 1, OUTPUT_LOST) is Action.WAIT
    assert played.end_well(3, 0) is Action.TERMINATE
    assert (played.report.reason, played.report.cause, played.report.finished) == (None, None, True)
    played = Played()
    played.rules.failure_stored(1, BEGAN + 1)
    played.stored(1, 1)
    assert played.exit(2, 1, OUTPUT_LOST) is Action.TERMINATE
    assert (played.report.reason, played.report.cause) == (StopReason.RANK_FAILED, 1)


@pytest.mark.parametrize(("stored", "finished"), [((0, 1), True), ((0,), False)])
def test_what_was_finished_before_the_end(stored: tuple[int, ...], finished: bool) -> None:
    """The report tells whether every rank had stored its outcome before the group was ended."""
    played = Played(limits=Limits(GRACE_S, timeout_s=10))
    played.stored(1, *stored)
    played.look(10)
    played.stored(11, 0, 1)
    for rank in (0, 1):
        played.exit(12, rank, 0)
    assert (played.report.reason, played.report.finished) == (StopReason.TIMEOUT, finished)


def test_a_signal_to_the_keeper() -> None:
    """A signal for a whole allocation gives the ranks their grace, and no second SIGTERM for half of it."""
    played = Played()
    played.rules.signalled("SIGTERM", BEGAN + 1)
    assert played.look(1) is Action.WAIT
    assert played.due == 1 + GRACE_S / 2
    assert played.look(1 + GRACE_S / 2) is Action.TERMINATE
    assert played.due == 1 + GRACE_S
    assert (played.report.reason, played.report.detail) == (StopReason.SIGNALLED, "SIGTERM")


def test_stacks_without_a_grace_period() -> None:
    """A rank that hangs shows where, also when it then is killed at once."""
    played = Played(limits=Limits(0.0, timeout_s=10))
    assert played.look(10) is Action.DUMP_STACKS
    assert played.look(10 + DUMP_STACKS_S) is Action.KILL


def test_a_bad_exit_after_every_outcome_ends_the_group_too() -> None:
    """A crash in tear-down is reported like any other bad exit: what it means is not for the keeper to say."""
    played = Played()
    played.stored(1, 0, 1)
    assert played.exit(2, 0, -11) is Action.TERMINATE
    assert (played.report.reason, played.report.cause) == (StopReason.RANK_FAILED, 0)


@pytest.mark.parametrize(
    ("orders", "kills"),
    [
        ([("stop", 1.0)], 1 + GRACE_S),
        ([("stop", 1.0), ("stop", 3.0)], 1 + GRACE_S),
        ([("stop", 1.0), ("kill", 3.0)], 3.0),
        ([("kill", 1.0), ("stop", 3.0)], 1.0),
        ([("lost", 1.0)], 1 + LAUNCHER_LOST_GRACE_S),
        ([("lost", 1.0), ("stop", 1.1)], 1 + LAUNCHER_LOST_GRACE_S),
        ([("stop", 1.0), ("lost", 2.0)], 2 + LAUNCHER_LOST_GRACE_S),
        ([("stop", 1.0), ("lost", GRACE_S + 0.9)], 1 + GRACE_S),
    ],
)
def test_when_a_group_is_killed(orders: list[tuple[str, float]], kills: float) -> None:
    """A later order can bring the SIGKILL nearer, never put it off."""
    played = Played()
    for order, after_s in orders:
        if order == "lost":
            played.lost(after_s)
        else:
            played.stop(after_s, at_once=order == "kill")
    assert played.due == pytest.approx(kills)


def test_killed_at_once() -> None:
    """An order to stop at once skips SIGTERM; an order that comes second does not send another SIGTERM."""
    played = Played()
    assert played.stop(1, at_once=True) is Action.KILL
    played = Played()
    assert played.stop(1) is Action.TERMINATE
    assert played.stop(2) is Action.WAIT
    assert played.stop(3, at_once=True) is Action.KILL


def test_no_grace() -> None:
    """Without a grace period a failed group is killed straight away, also when the launcher is lost."""
    assert Played(limits=Limits(0.0)).exit(1, 0, 1) is Action.KILL
    assert Played(limits=Limits(0.0)).lost(1) is Action.KILL
    assert Played(limits=Limits(0.2)).lost(1) is Action.TERMINATE
    played = Played(limits=Limits(0.2))
    played.lost(1)
    assert played.due == pytest.approx(1.2)


def test_the_first_order_has_the_last_word() -> None:
    """A reason and its detail stay, whatever is ordered later."""
    played = Played()
    played.stop(1, detail="SIGINT")
    played.stop(2, at_once=True, detail="SIGTERM")
    played.lost(3)
    assert (played.report.reason, played.report.detail) == (StopReason.ORDERED, "SIGINT")


# --- a start that fails


def test_no_rank_could_be_started() -> None:
    """When rank 0 cannot be started there is nothing to wait for, and rank 0 is the cause."""
    played = Played(nproc=3)
    played.rules.start_failed(0, "No such file or directory: nsys", BEGAN)
    assert played.rules.running == []
    assert played.report == GroupReport((), StopReason.START_FAILED, 0, "No such file or directory: nsys")


def test_a_later_rank_could_not_be_started() -> None:
    """When rank 2 cannot be started the ranks before it are ended and those behind it are not waited for."""
    played = Played(nproc=4)
    played.rules.start_failed(2, "no", BEGAN + 1)
    assert played.rules.running == [0, 1]
    assert played.look(1) is Action.TERMINATE
    played.exit(2, 0, -15)
    played.exit(3, 1, 1)
    assert played.rules.running == []
    assert played.report == GroupReport(
        (RankExit(0, -15, 2.0, True), RankExit(1, 1, 3.0, True)), StopReason.START_FAILED, 2, "no"
    )


# --- time limits


def test_timeout() -> None:
    """`timeout_min` ends a job to the second, and says who still ran."""
    played = Played(nproc=3, limits=Limits(GRACE_S, timeout_s=60))
    assert played.due == 60
    played.end_well(10, 1)
    assert played.look(59.9) is Action.WAIT
    assert played.look(60) is Action.DUMP_STACKS
    assert played.due == 60 + DUMP_STACKS_S
    assert played.look(60 + DUMP_STACKS_S) is Action.TERMINATE
    assert played.look(60 + DUMP_STACKS_S + GRACE_S) is Action.KILL
    assert (played.report.reason, played.report.cause) == (StopReason.TIMEOUT, None)
    assert played.report.detail == "ranks 0, 2 still running"


def test_exit_timeout() -> None:
    """`exit_timeout_s` counts from the first good exit, not from later ones."""
    played = Played(nproc=3, limits=Limits(GRACE_S, exit_timeout_s=5))
    assert played.due is None
    played.end_well(10, 2)
    assert played.due == 15
    played.end_well(13, 1)
    assert played.look(14.9) is Action.WAIT
    assert played.look(15) is Action.DUMP_STACKS
    assert played.look(15 + DUMP_STACKS_S) is Action.TERMINATE
    assert (played.report.reason, played.report.detail) == (StopReason.EXIT_TIMEOUT, "rank 0 still running")


def test_no_limits() -> None:
    """Without limits ranks may go on for ever after the first one ended, with one line after a minute."""
    played = Played()
    played.end_well(10, 1)
    for minute in range(1, 100):
        assert played.look(10 + 60.0 * minute) is Action.WAIT
    assert played.due is None
    assert played.notes == [
        (
            10 + STILL_RUNNING_NOTE_S,
            "rank 0 still running 60 s after the first rank ended, for which there is no limit (exit_timeout_s)",
        ),
    ]


def test_lingering() -> None:
    """Ranks that do not exit after the last outcome are named after 10 s and ended after 300 s."""
    played = Played(nproc=3)
    played.stored(1, 0, 2)
    assert played.due is None
    played.stored(5, 1)
    assert played.due == 5 + TEARDOWN_TIMEOUT_S
    played.exit(6, 0, 0)
    played.look(5 + TEARDOWN_NOTE_S - 0.1)
    assert played.notes == []
    played.look(5 + TEARDOWN_NOTE_S)
    played.look(5 + TEARDOWN_NOTE_S + 1)
    line = "every rank has finished, but ranks 1, 2 do not exit: ended in 290 s, and the results count"
    assert played.notes == [(15, line)]
    assert played.look(5 + TEARDOWN_TIMEOUT_S - 0.1) is Action.WAIT
    assert played.look(5 + TEARDOWN_TIMEOUT_S) is Action.DUMP_STACKS
    assert played.look(5 + TEARDOWN_TIMEOUT_S + DUMP_STACKS_S) is Action.TERMINATE
    assert (played.report.reason, played.report.cause) == (StopReason.TEARDOWN_TIMEOUT, None)


def test_a_failed_rank_that_does_not_end() -> None:
    """A rank that stored an error and does not end is the cause; it is said to hang only if it has to be killed."""
    played = Played(nproc=3)
    played.rules.failure_stored(2, BEGAN + 5)
    played.rules.failure_stored(1, BEGAN + 6)
    assert played.due == 5 + FAILED_RANK_HUNG_S
    assert played.look(5 + FAILED_RANK_HUNG_S - 0.1) is Action.WAIT
    assert played.look(5 + FAILED_RANK_HUNG_S) is Action.TERMINATE
    assert (played.report.reason, played.report.cause) == (StopReason.RANK_FAILED, 2)
    assert played.look(5 + FAILED_RANK_HUNG_S + GRACE_S) is Action.DUMP_STACKS
    assert played.look(5 + FAILED_RANK_HUNG_S + GRACE_S + DUMP_STACKS_S - 0.1) is Action.WAIT
    assert played.look(5 + FAILED_RANK_HUNG_S + GRACE_S + DUMP_STACKS_S) is Action.KILL
    assert (played.report.reason, played.report.cause) == (StopReason.FAILED_RANK_HUNG, 2)


def test_a_failed_rank_that_is_slow_to_end_does_not_hang() -> None:
    """Neither one that ends within the grace period, nor one for which that is cut short, is said to hang."""
    for cut_short in (False, True):
        played = Played(nproc=2)
        played.rules.failure_stored(1, BEGAN + 5)
        played.look(5 + FAILED_RANK_HUNG_S)
        if cut_short:
            played.rules.stop_ordered(BEGAN + 7, at_once=True)
            assert played.look(7) is Action.KILL
        else:
            played.exit(5 + FAILED_RANK_HUNG_S + GRACE_S - 0.1, 1, 1)
        assert (played.report.reason, played.report.cause) == (StopReason.RANK_FAILED, 1)


def test_a_failed_rank_that_ends() -> None:
    """A rank that stored an error and ends is judged by its exit code."""
    played = Played()
    played.rules.failure_stored(1, BEGAN + 5)
    assert played.exit(6, 1, 1) is Action.TERMINATE
    assert (played.report.reason, played.report.cause) == (StopReason.RANK_FAILED, 1)


def test_a_failed_rank_that_exits_with_0() -> None:
    """A rank that stored an error has failed, whatever its exit code, and is no first good exit."""
    played = Played(nproc=3, limits=Limits(GRACE_S, exit_timeout_s=5))
    played.rules.failure_stored(1, BEGAN + 1)
    assert played.rules.failing == [1]
    assert played.exit(1.5, 1, 0) is Action.TERMINATE
    assert played.rules.failing == []
    assert (played.report.reason, played.report.cause) == (StopReason.RANK_FAILED, 1)
    assert played.due == 1.5 + GRACE_S


def test_outcomes_alone_end_nothing() -> None:
    """As long as one rank has stored nothing, the others may linger."""
    played = Played()
    played.stored(1, 0)
    assert played.look(TEARDOWN_TIMEOUT_S * 10) is Action.WAIT
    assert played.notes == []


def test_the_earliest_limit_is_due_first() -> None:
    """Of several limits the nearest is what the loop sleeps for."""
    played = Played(limits=Limits(GRACE_S, timeout_s=1000, exit_timeout_s=100))
    assert played.due == 1000
    played.stored(10, 0, 1)
    assert played.due == 10 + TEARDOWN_TIMEOUT_S
    played.exit(20, 0, 0)
    assert played.due == 120


def test_a_stopped_group_has_no_further_limits_or_notes() -> None:
    """Once a group is being ended, no limit changes its reason and no line says that it still runs."""
    played = Played(limits=Limits(1000.0, timeout_s=100, exit_timeout_s=50))
    played.stored(1, 0, 1)
    played.exit(2, 0, 0)
    played.stop(3, detail="SIGINT")
    for after_s in (60.0, 110.0, 500.0):
        played.look(after_s)
    assert played.notes == []
    assert played.report.reason is StopReason.ORDERED
    assert played.actions == [(3, Action.TERMINATE)]


def test_running() -> None:
    """The ranks that run are those that have not exited, in order."""
    played = Played(nproc=4)
    assert played.rules.running == [0, 1, 2, 3]
    played.exit(1, 2, 0)
    played.exit(2, 0, 1)
    assert played.rules.running == [1, 3]


# --- a job on several nodes


def test_another_node_fails() -> None:
    """The group is ended like one whose own rank has failed, and the others are told of it as well."""
    played = Played()
    assert not played.rules.concerns_all
    played.rules.node_failed("node 1 (b)", BEGAN + 5)
    assert played.rules.concerns_all
    played.look(5)
    assert played.due == 5 + GRACE_S
    played.exit(6, 0, -15)
    played.exit(7, 1, -15)
    report = played.report
    assert (report.reason, report.detail, report.cause) == (StopReason.NODE_FAILED, "node 1 (b)", None)
    assert all(ended.stopped for ended in report.exits)


def test_another_node_is_lost() -> None:
    """Nobody waits for it: its ranks cannot be met any more."""
    played = Played()
    played.rules.node_lost("node 1 (b)", BEGAN + 5)
    assert played.look(5) is Action.TERMINATE
    assert (played.report.reason, played.rules.concerns_all) == (StopReason.NODE_LOST, True)


def test_the_ranks_of_another_node_have_ended() -> None:
    """From then on the limit for the rest counts, as if they were ranks of this node; the first end counts."""
    played = Played(limits=Limits(GRACE_S, exit_timeout_s=10))
    assert played.due is None
    played.rules.node_ended(BEGAN + 3)
    played.rules.node_ended(BEGAN + 9)
    played.end_well(11, 0)
    assert played.due == 13
    played.look(13)
    assert (played.report.reason, played.report.detail) == (StopReason.EXIT_TIMEOUT, "rank 1 still running")


def test_stopped_after_its_own_ranks_have_ended() -> None:
    """The other nodes may still run: they are told, and the report says why the job was ended."""
    played = Played()
    played.end_well(1, 0)
    played.end_well(2, 1)
    assert (played.report.reason, played.rules.concerns_all) == (None, False)
    played.stop(60, detail="SIGINT")
    played.lost(61)
    assert played.rules.concerns_all
    report = played.report
    assert (report.reason, report.detail, report.finished) == (StopReason.ORDERED, "SIGINT", True)


def test_what_lingers_concerns_no_other_node() -> None:
    """Its ranks have finished, as those of the others may."""
    played = Played()
    played.stored(1, 0, 1)
    played.look(1 + TEARDOWN_TIMEOUT_S)
    assert (played.report.reason, played.rules.concerns_all) == (StopReason.TEARDOWN_TIMEOUT, False)


@pytest.mark.parametrize(
    ("warned", "terms_at", "kills_at"), [(False, 5, 5 + GRACE_S), (True, 5 + GRACE_S, 5 + 2 * GRACE_S)]
)
def test_preempted(warned: bool, terms_at: float, kills_at: float) -> None:
    """Ranks that handle the cluster's signal have the grace period for it, before SIGTERM and a second one."""
    played = Played()
    played.rules.preempted("SIGUSR1", BEGAN + 5, warned=warned)
    played.look(5)
    while played.due is not None and not any(action is Action.KILL for _, action in played.actions):
        played.look(played.due)
    assert played.actions == [(terms_at, Action.TERMINATE), (kills_at, Action.KILL)]
    assert (played.report.reason, played.report.detail) == (StopReason.PREEMPTED, "SIGUSR1")


def test_preempted_while_it_is_being_ended() -> None:
    """The first reason stays, and nobody is given more time."""
    played = Played()
    played.stop(1)
    played.rules.preempted("SIGUSR1", BEGAN + 2, warned=True)
    assert played.due == 1 + GRACE_S
    assert played.report.reason is StopReason.ORDERED


def test_time_begins_with_the_ranks() -> None:
    """Waiting for other nodes takes none of a job's time."""
    played = Played(limits=Limits(GRACE_S, timeout_s=30))
    played.rules.begin(BEGAN + 1000)
    assert played.due == 1030
    played.exit(1010, 0, 1)
    assert played.report.exits == (RankExit(0, 1, 10.0, stopped=False),)


def test_a_group_that_never_started() -> None:
    """One that was stopped while it waited for the others has no ranks to wait for."""
    played = Played()
    played.stop(1, detail="SIGINT")
    played.rules.not_started()
    assert played.rules.running == []
    assert (played.report.reason, played.report.exits, played.report.finished) == (StopReason.ORDERED, (), False)
    assert played.rules.concerns_all


def test_when_what_is_left_behind_is_worth_a_line() -> None:
    """Not while ranks run, not before it has had a moment to obey, and not once it is killed."""
    played = Played(nproc=1)
    assert played.rules.leftovers_due(BEGAN + 1) is None
    assert played.end_well(2, 0) is Action.TERMINATE
    assert played.rules.leftovers_due(BEGAN + 2) is None
    due = played.rules.leftovers_due(BEGAN + 2 + LEFTOVERS_NOTE_S)
    assert due == pytest.approx(GRACE_S - LEFTOVERS_NOTE_S)
    assert played.look(2 + GRACE_S) is Action.KILL
    assert played.rules.leftovers_due(BEGAN + 2 + GRACE_S) is None
