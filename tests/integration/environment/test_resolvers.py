"""Resolvers that come with callbacks, or are registered just before the jobs: every rank has them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Runner

# Hydra calls the methods before the launcher starts a job; the module is imported when the callback is made.
CALLBACK = """
import functools, threading

import omegaconf
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

register = OmegaConf.register_new_resolver if omegaconf.__version__ < "2.4" else OmegaConf.register_resolver
STATE = []
LOCK = threading.Lock()
register("imported", lambda: len(STATE))
register("replaced_again", lambda: "at import")


def times(factor, value):
    return factor * value


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def scale(self, value):
        return self.factor * value

    def __call__(self, value):
        return self.factor * value


def closure(factor):
    return lambda value: factor * value


class Registers(Callback):
    def on_multirun_start(self, config, **kwargs):
        STATE.append("of the launching process alone")
        register("by_lambda", lambda value: 2 * value)
        register("by_closure", closure(3))
        register("by_function", times)
        register("by_method", Scale(4).scale)
        register("by_object", Scale(5))
        register("by_partial", functools.partial(times, 6))
        register("with_node", lambda _parent_: _parent_.x * 7)
        register("cached", lambda: __import__("random").random(), use_cache=True)
        register("replaced", lambda: "by the callback", replace=True)
        register("replaced_again", lambda: "by the callback", replace=True)
        register("made", closure(9), replace=True)
        register("unused", lambda: LOCK)
        register("locked_cached", lambda: "cached" if LOCK else None, use_cache=True)
        register("locked", lambda: "locked" if LOCK else None)
"""
APP = """
import json, os

import hydra
import omegaconf
from omegaconf import OmegaConf

register = OmegaConf.register_new_resolver if omegaconf.__version__ < "2.4" else OmegaConf.register_resolver
SEEN = []


def note(value):
    SEEN.append(value)
    return len(SEEN)


def closure(factor):
    return lambda value: factor * value


register("own", lambda value: note(value))
register("replaced", lambda: "by the program")
register("made", closure(1))


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(cfg):
    values = OmegaConf.to_container(cfg, resolve=True)
    values["seen"] = list(SEEN)
    with open(f"values_{os.environ.get('RANK', 'basic')}.json", "w") as file:
        json.dump(values, file)


if __name__ == "__main__":
    main()
"""
CONFIG = """
x: 10
lambda: ${by_lambda:${x}}
closure: ${by_closure:${x}}
function: ${by_function:2,${x}}
method: ${by_method:${x}}
object: ${by_object:${x}}
partial: ${by_partial:${x}}
node: ${with_node:}
cached: ${cached:}
replaced: ${replaced:}
replaced_again: ${replaced_again:}
made: ${made:1}
own: ${own:word}
locked_cached: ${locked_cached:}
imported: ${imported:}
hydra:
  callbacks:
    registers:
      _target_: callback_module.Registers
"""


def write(runner: Runner, config: str = CONFIG) -> None:
    """Write the program, its config and its callback."""
    (runner.cwd / "app.py").write_text(APP)
    (runner.cwd / "config.yaml").write_text(config)
    (runner.cwd / "callback_module.py").write_text(CALLBACK)


def values(runner: Runner, who: str) -> dict[str, Any]:
    """Return what a rank, or the job of the basic launcher, has resolved."""
    found: dict[str, Any] = json.loads((runner.cwd / f"values_{who}.json").read_text())
    return found


@pytest.mark.parametrize("options", [(), ("hydra.launcher.preload=auto", "hydra.launcher.check_config=null")])
def test_resolvers_of_callbacks(runner: Runner, options: tuple[str, ...]) -> None:
    """Each form of resolver that a method of a callback registers or replaces resolves alike in all ranks."""
    write(runner)
    assert runner.python("app.py", "-m", f"hydra.sweep.dir={runner.cwd / 'basic'}").returncode == 0
    basic = values(runner, "basic")
    ran = runner.sweep(runner.cwd / "app.py", *options)
    assert ran.returncode == 0, ran.output
    first, second = (values(runner, str(rank)) for rank in range(2))
    assert first == second
    # It is random, and cached for the job.
    del first["cached"], basic["cached"]
    # State of a module stays with it: resolvers that a rank has of its own are not replaced.
    assert (basic.pop("imported"), first.pop("imported")) == (1, 0)
    assert first["seen"] == ["word"]
    assert first == basic


def test_a_resolver_that_cannot_be_carried(runner: Runner) -> None:
    """Only a job that needs it fails, with its name and what to do."""
    write(runner, CONFIG + "needed: ${locked:}\n")
    ran = runner.sweep(runner.cwd / "app.py")
    assert ran.returncode != 0
    assert "'locked'" in ran.output
    assert "Register it at the top" in ran.output


def test_resolvers_of_a_program_that_is_not_run_again(runner: Runner) -> None:
    """A function that goes to the ranks by pickle has the resolvers of the program that is not run there."""
    write(runner)
    ran = runner.sweep(runner.cwd / "app.py", "hydra.launcher.entry=function")
    assert ran.returncode == 0, ran.output
    assert values(runner, "0") == values(runner, "1")
    assert values(runner, "0")["replaced"] == "by the callback"
    assert values(runner, "0")["made"] == 9


def test_a_callback_that_cannot_be_imported_elsewhere(runner: Runner) -> None:
    """A callback's module that fails to be imported in rank 1 alone does not fail the job."""
    write(runner, "x: 1\nhydra:\n  callbacks:\n    registers:\n      _target_: callback_module.Registers\n")
    path = runner.cwd / "callback_module.py"
    path.write_text("import os\nassert os.environ.get('RANK') != '1', 'not here'\n" + CALLBACK)
    ran = runner.sweep(runner.cwd / "app.py")
    assert ran.returncode == 0, ran.output
    assert "not here" in (runner.cwd / "sweep" / "0" / ".ddp" / "rank_1.log").read_text()
