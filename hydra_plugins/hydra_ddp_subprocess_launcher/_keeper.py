"""A keeper: the process that owns one job. It starts the ranks, watches them, and ends everything below it.

Nothing here waits for the launching process, which may be busy for a second at a time, or stopped.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from . import _process, _signals
from ._channel import Channel
from ._company import Company
from ._orders import Forward, Note, Preempt, Started, Stop
from ._rules import Action, GroupRules
from ._specs import GroupReport, GroupSpec

# Seconds between two looks at the outcome files, and between two rounds of SIGKILL.
_LOOK_INTERVAL_S = 0.5
_KILL_INTERVAL_S = 0.01
# Seconds of SIGKILL after which what is left is named, and given up: another user's process, or one that waits for a
# dead disk.
_NAME_LEFT_S = 5.0
GIVE_UP_S = 60.0
_MOST_NAMED = 4
# Seconds within which a signal that comes here and one that is to be forwarded are one, sent to all processes of a job.
_ONE_SIGNAL_S = 1.0
# Seconds for one of a cluster to come to all of them.
_SENT_TO_ALL_S = 0.3


class RankForked(BaseException):
    """Raised by a `StartRank` in a rank that is a fork of its keeper.

    It leaves all functions of keeper and spawner, and what they hold, so that the program is called by nobody, and the
    interpreter ends the process as it always does.
    """


# Starts one rank, with all its variables, its log file and what it inherits, and returns its pid.
StartRank = Callable[[GroupSpec, Mapping[str, str], str, _process.Inherited], int]


def exec_rank(spec: GroupSpec, environment: Mapping[str, str], log_file: str, inherited: _process.Inherited) -> int:
    """Start one rank as a program of its own."""
    process = _process.start_rank(spec.argv, spec.cwd, environment, log_file, inherited)
    # Children are reaped all together; without a return code Popen would wait for this one, too.
    process.returncode = 0
    return process.pid


def keep_job(sock: socket.socket, launcher: int, held: Sequence[int] = (), start_rank: StartRank = exec_rank) -> None:
    """Run one job from the spec that arrives on `sock` until no process of it is left, then report.

    Args:
        sock: This keeper's end of the socketpair to the launcher.
        launcher: Pid of the launching process.
        held: Descriptors that the ranks inherit, such as locks on their devices; perhaps those of a terminal
            (GroupSpec.terminal).
        start_rank: Starts one rank.
    """
    _signals.reset_signals()
    _process.become_subreaper()
    _process.name_process("ddp-keeper")
    channel = Channel(sock)
    # Those to stop may be for all processes of an allocation; the others only the launcher forwards.
    heard = (signal.SIGCHLD, *_signals.STOP_SIGNALS, *_signals.FORWARDED_SIGNALS)
    with _signals.recorded_signals(heard) as arrived, selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ, "launcher")
        selector.register(arrived.wakeup, selectors.EVENT_READ, "signals")
        watch = _process.parent_watch(launcher)
        if watch is not None:
            selector.register(watch, selectors.EVENT_READ, "launcher ended")
        messages = _receive_spec(channel, selector)
        if messages:
            report = _Group(messages, channel, selector, arrived, held).run(start_rank)
            os.set_blocking(sock.fileno(), True)
            channel.send(report)


def _receive_spec(channel: Channel, selector: selectors.BaseSelector) -> list[object]:
    """Return the spec and what came with it, such as an order to stop; empty: the launcher is gone."""
    while not channel.lost:
        for key, _ in selector.select():
            if key.data == "launcher ended":
                return []
        messages = channel.receive()
        if messages:
            return messages
    return []


class _Group:
    """The event loop over one job's processes; what it decides is in GroupRules."""

    def __init__(
        self,
        messages: Sequence[object],
        channel: Channel,
        selector: selectors.BaseSelector,
        arrived: _signals.RecordedSignals,
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
        self._rules = GroupRules(spec.ranks, spec.limits, time.monotonic())
        self._rank_of: dict[int, int] = {}
        self._began_at = time.time()
        self._unstored = set(spec.ranks)
        self._company = None
        if spec.meeting is not None:
            self._company = Company(spec.meeting, self._rules, self._hear, lambda line: self._tell(Note(line)))
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
        left = _process.has_children()
        if left:
            self._tell(Note(f"process {_left()} cannot be ended, and may hold its devices"))
        if self._company is not None:
            return self._company.part(lambda: self._report(left), lambda: self._hurried or self._channel.lost)
        return self._report(left)

    def _report(self, left: bool) -> GroupReport:
        return replace(self._rules.report(), began_at=self._began_at, left=left)

    def _watch_ranks(self) -> None:
        action = Action.WAIT
        killing_since = math.inf
        named = waits = False
        while (self._rules.running or _process.has_children()) and time.monotonic() < killing_since + GIVE_UP_S:
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
            if left_s is not None and _process.has_children():
                waits = True
                grace = f"up to {left_s:.0f} s (hydra.launcher.grace_period_s), then kills it"
                self._tell(Note(f"its ranks have ended, but not what they started: waits for {_named_left()} {grace}"))
            if time.monotonic() > killing_since + _NAME_LEFT_S and not named:
                named = True
                self._tell(Note(f"process {_left()} does not end although it was killed"))

    def _act(self, action: Action) -> None:
        if action is Action.DUMP:
            pids = _process.topmost(self._pids_of(self._rules.running), _shows_stacks)
            _signals.send_signal(pids, _signals.STACKS_SIGNAL or 0)
            _signals.send_signal(pids, signal.SIGCONT)
        elif action is Action.TERMINATE:
            failing = [pid for pid, rank in self._rank_of.items() if rank in self._rules.failing]
            everyone = _process.descendants([pid for pid in _process.own_children() if pid not in failing])
            _signals.send_signal(everyone, signal.SIGTERM)
            # One that is stopped could not obey.
            _signals.send_signal(everyone, signal.SIGCONT)
        elif action is Action.KILL:
            _signals.send_signal(_process.descendants(_process.own_children()), signal.SIGKILL)

    def _pids_of(self, ranks: Sequence[int]) -> list[int]:
        return [pid for pid, rank in self._rank_of.items() if rank in ranks]

    def _start_ranks(self, start_rank: StartRank) -> None:
        spec = self._spec
        for rank, own, log_file in zip(spec.ranks, spec.rank_environments, spec.log_files, strict=True):
            environment = {**spec.environment, **own}
            inherited = _process.Inherited(self._held, self._terminal if rank == 0 else (), spec.ignored)
            try:
                pid = start_rank(spec, environment, log_file, inherited)
            except OSError as error:
                self._rules.start_failed(rank, f"{error.strerror}: {error.filename or spec.argv[0]}", time.monotonic())
                break
            except ValueError as error:
                # A name or value that no process can have, as from hydra.job.env_set.
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
        self._hear(timeout)
        if self._company is not None:
            self._company.look()

    def _hear(self, timeout: float) -> None:
        self._selector.modify(self._channel, self._interest(), "launcher") if not self._channel.lost else None
        events = {key.data for key, _ in self._selector.select(timeout)}
        if "signals" in events:
            for number in self._arrived.take():
                if number in _signals.STOP_SIGNALS:
                    self._look_for_outcomes()
                    self._rules.signalled(signal.Signals(number).name, time.monotonic())
                elif number in self._spec.ignored:
                    self._preempt(number, sent=True)
                else:
                    self._heard_at[number] = time.monotonic()
        if "launcher" in events:
            self._obey(self._channel.receive())
            self._channel.flush()
        if "launcher ended" in events or self._channel.lost:
            self._lose_launcher()

    def _interest(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.wants_to_write else 0)

    def _lose_launcher(self) -> None:
        # These stay readable for ever: without them the loop can sleep again.
        for key in list(self._selector.get_map().values()):
            if key.data != "signals":
                self._selector.unregister(key.fileobj)
        self._channel.lost = True
        self._rules.launcher_lost(time.monotonic())

    def _obey(self, messages: Sequence[object]) -> None:
        for message in messages:
            if isinstance(message, Stop):
                # Then nobody shall wait for other nodes, either.
                self._hurried |= message.at_once
                self._look_for_outcomes()
                self._rules.stop_ordered(time.monotonic(), at_once=message.at_once, detail=message.detail)
            elif isinstance(message, Forward):
                wanted = self._rules.running if message.rank is None else [message.rank]
                # Where this process has it, too, somebody sent it to all, as a cluster does.
                if time.monotonic() - self._heard_at.get(message.signal, -math.inf) > _ONE_SIGNAL_S:
                    _signals.send_signal(self._pids_of(wanted), message.signal)
            elif isinstance(message, Preempt):
                self._preempt(message.signal, sent=self._comes_here(message.signal))

    def _comes_here(self, number: int) -> bool:
        """Return whether a signal that the launcher tells of comes to this process, too, as it was sent to all."""
        until = time.monotonic() + _SENT_TO_ALL_S
        while not self._arrived.has(number) and time.monotonic() < until:
            time.sleep(_KILL_INTERVAL_S)
        return self._arrived.has(number)

    def _preempt(self, number: int, *, sent: bool) -> None:
        """Have the group ended for a signal of the cluster, which has sent it to the ranks itself if `sent`."""
        if self._preempted:
            return
        self._preempted = True
        running = self._pids_of(self._rules.running)
        heard = _process.topmost(running, lambda pid: _signals.handles(pid, number))
        if not sent:
            _signals.send_signal(heard, number)
        self._look_for_outcomes()
        self._rules.preempted(signal.Signals(number).name, time.monotonic(), warned=bool(heard))

    def _reap(self) -> None:
        for pid, code in _process.reap():
            rank = self._rank_of.pop(pid, None)
            if rank is not None:
                # What a rank stored, it stored before it ended: look first.
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
    return _signals.STACKS_SIGNAL is not None and _signals.handles(pid, _signals.STACKS_SIGNAL)


def _named_left() -> str:
    pids = _process.descendants(_process.own_children())
    names = [f"{_process.name_of(pid)} (pid {pid})" for pid in pids[:_MOST_NAMED]]
    more = len(pids) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _left() -> str:
    return " ".join(map(str, _process.descendants(_process.own_children())))
