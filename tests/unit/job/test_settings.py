"""Options become settings, or one error that names the key, the value and what is valid."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins.hydra_ddp_subprocess_launcher.common.choices import (
    Entry,
    OnCodeChange,
    OnConfigDifference,
    ShowProgress,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import OptionError
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import Limits, RankOptions
from hydra_plugins.hydra_ddp_subprocess_launcher.config import DDPSubprocessLauncherConf
from hydra_plugins.hydra_ddp_subprocess_launcher.job.settings import LaunchSettings, read_settings, read_size

OPTIONS = [option.name for option in fields(DDPSubprocessLauncherConf) if option.name != "_target_"]


def options(**changes: Any) -> dict[str, Any]:
    """Return the options as Hydra hands them over, some of them changed by interpolations into the user's config."""
    config = OmegaConf.create({"mine": changes, "launcher": OmegaConf.structured(DDPSubprocessLauncherConf)})
    with open_dict(config.launcher):
        for name in changes:
            config.launcher[name] = f"${{mine.{name}}}"
    read = OmegaConf.to_container(config.launcher, resolve=True)
    assert isinstance(read, dict)
    return {str(name): value for name, value in read.items()}


def test_defaults() -> None:
    """The defaults of the dataclass are usable, and each means what its comment says."""
    assert read_settings(options()) == LaunchSettings(
        nproc_per_node=None,
        devices_per_rank=1,
        devices=None,
        device_env_var="CUDA_VISIBLE_DEVICES",
        jobs_per_device=1,
        max_parallel_jobs=None,
        lock_devices=True,
        min_free_memory_gb=None,
        omp_num_threads=None,
        master_addr=None,
        master_port=None,
        nnodes=1,
        node_rank=0,
        max_restarts=0,
        limits=Limits(grace_period_s=15.0, timeout_s=None, exit_timeout_s=None),
        rank_options=RankOptions(),
        preload=(),
        wrapper=(),
        entry=Entry.auto,
        tee_ranks=(0,),
        progress=ShowProgress.auto,
        check_config=None,
        code_changed=OnCodeChange.warn,
        resume=None,
        max_failures=None,
        stop_running=False,
        allow_nested=False,
        debug=False,
        dry_run=False,
    )


def test_every_option_is_read() -> None:
    """No option of the dataclass is forgotten on the way to the settings."""
    settings = {field.name for field in fields(LaunchSettings)} | {"timeout_min", "exit_timeout_s", "grace_period_s"}
    assert set(OPTIONS) == settings - {"limits", "rank_options"}


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("nproc_per_node", 2, 2),
        ("nproc_per_node", "2", 2),
        ("nproc_per_node", " 2 ", 2),
        ("nproc_per_node", "auto", None),
        ("devices", [], ()),
        ("devices", ["0", "1"], ("0", "1")),
        ("devices", [0, 1], ("0", "1")),
        ("devices", [" GPU-8a5b ", "MIG-x"], ("GPU-8a5b", "MIG-x")),
        ("device_env_var", "HIP_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        ("devices_per_rank", 2, 2),
        ("jobs_per_device", 3, 3),
        ("lock_devices", False, False),
        ("min_free_memory_gb", 20, 20.0),
        ("min_free_memory_gb", 0.5, 0.5),
        ("max_parallel_jobs", 3, 3),
        ("omp_num_threads", 1, 1),
        ("master_addr", "127.0.0.1", "127.0.0.1"),
        ("master_port", 1, 1),
        ("master_port", 65535, 65535),
        ("wrapper", ["nsys", "profile"], ("nsys", "profile")),
        ("preload", "auto", None),
        ("preload", [], ()),
        ("preload", ["torch", "my.own", "torch"], ("torch", "my.own")),
        ("entry", "function", Entry.function),
        ("entry", Entry.script, Entry.script),
        ("tee_ranks", "all", None),
        ("tee_ranks", [], ()),
        ("tee_ranks", [2, 0, 2], (0, 2)),
        ("check_config", "error", OnConfigDifference.error),
        ("check_config", OnConfigDifference.warn, OnConfigDifference.warn),
        ("code_changed", "ignore", OnCodeChange.ignore),
        ("allow_nested", True, True),
        ("debug", True, True),
    ],
)
def test_a_good_value(name: str, given: Any, read: Any) -> None:
    """A value that can be used comes out in one form, whether a config or an interpolation gave it."""
    assert getattr(read_settings(options(**{name: given})), name) == read


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({"timeout_min": 1.5}, Limits(15.0, 90.0, None)),
        ({"exit_timeout_s": 0}, Limits(15.0, None, 0.0)),
        ({"exit_timeout_s": 7}, Limits(15.0, None, 7.0)),
        ({"grace_period_s": 0}, Limits(0.0, None, None)),
        ({"grace_period_s": 0.5, "timeout_min": 1, "exit_timeout_s": 2.5}, Limits(0.5, 60.0, 2.5)),
    ],
)
def test_limits(given: dict[str, Any], limits: Limits) -> None:
    """The three time limits come out in seconds."""
    assert read_settings(options(**given)).limits == limits


@pytest.mark.parametrize(
    ("name", "given", "valid"),
    [
        ("nproc_per_node", 0, "auto, or a whole number from 1 up"),
        ("nproc_per_node", -1, "auto"),
        ("nproc_per_node", 1.5, "whole number"),
        ("nproc_per_node", True, "whole number"),
        ("nproc_per_node", None, "auto"),
        ("nproc_per_node", "gpu", "auto"),
        ("nproc_per_node", [2], "auto"),
        ("devices", "0,1", "null, or a list of ids such as [0,1]"),
        ("devices", 2, "a list of ids"),
        ("devices", ["0,1"], "one id an element"),
        ("devices", [""], "one id an element"),
        ("devices", ["0", " 0"], "no id stands twice"),
        ("device_env_var", "", "the name of an environment variable"),
        ("device_env_var", "A=B", "the name of an environment variable"),
        ("device_env_var", "A\0B", "the name of an environment variable"),
        ("devices_per_rank", 0, "a whole number from 1 up"),
        ("jobs_per_device", 0, "a whole number from 1 up"),
        ("min_free_memory_gb", 0, "null, or a number above 0"),
        ("max_parallel_jobs", 0, "null, or a whole number from 1 up"),
        ("omp_num_threads", -2, "null, or a whole number from 1 up"),
        ("master_addr", "", "null, or an address"),
        ("master_addr", "  ", "null, or an address"),
        ("master_port", 0, "null, or a whole number from 1 to 65535"),
        ("master_port", 65536, "from 1 to 65535"),
        ("timeout_min", 0, "null, or a number above 0"),
        ("timeout_min", -1, "null, or a number above 0"),
        ("timeout_min", float("nan"), "a number above 0"),
        ("timeout_min", float("inf"), "a number above 0"),
        ("exit_timeout_s", -0.1, "null, or a number from 0"),
        ("grace_period_s", -1, "a number from 0"),
        ("wrapper", "nsys profile", "a list of strings"),
        ("preload", "torch", "null, auto, or a list of modules"),
        ("preload", ["torch nn"], "null, auto, or a list of modules"),
        ("preload", [".torch"], "null, auto, or a list of modules"),
        ("preload", True, "null, auto, or a list of modules"),
        ("wrapper", ["nsys", 3], "a list of strings"),
        ("tee_ranks", "none", "all, or a list of ranks such as [0]"),
        ("tee_ranks", [-1], "a list of ranks"),
        ("tee_ranks", [True], "a list of ranks"),
        ("tee_ranks", 0, "a list of ranks"),
    ],
)
def test_a_bad_value(name: str, given: Any, valid: str) -> None:
    """A value that cannot be used is one error with the key, the value and what is valid."""
    # Not through OmegaConf, whose later versions refuse or convert some of them.
    read = options() | {name: given}
    start = re.escape(f"hydra.launcher.{name}={read[name]!r} cannot be used. Valid: ")
    with pytest.raises(OptionError, match=f"^{start}.*{re.escape(valid)}.*\\.$"):
        read_settings(read)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("device_env_var", None),
        ("devices_per_rank", None),
        ("jobs_per_device", None),
        ("lock_devices", None),
        ("min_free_memory_gb", "20GB"),
        ("max_parallel_jobs", "many"),
        ("timeout_min", "1h"),
        ("exit_timeout_s", True),
        ("grace_period_s", None),
        ("entry", "program"),
        ("check_config", "off"),
        ("check_config", False),
        ("code_changed", None),
        ("debug", "pdb"),
    ],
)
def test_a_value_of_another_type(name: str, given: Any) -> None:
    """OmegaConf refuses it and names the option and the value, also where an interpolation gives it."""
    with pytest.raises(OmegaConfBaseException, match=f"(?s){given}.*launcher.{name}"):
        read_settings(options(**{name: given}))


def test_an_unknown_option() -> None:
    """`+hydra.launcher.bogus=1` passes Hydra, so we name it, and every valid option beside it."""
    with pytest.raises(OptionError) as caught:
        read_settings(options(bogus=1))
    assert str(caught.value) == (f"Unknown option hydra.launcher.bogus. Valid options: {', '.join(sorted(OPTIONS))}.")


@pytest.mark.parametrize(("name", "given"), [("timeout_min", 5), ("exit_timeout_s", 0)])
def test_no_time_limit_for_a_job_that_is_debugged(name: str, given: float) -> None:
    """Two options that contradict each other are named, with what to do; apart they can be used."""
    read_settings(options(**{name: given}))
    with pytest.raises(
        OptionError, match=f"debug=true contradicts hydra.launcher.{name}={float(given)}: .* Leave out one"
    ):
        read_settings(options(debug=True, **{name: given}))


def test_no_restart_of_a_job_that_is_debugged() -> None:
    """Restarts that a config has for its other runs are no error."""
    assert [read_settings(options(debug=debug, max_restarts=2)).max_restarts for debug in (False, True)] == [2, 0]


@pytest.mark.parametrize(("progress", "shown"), [("auto", "plain"), ("rich", "plain"), ("none", "none")])
def test_no_board_over_a_debugger(progress: str, shown: str) -> None:
    """Rank 0 has the terminal to itself, but for lines."""
    assert read_settings(options(debug=True, progress=progress)).progress.value == shown


def test_keys_of_instantiate_are_no_options() -> None:
    """What Hydra's `instantiate` reads may stand among the options."""
    assert read_settings(options(_recursive_=False, _convert_="all")) == read_settings(options())


@pytest.mark.parametrize(("given", "read"), [("auto", None), (1, 1), ("4", 4)])
def test_size_of_a_job(given: Any, read: int | None) -> None:
    """A job's own config gives the number of ranks by the same rule as the sweep's."""
    assert read_size(given, 3) == (read, 3)


@pytest.mark.parametrize("kind", [Entry, OnCodeChange, OnConfigDifference])
def test_no_word_is_a_yaml_boolean(kind: type[Entry]) -> None:
    """A word of an option stays a word in YAML, unlike `off`, and is its member's name, which Hydra compares."""
    for choice in kind:
        assert yaml.safe_load(str(choice.value)) == choice.value == choice.name


def test_nodes() -> None:
    """On several nodes one job runs at a time, and rank 0 has an address that all of them know."""
    read = read_settings(options(nnodes=3, node_rank=2, master_addr="head"))
    assert (read.nnodes, read.node_rank, read.max_parallel_jobs) == (3, 2, 1)
    assert read_settings(options(nnodes=2, master_addr="head", max_parallel_jobs=1)).max_parallel_jobs == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nnodes": 0}, "nnodes=0 cannot be used. Valid: a whole number from 1 up"),
        ({"node_rank": -1}, "node_rank=-1 cannot be used"),
        ({"node_rank": 1}, "node_rank=1 cannot be used. Valid: a whole number from 0 to nnodes - 1, which is 0"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "from 0 to nnodes - 1, which is 1"),
        ({"nnodes": 2}, "hydra.launcher.nnodes=2 needs hydra.launcher.master_addr"),
        ({"nnodes": 2, "master_addr": "a", "max_parallel_jobs": 2}, "max_parallel_jobs=2 contradicts"),
        ({"nnodes": 2, "master_addr": "a", "debug": True}, "debug=true contradicts hydra.launcher.nnodes=2"),
    ],
)
def test_nodes_that_cannot_be(given: dict[str, Any], said: str) -> None:
    """What does not fit together is named, with what to do."""
    with pytest.raises(OptionError, match=re.escape(said)):
        read_settings(options(**given))
