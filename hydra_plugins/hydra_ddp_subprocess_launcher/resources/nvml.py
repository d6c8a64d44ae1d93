"""What NVML tells about devices. Apart from `devices`, as `hydra-ddp info` does without Hydra."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# The only variable whose ids NVML knows, and the order in which NVML numbers devices.
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "PCI_BUS_ID"


class Nvml:
    """NVML, initialized on the first query. Without a working driver and the Python module, queries return None.

    Args:
        variable: Name of the visible-devices variable; NVML only knows the ids of CUDA's.
        environ: Environment with `CUDA_DEVICE_ORDER`.
    """

    def __init__(self, variable: str, environ: Mapping[str, str]) -> None:
        self._module: Any = None
        self._missing = variable != _VARIABLE
        # By default, ranks get CUDA_DEVICE_ORDER=PCI_BUS_ID, which is NVML's order.
        self._knows_numbers = environ.get("CUDA_DEVICE_ORDER", _ORDER) == _ORDER
        self._handles: dict[str, Any] = {}

    def count(self) -> int:
        """Return the number of devices, or 0 if unknown."""
        return self._ask(lambda nvml: int(nvml.nvmlDeviceGetCount())) or 0

    def driver(self) -> str | None:
        """Return the driver version."""
        return self._ask(lambda nvml: _text(nvml.nvmlSystemGetDriverVersion()))

    def model(self, device: str) -> str | None:
        """Return the model of a device, such as `NVIDIA H200`."""
        return self._ask(lambda nvml: _text(nvml.nvmlDeviceGetName(self._handle(nvml, device))))

    def uuid(self, device: str) -> str | None:
        """Return the UUID of a device, which is the same in every process."""
        return self._ask(lambda nvml: _text(nvml.nvmlDeviceGetUUID(self._handle(nvml, device))))

    def memory(self, device: str) -> tuple[int, int] | None:
        """Return the free and total memory of a device in bytes."""

        def ask(nvml: Any) -> tuple[int, int]:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle(nvml, device))
            return int(memory.free), int(memory.total)

        return self._ask(ask)

    def processes(self, device: str) -> frozenset[int] | None:
        """Return the pids of the processes on a device; within a container, these are the host's pids."""

        def ask(nvml: Any) -> frozenset[int]:
            found = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle(nvml, device))
            return frozenset(int(process.pid) for process in found)

        return self._ask(ask)

    def close(self) -> None:
        """Shut NVML down; the next query initializes it again."""
        module, self._module = self._module, None
        self._handles.clear()
        if module is not None:
            try:
                module.nvmlShutdown()
            except Exception as error:  # noqa: BLE001  (as above)
                _log.debug("NVML does not close: %s", error)

    def _ask(self, question: Callable[[Any], _T]) -> _T | None:
        if self._missing:
            return None
        try:
            if self._module is None:
                import pynvml

                pynvml.nvmlInit()
                self._module = pynvml
        except Exception as error:  # noqa: BLE001  (no driver, an old driver or no module: nothing is known)
            self._missing = True
            _log.debug("NVML cannot be asked: %s", error)
            return None
        try:
            return question(self._module)
        except Exception as error:  # noqa: BLE001  (as above)
            _log.debug("NVML does not tell: %s", error)
            return None

    def _handle(self, nvml: Any, device: str) -> Any:
        if device not in self._handles:
            self._handles[device] = self._find(nvml, device)
        return self._handles[device]

    def _find(self, nvml: Any, device: str) -> Any:
        if device.isdecimal():
            if not self._knows_numbers:
                raise LookupError(f"CUDA_DEVICE_ORDER is not {_ORDER}")
            return nvml.nvmlDeviceGetHandleByIndex(int(device))
        if device.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(device)
        # CUDA also accepts a prefix of a UUID.
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(device):
                return handle
        raise LookupError(f"there is no device {device}")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
