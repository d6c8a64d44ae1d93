"""Signals are recorded for a loop and put back after it, reset after a fork, and said in words."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common import signals

if TYPE_CHECKING:
    from support.runner import Runner

MODULE = signals.__name__


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "signal 9 (SIGKILL)"),
        (-11, "signal 11 (SIGSEGV)"),
        (-15, "signal 15 (SIGTERM)"),
        (-99, "signal 99 (unknown)"),
    ],
)
def test_an_exit_in_words(code: int, words: str) -> None:
    """An exit code is a number, a signal has its name; an unknown one is no error."""
    assert signals.describe_exit(code) == words


def test_signals_are_recorded_and_handlers_put_back() -> None:
    """Within the block signals only arrive, in order, and wake a selector; after it the earlier handlers hold."""
    heard: list[int] = []
    before = {
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number)),
        signal.SIGUSR2: signal.signal(signal.SIGUSR2, signal.SIG_DFL),
    }
    try:
        earlier = {number: signal.getsignal(number) for number in before}
        with signals.recorded_signals(list(before)) as arrived:
            assert select.select([arrived.wakeup], [], [], 0)[0] == []
            for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(os.getpid(), number)
            assert select.select([arrived.wakeup], [], [], 5)[0] == [arrived.wakeup]
            assert arrived.take() == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2]
            assert arrived.take() == []
            assert select.select([arrived.wakeup], [], [], 0)[0] == []
        assert {number: signal.getsignal(number) for number in before} == earlier
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_handlers_are_put_back_after_an_error() -> None:
    """An error within the block leaves neither our handlers nor our wake-up descriptor nor a descriptor open."""
    open_before = sorted(os.listdir("/proc/self/fd"))
    handler, wakeup = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)

    def fail() -> None:
        with signals.recorded_signals(signals.STOP_SIGNALS):
            assert signal.getsignal(signal.SIGTERM) is not handler
            raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        fail()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.set_wakeup_fd(wakeup) == wakeup
    assert sorted(os.listdir("/proc/self/fd")) == open_before


def test_an_ignored_signal_stays_ignored() -> None:
    """What `nohup` or a shell's `&` had ignored is neither recorded nor reset."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.recorded_signals([signal.SIGHUP]) as arrived:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            assert arrived.take() == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_recorded() -> None:
    """A sweep in another thread, where Python allows no handlers, runs without them."""
    seen = []

    def run() -> None:
        with signals.recorded_signals(signals.STOP_SIGNALS) as arrived:
            seen.append(arrived.take())

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [[]]
    assert signal.getsignal(signal.SIGINT) is handler


def test_many_signals_do_not_block() -> None:
    """A loop that is busy while thousands of signals arrive loses none and is not stopped by a full pipe."""
    before = signal.getsignal(signal.SIGUSR1)
    with signals.recorded_signals([signal.SIGUSR1]) as arrived:
        for _ in range(70_000):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert len(arrived.take()) == 70_000
        assert select.select([arrived.wakeup], [], [], 0)[0] == []
    assert signal.getsignal(signal.SIGUSR1) is before


def test_reset_signals(runner: Runner) -> None:
    """After a fork or an exec, handlers and mask are forgotten; what is ignored stays so, but for SIGCHLD."""
    code = f"""
import signal
from {MODULE} import reset_signals
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(number, lambda *args: None)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGCHLD}})
reset_signals()
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGCHLD", "SIGHUP", "SIGUSR2"):
    print(name, signal.getsignal(getattr(signal, name)).name)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    assert runner.python("-c", code).output.split("\n") == [
        "SIGTERM SIG_DFL",
        "SIGINT SIG_DFL",
        "SIGUSR1 SIG_DFL",
        "SIGCHLD SIG_DFL",
        "SIGHUP SIG_IGN",
        "SIGUSR2 SIG_IGN",
        "set()",
        "",
    ]


def test_sending_to_who_is_gone(runner: Runner) -> None:
    """A process that has ended in the meantime is no error, and keeps no other from its signal."""
    gone = runner.start("true")
    gone.communicate()
    alive = runner.start("sleep", "1000")
    signals.send_signal([gone.pid, alive.pid], signal.SIGTERM)
    alive.communicate()
    assert alive.returncode == -signal.SIGTERM


def test_stacks_on_a_signal(runner: Runner, tmp_path: Path) -> None:
    """A rank that hangs writes where; a process that does not know the signal is left alone, not ended by it."""
    log = tmp_path / "rank.log"
    log.write_text("")
    code = f"""
import sys, time
from {MODULE} import write_stacks_on_signal
write_stacks_on_signal({str(log)!r})
def the_place_where_it_hangs():
    print("ready", flush=True)
    time.sleep(1000)
the_place_where_it_hangs()
"""
    rank, other = runner.start(sys.executable, "-c", code), runner.start("sleep", "1000")
    assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    assert signals.STACKS_SIGNAL is not None
    assert [signals.handles(one.pid, signals.STACKS_SIGNAL) for one in (rank, other)] == [True, False]
    signals.send_signal([rank.pid], signals.STACKS_SIGNAL)
    runner.wait_until(lambda: "the_place_where_it_hangs" in log.read_text(), what="the stacks")
    # A signal may be on its way for a moment.
    time.sleep(0.2)
    assert rank.poll() is None and other.poll() is None
    for process in (rank, other):
        process.kill()
        process.communicate()
