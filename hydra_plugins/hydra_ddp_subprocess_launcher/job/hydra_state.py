"""Hydra's state that ranks take over: resolvers and logging.

Hydra imports this module with the launcher's config, before it creates the callbacks.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from hydra import version
from hydra.core.utils import configure_log
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

# Resolvers that the plugins, and the program at import time, have registered. Ranks register them themselves.
_AT_START = dict(BaseContainer._resolvers)
# Resolvers of OmegaConf and Hydra themselves.
_EVERYWHERE = ("now", "hydra", "python_version")


@dataclass(frozen=True)
class CarriedResolver:
    """A registered resolver, for another process.

    Attributes:
        source: Where its function is defined, which distinguishes it from another one of the same name.
        state: Pickle of its other state, such as the variables of a closure, or None if it cannot be pickled.
        pickle: Pickle of the resolver itself, or None if it cannot be pickled.
        why: Why it cannot be pickled.
        cached: Whether OmegaConf caches its values.
    """

    source: tuple[object, ...]
    state: bytes | None
    pickle: bytes | None
    why: str
    cached: bool


def is_cached(resolver: Callable[..., Any]) -> bool:
    """Return whether OmegaConf caches the values of a resolver, which only a closure variable shows."""
    # Legacy resolvers have no such variable, and are always cached.
    return bool(_variables(resolver).get("use_cache", True))


def carry_resolvers(dump: Callable[[object], bytes], *, without_program: bool) -> dict[str, CarriedResolver]:
    """Return the resolvers that ranks may lack, by name.

    Args:
        without_program: Whether ranks do not run the program, so that they lack everything that it has registered.
    """
    return {
        name: _carry(resolver, dump)
        for name, resolver in BaseContainer._resolvers.items()
        if not (name.startswith("oc.") or name in _EVERYWHERE)
        and (without_program or _AT_START.get(name) is not resolver)
    }


def restore_resolvers(
    carried: Mapping[str, CarriedResolver], dump: Callable[[object], bytes], load: Callable[[bytes], Any]
) -> None:
    """Register the resolvers that this process lacks or defines differently.

    Others stay, as they share the state of their modules.

    Args:
        carried: Resolvers of the launching process.
        dump: Pickles an object as the launching process did.
    """
    for name, resolver in carried.items():
        own = BaseContainer._resolvers.get(name)
        if own is None or not _is_same(_carry(own, dump), resolver):
            BaseContainer._resolvers[name] = _load(name, resolver, load)


def _carry(resolver: Callable[..., Any], dump: Callable[[object], bytes]) -> CarriedResolver:
    function = _variables(resolver).get("resolver", resolver)
    data, why = _pickled(resolver, dump)
    state, _ = _pickled(_state(function), dump)
    return CarriedResolver(_source(function), state, data, why, is_cached(resolver))


def _pickled(value: object, dump: Callable[[object], bytes]) -> tuple[bytes | None, str]:
    try:
        return dump(value), ""
    except Exception as error:  # noqa: BLE001  (pickling may raise anything)
        return None, f"{type(error).__name__}: {error}"


def _is_same(own: CarriedResolver, other: CarriedResolver) -> bool:
    unknown = own.state is None or other.state is None
    return own.source == other.source and (unknown or own.state == other.state)


def _load(name: str, carried: CarriedResolver, load: Callable[[bytes], Any]) -> Callable[..., Any]:
    why = carried.why
    if carried.pickle is not None:
        try:
            resolver: Callable[..., Any] = load(carried.pickle)
        except Exception as error:  # noqa: BLE001  (pickling may raise anything)
            why = f"{type(error).__name__}: {error}"
        else:
            return resolver

    def lost(config: BaseContainer, *call: Any) -> Any:
        # OmegaConf passes the arguments as text last; they are the key of the cache.
        values = OmegaConf.get_cache(config)[name]
        if carried.cached and call[-1] in values:
            return values[call[-1]]
        raise ValueError(
            f"The resolver {name!r} was registered in the launching process alone, and cannot be handed to the ranks: "
            f"{why}. Register it at the top of the program, or of a module of the callbacks."
        )

    return lost


def _variables(function: Any) -> dict[str, Any]:
    """Return the variables of a closure."""
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _source(function: Any) -> tuple[object, ...]:
    if isinstance(function, MethodType):
        return _source(function.__func__)
    if isinstance(function, partial):
        return _source(function.func)
    named = function if hasattr(function, "__qualname__") else type(function)
    code = getattr(function, "__code__", None)
    return (named.__module__, named.__qualname__, code and code.co_firstlineno)


def _state(function: Any) -> object:
    if isinstance(function, FunctionType):
        return function.__defaults__, function.__kwdefaults__, _variables(function)
    if isinstance(function, MethodType):
        return function.__self__
    if isinstance(function, partial):
        return _state(function.func), function.args, function.keywords
    return function


# Bytes that a rotating handler may append to a name.
_ROOM = 24
_DIGEST = 8
_LONGEST_SUFFIX = 16


class OwnFiles:
    """Map each file that rank 0 writes to the file that a rank > 0 writes instead."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._prefix = f"rank_{rank}."
        # The first name belongs to the rank's own output.
        self._originals = {f"rank_{rank}.log": ""}
        self._name_max = os.pathconf(folder, "PC_NAME_MAX") - _ROOM

    def __call__(self, path: str, mode: str) -> tuple[str, str]:
        """Return the file to open for a path, absolute, and the mode."""
        is_own = os.path.dirname(path) == self._folder and os.path.basename(path) in self._originals
        # Leave devices and pipes alone.
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
    """Append to a file that another process has begun to write."""
    return path, mode.replace("w", "a").replace("x", "a")


@contextlib.contextmanager
def redirected(where: Callable[[str, str], tuple[str, str]]) -> Iterator[None]:
    """Redirect the files that this thread opens for writing, such as those of log handlers.

    Files are redirected when they are opened, as a handler may be created by any function, with any arguments.

    Args:
        where: Returns the path and mode to open instead of a path, absolute, and a mode.
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
    """Return the logging settings of a sweep's own config, resolved."""
    nodes = {name: config.hydra[name] for name in ("hydra_logging", "verbose")}
    return {
        name: _literal(OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
        for name, node in nodes.items()
    }


def changes_directory(config: DictConfig) -> bool:
    """Return whether Hydra runs the job in its output directory."""
    # Hydra's own rule: programs with version_base 1.1 or none get the old default. Hydra 1.4 has one default for all.
    chdir = config.hydra.job.chdir
    return bool(chdir) if chdir is not None else not version.base_at_least("1.2")


def _literal(value: Any) -> Any:
    """Escape a resolved value, so that OmegaConf resolves it to itself."""
    # Import here: every Hydra app imports this module, and the dataclasses of `protocol` would double the scan's time.
    from ..common.quoting import escape_interpolations

    if isinstance(value, str):
        return escape_interpolations(value)
    if isinstance(value, dict):
        return {key: _literal(part) for key, part in value.items()}
    return [_literal(part) for part in value] if isinstance(value, list) else value


def log_as_sweep(hydra_logging: Any, verbose: Any, context: HydraContext) -> None:
    """Set up Python's logging as Hydra does in a launching process.

    Raises:
        Exception: anything that creating the handlers raises.
    """
    whitelist = getattr(context, "execution_whitelist", None)
    extra = {} if whitelist is None else {"execution_whitelist": whitelist}
    configure_log(hydra_logging, verbose, **extra)


_log = logging.getLogger(__name__)
