"""Resolvers that the launching process has and a rank lacks, such as those that a callback's method registers.

Hydra imports this module with the options, before it makes the callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

# What the plugins, and the program at its top, have registered: ranks do so themselves.
_AT_START = dict(BaseContainer._resolvers)
# OmegaConf's and Hydra's own.
_EVERYWHERE = ("now", "hydra", "python_version")


@dataclass(frozen=True)
class CarriedResolver:
    """A resolver as OmegaConf keeps it, for another process.

    Attributes:
        source: Where its function is defined, which tells it from another one of the same name.
        state: Pickle of what it depends on besides, such as the variables of a closure; None: it cannot be pickled.
        pickle: The resolver itself; None: it cannot be pickled.
        why: The reason why it cannot.
        cached: Whether OmegaConf keeps its values.
    """

    source: tuple[object, ...]
    state: bytes | None
    pickle: bytes | None
    why: str
    cached: bool


def is_cached(resolver: Callable[..., Any]) -> bool:
    """Return whether OmegaConf keeps the values of a resolver, which it says in a closure only."""
    # Its legacy resolvers say nothing, and always are.
    return bool(_variables(resolver).get("use_cache", True))


def carry_resolvers(dump: Callable[[object], bytes], *, without_program: bool) -> dict[str, CarriedResolver]:
    """Return what ranks may lack, by name.

    Args:
        dump: Pickles.
        without_program: Whether ranks do not run the program, so that they lack all that it has registered.
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
    """Register what this process lacks, or has of another definition. Its own ones share the state of their modules.

    Args:
        carried: What the launching process has.
        dump: Pickles as it did.
        load: Its counterpart.
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
    except Exception as error:  # noqa: BLE001  (a pickle can fail with anything)
        return None, f"{type(error).__name__}: {error}"


def _is_same(own: CarriedResolver, other: CarriedResolver) -> bool:
    unknown = own.state is None or other.state is None
    return own.source == other.source and (unknown or own.state == other.state)


def _load(name: str, carried: CarriedResolver, load: Callable[[bytes], Any]) -> Callable[..., Any]:
    why = carried.why
    if carried.pickle is not None:
        try:
            resolver: Callable[..., Any] = load(carried.pickle)
        except Exception as error:  # noqa: BLE001  (a pickle can fail with anything)
            why = f"{type(error).__name__}: {error}"
        else:
            return resolver

    def lost(config: BaseContainer, *call: Any) -> Any:
        # What OmegaConf gives last are the arguments as text, which it keeps values by.
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
