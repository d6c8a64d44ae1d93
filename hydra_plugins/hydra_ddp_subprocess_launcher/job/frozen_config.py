"""Freeze, cache and pickle the config of a job."""

from __future__ import annotations

import contextlib
import io
import logging
import marshal
import os
import pickle
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import IO, Any

import cloudpickle
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from omegaconf import Container, DictConfig, OmegaConf, open_dict, read_write
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from ..common.errors import FreezeError
from ..common.quoting import escape_interpolations
from .hydra_state import is_cached

_log = logging.getLogger(__name__)
_RESOLVER_NAME = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
# Options that each job's own config decides.
SIZE_OPTIONS = ("nproc_per_node", "devices_per_rank")


@contextlib.contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Resolve `${hydra:…}` with this config for the duration of the block. Make its `hydra` node read-only for good."""
    holder = HydraConfig.instance()
    earlier = holder.cfg
    OmegaConf.set_readonly(config.hydra, True)
    try:
        # Not with `set_config`, whose copy takes longer than everything else that freezes a job.
        holder.cfg = config  # type: ignore[assignment]
        yield
    finally:
        holder.cfg = earlier


@dataclass(frozen=True)
class Frozen:
    """The resolved values of a final config that the launcher needs.

    Attributes:
        sweep_dir: Sweep directory, absolute.
        run_dir: Run directory, absolute.
        env_set: `hydra.job.env_set`, into which Hydra has merged `env_copy`.
        size: As `asked_size` returns it.
    """

    sweep_dir: str
    run_dir: str
    env_set: dict[str, str]
    size: tuple[Any, Any]


def freeze(config: DictConfig, job_num: int, run_dir: str | None = None, job_id: str | None = None) -> Frozen:
    """Make a composed job config final, in place, so that every process resolves it to the same values.

    Args:
        run_dir: Run directory, absolute, or None to use the one in the config.
        job_id: Value of `hydra.job.id`, or None to use the job's number.

    Raises:
        FreezeError: if a value that the launcher needs cannot be resolved.
    """
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.id = str(job_num) if job_id is None else job_id
        config.hydra.job.num = job_num
    with hydra_config(config):
        sweep_dir = os.path.abspath(_resolved(config, "hydra.sweep.dir", job_num))
        if run_dir is None:
            run_dir = os.path.abspath(os.path.join(sweep_dir, _resolved(config, "hydra.sweep.subdir", job_num)))
        with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
            config.hydra.runtime.output_dir = escape_interpolations(run_dir)
        env_set = _resolved_env_set(config)
        # Resolve with the job's own variables.
        with env_override(env_set):
            fill_caches(config)
        try:
            size = asked_size(config)
        except OmegaConfBaseException as error:
            names = " or ".join(f"hydra.launcher.{name}" for name in SIZE_OPTIONS)
            raise FreezeError(f"{names} of job {job_num} cannot be resolved: {error}") from error
    return Frozen(sweep_dir, run_dir, env_set, size)


def asked_size(config: DictConfig) -> tuple[Any, Any]:
    """Return the values of SIZE_OPTIONS, resolved.

    Raises:
        OmegaConfBaseException: if one cannot be resolved.
    """
    ranks, devices = (OmegaConf.select(config, f"hydra.launcher.{name}") for name in SIZE_OPTIONS)
    return ranks, devices


def set_job_id(config: DictConfig, token: str, job_id: str, run_dir: str) -> None:
    """Replace the token that stood for the job's id with the id, now that it is known.

    Args:
        token: The `job_id` that `freeze` was given.
        run_dir: The run directory with the id in it, absolute.
    """
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.id = job_id
        config.hydra.runtime.output_dir = escape_interpolations(run_dir)
    for cache in OmegaConf.get_cache(config).values():
        for key, value in list(cache.items()):
            cache[key] = _replaced(value, token, job_id)


def _replaced(value: Any, token: str, text: str) -> Any:
    """Replace a token with a text in a value that a resolver has returned."""
    if isinstance(value, str):
        return value.replace(token, text)
    if type(value) is dict:
        return {_replaced(key, token, text): _replaced(part, token, text) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(part, token, text) for part in value)
    return value


def _resolved(config: DictConfig, key: str, job_num: int) -> str:
    try:
        return str(OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        raise FreezeError(
            f"The run directory of job {job_num} (hydra.sweep.dir, hydra.sweep.subdir) cannot be resolved: {error}"
        ) from error


def fill_caches(config: DictConfig) -> None:
    """Resolve every interpolation that uses a cached resolver once, so that the config carries its value.

    Otherwise, `${now:…}` and a user's cached random values would differ between the ranks of a job.
    """
    cached = {name for name, resolver in BaseContainer._resolvers.items() if is_cached(resolver)}
    for _, parent, key, node in _nodes(config):
        if node._is_interpolation() and cached.intersection(_RESOLVER_NAME.findall(node._value())):
            # If it cannot be resolved here, it fails when the job uses it.
            with contextlib.suppress(Exception):
                parent[key]


def _resolved_env_set(config: DictConfig) -> dict[str, str]:
    try:
        values = OmegaConf.to_container(config.hydra.job.env_set, resolve=True)
    except OmegaConfBaseException as error:
        raise FreezeError(f"hydra.job.env_set cannot be resolved: {error}") from error
    assert isinstance(values, dict)
    return {str(name): str(value) for name, value in values.items()}


def sweep_env_set(config: DictConfig) -> dict[str, str]:
    """Return `hydra.job.env_set` of the sweep's own config, or an empty dict if only a job's config can resolve it."""
    try:
        with hydra_config(config):
            return _resolved_env_set(config)
    except FreezeError:
        return {}


def unpicklable_key(config: DictConfig, dump: Callable[[object], bytes]) -> str | None:
    """Return the first key of a config whose value cannot be pickled, with the reason, or None if all can."""
    cache = OmegaConf.get_cache(config)
    for key, _, _, node in _nodes(config):
        if node._is_interpolation():
            used = {name for name in _RESOLVER_NAME.findall(node._value()) if name in cache}
            values = [value for name in used for value in cache[name].values()]
        else:
            values = [] if isinstance(node, Container) else [node._value()]
        for value in values:
            try:
                dump(value)
            except Exception as error:  # noqa: BLE001  (pickling may raise anything)
                return f"{key} ({type(value).__name__}: {error})"
    return None


def _nodes(container: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield full key, parent, key in the parent, and node for everything below a container."""
    if container._is_none() or container._is_missing() or container._is_interpolation():
        return
    # OmegaConf 2.4 has tuples beside lists.
    in_list = not isinstance(container, DictConfig)
    for key in range(len(container)) if in_list else list(container.keys()):
        node = container._get_node(key)
        name = f"{prefix}[{key}]" if in_list else f"{prefix}.{key}".lstrip(".")
        yield name, container, key, node
        if isinstance(node, Container):
            yield from _nodes(node, name)


def structured_types(config: Any) -> set[type]:
    """Return the structured config classes that a config, or a part of it, was made from."""
    nodes = [config, *(node for _, _, _, node in _nodes(config))] if isinstance(config, Container) else []
    kinds = (OmegaConf.get_type(node) for node in nodes if isinstance(node, DictConfig))
    return {kind for kind in kinds if kind is not None and kind is not dict}


def own_yaml(config: DictConfig) -> str:
    """Return a job's own config without the `hydra` node, as YAML with sorted keys, not resolved."""
    own = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])  # type: ignore[misc]
    try:
        return OmegaConf.to_yaml(own, resolve=False, sort_keys=True)
    except Exception:  # noqa: BLE001  (a user's object may not be representable in YAML)
        return "".join(sorted(f"{key}: {node!r}\n" for key, _, _, node in _nodes(own)))


def resolved_values(config: DictConfig) -> dict[str, str]:
    """Return the value of each key of a config that is not a container, resolved and as text."""
    values = {}
    for name, parent, key, node in _nodes(config):
        if isinstance(node, Container) and not node._is_interpolation():
            continue
        try:
            values[name] = repr(parent[key])
        except Exception as error:  # noqa: BLE001  (a resolver may raise anything; ranks should agree on that, too)
            values[name] = f"<{type(error).__name__}>"
    return values


@dataclass(frozen=True)
class CachedConfig:
    """A composed job config, pickled: about 10 kB for 350 nodes, a hundredth of its size in memory.

    Attributes:
        pickle: Pickle of the config.
        size: Its `nproc_per_node` and `devices_per_rank`, resolved, or None if they cannot be resolved.
    """

    pickle: LocalPickle
    size: tuple[Any, Any] | None

    @classmethod
    def store(cls, config: DictConfig) -> CachedConfig | None:
        """Pickle a config. Return None if it cannot be pickled."""
        try:
            return cls(LocalPickle.of(config), _size(config))
        except Exception as error:  # noqa: BLE001  (pickling may raise anything)
            # The config is composed again when its turn comes, and the job's error names it then.
            _log.debug("A config cannot be kept: %s: %s", type(error).__name__, error)
            return None

    def load(self) -> DictConfig:
        """Unpickle the config."""
        config = self.pickle.load()
        assert isinstance(config, DictConfig)
        return config


def _size(config: DictConfig) -> tuple[Any, Any] | None:
    try:
        if not any(OmegaConf.is_interpolation(config.hydra.launcher, name) for name in SIZE_OPTIONS):
            return asked_size(config)
        with hydra_config(config):
            return asked_size(config)
    except Exception:  # noqa: BLE001  (a resolver may raise anything; the job fails with it in its turn)
        return None


class ConfigCache:
    """Keep the configs that the sweeper composes for its own check, so that they need not be composed again.

    Args:
        config_loader: The loader whose `load_sweep_config` is replaced while the cache records.
        failed: Called if composing fails, as Hydra does not call the launcher then.
    """

    def __init__(self, config_loader: Any, failed: Callable[[], object] = lambda: None) -> None:
        self._loader = config_loader
        self._failed = failed
        self._configs: dict[tuple[str, ...], list[CachedConfig]] = {}

    def record(self) -> None:
        """Record every config that is composed with this loader, until `stop`."""
        compose = self._loader.load_sweep_config

        def load_sweep_config(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
            try:
                config: DictConfig = compose(master_config, sweep_overrides)
            except BaseException:
                self._failed()
                raise
            kept = CachedConfig.store(config)
            if kept is not None:
                self._configs.setdefault(tuple(sweep_overrides), []).append(kept)
            return config

        self._loader.load_sweep_config = load_sweep_config

    def stop(self) -> None:
        """Restore the loader's own method."""
        vars(self._loader).pop("load_sweep_config", None)

    def take(self, overrides: Sequence[str]) -> CachedConfig | None:
        """Return a config composed from these overrides, each config once, or None if there is none."""
        kept = self._configs.get(tuple(overrides))
        return kept.pop(0) if kept else None

    def clear(self) -> None:
        """Drop all configs."""
        self._configs.clear()


_MAIN = "__main__"
# Index of the state in the tuple that `__reduce__` returns.
_STATE = 2


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickle a class or function by name if that name leads to the same object, and by value otherwise.

    cloudpickle does so for importable modules, but pickles everything in `__main__` by value, and a class of which each
    process has its own copy fails `isinstance`. A rank's `__main__` is the user's program, so its names are valid
    there. Code keeps its file name, which cloudpickle drops, so that tracebacks show the user's lines.
    """

    def __init__(self, file: IO[bytes], main_namespace: Mapping[str, Any] | None) -> None:
        super().__init__(file)
        self._main_namespace = main_namespace

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        if self._main_namespace is not None and isinstance(obj, type | FunctionType) and obj.__module__ == _MAIN:
            path = tuple(obj.__qualname__.split("."))
            if _look_up(self._main_namespace, path) is obj:
                return _from_main, (path,)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > _STATE:
            # cloudpickle drops the function or class that a class was defined in.
            attributes, slots = reduced[_STATE]
            state = ({**attributes, "__qualname__": obj.__qualname__}, slots)
            reduced = (*reduced[:_STATE], state, *reduced[_STATE + 1 :])
        return reduced


def _look_up(namespace: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found = namespace.get(path[0])
    for name in path[1:]:
        found = getattr(found, name, None)
    return found


def _from_main(path: tuple[str, ...]) -> Any:
    found = _look_up(vars(sys.modules[_MAIN]), path)
    if found is None:
        raise pickle.UnpicklingError(f"the program's __main__ has no {'.'.join(path)}")
    return found


def dumps(obj: object, main_namespace: Mapping[str, Any] | None) -> bytes:
    """Pickle an object for another process of the same Python.

    Args:
        obj: Any object that makes sense in another process, so no locks or open files.
        main_namespace: Namespace of the program's `__main__` if the reader runs the same program. If None, what is
            defined there is pickled by value.
    """
    with io.BytesIO() as file:
        _Pickler(file, main_namespace).dump(obj)
        return file.getvalue()


loads = pickle.loads


def program_namespace(task_function: Any) -> Mapping[str, Any]:
    """Return the namespace of the program's `__main__`.

    Under a profiler, `sys.modules["__main__"]` is the profiler, and only the program's own functions refer to it.
    """
    names: Mapping[str, Any] = getattr(task_function, "__globals__", {})
    return names if names.get("__name__") == _MAIN else vars(sys.modules[_MAIN])


@dataclass(frozen=True)
class LocalPickle:
    """An object pickled and compressed for this process. Classes and functions stay the very same objects.

    Pickled by value, they would be loaded as copies, or even overwrite the live ones.

    Attributes:
        data: The pickle, which refers to classes and functions by their index in `objects`.
        objects: These classes and functions, each once.
    """

    data: bytes
    objects: tuple[object, ...]

    @classmethod
    def of(cls, obj: object) -> LocalPickle:
        """Pickle an object.

        Raises:
            Exception: anything that pickling its parts raises.
        """
        with io.BytesIO() as file:
            pickler = _LocalPickler(file)
            pickler.dump(obj)
            return cls(zlib.compress(file.getvalue(), level=1), tuple(pickler.objects))

    def load(self) -> Any:
        """Return a new copy of the object."""
        return _LocalUnpickler(io.BytesIO(zlib.decompress(self.data)), self.objects).load()


class _LocalPickler(pickle.Pickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.objects: list[object] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, type | FunctionType):
            return None
        place = self._places.setdefault(id(obj), len(self.objects))
        if place == len(self.objects):
            self.objects.append(obj)
        return place


class _LocalUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], objects: Sequence[object]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: int) -> object:
        return self._objects[pid]
