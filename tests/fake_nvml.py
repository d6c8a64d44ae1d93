"""A stand-in for NVIDIA's Python module, `pynvml`: the boundary behind which a driver would be."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class FakeDevice:
    """One device.

    Attributes:
        uuid: Its name, text or, as from old versions of the module, bytes.
        free: Free bytes.
        total: All bytes.
        pids: Processes on it.
    """

    uuid: str | bytes
    free: int = 80 * 10**9
    total: int = 80 * 10**9
    pids: list[int] = field(default_factory=list)


@dataclass
class FakeNvml:
    """The module's functions that are used, over a list of devices.

    Attributes:
        devices: By NVML's number.
        fails: Name of the function that raises.
        calls: Names of the functions that were called.
    """

    devices: list[FakeDevice]
    fails: str = ""
    calls: list[str] = field(default_factory=list)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError("Driver Not Loaded")

    def nvmlInit(self) -> None:
        self._call("nvmlInit")

    def nvmlShutdown(self) -> None:
        self._call("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        self._call("nvmlDeviceGetCount")
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        self._call("nvmlDeviceGetHandleByIndex")
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeDevice:
        self._call("nvmlDeviceGetHandleByUUID")
        return next(device for device in self.devices if device.uuid == uuid)

    def nvmlDeviceGetUUID(self, handle: FakeDevice) -> str | bytes:
        self._call("nvmlDeviceGetUUID")
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeDevice) -> Any:
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(free=handle.free, total=handle.total)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeDevice) -> list[Any]:
        self._call("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid) for pid in handle.pids]
