"""What integration tests share: running tests/apps/behave.py, reading its notes, looking at processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from support.runner import APPS, NOISE_S, PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Ran, Runner

BEHAVE = APPS / "behave.py"
# Long silence of a node is told in seconds, in launching processes and in keepers.
HASTY = """
from hydra_plugins.hydra_ddp_subprocess_launcher.groups import rendezvous
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor import heartbeat, spawner
heartbeat.HEARTBEAT_TIMEOUT_S, heartbeat.HEARTBEAT_INTERVAL_S = 8.0, 2.0
rendezvous.HEARTBEAT_INTERVAL_S = 2.0
spawner._BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); from {package} import heartbeat, spawner; "
    "heartbeat.HEARTBEAT_TIMEOUT_S, heartbeat.HEARTBEAT_INTERVAL_S = 8.0, 2.0; spawner.main(*map(int, sys.argv[2:]))"
)
"""


class Notes:
    """The notes that one run of behave.py left; see there for their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def read(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())  # type: ignore[no-any-return]

    def all(self, prefix: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{prefix}_*.json"))]

    def places(self, prefix: str = "body") -> list[tuple[int, int]]:
        """Return (job, rank) of every body that ran, sorted."""
        return sorted((note["job"], note["rank"]) for note in self.all(prefix))

    def ranks(self) -> list[dict[str, Any]]:
        """Return the notes of the processes that were started as ranks, whether they got to their body or not."""
        return [note for note in self.all("process") if "RANK" in note["environment"]]

    def environment(self, job: int, rank: int) -> dict[str, str]:
        """Return what this rank's process was started with."""
        pid = self.read(f"body_{job}_{rank}")["pid"]
        return self.read(f"process_{pid}")["environment"]  # type: ignore[no-any-return]

    def returns(self) -> list[dict[str, Any]]:
        """Return the JobReturns of a sweep with `hydra/sweeper=recording`, in order."""
        return self.read("returns")["returns"]  # type: ignore[no-any-return]

    def statuses(self) -> list[str]:
        return [result["status"] for result in self.returns()]


def notes_of(runner: Runner) -> Notes:
    return Notes(runner.cwd / "notes")


def write_app(runner: Runner, before: str = "", config: str = "config_path=None, config_name='behave'") -> Path:
    """Write app.py, which does what behave.py does after `before`, with a config of its own if `config` names one."""
    return _write_program(runner, f"import behave, hydra\n{before}", config, "return behave.act(cfg)", "main()")


def write_talk(
    runner: Runner,
    before: str = "",
    config: str = "config_path=None, config_name='talk'",
    body: str = "return talk.main.__wrapped__(cfg)",
    program: str = "main()",
) -> Path:
    """Write the same around talk.py, with what the job does (`body`) and what the program does (`program`)."""
    return _write_program(runner, f"import os, sys, hydra, talk\n{before}", config, body, program)


def _write_program(runner: Runner, before: str, config: str, body: str, program: str) -> Path:
    app = runner.cwd / "app.py"
    app.write_text(
        f"import sys\nsys.path.insert(0, {str(APPS)!r})\n{before}\n\n"
        f"@hydra.main(version_base=None, {config})\ndef main(cfg):\n{indent(body, '    ')}\n\n\n"
        f"if __name__ == '__main__':\n{indent(program, '    ')}\n",
        encoding="utf-8",
    )
    return app


def behave_environment(runner: Runner, **extra: str) -> dict[str, str]:
    folder = runner.cwd / "notes"
    folder.mkdir(exist_ok=True)
    return {"BEHAVE_DIR": str(folder), **extra}


def behave(
    runner: Runner, *overrides: str, nproc: int = 2, env: dict[str, str] | None = None, timeout_s: float = PATIENCE_S
) -> tuple[Ran, Notes]:
    """Sweep behave.py with our launcher, to its end."""
    environment = behave_environment(runner, **(env or {}))
    return runner.sweep("behave.py", *overrides, nproc=nproc, env=environment, timeout_s=timeout_s), notes_of(runner)


@contextmanager
def behaving(
    runner: Runner, *overrides: str, nproc: int = 2, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Notes]]:
    """Have the same sweep run meanwhile, in a session of its own, as a terminal would start it."""
    process = runner.start(
        sys.executable,
        BEHAVE,
        "-m",
        "hydra/launcher=ddp_subprocess",
        f"hydra.launcher.nproc_per_node={nproc}",
        f"hydra.sweep.dir={runner.cwd / 'sweep'}",
        *overrides,
        env=behave_environment(runner, **(env or {})),
        start_new_session=True,
    )
    with process:
        try:
            yield process, notes_of(runner)
        finally:
            process.kill()


def alive(runner: Runner, variable: bytes = b"") -> dict[int, str]:
    """Return the processes, zombies left out, of this test's sweeps: pid to command line.

    They are known by the folder of their notes, which is inherited like any variable of the user's. `variable` picks
    those that have a variable whose text begins like this.
    """
    found = {}
    needle = f"BEHAVE_DIR={runner.cwd / 'notes'}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if needle in variables and any(text.startswith(variable) for text in variables):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # It ended meanwhile.
    return found


def assert_nothing_left(runner: Runner, timeout_s: float = NOISE_S) -> None:
    seconds_until(lambda: not alive(runner), at_most_s=timeout_s)
    assert alive(runner) == {}


def finish(process: subprocess.Popen[str], timeout_s: float = PATIENCE_S) -> tuple[int, str]:
    """Wait for a started program; return its exit code as a shell shows it, and what it printed."""
    stdout, stderr = process.communicate(timeout=timeout_s)
    code = process.returncode
    return (128 - code if code < 0 else code), stdout + stderr


def state_of(pid: int) -> tuple[str, int]:
    """Return the state letter and the parent of a process; ('', 0) if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def is_running(pid: int) -> bool:
    return state_of(pid)[0] not in ("", "Z", "X")


def descendants(pid: int) -> Iterator[int]:
    """Yield everything below a process, zombies included."""
    parents = {
        int(entry.name): state_of(int(entry.name))[1] for entry in Path("/proc").iterdir() if entry.name.isdigit()
    }
    wanted = [pid]
    while wanted:
        parent = wanted.pop()
        children = [child for child, of in parents.items() if of == parent]
        wanted += children
        yield from children


def seconds_until(holds: Callable[[], object], at_most_s: float = 30) -> float:
    """Return how long it took until the condition held, or `at_most_s`."""
    began = time.monotonic()
    while not holds() and time.monotonic() - began < at_most_s:
        time.sleep(0.02)
    return time.monotonic() - began


def line_of(marker: str, source: Path = BEHAVE) -> int:
    """Return the number of the line that has this comment."""
    lines = source.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if f"# {marker}" in line)


def assert_one_clear_error(ran: Ran, *words: str, most_lines: int = 8) -> None:
    """The program failed, its last words are few, have what is asked for, and are no stack trace."""
    assert ran.returncode not in (0, None), ran.output
    assert "Traceback" not in ran.stderr, ran.stderr
    for word in words:
        assert word in ran.output, f"{word!r} is not in:\n{ran.output}"
    # Hydra 1.4 warns of version_base and of callbacks: not ours, hence not counted.
    lines = [line for line in ran.stderr.splitlines() if line.strip() and "arning" not in line]
    assert len(lines) <= most_lines, ran.stderr


def arguments(runner: Runner, overrides: tuple[str, ...], nproc: int) -> list[str]:
    return [
        str(APPS / "misbehave.py"),
        "-m",
        "hydra/launcher=ddp_subprocess",
        f"hydra.launcher.nproc_per_node={nproc}",
        f"hydra.sweep.dir={runner.cwd / 'sweep'}",
        *overrides,
    ]


def misbehave(
    runner: Runner, *overrides: str, nproc: int = 2, env: dict[str, str] | None = None, timeout_s: float = PATIENCE_S
) -> tuple[Ran, Notes]:
    """Sweep misbehave.py with our launcher, to its end."""
    environment = behave_environment(runner, **(env or {}))
    ran = runner.python(*arguments(runner, overrides, nproc), env=environment, timeout_s=timeout_s)
    return ran, notes_of(runner)


@contextmanager
def misbehaving(
    runner: Runner, *overrides: str, nproc: int = 2, env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Notes]]:
    """Have the same sweep run meanwhile."""
    environment = behave_environment(runner, **(env or {}))
    argv = [sys.executable, *arguments(runner, overrides, nproc)]
    with runner.start(*argv, env=environment, start_new_session=True) as process:
        try:
            yield process, notes_of(runner)
        finally:
            process.kill()


def let_go(notes: Notes, name: str = "go") -> None:
    (notes.folder / f"{name}.json").write_text("{}")


def keeper_of(notes: Notes, job: int = 0) -> int:
    return state_of(notes.read(f"body_{job}_0")["pid"])[1]


def job_folder(runner: Runner, job: int) -> Path:
    return runner.cwd / "sweep" / str(job) / ".ddp"
