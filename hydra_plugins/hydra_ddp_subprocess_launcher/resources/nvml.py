"""What NVML tells about devices. Apart from `devices`, as `hydra-ddp info` does without Hydra."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# The only variable whose ids NVML knows, and the order of numbers in which it counts.
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "PCI_BUS_ID"


class Nvml:
    """NVML, opened when it is first asked. No driver, a broken one, no Python module: nothing is known.

    Args:
        variable: The visible-devices variable; NVML knows the ids of CUDA's only.
    """

    def __init__(self, variable: str, environ: Mapping[str, str]) -> None:
        self._module: Any = None
        self._missing = variable != _VARIABLE
        # By default numbers are given in NVML's order to ranks, too.
        self._knows_numbers = environ.get("CUDA_DEVICE_ORDER", _ORDER) == _ORDER
        self._handles: dict[str, Any] = {}

    def count(self) -> int:
        """Return the number of devices; 0 where nothing is known."""
        return self._ask(lambda nvml: int(nvml.nvmlDeviceGetCount())) or 0

    def driver(self) -> str | None:
        """Return the version of the driver."""
        return self._ask(lambda nvml: _text(nvml.nvmlSystemGetDriverVersion()))

    def model(self, device: str) -> str | None:
        """Return what kind of device it is, such as `NVIDIA H200`."""
        return self._ask(lambda nvml: _text(nvml.nvmlDeviceGetName(self._handle(nvml, device))))

    def uuid(self, device: str) -> str | None:
        """Return the name that a device has in every process."""
        return self._ask(lambda nvml: _text(nvml.nvmlDeviceGetUUID(self._handle(nvml, device))))

    def memory(self, device: str) -> tuple[int, int] | None:
        """Return a device's free and total memory in bytes."""

        def ask(nvml: Any) -> tuple[int, int]:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle(nvml, device))
            return int(memory.free), int(memory.total)

        return self._ask(ask)

    def processes(self, device: str) -> frozenset[int] | None:
        """Return the pids of the processes on a device; within a container they are those of the machine."""

        def ask(nvml: Any) -> frozenset[int]:
            found = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle(nvml, device))
            return frozenset(int(process.pid) for process in found)

        return self._ask(ask)

    def close(self) -> None:
        """Let go of NVML; it is opened again when it is asked again."""
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
        except Exception as error:  # noqa: BLE001  (no driver, an old driver, no module: all mean that nothing is known)
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
        # CUDA takes the beginning of a UUID, too.
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(device):
                return handle
        raise LookupError(f"there is no device {device}")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
