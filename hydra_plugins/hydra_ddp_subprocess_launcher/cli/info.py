"""What a bug report needs: versions, devices, environment, and the sweep. Does without Hydra, which may be broken."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata

from .. import __version__
from ..common import quoting
from ..records.events import JobState
from ..resources.nvml import Nvml
from .sweep_view import SweepSnapshot, in_words

_OWN = "hydra-ddp-subprocess-launcher"
_PACKAGES = (
    *("hydra-core", "omegaconf", "cloudpickle", "rich", "submitit"),
    *("hydra-submitit-launcher", "torch", "lightning", "pytorch-lightning", "accelerate", "nvidia-ml-py"),
)
_DEVICE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MOST_CAUSES = 3


@dataclass(frozen=True)
class DeviceInfo:
    """One device, as NVML reports it.

    Attributes:
        id: Its number there.
        model: Its kind. None, here as below, if NVML does not report it.
        uuid: Its name in every process.
        free_bytes: Free memory.
        total_bytes: All memory.
    """

    id: str
    model: str | None
    uuid: str | None
    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True)
class SweepInfo:
    """The state of a sweep.

    Attributes:
        argv: Its command line without what may be a secret.
        launcher: Version of this package that ran it.
        status: Whether it runs, and how it ended if not.
        jobs: Number of jobs, by state.
        first_causes: Causes of the first failures.
    """

    argv: tuple[str, ...]
    launcher: str
    status: str
    jobs: Mapping[str, int]
    first_causes: tuple[str, ...]


@dataclass(frozen=True)
class Info:
    """All of a report.

    Attributes:
        versions: Of packages, Python and the system; None if not installed.
        driver: Version of NVIDIA's driver, or None.
        devices: As NVML reports them.
        visible_devices: Variables that hide devices.
        sweep: The sweep, or None if none was found.
    """

    versions: Mapping[str, str | None]
    driver: str | None
    devices: tuple[DeviceInfo, ...]
    visible_devices: Mapping[str, str]
    sweep: SweepInfo | None


def collect(environ: Mapping[str, str], snapshot: SweepSnapshot | None) -> Info:
    """Collect facts about this machine and a sweep.

    Args:
        snapshot: The sweep; None: there is none.
    """
    nvml = Nvml(_DEVICE_VARIABLE, {})
    devices = tuple(_device(nvml, str(number)) for number in range(nvml.count()))
    driver = nvml.driver()
    nvml.close()
    packages = {name: _version(name) for name in _PACKAGES}
    return Info(
        versions={_OWN: __version__, **packages, "python": platform.python_version(), "system": platform.platform()},
        driver=driver,
        devices=devices,
        visible_devices={name: value for name, value in sorted(environ.items()) if _hides_devices(name)},
        sweep=None if snapshot is None else _sweep_info(snapshot),
    )


def _device(nvml: Nvml, device: str) -> DeviceInfo:
    free, total = nvml.memory(device) or (None, None)
    return DeviceInfo(device, nvml.model(device), nvml.uuid(device), free, total)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _hides_devices(name: str) -> bool:
    return name.endswith("VISIBLE_DEVICES") or name in ("CUDA_DEVICE_ORDER", "ZE_AFFINITY_MASK")


def _sweep_info(snapshot: SweepSnapshot) -> SweepInfo:
    record = snapshot.record
    by_state = record.by_state()
    causes = [f"job {job.number}: {job.cause}" for job in by_state[JobState.FAILED]]
    return SweepInfo(
        argv=() if record.began is None else record.began.argv,
        launcher="" if record.began is None else record.began.launcher,
        status=in_words(snapshot),
        jobs={state.value: len(jobs) for state, jobs in by_state.items() if jobs},
        first_causes=tuple(causes[:_MOST_CAUSES]),
    )


def as_json(info: Info) -> str:
    """Return a report for programs."""
    return json.dumps(asdict(info), indent=2) + "\n"


def as_text(info: Info) -> str:
    """Return a report for people, one thing a line."""
    lines = [f"{name}: {version or 'not installed'}" for name, version in info.versions.items()]
    lines += [f"NVIDIA driver: {info.driver or 'none'}", *map(_device_line, info.devices)]
    lines += [f"{name}={value}" for name, value in info.visible_devices.items()]
    return "".join(f"{line}\n" for line in [*lines, *_sweep_lines(info.sweep)])


def _device_line(device: DeviceInfo) -> str:
    memory = f"{_gigabytes(device.free_bytes)} of {_gigabytes(device.total_bytes)} free"
    return f"device {device.id}: {device.model or 'unknown'}, {device.uuid or 'unknown'}, {memory}"


def _gigabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e9:.1f} GB"


def _sweep_lines(sweep: SweepInfo | None) -> list[str]:
    if sweep is None:
        return ["sweep: none here (-d DIR)"]
    jobs = ", ".join(f"{count} {state.lower()}" for state, count in sweep.jobs.items()) or "none"
    return [
        f"sweep: {quoting.shell_words(sweep.argv)}",
        f"sweep ran with version: {sweep.launcher}",
        f"state: {sweep.status}",
        f"jobs: {jobs}",
        *sweep.first_causes,
    ]
