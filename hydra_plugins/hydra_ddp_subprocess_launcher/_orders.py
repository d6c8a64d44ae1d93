"""What a keeper and the process that has it say to each other, apart from the job's spec and the last report.

Keepers import this module, so it imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Started:
    """Keeper to launcher: it is there, and then once more, that the ranks run.

    Attributes:
        keeper: Pid of the keeper.
        ranks: One pid a rank; empty: they are still to be started, which may take a while on a dead disk.
    """

    keeper: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """Keeper to launcher: a line for the user."""

    text: str


@dataclass(frozen=True)
class Stop:
    """Launcher to keeper: end the group, by SIGTERM first or `at_once`."""

    at_once: bool
    detail: str = ""


@dataclass(frozen=True)
class Forward:
    """Launcher to keeper: send this signal to one rank, or to every rank (None)."""

    signal: int
    rank: int | None = None


@dataclass(frozen=True)
class Preempt:
    """Launcher to keeper: pass this signal on to the ranks that handle it, give them time for it, and end the group."""

    signal: int
