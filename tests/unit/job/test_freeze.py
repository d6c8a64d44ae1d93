"""A job's config made final: caches filled, the run directory literal, and what the sweeper composed kept."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import FreezeError
from hydra_plugins.hydra_ddp_subprocess_launcher.job import frozen_config

# The old spellings of Hydra 1.3 and OmegaConf 2.3, which the next versions warn of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:register_new_resolver"),
    pytest.mark.filterwarnings("ignore:The version_base parameter is deprecated"),
]
# `hydra:` and `now:`, which Hydra registers when it starts.
setup_globals()


@pytest.fixture
def resolver() -> Iterator[Callable[..., None]]:
    """Register resolvers that are gone after the test."""
    names = []

    def register(name: str, function: Callable[..., Any], *, use_cache: bool) -> None:
        OmegaConf.register_new_resolver(name, function, use_cache=use_cache)
        names.append(name)

    yield register
    for name in names:
        OmegaConf.clear_resolver(name)


def counting() -> Callable[..., str]:
    """Return a resolver that gives another value at each call."""
    calls = itertools.count()
    return lambda *args: "-".join(map(str, (*args, next(calls))))


def hydra_node(**job: Any) -> dict[str, Any]:
    """Return what freezing needs of Hydra's own node."""
    return {
        "job": {"name": "app", "chdir": False, "env_set": {}, **job},
        "runtime": {"cwd": "/start"},
        "sweep": {"dir": "/sweep", "subdir": "${hydra:job.num}"},
        "mode": "MULTIRUN",
        "overrides": {"task": [], "hydra": []},
    }


def job_config(content: dict[str, Any] | None = None, **hydra: Any) -> DictConfig:
    """Return a composed job's config: the user's keys and Hydra's, read-only and closed as Hydra makes it."""
    config = OmegaConf.create({**(content or {}), "hydra": OmegaConf.structured(HydraConf)})
    config.hydra.merge_with({**hydra_node(), **hydra})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config.hydra, True)
    assert isinstance(config, DictConfig)
    return config


def travelled(config: DictConfig) -> DictConfig:
    """Return what a rank gets of a config."""
    copy = frozen_config.loads(frozen_config.dumps(config, None))
    assert isinstance(copy, DictConfig)
    return copy


# --- filling caches


def test_cached_resolvers_are_filled(resolver: Callable[..., None]) -> None:
    """Every copy of a config that was filled has one value of a cached resolver, wherever it stands."""
    resolver("count", counting(), use_cache=True)
    resolver("ns.count", counting(), use_cache=True)
    config = job_config(
        {
            "plain": "${count:}",
            "in_text": "a ${ count : x} b",
            "in_list": [{"deep": "${count:y}"}, "${ns.count:}"],
            "nested": "${oc.decode:${count:z}}",
            "behind": "${plain}",
        }
    )
    frozen_config.fill_caches(config)
    copies = [travelled(config) for _ in range(2)]
    values = [OmegaConf.to_container(copy, resolve=False) for copy in copies]
    assert values[0] == OmegaConf.to_container(config, resolve=False), "interpolations stay as they are written"
    reads: tuple[Callable[[Any], Any], ...] = (
        lambda copy: copy.plain,
        lambda copy: copy.in_text,
        lambda copy: copy.in_list[0].deep,
        lambda copy: copy.in_list[1],
        lambda copy: copy.nested,
        lambda copy: copy.behind,
    )
    for read in reads:
        assert read(copies[0]) == read(copies[1]) == read(config)


def test_hydras_now_is_filled() -> None:
    """`${now:}` is the same moment in every rank."""
    config = job_config({"moment": "${now:%S.%f}"})
    OmegaConf.register_new_resolver("now", lambda pattern: str(os.urandom(8)), use_cache=True, replace=True)
    try:
        frozen_config.fill_caches(config)
        assert travelled(config).moment == travelled(config).moment == config.moment
    finally:
        OmegaConf.clear_resolver("now")


def test_uncached_resolvers_stay_lazy(resolver: Callable[..., None]) -> None:
    """An uncached resolver is not called when a config is frozen, and gives each process its own value."""
    calls: list[int] = []

    def count() -> int:
        calls.append(1)
        return len(calls)

    resolver("mine", count, use_cache=False)
    config = job_config({"mine": "${mine:}", "env": "${oc.env:FREEZE_TEST,unset}", "where": "${hydra:runtime.cwd}"})
    frozen_config.fill_caches(config)
    assert calls == []
    copy = travelled(config)
    assert (copy.mine, copy.mine) == (1, 2)
    os.environ["FREEZE_TEST"] = "set"
    try:
        assert copy.env == "set"
    finally:
        del os.environ["FREEZE_TEST"]


def test_what_cannot_be_resolved_does_not_matter(resolver: Callable[..., None]) -> None:
    """A cached resolver that raises, whatever it raises, leaves the others filled, and raises again when used."""

    def fails() -> None:
        raise RuntimeError("no")

    resolver("fails", fails, use_cache=True)
    resolver("count", counting(), use_cache=True)
    config = job_config({"a": "${fails:}", "b": "${count:${missing}}", "c": "${count:}", "d": "???", "e": None})
    frozen_config.fill_caches(config)
    assert travelled(config).c == travelled(config).c
    with pytest.raises(Exception, match="no"):
        _ = travelled(config).a


def test_interpolated_containers(resolver: Callable[..., None]) -> None:
    """A cached resolver that gives a whole dict or list is filled like any other."""
    count = itertools.count()
    resolver("table", lambda: {"x": next(count)}, use_cache=True)
    config = job_config({"table": "${table:}", "other": {"list": "${table:}"}})
    frozen_config.fill_caches(config)
    assert travelled(config).table == travelled(config).table
    assert travelled(config).other.list["x"] == travelled(config).table["x"]


# --- freezing


def test_freeze(resolver: Callable[..., None]) -> None:
    """A job's number, id and run directory become literals; Hydra's sweep section stays as the user wrote it."""
    resolver("count", counting(), use_cache=True)
    config = job_config({"c": "${count:mine}"}, sweep={"dir": "/sweep", "subdir": "${hydra:job.num}_${count:}"})
    run_dir = frozen_config.freeze(config, 7).run_dir
    assert run_dir.startswith("/sweep/7_")
    for frozen in (config, travelled(config)):
        assert (frozen.hydra.job.id, frozen.hydra.job.num) == ("7", 7)
        assert frozen.hydra.runtime.output_dir == run_dir
        assert OmegaConf.to_container(frozen.hydra.sweep, resolve=False) == {
            "dir": "/sweep",
            "subdir": "${hydra:job.num}_${count:}",
        }
        assert OmegaConf.is_readonly(frozen.hydra) and OmegaConf.is_struct(frozen)
    assert travelled(config).c == config.c


def test_a_random_run_directory_is_one_directory(resolver: Callable[..., None]) -> None:
    """A run directory that an uncached resolver makes up is resolved once."""
    resolver("random", lambda: os.urandom(4).hex(), use_cache=False)
    config = job_config(sweep={"dir": "/sweep", "subdir": "${random:}"})
    run_dir = frozen_config.freeze(config, 0).run_dir
    assert travelled(config).hydra.runtime.output_dir == config.hydra.runtime.output_dir == run_dir


def test_a_run_directory_that_is_given(tmp_path: Path) -> None:
    """It takes the place of what the config says, which may differ from process to process."""
    config = job_config(sweep={"dir": "multirun", "subdir": "${now:%f}"})
    assert frozen_config.freeze(config, 3, str(tmp_path)).run_dir == str(tmp_path)
    assert config.hydra.runtime.output_dir == str(tmp_path)


def test_a_relative_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative sweep directory is meant from where the process is when the job is frozen."""
    monkeypatch.chdir(tmp_path)
    config = job_config(sweep={"dir": "multirun/now", "subdir": "${hydra.job.num}"})
    assert frozen_config.freeze(config, 3).run_dir == str(tmp_path / "multirun" / "now" / "3")


@pytest.mark.parametrize("name", ["a ${b}", "back\\${slash}", "100%", "it's", "$x", "${", "\\"])
def test_a_run_directory_that_looks_like_an_interpolation(name: str) -> None:
    """A folder may be called anything; the literal directory is read back as it is."""
    config = job_config(sweep={"dir": "/sweep", "subdir": frozen_config.escape_interpolations(name)})
    assert frozen_config.freeze(config, 0).run_dir == f"/sweep/{name}"
    assert travelled(config).hydra.runtime.output_dir == f"/sweep/{name}"


def test_a_run_directory_that_cannot_be_resolved() -> None:
    """A run directory that cannot be resolved is this job's error, with its number and the reason."""
    config = job_config(sweep={"dir": "${nowhere}", "subdir": "0"})
    with pytest.raises(
        FreezeError,
        match=r"(?s)run directory of job 4 \(hydra.sweep.dir, hydra.sweep.subdir\) cannot be resolved: .*nowhere",
    ):
        frozen_config.freeze(config, 4)


@given(st.text(st.sampled_from("\\${}a:.'\" ")))
@example("\\\\${x}\\")
@example("${")
@example("a\\")
def test_escaped_text_comes_back(text: str) -> None:
    """OmegaConf resolves what `escape_interpolations` returns to the text that went in."""
    config = OmegaConf.create({"x": None, "y": 1})
    config.x = frozen_config.escape_interpolations(text)
    assert config.x == text


@given(st.text())
def test_any_escaped_text_comes_back(text: str) -> None:
    """So it does for text of all kinds."""
    assert OmegaConf.create({"x": frozen_config.escape_interpolations(text)}).x == text


# --- an id that is known later

TOKEN = "the_place_of_the_id"


def test_the_id_of_a_job_on_a_cluster(resolver: Callable[..., None]) -> None:
    """It is put in wherever it is asked for: plainly, in the run directory, and in what cached resolvers made of it."""
    resolver("cached", lambda text: f"<{text}>", use_cache=True)
    resolver("wrapped", lambda text: {"id": ["of", text]}, use_cache=True)
    config = job_config(
        {
            "plain": "${hydra:job.id}",
            "cached": "${cached:${hydra:job.id}}",
            "other": "${cached:x}",
            "deep": "${wrapped:${hydra:job.id}}",
        },
        sweep={"dir": "/sweep", "subdir": "of_${hydra:job.id}"},
    )
    frozen = frozen_config.freeze(config, 3, job_id=TOKEN)
    assert frozen.run_dir == f"/sweep/of_{TOKEN}"
    for copy in (config, travelled(config)):
        frozen_config.set_job_id(copy, TOKEN, "7_1", "/sweep/of_7_1")
        with frozen_config.hydra_config(copy):
            assert (copy.plain, copy.cached, copy.other) == ("7_1", "<7_1>", "<x>")
            assert copy.deep == {"id": ["of", "7_1"]}
        assert (copy.hydra.job.id, copy.hydra.job.num) == ("7_1", 3)
        assert copy.hydra.runtime.output_dir == "/sweep/of_7_1"
        assert OmegaConf.is_readonly(copy.hydra) and OmegaConf.is_struct(copy)


def test_a_cached_value_is_made_once(resolver: Callable[..., None]) -> None:
    """A cached resolver that was given the id is not called again when the id is known: ranks would differ."""
    resolver("count", counting(), use_cache=True)
    config = job_config({"value": "${count:${hydra:job.id}}"})
    frozen_config.freeze(config, 0, job_id=TOKEN)
    copies = [travelled(config), travelled(config)]
    values = set()
    for copy in copies:
        frozen_config.set_job_id(copy, TOKEN, "7", "/sweep/0")
        with frozen_config.hydra_config(copy):
            values.add(copy.value)
    assert values == {"7-0"}


# --- `${hydra:…}`


def test_no_copy_is_made() -> None:
    """What programs ask Hydra for is the config itself, read-only as Hydra has it: a copy takes milliseconds a job."""
    config = job_config(job={"name": "mine"})
    with frozen_config.hydra_config(config):
        assert HydraConfig.get() is config.hydra
    assert OmegaConf.is_readonly(config.hydra)


def put_back_after_an_error(probe: DictConfig) -> None:
    with frozen_config.hydra_config(job_config(job={"name": "inner"})):
        assert probe.name == "inner"
        raise ZeroDivisionError


@pytest.mark.parametrize("earlier", [None, "outer"])
def test_hydra_config_is_put_back(earlier: str | None) -> None:
    """`${hydra:…}` means the given config within the block, and what it meant before after it, also after an error."""
    holder = HydraConfig.instance()
    before = holder.cfg
    try:
        holder.cfg = None
        if earlier is not None:
            holder.set_config(job_config(job={"name": earlier}))
        outer = holder.cfg
        probe = OmegaConf.create({"name": "${hydra:job.name}"})
        with pytest.raises(ZeroDivisionError):
            put_back_after_an_error(probe)
        assert holder.cfg is outer
    finally:
        holder.cfg = before


def test_env_set() -> None:
    """`env_set` is resolved for its job, and every value is text."""
    config = job_config({"lr": 0.1}, job={"name": "app", "env_set": {"A": "job${hydra:job.num}", "B": 1, "C": "${lr}"}})
    env_set = frozen_config.freeze(config, 5).env_set
    assert env_set == {"A": "job5", "B": "1", "C": "0.1"}


def test_an_env_set_that_cannot_be_resolved() -> None:
    """A value of `env_set` that cannot be resolved is this job's error."""
    with pytest.raises(FreezeError, match=r"(?s)hydra\.job\.env_set cannot be resolved: .*nowhere"):
        frozen_config.freeze(job_config(job={"name": "app", "env_set": {"A": "${nowhere}"}}), 0)


# --- what cannot be pickled


@dataclass
class Typed:
    """A structured config with room for anything."""

    anything: Any = None
    parts: list[Any] = field(default_factory=list)


def dump(value: object) -> bytes:
    return frozen_config.dumps(value, None)


def with_lock(**where: Any) -> DictConfig:
    config = OmegaConf.create({"a": {"b": 1}, **where}, flags={"allow_objects": True})
    assert isinstance(config, DictConfig)
    return config


@pytest.mark.parametrize(
    ("where", "key"),
    [
        ({"x": threading.Lock()}, "x"),
        ({"x": {"y": [1, {"z": threading.Lock()}]}}, "x.y[1].z"),
        ({"x": [[threading.Lock()]]}, "x[0][0]"),
        ({"x": Typed(parts=[0, threading.Lock()])}, "x.parts[1]"),
    ],
)
def test_the_key_that_cannot_be_pickled(where: dict[str, Any], key: str) -> None:
    """The key in the config is named in full, with the kind of value and the pickler's reason."""
    found = frozen_config.unpicklable_key(with_lock(**where), dump)
    assert found is not None
    assert found.startswith(f"{key} (lock: ")
    assert "cannot pickle" in found


def test_a_cached_value_that_cannot_be_pickled(resolver: Callable[..., None]) -> None:
    """A cached resolver's value travels with the config: the key that names the resolver is at fault."""
    resolver("lock", lambda: threading.Lock(), use_cache=True)  # noqa: PLW0108  (OmegaConf inspects it)
    config = with_lock(x={"lock": "${lock:}"})
    frozen_config.fill_caches(config)
    assert (frozen_config.unpicklable_key(config, dump) or "").startswith("x.lock (lock: ")


def test_a_config_that_can_be_pickled() -> None:
    """Where everything can be pickled, no key is named; what is missing or not resolvable does not matter."""
    config = with_lock(m="???", n=None, i="${nowhere}", t=Typed, d={}, e=[], s="${a}", y=Typed(), z=("a", 1))
    assert frozen_config.unpicklable_key(config, dump) is None


# --- the values that ranks compare


def test_resolved_values() -> None:
    """Each key that holds a value is there once, in full, resolved and as text; an error is a value, too."""
    config = OmegaConf.create(
        {"a": {"b": 1, "c": ["x", {"d": None}]}, "ref": "${a.b}", "tree": "${a}", "bad": "${nowhere}", "m": "???"}
    )
    assert isinstance(config, DictConfig)
    assert frozen_config.resolved_values(config) == {
        "a.b": "1",
        "a.c[0]": "'x'",
        "a.c[1].d": "None",
        "ref": "1",
        "tree": repr({"b": 1, "c": ["x", {"d": None}]}),
        "bad": "<InterpolationKeyError>",
        "m": "<MissingMandatoryValue>",
    }
