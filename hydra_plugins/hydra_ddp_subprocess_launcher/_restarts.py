"""Jobs between two starts: they keep their devices, and wait until what the last start left there is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ._devices import DeviceGate
from ._plan import PlannedJob
from ._results import Verdict
from ._start import Attempt


@dataclass(frozen=True)
class Pause:
    """A job that is to be started once more.

    Attributes:
        plan: The job.
        devices: Which it keeps.
        following: The start that follows.
        verdict: How the last one ended.
    """

    plan: PlannedJob
    devices: tuple[str, ...]
    following: Attempt
    verdict: Verdict


class Restarts:
    """The jobs of a batch that are between two starts.

    Args:
        gate: Tells when their devices are free of the last start.
    """

    def __init__(self, gate: DeviceGate) -> None:
        self._gate = gate
        self._pauses: list[Pause] = []

    def __bool__(self) -> bool:
        return bool(self._pauses)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter([(pause.plan.number, pause.plan.run_dir) for pause in self._pauses])

    def add(self, pause: Pause) -> bool:
        """Let a job wait; return whether it has to, as its devices are not free yet."""
        self._pauses.append(pause)
        return not self._gate.ready(pause.devices)

    def take_ready(self, *, all_of_them: bool) -> list[Pause]:
        """Return, and let go of, the jobs that can be started.

        Args:
            all_of_them: Also those that cannot, as no job shall start any more.
        """
        ready = [pause for pause in self._pauses if all_of_them or self._gate.ready(pause.devices)]
        self._pauses = [pause for pause in self._pauses if pause not in ready]
        return ready
