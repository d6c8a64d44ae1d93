"""Running programs as a user would, and looking for processes that they have left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

APPS = Path(__file__).parents[1] / "apps"
# After which a test gives up on what must come, on a busy machine, too.
PATIENCE_S = 400.0
# What a busy machine may add to a time that is asserted. What must not be waited for in such a test is far longer.
NOISE_S = 8.0
# Every process that a test starts carries this variable with a value of its own, so that left-overs can be found.
# No HYDRA_DDP_…: those of the launching process do not reach a rank.
MARKER = "LAUNCHER_TEST_MARKER"
# LAUNCHER_TEST_PRELOAD=auto runs the sweeps of all tests with preloaded ranks, where ranks can be preloaded.
PRELOAD = os.environ.get("LAUNCHER_TEST_PRELOAD", "")


@dataclass(frozen=True)
class Ran:
    """How a program ended: exit code (negative: signal), both streams as text, wall-clock seconds."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def preload_option(argument: str | Path) -> list[str]:
    """Return what follows this argument of a sweep."""
    chosen = PRELOAD and argument == "hydra/launcher=ddp_subprocess"
    return [f"hydra.launcher.preload={PRELOAD}"] if chosen else []


class Runner:
    """Start programs with this test's marker in a clean environment."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.marker = uuid.uuid4().hex

    def environment(self, **extra: str) -> dict[str, str]:
        keep = ("PATH", "HOME", "LANG", "TMPDIR", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START", "PYTHONPATH")
        base = {name: os.environ[name] for name in keep if name in os.environ}
        return {**base, "GLOO_SOCKET_IFNAME": "lo", MARKER: self.marker, **extra}

    def start(
        self, *argv: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, **options: object
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            [part for one in argv for part in (str(one), *preload_option(one))],
            cwd=cwd or self.cwd,
            env=self.environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            **options,
        )

    def run(
        self,
        *argv: str | Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> Ran:
        began = time.monotonic()
        process = self.start(*argv, env=env, cwd=cwd)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"{argv} did not end in {timeout_s} s\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
        return Ran(process.returncode, stdout, stderr, time.monotonic() - began)

    def python(
        self,
        *argv: str | Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> Ran:
        return self.run(sys.executable, *argv, env=env, cwd=cwd, timeout_s=timeout_s)

    def sweep(
        self,
        app: str | Path,
        *overrides: str,
        nproc: int = 2,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> Ran:
        """Run `python <app> -m hydra/launcher=ddp_subprocess …`; a bare name is looked up in tests/apps."""
        script = APPS / app if isinstance(app, str) and "/" not in app else app
        return self.python(
            script,
            "-m",
            "hydra/launcher=ddp_subprocess",
            f"hydra.launcher.nproc_per_node={nproc}",
            f"hydra.sweep.dir={self.cwd / 'sweep'}",
            *overrides,
            env=env,
            cwd=cwd,
            timeout_s=timeout_s,
        )

    def alive(self) -> dict[int, str]:
        """Processes, zombies left out, that carry this test's marker: pid to command line."""
        found = {}
        needle = f"{MARKER}={self.marker}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
            except OSError:
                continue  # It ended meanwhile, or is somebody else's.
        return found

    def wait_until(
        self, holds: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "the condition"
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not come true in {timeout_s} s")
            time.sleep(0.02)

    def assert_nothing_left(self, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == {}
