"""Which devices jobs may use, and who has which: ids are opaque, and no two jobs ever share one."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher._devices import DevicePool, find_devices
from hydra_plugins.hydra_ddp_subprocess_launcher._errors import OptionError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def fake_nvml(count: int, *, fails: str = "") -> tuple[SimpleNamespace, list[str]]:
    """Return a stand-in for pynvml that finds so many devices, and what it is called for."""
    calls: list[str] = []

    def call(name: str, result: Any = None) -> Any:
        def function() -> Any:
            calls.append(name)
            if name == fails:
                raise RuntimeError("Driver Not Loaded")
            return result

        return function

    names = {"nvmlInit": None, "nvmlDeviceGetCount": count, "nvmlShutdown": None}
    return SimpleNamespace(**{name: call(name, result) for name, result in names.items()}), calls


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("3,5,7", ("3", "5", "7")),
        (" 1 , 0 ,", ("1", "0")),
        ("GPU-8a5b,MIG-GPU-1/2/3", ("GPU-8a5b", "MIG-GPU-1/2/3")),
        ("", ()),
        (" ", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,1,-1,2", ("0", "1")),
    ],
)
def test_what_the_process_may_see(monkeypatch: pytest.MonkeyPatch, visible: str, found: tuple[str, ...]) -> None:
    """The visible-devices variable decides, in its order and with its ids; NVML is then not asked."""
    nvml, calls = fake_nvml(8)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert find_devices(None, VARIABLE, {VARIABLE: visible}) == found
    assert find_devices(None, "HIP_VISIBLE_DEVICES", {"HIP_VISIBLE_DEVICES": visible, VARIABLE: "9"}) == found
    assert calls == []


def test_what_nvml_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable NVML is asked, and closed again."""
    nvml, calls = fake_nvml(3)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert find_devices(None, VARIABLE, {}) == ("0", "1", "2")
    assert calls == ["nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"]


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"])
def test_no_driver(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """A machine without a driver, or with a broken one, has no devices; that is no error."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(3, fails=fails)[0])
    assert find_devices(None, VARIABLE, {}) == ()


def test_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a machine without the module."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_devices(None, VARIABLE, {}) == ()


@pytest.mark.parametrize(
    ("chosen", "environ", "found"),
    [
        ((), {}, ()),
        ((), {VARIABLE: "0,1"}, ()),
        (("1", "0"), {}, ("1", "0")),
        (("2", "0"), {VARIABLE: "0,1,2"}, ("2", "0")),
        (("GPU-a",), {VARIABLE: "GPU-b,GPU-a"}, ("GPU-a",)),
    ],
)
def test_chosen_devices(chosen: tuple[str, ...], environ: dict[str, str], found: tuple[str, ...]) -> None:
    """The option's devices are used as they are, in its order, as long as the process may see them."""
    assert find_devices(chosen, VARIABLE, environ) == found


@pytest.mark.parametrize(("visible", "named"), [("3,5,7", "'0'"), ("", "'0'"), ("0,1", "'4'")])
def test_a_device_that_may_not_be_seen(visible: str, named: str) -> None:
    """A device outside of what the process may see is an error with the option, the id and the variable."""
    with pytest.raises(OptionError) as caught:
        find_devices(("0", "4"), VARIABLE, {VARIABLE: visible})
    for words in ("hydra.launcher.devices=['0', '4']", named, f"{VARIABLE}={visible}"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "asked", "nproc"),
    [("", None, 1), ("0", None, 1), ("0123", None, 4), ("", 3, 3), ("0123", 2, 2), ("01", 2, 2)],
)
def test_ranks_of_a_job(ids: str, asked: int | None, nproc: int) -> None:
    """`auto` is one rank a device, 1 without devices; a number is that number."""
    assert DevicePool(tuple(ids)).nproc(asked) == nproc


def test_a_job_that_never_fits() -> None:
    """A job that needs more devices than there are is an error with both numbers and the ids."""
    with pytest.raises(OptionError, match=r"nproc_per_node=3, but there are only 2 devices \(GPU-a, GPU-b\)"):
        DevicePool(("GPU-a", "GPU-b")).nproc(3)


@pytest.mark.parametrize(
    ("ids", "nproc", "limit", "jobs"),
    [
        ("", 2, None, 1),
        ("", 2, 4, 4),
        ("0123", 2, None, 2),
        ("0123", 2, 1, 1),
        ("0123", 2, 9, 2),
        ("0123", 3, None, 1),
        ("0123", 1, None, 4),
        ("01", 4, None, 1),
    ],
)
def test_jobs_at_once(ids: str, nproc: int, limit: int | None, jobs: int) -> None:
    """As many jobs as whole sets of devices, 1 without devices, and no more than the option allows."""
    assert DevicePool(tuple(ids)).most_jobs(nproc, limit) == jobs


def test_leases() -> None:
    """Devices are given out in order, in whole sets, and can be had again when they are back."""
    pool = DevicePool(("a", "b", "c"))
    first = pool.lease(2)
    assert first == ("a", "b")
    assert pool.lease(2) is None
    assert pool.lease(1) == ("c",)
    assert pool.lease(1) is None
    pool.give_back(first)
    assert pool.lease(1) == ("a",)
    pool.give_back(("c",))
    assert pool.lease(2) == ("b", "c")


def test_leases_without_devices() -> None:
    """Without devices every job gets an empty lease, which can be given back."""
    pool = DevicePool(())
    for _ in range(3):
        assert pool.lease(4) == ()
    pool.give_back(())
    assert pool.lease(1) == ()


@pytest.mark.parametrize("seed", range(20))
def test_no_device_is_given_out_twice(seed: int) -> None:
    """Whatever the order of leases and returns, two jobs never have the same device, and none is lost."""
    choose = random.Random(seed)
    pool = DevicePool(tuple(map(str, range(7))))
    held: list[tuple[str, ...]] = []
    for _ in range(300):
        if held and choose.random() < 0.5:
            pool.give_back(held.pop(choose.randrange(len(held))))
            continue
        nproc = choose.randint(1, 4)
        in_use = [device for lease in held for device in lease]
        lease = pool.lease(nproc)
        if len(pool.ids) - len(in_use) < nproc:
            assert lease is None
        else:
            assert lease is not None and len(set(lease)) == nproc
            assert not set(lease) & set(in_use)
            held.append(lease)
    for lease in held:
        pool.give_back(lease)
    assert pool.lease(7) == pool.ids
