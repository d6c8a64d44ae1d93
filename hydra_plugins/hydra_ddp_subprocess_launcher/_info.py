"""What a bug report needs of the launcher: versions, devices, and how the sweep stands.

The rest of the machine is what `python -m torch.utils.collect_env` reports.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata

from . import __version__, _commands
from ._nvml import Nvml
from ._records import JobState
from ._watching import Sight, in_words

_OWN = "hydra-ddp-subprocess-launcher"
_PACKAGES = (
    *("hydra-core", "omegaconf", "cloudpickle", "rich", "submitit"),
    *("hydra-submitit-launcher", "torch", "lightning", "pytorch-lightning", "accelerate", "nvidia-ml-py"),
)
_DEVICE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MOST_CAUSES = 3


@dataclass(frozen=True)
class DeviceInfo:
    """One device, as NVML tells.

    Attributes:
        id: Its number there.
        model: What kind it is; None, here as below: NVML does not tell.
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
    """How a sweep stands.

    Attributes:
        argv: Its command line, with what may be a secret left out.
        launcher: Version of this package that ran it.
        standing: What has become of it.
        jobs: Number of jobs, by state.
        first_causes: Why the first ones failed that did.
    """

    argv: tuple[str, ...]
    launcher: str
    standing: str
    jobs: Mapping[str, int]
    first_causes: tuple[str, ...]


@dataclass(frozen=True)
class Info:
    """All of a report.

    Attributes:
        versions: Of packages, Python and the system; None: not installed.
        driver: Version of NVIDIA's driver; None: there is none.
        devices: As NVML tells.
        visible_devices: Variables that hide devices.
        sweep: The sweep; None: none was found.
    """

    versions: Mapping[str, str | None]
    driver: str | None
    devices: tuple[DeviceInfo, ...]
    visible_devices: Mapping[str, str]
    sweep: SweepInfo | None


def gather(environ: Mapping[str, str], sight: Sight | None) -> Info:
    """Look at this machine, and at a sweep.

    Args:
        environ: The environment.
        sight: The sweep; None: there is none.
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
        sweep=None if sight is None else _sweep_info(sight),
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


def _sweep_info(sight: Sight) -> SweepInfo:
    record = sight.record
    by_state = record.by_state()
    causes = [f"job {job.number}: {job.cause}" for job in by_state[JobState.FAILED]]
    return SweepInfo(
        argv=() if record.began is None else record.began.argv,
        launcher="" if record.began is None else record.began.launcher,
        standing=in_words(sight),
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
        f"sweep: {_commands.shell_words(sweep.argv)}",
        f"sweep ran with version: {sweep.launcher}",
        f"state: {sweep.standing}",
        f"jobs: {jobs}",
        *sweep.first_causes,
    ]
