"""Whether a process notices the process groups that it opens, with a stand-in for torch's module."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.job.outcome import GroupWatch

NAME = "torch.distributed.distributed_c10d"


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in (NAME, "multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    sys.modules.pop(NAME, None)


def fake_torch() -> Any:
    torch: Any = ModuleType(NAME)
    torch.GroupMember = SimpleNamespace(WORLD=None)

    def update(group: object) -> None:
        torch.GroupMember.WORLD = group

    torch._update_default_pg = update
    sys.modules[NAME] = torch
    return torch


def group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size)


def import_something() -> None:
    with pytest.raises(ImportError):
        __import__("no_module_of_this_name")


def test_without_torch() -> None:
    """Nothing is known of a process that has not imported it, and torch is not imported to find out."""
    watch = GroupWatch()
    import_something()
    assert not watch.ran_alone
    assert NAME not in sys.modules


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("sizes", "alone"), [((), True), ((1,), True), ((2,), False), ((1, 8), False)])
def test_groups_that_are_gone_again(late: bool, sizes: tuple[int, ...], alone: bool) -> None:
    """Whether torch was imported before or is imported later, a group counts that has since been destroyed."""
    if not late:
        fake_torch()
    watch = GroupWatch()
    if late:
        fake_torch()
        import_something()
    torch = sys.modules[NAME]
    for size in sizes:
        torch._update_default_pg(group(size))
        assert torch.GroupMember.WORLD.size() == size
        torch._update_default_pg(None)
    assert watch.ran_alone is alone
    assert watch not in sys.meta_path


def test_a_group_that_was_open_before() -> None:
    """What the program's top level opened, and destroys after its main function, is noticed."""
    fake_torch().GroupMember.WORLD = group(2)
    assert not GroupWatch().ran_alone


def test_a_group_of_a_fork() -> None:
    """A child that is a fork speaks for its parent."""
    torch = fake_torch()
    watch = GroupWatch()
    pid = os.fork()
    if pid == 0:
        torch._update_default_pg(group(2))
        os._exit(0)
    os.waitpid(pid, 0)
    assert not watch.ran_alone


def test_a_child_that_is_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What such children open cannot be known, so nothing is claimed."""
    fake_torch()
    watch = GroupWatch()
    monkeypatch.setitem(sys.modules, "multiprocessing.popen_spawn_posix", ModuleType("popen_spawn_posix"))
    assert not watch.ran_alone


def test_another_torch() -> None:
    """Of one that has no such function nothing is known."""
    sys.modules[NAME] = ModuleType(NAME)
    assert not GroupWatch().ran_alone


def test_a_group_that_does_not_tell_its_size() -> None:
    """It counts, and does not disturb the program."""
    torch = fake_torch()
    watch = GroupWatch()
    torch._update_default_pg(object())
    assert not watch.ran_alone
