"""A job's config made final: composed once, resolver caches filled, run directory literal."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from omegaconf import Container, DictConfig, OmegaConf, open_dict, read_write
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from ._errors import FreezeError

_log = logging.getLogger(__name__)
_RESOLVER_NAME = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
# Options that each job's own config has the last word on.
SIZE_OPTIONS = ("nproc_per_node", "devices_per_rank")
_INTERPOLATION = re.compile(r"(\\*)(\$\{)")


@contextlib.contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Let `${hydra:…}` mean this config while the block runs; Hydra's part of it is read-only from then on."""
    holder = HydraConfig.instance()
    earlier = holder.cfg
    OmegaConf.set_readonly(config.hydra, True)
    try:
        # Not by `set_config`, whose copy takes longer than all else that freezes a job.
        holder.cfg = config  # type: ignore[assignment]
        yield
    finally:
        holder.cfg = earlier


@dataclass(frozen=True)
class Frozen:
    """What the launcher needs of a final config, resolved.

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
    """Make a composed job config final, in place, so that every process resolves it alike.

    Args:
        config: Of the job.
        job_num: Its number.
        run_dir: Its run directory, absolute; None: what the config says.
        job_id: What `hydra.job.id` shall be; None: the number.

    Raises:
        FreezeError: when what the launcher needs cannot be resolved.
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
        # A job sees its own variables.
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
        OmegaConfBaseException: when one cannot be.
    """
    ranks, devices = (OmegaConf.select(config, f"hydra.launcher.{name}") for name in SIZE_OPTIONS)
    return ranks, devices


def set_job_id(config: DictConfig, token: str, job_id: str, run_dir: str) -> None:
    """Put the job's id where a token stood for it while it was not known.

    Args:
        config: A frozen config.
        token: What `freeze` was given as `job_id`.
        job_id: The id.
        run_dir: The run directory, with the id in it, absolute.
    """
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.id = job_id
        config.hydra.runtime.output_dir = escape_interpolations(run_dir)
    for cache in OmegaConf.get_cache(config).values():
        for key, value in list(cache.items()):
            cache[key] = _replaced(value, token, job_id)


def _replaced(value: Any, token: str, text: str) -> Any:
    """Return what a resolver has made of a token, as if it had been given the text."""
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


def escape_interpolations(text: str) -> str:
    """Return what OmegaConf resolves to `text`, which may hold `${` as it stands."""
    return _INTERPOLATION.sub(lambda found: found[1] * 2 + "\\" + found[2], text)


def fill_caches(config: DictConfig) -> None:
    """Resolve every interpolation that names a cached resolver once, so that its value travels with the config.

    Else `${now:…}` and a user's cached random value would differ between the ranks of a job.
    """
    cached = {name for name, resolver in BaseContainer._resolvers.items() if _caches(resolver)}
    for _, parent, key, node in _nodes(config):
        if node._is_interpolation() and cached.intersection(_RESOLVER_NAME.findall(node._value())):
            # What cannot be resolved here fails where the job uses it, or is never used.
            with contextlib.suppress(Exception):
                parent[key]


def _caches(resolver: Callable[..., Any]) -> bool:
    # OmegaConf keeps `use_cache` in a closure only. Its legacy resolvers have none and always cache.
    names = resolver.__code__.co_freevars
    if "use_cache" not in names:
        return True
    return bool(resolver.__closure__[names.index("use_cache")].cell_contents)  # type: ignore[index]


def _resolved_env_set(config: DictConfig) -> dict[str, str]:
    try:
        values = OmegaConf.to_container(config.hydra.job.env_set, resolve=True)
    except OmegaConfBaseException as error:
        raise FreezeError(f"hydra.job.env_set cannot be resolved: {error}") from error
    assert isinstance(values, dict)
    return {str(name): str(value) for name, value in values.items()}


def sweep_env_set(config: DictConfig) -> dict[str, str]:
    """Return `hydra.job.env_set` as the sweep's own config has it; empty where that cannot be told before a job is."""
    try:
        with hydra_config(config):
            return _resolved_env_set(config)
    except FreezeError:
        return {}


def unpicklable_key(config: DictConfig, dump: Callable[[object], bytes]) -> str | None:
    """Return the first key of a config whose value cannot be pickled, with the reason; None when all can."""
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
            except Exception as error:  # noqa: BLE001  (a pickle can fail with anything)
                return f"{key} ({type(value).__name__}: {error})"
    return None


def _nodes(container: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Walk everything below a container: full key, parent, key in it, node."""
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
    """Return the classes that a config, or a part of it, was made from."""
    nodes = [config, *(node for _, _, _, node in _nodes(config))] if isinstance(config, Container) else []
    kinds = (OmegaConf.get_type(node) for node in nodes if isinstance(node, DictConfig))
    return {kind for kind in kinds if kind is not None and kind is not dict}


def own_yaml(config: DictConfig) -> str:
    """Return a job's own config, without Hydra's part, as YAML with sorted keys, not resolved."""
    own = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])  # type: ignore[misc]
    try:
        return OmegaConf.to_yaml(own, resolve=False, sort_keys=True)
    except Exception:  # noqa: BLE001  (an object of the user's that YAML cannot hold)
        return "".join(sorted(f"{key}: {node!r}\n" for key, _, _, node in _nodes(own)))


def resolved_values(config: DictConfig) -> dict[str, str]:
    """Return each key of a config that holds a value, with that value resolved and written as text."""
    values = {}
    for name, parent, key, node in _nodes(config):
        if isinstance(node, Container) and not node._is_interpolation():
            continue
        try:
            values[name] = repr(parent[key])
        except Exception as error:  # noqa: BLE001  (a resolver may raise anything; that, too, should be alike)
            values[name] = f"<{type(error).__name__}>"
    return values
