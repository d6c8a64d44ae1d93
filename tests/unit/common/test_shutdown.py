"""What signals to stop ask for, and how the process ends then."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.signals import ONE_ORDER_S, Shutdown, ShutdownController

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
STOP, KILL, IGNORE = Shutdown.STOP, Shutdown.KILL, Shutdown.IGNORE
LATER = 2 * ONE_ORDER_S
AT_ONCE = ONE_ORDER_S / 2


@pytest.mark.parametrize(
    ("arrived", "orders"),
    [
        pytest.param([(INT, 0.0)], [STOP], id="one"),
        pytest.param([(INT, 0.0), (INT, LATER)], [STOP, KILL], id="once more"),
        pytest.param([(TERM, 0.0), (INT, LATER), (HUP, 2 * LATER)], [STOP, KILL, KILL], id="any other one"),
        pytest.param([(TERM, 0.0), (HUP, AT_ONCE)], [STOP, IGNORE], id="of a service manager"),
        pytest.param([(INT, 0.0), (INT, AT_ONCE), (INT, LATER)], [STOP, IGNORE, KILL], id="passed on by a wrapper"),
    ],
)
def test_orders(arrived: list[tuple[int, float]], orders: list[Shutdown]) -> None:
    """The first signal stops; one that comes with it is the same order, a later one kills."""
    controller = ShutdownController()
    assert not controller.stopped and controller.name == ""
    assert [controller.receive(number, 1000.0 + at) for number, at in arrived] == orders
    assert controller.stopped
    assert controller.name == signal.Signals(arrived[0][0]).name


@pytest.fixture(params=[INT, TERM, HUP], ids=lambda number: signal.Signals(number).name)
def stopped_by(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal that has the handler with which Python begins."""
    number: int = request.param
    default = signal.default_int_handler if number == INT else signal.SIG_DFL
    before = signal.signal(number, default)
    yield number
    signal.signal(number, before)


def test_nothing_has_come() -> None:
    """The process goes on."""
    ShutdownController().leave_if_stopped()


def test_how_the_process_ends(stopped_by: int) -> None:
    """As Python ends for Ctrl-C, and with the shell's exit code for the others; a later signal changes nothing."""
    controller = ShutdownController()
    controller.receive(stopped_by, 0.0)
    controller.receive(TERM if stopped_by != TERM else INT, 5.0)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        controller.leave_if_stopped()
    if stopped_by == INT:
        assert raised.type is KeyboardInterrupt
    else:
        assert isinstance(raised.value, SystemExit) and raised.value.code == 128 + stopped_by


def test_a_handler_of_the_program(stopped_by: int) -> None:
    """It decides first: what it raises ends the process, and what it does is done once."""
    calls: list[int] = []
    signal.signal(stopped_by, lambda number, _frame: calls.append(number))
    controller = ShutdownController()
    controller.receive(stopped_by, 0.0)
    with pytest.raises(SystemExit):
        controller.leave_if_stopped()
    assert calls == [stopped_by]
