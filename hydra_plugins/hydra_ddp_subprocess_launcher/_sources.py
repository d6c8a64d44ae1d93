"""Source files of the running program, and which of them changed since."""

from __future__ import annotations

import logging
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from ._choices import OnCodeChange
from ._errors import StartError

_log = logging.getLogger(__name__)
Stamp = tuple[int, int]


class SourceWatch:
    """The program's source files as they were when the sweep started.

    Args:
        main_script: The file that holds the program; None: there is none.
    """

    def __init__(self, main_script: str | None) -> None:
        self._stamps = stamp_sources(main_script)
        self._said: set[str] = set()

    def check(self, rule: OnCodeChange, preloaded: bool = False) -> None:
        """Say, once a file, that it changed.

        Args:
            rule: What follows from that.
            preloaded: Whether ranks have modules that were imported before (`preload`).

        Raises:
            StartError: where the rule is that no job starts then.
        """
        if rule is OnCodeChange.ignore:
            return
        changed = changed_sources(self._stamps)
        if changed and rule is OnCodeChange.fail:
            raise StartError(
                f"The code changed since the sweep started: {', '.join(changed)}. Jobs would no longer run the same "
                "program (hydra.launcher.code_changed=fail). Start the "
                "sweep again; hydra.launcher.resume=unfinished runs what is left."
            )
        new = [file for file in changed if file not in self._said]
        if new:
            self._said.update(new)
            _log.warning(
                "The code changed since the sweep started: %s. Jobs that start from now on run the new code%s.",
                ", ".join(new),
                ", but for what hydra.launcher.preload names, which stays as it was" if preloaded else "",
            )


def stamp_sources(main_script: str | None) -> dict[str, Stamp]:
    """Return size in bytes and modification time in ns of the program's own source files.

    These are the main script and every imported file outside the standard library, site-packages and this package.
    """
    others = _installed_prefixes()
    # By the namespace: asking a lazy module for an attribute would load it, and may raise anything.
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    spaces = [object.__getattribute__(module, "__dict__") for module in modules]
    files = {str(space.get("__file__") or "") for space in spaces}
    own = {file for file in files if file.endswith(".py") and not os.path.realpath(file).startswith(others)}
    if main_script is not None and os.path.isfile(main_script):
        own.add(main_script)
    return {file: stamp for file in own if (stamp := _stamp(file)) is not None}


def _installed_prefixes() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parent)}
    return tuple(os.path.realpath(path) + os.sep for path in paths if path)


def _stamp(file: str) -> Stamp | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def changed_sources(stamps: Mapping[str, Stamp]) -> list[str]:
    """Return the files whose stamp is no longer what it was, in order; a file that is gone counts."""
    return sorted(file for file, stamp in stamps.items() if _stamp(file) != stamp)
