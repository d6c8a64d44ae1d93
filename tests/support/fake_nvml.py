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

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._call("nvmlDeviceGetHandleByIndex")
        return range(len(self.devices))[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self._call("nvmlDeviceGetHandleByUUID")
        return next(index for index, device in enumerate(self.devices) if device.uuid == uuid)

    def nvmlSystemGetDriverVersion(self) -> str:
        self._call("nvmlSystemGetDriverVersion")
        return "580.1"

    def nvmlDeviceGetName(self, handle: int) -> str:
        self._call("nvmlDeviceGetName")
        return f"Fake {handle}"

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        self._call("nvmlDeviceGetUUID")
        return self.devices[handle].uuid

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(free=self.devices[handle].free, total=self.devices[handle].total)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._call("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid) for pid in self.devices[handle].pids]
