"""What a bug report needs: versions, the machine, the environment's names, and how the sweep stands."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from . import __version__, _commands, _machine
from ._nvml import Nvml
from ._records import JobState
from ._watching import Sight, in_words

_OWN = "hydra-ddp-subprocess-launcher"
_PACKAGES = (
    *("hydra-core", "omegaconf", "cloudpickle", "rich", "submitit"),
    *("hydra-submitit-launcher", "torch", "lightning", "pytorch-lightning", "accelerate", "nvidia-ml-py"),
)
# Named, but not shown: a value may be a secret, or tell who somebody is.
_PREFIXES = ("HYDRA_", "SLURM_", "NCCL_", "OMP_", "MASTER_", "TORCH", "GLOO_")
_DEVICE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SHARED_MEMORY = "/dev/shm"
# Below it data loaders and NCCL run out of it; Docker's default is 64 MB.
_LITTLE_SHARED_MEMORY = 10**9
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv", "/singularity.d", "/.singularity.d")
_CONTAINER_VARIABLES = ("container", "SINGULARITY_NAME", "APPTAINER_NAME", "KUBERNETES_SERVICE_HOST")
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
        versions: Of packages; None: not installed.
        python: Its version.
        system: Kernel and distribution.
        libc: Name and version.
        cores: That this process may use.
        memory_bytes: Of the machine; None: the system does not tell.
        shared_memory_bytes: Size of /dev/shm, likewise.
        container: What hints that this is one.
        driver: Version of NVIDIA's driver; None: there is none.
        devices: As NVML tells.
        visible_devices: Variables that hide devices.
        variables: Names of other variables that matter.
        sweep: The sweep; None: none was found.
    """

    versions: Mapping[str, str | None]
    python: str
    system: str
    libc: str
    cores: int
    memory_bytes: int | None
    shared_memory_bytes: int | None
    container: tuple[str, ...]
    driver: str | None
    devices: tuple[DeviceInfo, ...]
    visible_devices: Mapping[str, str]
    variables: tuple[str, ...]
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
    return Info(
        versions={_OWN: __version__, **{name: _version(name) for name in _PACKAGES}},
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}, {_distribution()}",
        libc=" ".join(platform.libc_ver()).strip() or "unknown",
        cores=_machine.usable_cores(),
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=_size_of(_SHARED_MEMORY),
        container=_container_hints(environ),
        driver=driver,
        devices=devices,
        visible_devices={name: value for name, value in sorted(environ.items()) if _hides_devices(name)},
        variables=tuple(sorted(name for name in environ if name.startswith(_PREFIXES))),
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


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _size_of(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _container_hints(environ: Mapping[str, str]) -> tuple[str, ...]:
    files = [path for path in _CONTAINER_FILES if Path(path).exists()]
    return (*files, *(f"${name}" for name in _CONTAINER_VARIABLES if name in environ))


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
    lines += [f"python: {info.python}", f"system: {info.system}", f"libc: {info.libc}"]
    lines += [f"usable cores: {info.cores}", f"memory: {_gigabytes(info.memory_bytes)}"]
    little = info.shared_memory_bytes is not None and info.shared_memory_bytes < _LITTLE_SHARED_MEMORY
    hint = " (small: data loaders and NCCL may need more, see docker run --shm-size)" if little else ""
    lines += [f"{_SHARED_MEMORY}: {_gigabytes(info.shared_memory_bytes)}{hint}"]
    lines += [f"container: {', '.join(info.container) or 'no sign of one'}"]
    lines += [f"NVIDIA driver: {info.driver or 'none'}", *map(_device_line, info.devices)]
    lines += [f"{name}={value}" for name, value in info.visible_devices.items()]
    lines += [f"variables set: {' '.join(info.variables) or 'none'}"]
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
