"""The function that a sweep runs has a name that another process of the same program finds again."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import TaskId
from hydra_plugins.hydra_ddp_subprocess_launcher.job.rank import identify


def task(cfg: Any) -> None:
    pass


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorate
@decorate
def decorated(cfg: Any) -> None:
    pass


class Task:
    """A task that is an object, or has methods."""

    def __call__(self, cfg: Any) -> None:
        pass

    def method(self, cfg: Any) -> None:
        pass

    @staticmethod
    def static(cfg: Any) -> None:
        pass


def closure() -> Callable[..., Any]:
    def inner(cfg: Any) -> None:
        pass

    return inner


@pytest.mark.parametrize(
    ("function", "qualname"),
    [
        (task, "task"),
        (decorated, "decorated"),
        (functools.partial(task, 1), "task"),
        (functools.partial(functools.partial(decorated, 1), 2), "decorated"),
        (decorate(functools.partial(task, 1)), "task"),
        (Task(), "Task"),
        (Task().method, "Task.method"),
        (Task.static, "Task.static"),
        (closure(), "closure.<locals>.inner"),
        (lambda cfg: None, "<lambda>"),
    ],
)
def test_the_name_of_a_function(function: Callable[..., Any], qualname: str) -> None:
    """What is wrapped, partial or called as an object is known by what is inside, in any process by the same name."""
    assert identify(function, Counter()) == identify(function, Counter()) == TaskId(__name__, qualname, 0)


def test_sweeps_are_counted_by_name() -> None:
    """One function swept twice, and two closures of one name, are told apart by their order; others do not count."""
    sweeps: Counter[tuple[str, str]] = Counter()
    functions = [closure(), task, closure(), task, decorated]
    assert [identify(function, sweeps).nth for function in functions] == [0, 0, 1, 1, 0]


def test_counts_are_apart() -> None:
    """The sweeps of a launching process and those that a rank meets are counted apart."""
    launcher: Counter[tuple[str, str]] = Counter()
    rank: Counter[tuple[str, str]] = Counter()
    identify(task, launcher)
    assert identify(task, launcher) != identify(task, rank)
    assert identify(task, rank) == TaskId(__name__, "task", 1)
