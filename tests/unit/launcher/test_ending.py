"""How the launching process ends."""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.signals import leave


class Sweep:
    """What is on the stack at a Ctrl-C."""


def test_who_catches_ctrl_c_keeps_nothing_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep is forgotten, and with it its preloader; the exception, and it alone, would end without a traceback."""
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[0]))
    monkeypatch.setattr(sys, "__excepthook__", sys.excepthook)

    def interrupted() -> weakref.ref[Sweep]:
        sweep = Sweep()
        try:
            leave(signal.SIGINT)
        except KeyboardInterrupt as error:
            sys.excepthook(type(error), error, error.__traceback__)
        return weakref.ref(sweep)

    sweep = interrupted()
    gc.collect()
    assert sweep() is None
    assert shown == []
    for other in (KeyboardInterrupt(), ValueError()):
        sys.excepthook(type(other), other, None)
    assert shown == [KeyboardInterrupt, ValueError]
