"""Whether this process has been in a process group of torch's with others. torch itself is never imported here."""

from __future__ import annotations

import functools
import mmap
import sys
from types import ModuleType
from typing import Any

_TORCH = "torch.distributed.distributed_c10d"
# What multiprocessing imports for its first child that is a new interpreter, into which nothing here reaches.
_SPAWNED = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")


class GroupWatch:
    """Notice every default process group that this process or a fork of it opens, from now on.

    A group that was destroyed leaves no trace in torch. So the one function through which torch announces a default
    group is wrapped, as soon as it is there: at once, or at the first import after torch's own.
    """

    def __init__(self) -> None:
        # Shared with forks.
        self._seen = mmap.mmap(-1, 1)
        self._wrapped: ModuleType | None = None
        if not self._wrap():
            sys.meta_path.insert(0, self)

    def find_spec(self, _name: str, _path: Any = None, _target: Any = None) -> None:
        """Find no module: as part of `sys.meta_path` this is called before each import."""
        if self._wrap() and self in sys.meta_path:
            sys.meta_path.remove(self)

    def _wrap(self) -> bool:
        torch = sys.modules.get(_TORCH)
        announce = getattr(torch, "_update_default_pg", None)
        if torch is None or announce is None:
            return False
        if self._wrapped is torch:
            return True

        @functools.wraps(announce)
        def noting(group: Any) -> Any:
            self._note(group)
            return announce(group)

        torch._update_default_pg = noting  # type: ignore[attr-defined]
        self._wrapped = torch
        # What was opened before, as by the program's top level.
        self._note(getattr(getattr(torch, "GroupMember", None), "WORLD", None))
        return True

    def _note(self, group: Any) -> None:
        try:
            if group is not None and group.size() > 1:
                self._seen[0] = 1
        except Exception:  # noqa: BLE001  (a group of the user's own may raise anything; one that cannot tell counts)
            self._seen[0] = 1

    @property
    def ran_alone(self) -> bool:
        """Whether torch.distributed was there, but no group of several processes, as far as can be known."""
        self._wrap()
        return self._wrapped is not None and not self._seen[0] and not any(name in sys.modules for name in _SPAWNED)
