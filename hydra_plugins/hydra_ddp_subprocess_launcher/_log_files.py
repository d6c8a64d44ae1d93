"""Logging in a rank: as the launching process had it before the job's own, and with files of its own in ranks > 0."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hydra.core.utils import configure_log
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from ._freeze import escape_interpolations

# What a rotating handler may put behind a name.
_ROOM = 24
_DIGEST = 8
_LONGEST_SUFFIX = 16


class OwnFiles:
    """Names of the files that a rank > 0 writes in place of rank 0's, one for each of those.

    Args:
        folder: Where they lie.
        rank: The rank.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._prefix = f"rank_{rank}."
        # What the rank prints has the first of them.
        self._originals = {f"rank_{rank}.log": ""}
        self._name_max = os.pathconf(folder, "PC_NAME_MAX") - _ROOM

    def __call__(self, path: str, mode: str) -> tuple[str, str]:
        """Return what to open for a path, absolute, and in which mode."""
        is_own = os.path.dirname(path) == self._folder and os.path.basename(path) in self._originals
        # No device, and no pipe.
        if is_own or (os.path.exists(path) and not os.path.isfile(path)):
            return path, mode
        parts = path.split(os.sep)[1:]
        for count in range(1, len(parts) + 1):
            name = self._shortened(self._prefix + ".".join(parts[-count:]))
            if self._originals.setdefault(name, path) == path:
                return os.path.join(self._folder, name), mode
        return os.path.join(self._folder, self._prefix + _digest(path)), mode

    def _shortened(self, name: str) -> str:
        if len(os.fsencode(name)) <= self._name_max:
            return name
        suffix = os.path.splitext(name)[1]
        end = f"~{_digest(name)}{suffix if len(os.fsencode(suffix)) <= _LONGEST_SUFFIX else ''}"
        return os.fsencode(name)[: self._name_max - len(os.fsencode(end))].decode(errors="ignore") + end


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:_DIGEST]


def appended(path: str, mode: str) -> tuple[str, str]:
    """Return what to open in place of a file that another process has begun to write."""
    return path, mode.replace("w", "a").replace("x", "a")


@contextlib.contextmanager
def redirected(where: Callable[[str, str], tuple[str, str]]) -> Iterator[None]:
    """Let log handlers that this thread makes write to other files, and whatever opens a file for them.

    A handler may be made by any function, with arguments of any name: only when it opens its file, it is known.

    Args:
        where: Returns what is opened for a path, absolute, and a mode.
    """
    thread = threading.get_ident()
    make: Any = logging.FileHandler.__init__
    open_file: Any = builtins.open

    def moved(file: Any, mode: str) -> tuple[Any, str]:
        return where(os.path.abspath(os.fsdecode(file)), mode) if thread == threading.get_ident() else (file, mode)

    def make_moved(self: logging.FileHandler, filename: Any, mode: str = "a", *args: Any, **options: Any) -> None:
        make(self, *moved(filename, mode), *args, **options)

    def open_moved(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if isinstance(file, str | bytes | os.PathLike) and not set(mode).isdisjoint("wax+"):
            file, mode = moved(file, mode)
        return open_file(file, mode, *args, **options)

    patches: tuple[tuple[Any, str, Any], ...] = (
        (logging.FileHandler, "__init__", make_moved),
        (builtins, "open", open_moved),
        (io, "open", open_moved),
    )
    earlier = [getattr(holder, name) for holder, name, _ in patches]
    for holder, name, patch in patches:
        setattr(holder, name, patch)
    try:
        yield
    finally:
        for (holder, name, _), original in zip(patches, earlier, strict=True):
            setattr(holder, name, original)


def sweep_logging(config: DictConfig) -> dict[str, Any]:
    """Return how a sweep logs, from its own config, resolved."""
    nodes = {name: config.hydra[name] for name in ("hydra_logging", "verbose")}
    return {
        name: _literal(OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
        for name, node in nodes.items()
    }


def _literal(value: Any) -> Any:
    """Return what OmegaConf resolves to a value that is resolved."""
    if isinstance(value, str):
        return escape_interpolations(value)
    if isinstance(value, dict):
        return {key: _literal(part) for key, part in value.items()}
    return [_literal(part) for part in value] if isinstance(value, list) else value


def log_as_sweep(hydra_logging: Any, verbose: Any, context: HydraContext) -> None:
    """Set up Python's logging as Hydra does in a launching process.

    Raises:
        Exception: whatever the handlers raise that it makes.
    """
    whitelist = getattr(context, "execution_whitelist", None)
    extra = {} if whitelist is None else {"execution_whitelist": whitelist}
    configure_log(hydra_logging, verbose, **extra)
