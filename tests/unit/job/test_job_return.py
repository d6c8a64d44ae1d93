"""What a sweeper gets of a job: Hydra's JobReturn, in little memory."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import cloudpickle
import pytest
from hydra import version
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher.job.results import JobResult, make_job_return


def job_config(**job: Any) -> DictConfig:
    """Return a frozen job config with Hydra's own node."""
    config = OmegaConf.create({"lr": 0.1, "name": "${hydra:job.name}", "hydra": OmegaConf.structured(HydraConf)})
    config.hydra.overrides.task = ["lr=0.1"]
    config.hydra.job.name = "app"
    config.hydra.job.merge_with(job)
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, True)
    return config


def cloudpickle_again(one: JobReturn) -> JobReturn:
    again: JobReturn = pickle.loads(cloudpickle.dumps(one))
    return again


@pytest.fixture(autouse=True)
def job_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hydra know a job function, as it does in a program."""
    monkeypatch.setattr(JobRuntime.instance(), "conf", OmegaConf.create({"name": "app"}))


def made(config: DictConfig | None, verdict: JobResult) -> JobReturn:
    return make_job_return(["lr=0.1", "hydra.verbose=true"], config, "/run/0", verdict)


def test_a_job_return() -> None:
    """The sweeper gets what the basic launcher gives: value, configs, overrides of the task, name, directory."""
    config = job_config(chdir=False)
    before = HydraConfig.instance().cfg
    result = made(config, JobResult(completed=True, value=0.5))
    assert HydraConfig.instance().cfg is before
    assert result.status is JobStatus.COMPLETED and result.return_value == 0.5
    assert (result.overrides, result.task_name, result.working_dir) == (["lr=0.1"], "app", os.getcwd())
    assert result.cfg is not None and set(result.cfg) == {"lr", "name"}
    assert OmegaConf.is_struct(result.cfg)
    assert result.hydra_cfg is not None and result.hydra_cfg.hydra.job.name == "app"


def test_hydras_part_stands_alone() -> None:
    """Hydra's part of the config is read-only and in a config of its own, as Hydra's copy is; both keep their types."""
    result = made(job_config(), JobResult(completed=True, value=None))
    hydra_cfg = result.hydra_cfg
    assert isinstance(hydra_cfg, DictConfig) and set(hydra_cfg) == {"hydra"}
    assert hydra_cfg.hydra._get_root() is hydra_cfg and OmegaConf.get_type(hydra_cfg.hydra) is HydraConf
    assert OmegaConf.is_readonly(hydra_cfg.hydra) and not OmegaConf.is_readonly(hydra_cfg)
    assert pickle.loads(pickle.dumps(hydra_cfg)) == hydra_cfg


def test_the_configs_stay_what_somebody_made_of_them() -> None:
    """A config is loaded once: what is changed in it stays changed, and what is set in its place stays there."""
    result = made(job_config(), JobResult(completed=True, value=None))
    assert result.cfg is result.cfg and result.hydra_cfg is result.hydra_cfg
    assert result.cfg is not None
    result.cfg.lr = 0.2
    assert result.cfg.lr == 0.2
    for other in ("cfg", "hydra_cfg"):
        result = made(job_config(), JobResult(completed=True, value=None))
        setattr(result, other, None)
        assert result.hydra_cfg is not None or result.cfg is not None
        assert getattr(result, other) is None


@pytest.mark.parametrize(
    "again", [lambda one: pickle.loads(pickle.dumps(one)), cloudpickle_again, copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize("looked_at", [(), ("cfg",), ("hydra_cfg",), ("cfg", "hydra_cfg")])
def test_a_copy_is_hydras_own(again: Callable[[JobReturn], JobReturn], looked_at: tuple[str, ...]) -> None:
    """Who pickles or copies a JobReturn gets the class that every other launcher returns, with all that is in it."""
    first = made(job_config(), JobResult(completed=True, value={"loss": 0.5}))
    for name in looked_at:
        getattr(first, name)
    second = again(first)
    assert type(second) is JobReturn and isinstance(first, JobReturn)
    for field in fields(JobReturn):
        assert getattr(second, field.name) == getattr(first, field.name), field.name
    assert vars(second).keys() == vars(JobReturn()).keys()


def test_one_with_another_value() -> None:
    """Who replaces a field of a JobReturn, as of any dataclass, gets one with all the others."""
    first = made(job_config(), JobResult(completed=True, value=0.5))
    second = replace(first, task_name="other")
    assert second.task_name == "other" and first.task_name == "app"
    for one in (second, pickle.loads(pickle.dumps(second))):
        assert (one.cfg, one.hydra_cfg, one.return_value) == (first.cfg, first.hydra_cfg, 0.5)


def test_a_config_that_cannot_be_pickled() -> None:
    """Then the sweeper gets the live one."""
    config = job_config()
    OmegaConf.set_struct(config, False)
    config._set_flag("allow_objects", True)
    config.lock = lock = threading.Lock()
    result = made(config, JobResult(completed=True, value=None))
    assert type(result) is JobReturn
    assert result.cfg is config and config.lock is lock and "hydra" not in config
    assert result.hydra_cfg is not None and result.hydra_cfg.hydra.job.name == "app"


def test_many_of_them_are_small() -> None:
    """What a job leaves behind is a tenth of its live config at most."""

    def live(count: int) -> tuple[int, list[object]]:
        before = tracemalloc.get_traced_memory()[0]
        kept: list[object] = [job_config() for _ in range(count)]
        return tracemalloc.get_traced_memory()[0] - before, kept

    def returned(count: int) -> tuple[int, list[object]]:
        before = tracemalloc.get_traced_memory()[0]
        kept: list[object] = [made(job_config(), JobResult(completed=True, value=None)) for _ in range(count)]
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before, kept

    made(job_config(), JobResult(completed=True, value=None))
    tracemalloc.start()
    try:
        assert returned(5)[0] < live(5)[0] / 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("chdir", "changes"), [(True, True), (False, False)])
def test_the_working_directory(chdir: bool, changes: bool) -> None:
    """The working directory is the run directory where the job changed into it."""
    result = made(job_config(chdir=chdir), JobResult(completed=True, value=None))
    assert result.working_dir == ("/run/0" if changes else os.getcwd())


@pytest.mark.skipif(not hasattr(version, "base_at_least"), reason="Hydra 1.4 has one default for all programs")
@pytest.mark.parametrize(("base_is_new", "changes"), [(False, True), (True, False)])
def test_the_working_directory_by_default(monkeypatch: pytest.MonkeyPatch, base_is_new: bool, changes: bool) -> None:
    """Where the option is null, the program's version_base decides, as in Hydra itself."""
    monkeypatch.setattr(version, "base_at_least", lambda wanted: base_is_new)
    result = made(job_config(chdir=None), JobResult(completed=True, value=None))
    assert result.working_dir == ("/run/0" if changes else os.getcwd())


def test_a_job_return_of_a_failed_job() -> None:
    """A failed job's return raises the exception when its value is asked for."""
    result = made(job_config(), JobResult(completed=False, value=KeyError("mine")))
    assert result.status is JobStatus.FAILED
    with pytest.raises(KeyError, match="mine"):
        _ = result.return_value


def test_a_job_that_did_not_compose() -> None:
    """A job without a config still has its overrides and its error."""
    result = made(None, JobResult(completed=False, value=ValueError("no such group")))
    assert (result.overrides, result.cfg, result.hydra_cfg) == (["lr=0.1", "hydra.verbose=true"], None, None)
    assert result.status is JobStatus.FAILED


def test_unknown_remote_fields_are_left_out() -> None:
    """Fields of another version of Hydra do not get into a JobReturn that lacks them."""
    result = made(
        None, JobResult(completed=False, value=ValueError(), remote=(("no_such_field", 1), ("task_name", "t")))
    )
    assert not hasattr(result, "no_such_field")
    assert result.task_name == "t"


def test_a_verdict_may_hold_anything() -> None:
    """A value that cannot be copied is passed on as it is."""
    lock = threading.Lock()
    assert made(job_config(), JobResult(completed=True, value=lock)).return_value is lock
