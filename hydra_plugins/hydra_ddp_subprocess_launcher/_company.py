"""The keepers of a job's other nodes, as the keeper of this one deals with them.

Keepers import this module, so it imports the standard library only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from . import _machine
from ._peers import Peers
from ._rules import GroupRules
from ._specs import GroupReport, Meeting

# Seconds between two looks at the others: while this node has ranks, and when they are over.
_LOOK_INTERVAL_S = 0.1
_PART_INTERVAL_S = 0.5
# Seconds until a line says who has not come.
_MISSING_NOTE_S = 10.0


class Company:
    """The keepers of a job's other nodes.

    Args:
        meeting: Where they are met.
        rules: Of this node's group.
        hear: Waits for so many seconds for signals and orders, and obeys them.
        note: Takes a line for the user.
    """

    def __init__(
        self, meeting: Meeting, rules: GroupRules, hear: Callable[[float], None], note: Callable[[str], None]
    ) -> None:
        self._meeting = meeting
        self._rules = rules
        self._hear = hear
        self._note = note
        self._peers: Peers | None = None
        self._look_at = 0.0

    def meet(self) -> None:
        """Wait until all of them are there. Where they cannot be met, or will not come, the group is stopped."""
        began = time.monotonic()
        try:
            self._peers = Peers(self._meeting, _machine.host(), began)
        except OSError as error:
            why = f"{error.strerror}: {error.filename}, where its nodes meet"
            self._rules.start_failed(self._rules.running[0], why, began)
            return
        note_at = began + _MISSING_NOTE_S
        while self._peers.missing and self._rules.stopped is None:
            self._hear(_LOOK_INTERVAL_S)
            self._peers.refresh()
            self.look()
            if self._peers.missing and time.monotonic() > note_at:
                note_at = math.inf
                self._note(f"waits for {', '.join(self._peers.missing)}")
        self._rules.begin(time.monotonic())

    def look(self) -> None:
        """Take in what they have told, if it is time."""
        now = time.monotonic()
        if self._peers is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_INTERVAL_S
        self._peers.look(now)
        if self._peers.failed:
            self._rules.node_failed(self._peers.failed, now)
        elif lost := self._peers.lost(now):
            self._rules.node_lost(", ".join(lost), now)
        elif self._peers.ended_well:
            self._rules.node_ended(now)
        self.tell()

    def tell(self) -> None:
        """Tell them that this group is being ended, if theirs have to be, too."""
        if self._peers is not None and self._rules.concerns_all:
            self._peers.tell_failure(self._rules.report())

    def part(self, report: Callable[[], GroupReport], gives_up: Callable[[], bool]) -> GroupReport:
        """Tell them how this group has ended, wait for theirs, and return what is known about all.

        Args:
            report: Returns this group's.
            gives_up: Returns whether nobody shall wait any more.
        """
        if self._peers is None:
            return report()
        self.tell()
        self._peers.tell_end(report())
        lost: list[str] = []
        while not gives_up() and set(self._peers.unfinished) - set(lost):
            self._hear(_PART_INTERVAL_S)
            self.look()
            lost = self._peers.lost(time.monotonic())
        self.tell()
        self._peers.close()
        # Anew: meanwhile the job may have been stopped.
        return self._peers.merge(report())
