"""All checks: `nox`. One of them: `nox -s lint`. What there is: `nox -l`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "virtualenv"
# A Python that is not here is no failure.
nox.options.error_on_missing_interpreters = False

# What pyenv has on the path runs only where that version is chosen; the interpreters behind it always do.
for folder in Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.*/bin"):
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"

PACKAGE = "hydra_plugins.hydra_ddp_subprocess_launcher"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# torch is large, so that one Python has it.
MAIN = "3.11"
HYDRAS = ["1.3.2", "1.3.8", "1.4.0rc3"]
CONSTRAINTS = ("-c", "constraints.txt")
# What the tests need beside the package, without torch and the frameworks.
TEST_NEEDS = (
    *("pytest>=8", "pytest-timeout>=2.2", "pytest-xdist>=3.6", "hypothesis>=6.90", "pexpect>=4.9", "pyte>=0.8"),
    "matplotlib>=3.6",
)
SMALL = ("-m", "not torch and not slurm")


@nox.session(python=MAIN)
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install("ruff>=0.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=MAIN)
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    session.install(".[submitit]", "mypy>=1.10")
    session.run("mypy", "-p", PACKAGE)


@nox.session(python=PYTHONS)
@nox.parametrize("hydra", HYDRAS)
def tests(session: nox.Session, hydra: str) -> None:
    """Tests without torch and SLURM; arguments behind `--` go to pytest in place of `tests`."""
    omegaconf = "omegaconf>=2.4.0.dev0" if hydra.startswith("1.4") else "omegaconf<2.4"
    session.install("--pre", f"hydra-core=={hydra}", omegaconf, ".")
    session.install(*TEST_NEEDS)
    session.run("pytest", "--full", *SMALL, *(session.posargs or ["tests"]))


@nox.session(python=MAIN)
def full(session: nox.Session) -> None:
    """The full lane: every test."""
    session.install(*CONSTRAINTS, ".[dev,example]")
    session.run("pytest", "--full", *(session.posargs or ["tests"]))


@nox.session(python=MAIN)
def torch(session: nox.Session) -> None:
    """Tests with torch, the frameworks and the sweepers."""
    session.install(*CONSTRAINTS, ".[dev,example]")
    session.run("pytest", "--full", "-m", "torch", *(session.posargs or ["tests"]))


@nox.session(python=MAIN)
def preload(session: nox.Session) -> None:
    """Hydra's suites, and what the ranks of a sweep are compared with, on preloaded ranks."""
    session.install(*CONSTRAINTS, ".[dev,example]")
    tests = session.posargs or [
        "tests/integration/hydra/test_hydra_suites.py",
        "tests/integration/hydra/test_differential.py",
    ]
    session.run("pytest", "--full", *tests, env={"LAUNCHER_TEST_PRELOAD": "auto"})


@nox.session(python=MAIN)
def coverage(session: nox.Session) -> None:
    """Coverage of the full lane, in all processes that the tests start."""
    session.install(*CONSTRAINTS, ".[dev,example]")
    # The spawner runs without site-packages: see tests/support/measured_spawner.py.
    (packages,) = Path(session.virtualenv.location).glob("lib/python*/site-packages")
    shutil.copy("tests/support/measured_spawner.py", packages)
    (packages / "measured_spawner.pth").write_text("import measured_spawner\n")
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", "--full", *session.posargs)
    session.run("coverage", "combine")
    session.run("coverage", "report")


@nox.session(python=MAIN)
def docs(session: nox.Session) -> None:
    """What README and docs/ tell to type, their links, and the options."""
    session.install(".[submitit,timeline]", *TEST_NEEDS)
    pages = ["tests/guards/test_readme.py", "tests/guards/test_docs.py", "tests/integration/docs"]
    session.run("pytest", "--full", *SMALL, *pages)


@nox.session(python=MAIN)
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel; install the wheel alone, and sweep outside the repository."""
    session.install("build>=1", "pytest>=8", "pytest-timeout>=2.2", "pytest-xdist>=3.6", "hypothesis>=6.90", ".")
    session.run("pytest", "tests/guards/test_wheel.py", env={"HYDRA_DDP_TEST_WHEEL": "1"})
