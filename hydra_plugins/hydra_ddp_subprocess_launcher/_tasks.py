"""Which function of a program a sweep runs, said so that another process running the program finds it again."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import Any

from ._specs import TaskId

# Sweeps that began in this process, by function: those of the launcher, and those that a rank met.
LAUNCHER_SWEEPS: Counter[tuple[str, str]] = Counter()
RANK_SWEEPS: Counter[tuple[str, str]] = Counter()


def identify(task_function: Any, sweeps: Counter[tuple[str, str]]) -> TaskId:
    """Name the function of the sweep that begins now.

    Two functions can have one name (a closure made twice), and one function can be swept twice: so the sweeps of a
    name are counted.

    Args:
        task_function: What `hydra.main` decorates.
        sweeps: The count to carry on.
    """
    function = inspect.unwrap(task_function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    # An object that is called, such as hydra-zen's, is known by its type.
    named = function if hasattr(function, "__qualname__") else type(function)
    name = (str(named.__module__), str(named.__qualname__))
    task = TaskId(*name, nth=sweeps[name])
    sweeps[name] += 1
    return task
