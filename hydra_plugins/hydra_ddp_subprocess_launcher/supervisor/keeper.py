"""A keeper: the process that owns one job. It starts the ranks, watches them, and ends all its descendants.

It never blocks on the launching process, which may be busy for seconds, or stopped.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..common import processes, signals
from ..common.protocol import (
    Channel,
    Forward,
    GroupReport,
    GroupSpec,
    Note,
    Preempt,
    RankSpec,
    RendezvousDir,
    Started,
    Stop,
)
from .heartbeat import Peers
from .stop_policy import Action, StopPolicy

# Seconds between two checks of the outcome files, and between two rounds of SIGKILL.
_LOOK_INTERVAL_S = 0.5
_KILL_INTERVAL_S = 0.01
# Seconds of SIGKILL after which remaining processes are named, and given up: one may belong to another user, or block
# on a dead disk.
_NAME_LEFT_S = 5.0
GIVE_UP_S = 60.0
_MOST_NAMED = 4
# Seconds within which a received signal and one to forward count as the same one, sent to all processes of a job.
_ONE_SIGNAL_S = 1.0
# Seconds until a signal of a cluster has reached all of them.
_SENT_TO_ALL_S = 0.3


class RankForked(BaseException):
    """Raised by a `StartRank` in a rank that is a fork of its keeper.

    It unwinds all frames of the keeper and the spawner and releases what they hold, so that the program runs with a
    clean stack and the interpreter ends the process as usual.
    """


# Starts one rank and returns its pid.
StartRank = Callable[[RankSpec], int]


def exec_rank(spec: RankSpec) -> int:
    """Start one rank as a new program and return its pid."""
    process = processes.start_rank(spec)
    # The keeper reaps all children itself; without a return code, Popen would wait for this one, too.
    process.returncode = 0
    return process.pid


def keep_job(sock: socket.socket, launcher: int, held: Sequence[int] = (), start_rank: StartRank = exec_rank) -> None:
    """Run one job from the spec that arrives on `sock` until no process of it is left, then report.

    Args:
        sock: This keeper's end of the socketpair to the launcher.
        launcher: Pid of the launching process.
        held: Descriptors that the ranks inherit, such as locks on their devices; perhaps those of a terminal
            (GroupSpec.terminal).
    """
    signals.reset_signals()
    processes.become_subreaper()
    processes.name_process("ddp-keeper")
    channel = Channel(sock)
    # Stop signals may be sent to all processes of an allocation; the others are forwarded by the launcher only.
    heard = (signal.SIGCHLD, *signals.STOP_SIGNALS, *signals.FORWARDED_SIGNALS)
    with signals.recorded_signals(heard) as arrived, selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ, "launcher")
        selector.register(arrived.wakeup, selectors.EVENT_READ, "signals")
        watch = processes.parent_watch(launcher)
        if watch is not None:
            selector.register(watch, selectors.EVENT_READ, "launcher ended")
        messages = _receive_spec(channel, selector)
        if messages:
            report = _Group(messages, channel, selector, arrived, held).run(start_rank)
            os.set_blocking(sock.fileno(), True)
            channel.send(report)


def _receive_spec(channel: Channel, selector: selectors.BaseSelector) -> list[object]:
    """Return the spec and any messages after it, such as `Stop`; an empty list if the launcher is gone."""
    while not channel.disconnected:
        for key, _ in selector.select():
            if key.data == "launcher ended":
                return []
        messages = channel.receive()
        if messages:
            return messages
    return []


class _Group:
    """The event loop over the processes of one job; StopPolicy makes the decisions."""

    def __init__(
        self,
        messages: Sequence[object],
        channel: Channel,
        selector: selectors.BaseSelector,
        arrived: signals.RecordedSignals,
        held: Sequence[int],
    ) -> None:
        spec, *self._orders = messages
        assert isinstance(spec, GroupSpec)
        self._spec = spec
        self._channel = channel
        self._selector = selector
        self._arrived = arrived
        split = len(held) - 3 if spec.terminal else len(held)
        self._held, self._terminal = tuple(held[:split]), tuple(held[split:])
        self._rules = StopPolicy(spec.ranks, spec.limits, time.monotonic())
        self._rank_of: dict[int, int] = {}
        self._began_at = time.time()
        self._unstored = set(spec.ranks)
        self._company = None
        if spec.rendezvous is not None:
            self._company = RemoteGroups(
                spec.rendezvous, self._rules, self._receive, lambda line: self._tell(Note(line))
            )
        self._hurried = False
        self._preempted = False
        self._heard_at: dict[int, float] = {}

    def run(self, start_rank: StartRank) -> GroupReport:
        self._tell(Started(os.getpid(), ()))
        self._obey(self._orders)
        if self._company is not None:
            self._company.meet()
        if self._rules.stopped is None:
            self._start_ranks(start_rank)
        else:
            self._rules.not_started()
        self._watch_ranks()
        left = processes.has_children()
        if left:
            self._tell(Note(f"process {_left()} cannot be ended, and may hold its devices"))
        if self._company is not None:
            return self._company.part(lambda: self._report(left), lambda: self._hurried or self._channel.disconnected)
        return self._report(left)

    def _report(self, left: bool) -> GroupReport:
        return replace(self._rules.report(), began_at=self._began_at, left=left)

    def _watch_ranks(self) -> None:
        action = Action.WAIT
        killing_since = math.inf
        named = waits = False
        while (self._rules.running or processes.has_children()) and time.monotonic() < killing_since + GIVE_UP_S:
            self._wait(action)
            self._reap()
            self._look_for_outcomes()
            action = self._rules.decide(time.monotonic())
            if action is Action.KILL:
                killing_since = min(killing_since, time.monotonic())
            self._act(action)
            if self._company is not None:
                self._company.tell()
            for line in self._rules.notes(time.monotonic()):
                self._tell(Note(line))
            left_s = None if waits else self._rules.leftovers_due(time.monotonic())
            if left_s is not None and processes.has_children():
                waits = True
                grace = f"up to {left_s:.0f} s (hydra.launcher.grace_period_s), then kills it"
                self._tell(Note(f"its ranks have ended, but not what they started: waits for {_named_left()} {grace}"))
            if time.monotonic() > killing_since + _NAME_LEFT_S and not named:
                named = True
                self._tell(Note(f"process {_left()} does not end although it was killed"))

    def _act(self, action: Action) -> None:
        if action is Action.DUMP_STACKS:
            pids = processes.topmost(self._pids_of(self._rules.running), _shows_stacks)
            signals.send_signal(pids, signals.STACKS_SIGNAL or 0)
            signals.send_signal(pids, signal.SIGCONT)
        elif action is Action.TERMINATE:
            failing = [pid for pid, rank in self._rank_of.items() if rank in self._rules.failing]
            everyone = processes.descendants([pid for pid in processes.own_children() if pid not in failing])
            signals.send_signal(everyone, signal.SIGTERM)
            # A stopped process would not handle it.
            signals.send_signal(everyone, signal.SIGCONT)
        elif action is Action.KILL:
            signals.send_signal(processes.descendants(processes.own_children()), signal.SIGKILL)

    def _pids_of(self, ranks: Sequence[int]) -> list[int]:
        return [pid for pid, rank in self._rank_of.items() if rank in ranks]

    def _start_ranks(self, start_rank: StartRank) -> None:
        spec = self._spec
        for rank in spec.ranks:
            try:
                pid = start_rank(spec.rank(rank, self._held, self._terminal if rank == 0 else ()))
            except OSError as error:
                self._rules.start_failed(rank, f"{error.strerror}: {error.filename or spec.argv[0]}", time.monotonic())
                break
            except ValueError as error:
                # An invalid name or value, for example from hydra.job.env_set.
                self._rules.start_failed(rank, f"its command or environment cannot be used: {error}", time.monotonic())
                break
            self._rank_of[pid] = rank
        for descriptor in self._terminal:
            os.close(descriptor)
        self._tell(Started(os.getpid(), tuple(self._rank_of)))

    def _tell(self, message: object) -> None:
        self._channel.send(message)

    def _wait(self, action: Action) -> None:
        timeout = _LOOK_INTERVAL_S
        due = self._rules.next_due()
        if due is not None:
            timeout = min(timeout, max(0.0, due - time.monotonic()))
        if action is Action.KILL:
            timeout = _KILL_INTERVAL_S
        self._receive(timeout)
        if self._company is not None:
            self._company.look()

    def _receive(self, timeout: float) -> None:
        self._selector.modify(self._channel, self._interest(), "launcher") if not self._channel.disconnected else None
        events = {key.data for key, _ in self._selector.select(timeout)}
        if "signals" in events:
            for number in self._arrived.take():
                if number in signals.STOP_SIGNALS:
                    self._look_for_outcomes()
                    self._rules.signalled(signal.Signals(number).name, time.monotonic())
                elif number in self._spec.rank_options.ignored_signals:
                    self._preempt(number, sent=True)
                else:
                    self._heard_at[number] = time.monotonic()
        if "launcher" in events:
            self._obey(self._channel.receive())
            self._channel.flush()
        if "launcher ended" in events or self._channel.disconnected:
            self._lose_launcher()

    def _interest(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.wants_to_write else 0)

    def _lose_launcher(self) -> None:
        # These stay readable forever: unregister them, so that the loop can sleep again.
        for key in list(self._selector.get_map().values()):
            if key.data != "signals":
                self._selector.unregister(key.fileobj)
        self._channel.disconnected = True
        self._rules.launcher_lost(time.monotonic())

    def _obey(self, messages: Sequence[object]) -> None:
        for message in messages:
            if isinstance(message, Stop):
                # Do not wait for other nodes, either.
                self._hurried |= message.at_once
                self._look_for_outcomes()
                self._rules.stop_ordered(time.monotonic(), at_once=message.at_once, detail=message.detail)
            elif isinstance(message, Forward):
                wanted = self._rules.running if message.rank is None else [message.rank]
                # If this process received it too, it was sent to all processes, as a cluster does.
                if time.monotonic() - self._heard_at.get(message.signal, -math.inf) > _ONE_SIGNAL_S:
                    signals.send_signal(self._pids_of(wanted), message.signal)
            elif isinstance(message, Preempt):
                self._preempt(message.signal, sent=self._comes_here(message.signal))

    def _comes_here(self, number: int) -> bool:
        """Return whether a signal that the launcher received reaches this process too, because it was sent to all."""
        until = time.monotonic() + _SENT_TO_ALL_S
        while not self._arrived.has(number) and time.monotonic() < until:
            time.sleep(_KILL_INTERVAL_S)
        return self._arrived.has(number)

    def _preempt(self, number: int, *, sent: bool) -> None:
        """End the group because of a preemption signal, which the cluster has sent to the ranks itself if `sent`."""
        if self._preempted:
            return
        self._preempted = True
        running = self._pids_of(self._rules.running)
        heard = processes.topmost(running, lambda pid: signals.handles(pid, number))
        if not sent:
            signals.send_signal(heard, number)
        self._look_for_outcomes()
        self._rules.preempted(signal.Signals(number).name, time.monotonic(), warned=bool(heard))

    def _reap(self) -> None:
        for pid, code in processes.reap():
            rank = self._rank_of.pop(pid, None)
            if rank is not None:
                # A rank stores its outcome before it exits, so check the files first.
                self._look_for_outcomes()
                self._rules.rank_exited(rank, code, time.monotonic())

    def _look_for_outcomes(self) -> None:
        for rank in sorted(self._unstored):
            place = rank - self._spec.first_rank
            failed = os.path.exists(self._spec.failure_files[place])
            if failed:
                self._rules.failure_stored(rank, time.monotonic())
            if failed or os.path.exists(self._spec.outcome_files[place]):
                self._unstored.discard(rank)
                self._rules.outcome_stored(rank, time.monotonic())


def _shows_stacks(pid: int) -> bool:
    return signals.STACKS_SIGNAL is not None and signals.handles(pid, signals.STACKS_SIGNAL)


def _named_left() -> str:
    pids = processes.descendants(processes.own_children())
    names = [f"{processes.name_of(pid)} (pid {pid})" for pid in pids[:_MOST_NAMED]]
    more = len(pids) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _left() -> str:
    return " ".join(map(str, processes.descendants(processes.own_children())))


# Seconds between two checks of the other nodes: while this node has ranks, and after they have ended.
_NODES_INTERVAL_S = 0.1
_PART_INTERVAL_S = 0.5
# Seconds until a note names the nodes that have not joined.
_MISSING_NOTE_S = 10.0


class RemoteGroups:
    """The keepers of a job's other nodes.

    Args:
        rendezvous_dir: Directory in which the nodes exchange reports.
        hear: Waits for the given number of seconds for signals and messages, and handles them.
        note: Takes a line for the user.
    """

    def __init__(
        self,
        rendezvous_dir: RendezvousDir,
        rules: StopPolicy,
        hear: Callable[[float], None],
        note: Callable[[str], None],
    ) -> None:
        self._rendezvous_dir = rendezvous_dir
        self._rules = rules
        self._receive = hear
        self._note = note
        self._peers: Peers | None = None
        self._look_at = 0.0

    def meet(self) -> None:
        """Wait until all nodes have joined or the group is stopped, as it is if the directory cannot be used."""
        began = time.monotonic()
        try:
            self._peers = Peers(self._rendezvous_dir, processes.host(), began)
        except OSError as error:
            why = f"{error.strerror}: {error.filename}, where its nodes meet"
            self._rules.start_failed(self._rules.running[0], why, began)
            return
        note_at = began + _MISSING_NOTE_S
        while self._peers.missing and self._rules.stopped is None:
            self._receive(_NODES_INTERVAL_S)
            self._peers.refresh()
            self.look()
            if self._peers.missing and time.monotonic() > note_at:
                note_at = math.inf
                self._note(f"waits for {', '.join(self._peers.missing)}")
        self._rules.begin(time.monotonic())

    def look(self) -> None:
        """Process the reports of the other nodes, if a check is due."""
        now = time.monotonic()
        if self._peers is None or now < self._look_at:
            return
        self._look_at = now + _NODES_INTERVAL_S
        self._peers.look(now)
        if self._peers.failed:
            self._rules.node_failed(self._peers.failed, now)
        elif lost := self._peers.lost(now):
            self._rules.node_lost(", ".join(lost), now)
        elif self._peers.ended_well:
            self._rules.node_ended(now)
        self.tell()

    def tell(self) -> None:
        """Report to the other nodes that this group is being ended, if theirs must end, too."""
        if self._peers is not None and self._rules.concerns_all:
            self._peers.tell_failure(self._rules.report())

    def part(self, report: Callable[[], GroupReport], gives_up: Callable[[], bool]) -> GroupReport:
        """Report how this group has ended, wait for the other nodes, and return the report about all of them.

        Args:
            report: Returns the report of this group.
            gives_up: Returns whether to stop waiting.
        """
        if self._peers is None:
            return report()
        self.tell()
        self._peers.tell_end(report())
        lost: list[str] = []
        while not gives_up() and set(self._peers.unfinished) - set(lost):
            self._receive(_PART_INTERVAL_S)
            self.look()
            lost = self._peers.lost(time.monotonic())
        self.tell()
        self._peers.close()
        # Call `report` again: the job may have been stopped meanwhile.
        return self._peers.merge(report())
