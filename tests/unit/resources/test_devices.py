"""Which devices there are, and which can be had: from variables, NVML, locks, and what ended jobs left behind."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import OptionError
from hydra_plugins.hydra_ddp_subprocess_launcher.job.environment import locked_for_this_rank
from hydra_plugins.hydra_ddp_subprocess_launcher.resources import devices as devices_module
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.devices import (
    SETTLE_S,
    DeviceAllocator,
    DeviceLocks,
    Nvml,
    find_devices,
    name_devices,
)
from support.fake_nvml import FakeDevice, FakeNvml

VARIABLE = "CUDA_VISIBLE_DEVICES"
GB = 10**9


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two devices behind NVML."""
    nvml = FakeNvml([FakeDevice("GPU-aaa1"), FakeDevice(b"GPU-aab2")])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def asked(variable: str = VARIABLE, **environ: str) -> Nvml:
    return Nvml(variable, environ)


# --- which there are


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
def test_what_the_process_may_see(fake: FakeNvml, visible: str, found: tuple[str, ...]) -> None:
    """The visible-devices variable decides, in its order and with its ids; NVML is then not asked."""
    assert find_devices(None, VARIABLE, {VARIABLE: visible}, asked()) == found
    hip = "HIP_VISIBLE_DEVICES"
    assert find_devices(None, hip, {hip: visible, VARIABLE: "9"}, asked(hip)) == found
    assert fake.calls == []


def test_what_nvml_lists(fake: FakeNvml) -> None:
    """Without the variable NVML is asked, once it is needed, and closed by whoever asked."""
    nvml = asked()
    assert fake.calls == []
    assert find_devices(None, VARIABLE, {}, nvml) == ("0", "1")
    nvml.close()
    assert fake.calls == ["nvmlInit", "nvmlDeviceGetCount", "nvmlShutdown"]


def test_nvml_knows_one_kind_of_device(fake: FakeNvml) -> None:
    """For other visible-devices variables than CUDA's it says nothing."""
    assert find_devices(None, "HIP_VISIBLE_DEVICES", {}, asked("HIP_VISIBLE_DEVICES")) == ()
    assert fake.calls == []


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetCount"])
def test_no_driver(fake: FakeNvml, caplog: pytest.LogCaptureFixture, fails: str) -> None:
    """A machine without a driver, or with a broken one, has no devices; that is a debug line and no error."""
    fake.fails = fails
    with caplog.at_level(logging.DEBUG):
        assert find_devices(None, VARIABLE, {}, asked()) == ()
    assert [(record.levelname, "Driver Not Loaded" in record.message) for record in caplog.records] == [("DEBUG", True)]


def test_no_nvml(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is a machine without the module; and it is not asked again and again."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml = asked()
    with caplog.at_level(logging.DEBUG):
        assert find_devices(None, VARIABLE, {}, nvml) == ()
        assert nvml.memory("0") is nvml.uuid("0") is nvml.processes("0") is None
    assert len(caplog.records) == 1
    nvml.close()


def test_a_driver_that_fails_later(fake: FakeNvml) -> None:
    """What one question cannot be told is not known; the next may be. To close never fails."""
    nvml = asked()
    fake.fails = "nvmlDeviceGetMemoryInfo"
    assert nvml.memory("0") is None
    fake.fails = ""
    assert nvml.memory("0") == (80 * GB, 80 * GB)
    assert nvml.memory("7") is None
    fake.fails = "nvmlShutdown"
    nvml.close()


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
    assert find_devices(chosen, VARIABLE, environ, asked()) == found


@pytest.mark.parametrize(("visible", "named"), [("3,5,7", "'0'"), ("", "'0'"), ("0,1", "'4'")])
def test_a_device_that_may_not_be_seen(visible: str, named: str) -> None:
    """A device outside of what the process may see is an error with the option, the id and the variable."""
    with pytest.raises(OptionError) as caught:
        find_devices(("0", "4"), VARIABLE, {VARIABLE: visible}, asked())
    for words in ("hydra.launcher.devices=['0', '4']", named, f"{VARIABLE}={visible}"):
        assert words in str(caught.value)


# --- what they are called everywhere


def test_names(fake: FakeNvml) -> None:
    """A device has the name that NVML has for it, whatever id it was given, and else its variable and id."""
    fake.devices.append(FakeDevice("MIG-ccc3"))
    devices = ["1", "GPU-aaa", "MIG-ccc3", "9", "GPU-zzz"]
    names = ["GPU-aab2", "GPU-aaa1", "MIG-ccc3", f"{VARIABLE}=9", f"{VARIABLE}=GPU-zzz"]
    assert list(name_devices(devices, VARIABLE, asked()).items()) == list(zip(devices, names, strict=True))


def test_names_where_numbers_mean_something_else(fake: FakeNvml) -> None:
    """With another order of devices than NVML's a number does not tell which one it is; a UUID does."""
    nvml = asked(CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert name_devices(["0", "GPU-aab"], VARIABLE, nvml) == {"0": f"{VARIABLE}=0", "GPU-aab": "GPU-aab2"}
    assert name_devices(["0"], "HIP_VISIBLE_DEVICES", asked("HIP_VISIBLE_DEVICES")) == {"0": "HIP_VISIBLE_DEVICES=0"}


def test_one_device_under_two_names(fake: FakeNvml) -> None:
    """To name a device twice would have two jobs on it: an error with both ids."""
    with pytest.raises(OptionError, match="Devices 1 and GPU-aab are one and the same"):
        name_devices(["0", "1", "GPU-aab"], VARIABLE, asked())


# --- locks


def other_process(folder: Path, name: str) -> bool:
    """Return whether another process could take a lock."""
    code = (
        "import sys\n"
        "from hydra_plugins.hydra_ddp_subprocess_launcher.resources.devices import DeviceLocks\n"
        "sys.exit(not DeviceLocks('other', folder=sys.argv[1]).acquire(sys.argv[2]))"
    )
    return subprocess.run([sys.executable, "-c", code, folder, name], check=False).returncode == 0


def test_a_lock(tmp_path: Path) -> None:
    """Who has a lock keeps others from it, who can read whose it is, until it is released."""
    folder = tmp_path / "locks"
    locks = DeviceLocks("/sweeps/mine", folder=str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert locks.acquire("MIG-GPU-1/2/3") and locks.acquire("MIG-GPU-1/2/3")
    assert not other_process(folder, "MIG-GPU-1/2/3")
    assert other_process(folder, "GPU-2")
    other = DeviceLocks("/sweeps/other", folder=str(folder))
    assert not other.acquire("MIG-GPU-1/2/3")
    assert other.holder("MIG-GPU-1/2/3") == f"process {os.getpid()}, sweep /sweeps/mine"
    locks.release("MIG-GPU-1/2/3")
    locks.release("MIG-GPU-1/2/3")
    assert other.acquire("MIG-GPU-1/2/3")
    assert {path.name for path in folder.iterdir()} == {"MIG-GPU-1%2F2%2F3", "GPU-2"}


def test_a_lock_is_held_by_every_copy(tmp_path: Path) -> None:
    """A lock that was handed on is free when the last who has it lets go."""
    locks, other = DeviceLocks("one", folder=str(tmp_path)), DeviceLocks("other", folder=str(tmp_path))
    assert locks.acquire("a")
    assert not os.get_inheritable(locks.descriptor("a"))
    copy = os.dup(locks.descriptor("a"))
    locks.release("a")
    assert not other.acquire("a")
    os.close(copy)
    assert other.acquire("a")


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"pid": 1}'])
def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path, content: str) -> None:
    """Who waits is told as much as is known."""
    (tmp_path / "a").write_text(content)
    assert DeviceLocks("one", folder=str(tmp_path)).holder("a") == "another sweep of yours"


def test_a_lock_file_that_is_deleted(tmp_path: Path) -> None:
    """Who has locked a file that is gone from its place has locked nothing; the folder is made again."""
    folder = tmp_path / "locks"
    locks, other = DeviceLocks("one", folder=str(folder)), DeviceLocks("other", folder=str(folder))
    real = os.open

    def delete_after(path: str, *arguments: int) -> int:
        descriptor = real(path, *arguments)
        if not deleted:
            deleted.append(path)
            os.unlink(path)
        return descriptor

    deleted: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", delete_after)
        assert locks.acquire("a")
    assert deleted and not other.acquire("a")
    locks.release("a")
    shutil.rmtree(folder)
    assert other.acquire("a")


def test_locks_of_the_sweep_around(tmp_path: Path) -> None:
    """What is locked for the job of which this process is a rank is not locked again; all else is."""
    outer = DeviceLocks("outer", folder=str(tmp_path))
    assert outer.acquire("GPU 1") and outer.acquire("GPU-2")
    inherited = locked_for_this_rank({"HYDRA_DDP_LOCKED": "GPU%201"})
    assert inherited == {"GPU 1"}
    assert locked_for_this_rank({}) == frozenset()
    inner = DeviceLocks("inner", inherited, str(tmp_path))
    assert inner.acquire("GPU 1") and inner.descriptor("GPU 1") is None
    assert not inner.acquire("GPU-2")


def test_names_of_any_length(tmp_path: Path) -> None:
    """An id that is too long for a file has a lock of its own all the same."""
    names = [f"GPU-{'é' * 300}{number}" for number in range(2)]
    locks, other = DeviceLocks("one", folder=str(tmp_path)), DeviceLocks("other", folder=str(tmp_path))
    assert locks.acquire(names[0])
    assert not other.acquire(names[0]) and other.acquire(names[1])


def test_lock_files_stay_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of a lock that is held for days is touched, so that no cleaner of old files takes it."""
    locks = DeviceLocks("one", folder=str(tmp_path))
    assert locks.acquire("a")
    os.utime(tmp_path / "a", (0, 0))
    locks.touch()
    assert (tmp_path / "a").stat().st_mtime == 0
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3601)
    locks.touch()
    assert (tmp_path / "a").stat().st_mtime > 0


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    """A folder that is somebody else's, a link or no folder is an error that names the way out."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    for name in ("file", "link", "theirs", "file/below"):
        with pytest.raises(OptionError, match=r"lock_devices=false"):
            DeviceLocks("one", folder=str(tmp_path / name))
    locks = DeviceLocks("one", folder=str(tmp_path))
    (tmp_path / "a").symlink_to(tmp_path / "file")
    with pytest.raises(OptionError, match=r"lock_devices=false"):
        locks.acquire("a")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks cannot be had at all, that is said instead of waited for."""

    def flock(_descriptor: int, _how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OptionError, match=r"Operation not supported.*lock_devices=false"):
        DeviceLocks("one", folder=str(tmp_path)).acquire("a")


def test_all_sweeps_of_a_user_meet() -> None:
    """The folder does not depend on what differs between a login session, cron and a batch job."""
    code = "from hydra_plugins.hydra_ddp_subprocess_launcher.resources import devices as _locks; print(_locks.FOLDER)"
    for variables in ({}, {"XDG_RUNTIME_DIR": "/nowhere", "TMPDIR": "/nowhere", "HOME": "/nowhere"}):
        environment = {**os.environ, **variables}
        found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        assert found.strip() == devices_module.FOLDER
    assert str(os.getuid()) in devices_module.FOLDER


# --- the gate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def gate_of(tmp_path: Path, clock: Clock | None = None, min_free_gb: float | None = None) -> DeviceAllocator:
    nvml = asked()
    names = name_devices(["0", "1"], VARIABLE, nvml)
    return DeviceAllocator(names, nvml, DeviceLocks("mine", folder=str(tmp_path)), min_free_gb, clock or Clock())


def test_the_gate_locks_what_is_used(fake: FakeNvml, tmp_path: Path) -> None:
    """Devices that are obtained are locked for others, under the name that all know; the unused are let go."""
    gate, other = gate_of(tmp_path), DeviceLocks("other", folder=str(tmp_path))
    assert gate.acquire("0") and gate.acquire("1")
    assert not other.acquire("GPU-aaa1") and not other.acquire("GPU-aab2")
    gate.release_unused(["0"])
    assert not other.acquire("GPU-aaa1") and other.acquire("GPU-aab2")
    assert len(gate.descriptors(["0"])) == 1
    assert not gate.acquire("1")
    (why,) = gate.blocked_by().values()
    assert f"is held by process {os.getpid()}, sweep other" in why
    assert gate.blocked_by() == {}
    gate.job_ended(["0"])
    gate.release_unused([])
    assert other.acquire("GPU-aaa1")
    gate.close()


def test_locks_that_cannot_be_had_later(
    fake: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock that cannot be used is an error before any job; while jobs run it is a warning, and they go on."""
    gate = gate_of(tmp_path)

    def flock(_descriptor: int, _how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert gate.acquire("0") and gate.acquire("1")
    assert gate.descriptors(["0", "1"]) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Operation not supported" in caplog.text
    with pytest.raises(OptionError, match="Operation not supported"):
        gate_of(tmp_path)


def test_a_device_for_another_start(fake: FakeNvml, tmp_path: Path) -> None:
    """Between two starts of a job its devices are waited for, too: processes and memory."""
    gate = gate_of(tmp_path, min_free_gb=20)
    assert gate.acquire("0")
    assert gate.ready(["0"])
    fake.devices[0].pids = [77]
    gate.job_ended(["0"])
    assert not gate.ready(["0"])
    fake.devices[0].pids = []
    fake.devices[0].free = 0
    assert not gate.ready(["0"])
    fake.devices[0].free = 30 * GB
    assert gate.ready(["0"])


def test_a_busy_device(fake: FakeNvml, tmp_path: Path) -> None:
    """A device without the free memory that is asked for is not given out, nor locked, until it has it."""
    gate = gate_of(tmp_path, min_free_gb=20)
    fake.devices[0].free = 3 * GB
    assert not gate.acquire("0") and gate.acquire("1")
    assert gate.blocked_by() == {"0": "has less than hydra.launcher.min_free_memory_gb=20 free"}
    assert DeviceLocks("other", folder=str(tmp_path)).acquire("GPU-aaa1")
    fake.devices[0].free = 20 * GB
    assert not gate.acquire("0"), "the other sweep has it now"


def test_memory_that_is_not_known_later(fake: FakeNvml, tmp_path: Path) -> None:
    """A driver that fails while the sweep runs keeps nobody waiting."""
    gate = gate_of(tmp_path, min_free_gb=20)
    fake.fails = "nvmlDeviceGetMemoryInfo"
    assert gate.acquire("0")


def test_memory_that_no_device_has(fake: FakeNvml, tmp_path: Path) -> None:
    """More than a device has in all, or than can be known, is an error before any job."""
    with pytest.raises(OptionError, match=r"min_free_memory_gb=81 cannot be met by device 0: it has 80\.0 GB in all"):
        gate_of(tmp_path, min_free_gb=81)
    fake.fails = "nvmlDeviceGetMemoryInfo"
    with pytest.raises(OptionError, match=r"min_free_memory_gb=1 cannot be met by device 0: NVML does not tell"):
        gate_of(tmp_path, min_free_gb=1)


def test_processes_that_linger(fake: FakeNvml, tmp_path: Path) -> None:
    """A device is kept, locked, until the driver says that the last job's processes are off it."""
    clock = Clock()
    gate, other = gate_of(tmp_path, clock), DeviceLocks("other", folder=str(tmp_path))
    fake.devices[0].pids = [7]
    assert gate.acquire("0")
    fake.devices[0].pids = [7, 1234]
    gate.job_ended(["0"])
    gate.release_unused([])
    assert not gate.is_idle
    assert not gate.acquire("0")
    assert gate.blocked_by() == {"0": "has processes that were not there before the last job"}
    assert not other.acquire("GPU-aaa1")
    fake.devices[0].pids = [7]
    assert gate.is_idle
    gate.release_unused([])
    assert other.acquire("GPU-aaa1")


def test_a_process_of_somebody_else(fake: FakeNvml, tmp_path: Path) -> None:
    """A process that came while a job ran and stays is waited for once, not after every job that follows."""
    clock = Clock()
    gate = gate_of(tmp_path, clock)
    assert gate.acquire("0")
    fake.devices[0].pids = [515151]
    gate.job_ended(["0"])
    assert not gate.ready(["0"])
    clock.now += SETTLE_S
    assert gate.ready(["0"])
    for _ in range(2):
        gate.job_ended(["0"])
        assert gate.ready(["0"])
    gate.release_unused([])
    assert gate.acquire("0")
    gate.job_ended(["0"])
    assert gate.is_idle


def test_processes_that_stay(fake: FakeNvml, tmp_path: Path) -> None:
    """After ten seconds a device is given on in any case: the process may be somebody else's."""
    clock = Clock()
    gate = gate_of(tmp_path, clock)
    assert gate.acquire("0")
    fake.devices[0].pids = [99]
    gate.job_ended(["0"])
    clock.now += SETTLE_S - 0.1
    assert not gate.acquire("0")
    clock.now += 0.2
    assert gate.acquire("0")


def test_no_locks(fake: FakeNvml) -> None:
    """With lock_devices=false nothing is locked and nothing handed on."""
    nvml = asked()
    gate = DeviceAllocator(name_devices(["0"], VARIABLE, nvml), nvml, None, None)
    assert gate.acquire("0")
    assert gate.descriptors(["0"]) == []
    gate.close()
