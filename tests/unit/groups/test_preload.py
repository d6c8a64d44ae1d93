"""What is preloaded, which jobs may have it, and what a program meets as `__main__`, without starting ranks."""

from __future__ import annotations

import json
import logging
import math
import os
import selectors
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import GroupSpec, Limits
from hydra_plugins.hydra_ddp_subprocess_launcher.groups import spawners
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.running_job import JobMonitor
from hydra_plugins.hydra_ddp_subprocess_launcher.groups.spawners import ForkServer, RankProgram
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor import forkserver, import_checks
from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor.spawner import ENDED

PROGRAM = RankProgram((sys.executable, "-B"), ("-m", "app"), "/")
COMMON = {"PATH": "/bin", "MINE": "1"}


class FakeLink:
    """A preloader that is not started."""

    made: list[tuple[Any, ...]] = []  # noqa: RUF012  (emptied by the fixture)

    def __init__(self, *arguments: Any) -> None:
        self.made.append(arguments)
        self.disconnected = False
        self.ready_at = math.inf

    def close(self) -> None:
        self.disconnected = True


@pytest.fixture(autouse=True)
def _fake_link(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLink.made = []
    monkeypatch.setattr(spawners, "ForkServerLink", FakeLink)


def group(**environment: str) -> GroupSpec:
    own = {"RANK": "0", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "3", "MASTER_PORT": "1"}
    return GroupSpec(
        (sys.executable, "-B", "-m", "app"), "/", {**COMMON, **own, **environment}, ({},), (), (), (), Limits(1)
    )


def test_jobs_with_the_same_environment_are_admitted(caplog: pytest.LogCaptureFixture) -> None:
    """What each job has of its own makes no difference; anything else does, and is named once."""
    preload = ForkServer(("torch",), PROGRAM, "CUDA_VISIBLE_DEVICES")
    assert preload.admit(0, group()).program_at is None
    preload.begin(COMMON)
    assert preload.admit(0, group()).program_at == 2
    with caplog.at_level(logging.WARNING):
        assert preload.admit(1, group(MINE="2", NEW="x")).program_at is None
        assert preload.admit(2, group(MINE="3", NEW="x")).program_at is None
    (said,) = caplog.messages
    assert said.startswith("#1 : is not preloaded: its environment differs in MINE, NEW (hydra.job.env_set)")
    assert preload.admit(3, group(OMP_NUM_THREADS="7", RANK="5")).program_at == 2


def test_a_preloader_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had served is followed by another; one that had not is not tried again."""
    preload = ForkServer(None, PROGRAM, "CUDA_VISIBLE_DEVICES")
    preload.begin(COMMON)
    first: Any = preload.link()
    assert preload.link() is first
    first.ready_at, first.disconnected = 0.0, True
    second: Any = preload.link()
    assert second is not first
    second.disconnected = True
    assert preload.link() is None
    assert preload.admit(0, group()).program_at is None
    assert len(FakeLink.made) == 2
    _, spec, environment = FakeLink.made[0]
    assert set(spec.modules) == {name for name in spawners._AUTO if name in sys.modules}
    assert environment.items() >= {**COMMON, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}.items()
    assert {"RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} <= set(spec.varying)


def test_preloaders_that_are_lost_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """After the third one the jobs do without, and a line says so once."""
    preload = ForkServer(("torch",), PROGRAM, "CUDA_VISIBLE_DEVICES")
    preload.begin(COMMON)
    for _ in range(3):
        link: Any = preload.link()
        assert link is not None
        link.ready_at, link.disconnected = 0.0, True
    assert preload.link() is None
    assert preload.link() is None
    assert preload.admit(0, group()).program_at is None
    assert len(FakeLink.made) == 3
    assert caplog.messages == ["preload: its process was lost 3 times. From now on each rank is a new interpreter"]


def test_a_preloader_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The jobs run without, as where no file can be made in the temporary folder, and a line says so once."""

    def start(*arguments: Any) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(spawners, "ForkServerLink", start)
    preload = ForkServer(("torch",), PROGRAM, "CUDA_VISIBLE_DEVICES")
    preload.begin(COMMON)
    for number in range(2):
        assert preload.admit(number, group()).program_at is None
        assert preload.link() is None
    preload.close()
    (said,) = caplog.messages
    assert said.startswith("preload: its process cannot be started: ") and "No usable temporary" in said


def test_a_preloader_that_ended_before_it_got_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The module that ended it is named, however early that was, and the job has another spawner."""
    monkeypatch.undo()
    (tmp_path / "bad.py").write_text("import os; os._exit(4)\n")
    link = spawners.ForkServerLink(
        RankProgram((sys.executable,), ("-m", "app"), str(tmp_path)),
        spawners.ForkServerSpec(("bad",), ("-m", "app"), ()),
        dict(os.environ),
    )
    link._process.wait()
    with selectors.DefaultSelector() as selector, caplog.at_level(logging.WARNING):
        server: Any = SimpleNamespace(link=lambda: link)
        monitor = JobMonitor(selector, server)
        other, channel = monitor._ask_for_keeper(0, (), forked=True)
        monitor.wait(1)
        channel.close()
        monitor.close()
    assert other is not link
    assert caplog.messages == [
        "preload: importing bad ended the preloader: exit code 4. From now on each rank is a new interpreter"
    ]


def test_reads_of_the_environment_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a module asks for a variable; who is named is the module that is being imported."""
    monkeypatch.syspath_prepend(tmp_path)
    asks = {
        "get": "os.environ.get('RANK')",
        "getenv": "os.getenv('RANK')",
        "contains": "'RANK' in os.environ",
        "default": "os.environ.setdefault('RANK', '0')",
        "bytes": "os.environb.get(b'RANK')",
        "getenvb": "os.getenvb(b'RANK')",
        "copy": "os.environ.copy()",
        "items": "[name for name, value in os.environ.items() if name.startswith('TQDM_')]",
        "later": "",
        "other": "os.environ.get('HOME')",
    }
    monkeypatch.setenv("RANK", "0")
    for name, text in asks.items():
        (tmp_path / f"asks_{name}.py").write_text(f"import os\n{text}\ndef ask(): return os.environ['RANK']\n")
    plain = type(os.environ)
    monkeypatch.setattr(import_checks.processes, "thread_count", lambda: 1)
    monkeypatch.setattr(import_checks.processes, "has_children", lambda: False)
    # There is one, that of pytest-timeout.
    monkeypatch.setattr(import_checks, "_TIMERS", ())
    for name in asks:
        fault = import_checks.import_module(f"asks_{name}", {"RANK"}, ("app.py",))
        reason = f"asks_{name} reads RANK when it is imported, which each rank has with a value of its own"
        assert fault == (None if name in ("items", "later", "other") else reason)
    assert type(os.environ) is plain


def import_all(tmp_path: Path, *modules: str) -> list[str | None]:
    """Import modules as the preloader does, one after the other, in a process that has one thread."""
    for number, text in enumerate(modules):
        (tmp_path / f"module_{number}.py").write_text(text)
    code = f"import json, sys; sys.path[:] = {[str(tmp_path), *sys.path]!r}; from {import_checks.__name__} import *; "
    code += f"print(json.dumps([import_module(f'module_{{n}}', (), ('app.py',)) for n in range({len(modules)})]))"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path)
    faults: list[str | None] = json.loads(output)
    return faults


def test_threads_that_are_joined_at_import(tmp_path: Path) -> None:
    """A module may have threads while it is imported: a moment after the join they are still there for the system."""
    pool = "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
    assert import_all(tmp_path, *[f"{pool}    list(pool.map(abs, range(20)))\n"] * 30) == [None] * 30


def test_many_threads_with_names(tmp_path: Path) -> None:
    """As many are named as can be told, and the reason stands behind them."""
    start = "threading.Thread(target=time.sleep, args=(60,), name=f'Worker-{number}', daemon=True).start()"
    (fault,) = import_all(tmp_path, f"import threading, time\nfor number in range(300): {start}\n")
    assert fault is not None and len(fault) < 200
    assert fault.startswith("importing it starts 300 threads (Worker-0, Worker-1, ")
    assert fault.endswith("...), which a fork would not have")


@pytest.mark.parametrize("letter", ["x", " x", '"', "\\", "\x1b", "\n", "\0", "\udcff", "\u2028", "\U0001f600"])
def test_a_fault_of_any_length_can_be_told(letter: str) -> None:
    """What a module brings, such as the path of a file, is told in one note that the launching process can read."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forkserver._tell_fault(theirs.fileno(), "module", f"opens {letter * 9000}")
        _, length, _ = ENDED.unpack(ours.recv(ENDED.size))
        note = json.loads(ours.recv(length).decode())
    assert note["left_out"] == "module"
    assert note["why"].startswith("opens") and note["why"].isprintable()


@pytest.mark.parametrize("flags", [[], ["-I"]])
def test_the_path_of_a_program(tmp_path: Path, flags: list[str]) -> None:
    """It begins with what the interpreter itself puts there."""
    (tmp_path / "deep").mkdir()
    show = "import sys; print(sys.path)"
    for name in ("app.py", "deep/__main__.py"):
        (tmp_path / name).write_text(show)
    (tmp_path / "link.py").symlink_to("deep/__main__.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", show)
    code = f"import sys; sys.path = {sys.path!r}; from {forkserver.__name__} import own_path; print(own_path("
    code += "sys.argv[1:], '{}'))"
    for name in ("app.py", "deep", "link.py", "app.zip"):
        script = str(tmp_path / name)
        seen = eval(subprocess.check_output([sys.executable, *flags, script], text=True))
        own = eval(subprocess.check_output([sys.executable, *flags, "-c", code.format(tmp_path), script], text=True))
        assert seen[: len(own)] == own
        assert len(own) == (0 if flags and name.endswith(".py") else 1)


def test_imports_that_take_too_long(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The preloader is given up after its time, and the module is named."""
    monkeypatch.undo()
    link = spawners.ForkServerLink(
        RankProgram((sys.executable,), ("-m", "app"), "/"),
        spawners.ForkServerSpec((), ("-m", "app"), ()),
        dict(os.environ),
    )
    link.hear_note(b'{"importing": "slow"}')
    link.ready_by = time.monotonic() - 1
    with caplog.at_level(logging.WARNING):
        link.kill()
        link.close()
    assert caplog.messages == [
        "preload: importing slow takes more than 120 s. From now on each rank is a new interpreter"
    ]
