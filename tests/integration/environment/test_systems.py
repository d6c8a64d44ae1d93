"""Hostile surroundings: a job sees under this launcher what it sees under the basic one, or is refused with the reason.

The same small program is run by both launchers from one shell line; what it sees of its process is compared.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.runner import Ran, Runner

LAUNCHERS = ("basic", "ddp_subprocess")
PROGRAM = """
import getpass, json, os, resource, shutil, signal, sys
import hydra


def name_of_user():
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def seen(cfg):
    return {
        "value": ascii(cfg.get("x")),
        "folder": ascii(os.path.basename(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)),
        "cwd": ascii(os.getcwd()),
        "encoding": sys.getfilesystemencoding(),
        "output": sys.stdout and [sys.stdout.encoding, sys.stdout.errors],
        "flags": str(sys.flags),
        "options": sorted(map(str, sys._xoptions.items())),
        "warnings": sys.warnoptions,
        "cache": sys.pycache_prefix,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
        "umask": os.umask(os.umask(0)),
        "niceness": os.nice(0),
        "user": [os.getuid(), os.geteuid(), name_of_user()],
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "ignored": [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGHUP, signal.SIGPIPE)],
        "variables": {name: os.environ.get(name) for name in ("HOME", "TMPDIR", "TZ", "LC_ALL", "XDG_RUNTIME_DIR")},
        "columns": shutil.get_terminal_size((0, 0)).columns,
    }


@hydra.main(version_base=None, config_path=None)
def main(cfg):
    if os.environ.get("RANK", "0") == "0":
        with open(os.path.join(os.environ["FACTS"], f"{cfg.number}.json"), "w") as file:
            json.dump(seen(cfg), file)
    if cfg.get("ask"):
        os.get_terminal_size()
    print(cfg.get("x"))
    if cfg.get("fail") and os.environ.get("RANK", "0") == "0":
        raise ValueError(f"bad {cfg.x}")


if __name__ == "__main__":
    main()
"""


class Sweeps:
    """Run PROGRAM by either launcher, always at the same path."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.facts = runner.cwd / "facts"
        self.sweep_dir = runner.cwd / "sweep"
        (runner.cwd / "app.py").write_text(PROGRAM)

    def run(self, launcher: str, *overrides: str, shell: str = '"$@"', **env: str) -> tuple[Ran, list[dict[str, Any]]]:
        """Return how the sweep ended, and what each job that ran has seen."""
        for folder in (self.facts, self.sweep_dir):
            shutil.rmtree(folder, ignore_errors=True)
        self.facts.mkdir()
        nproc = () if launcher == "basic" else ("hydra.launcher.nproc_per_node=2",)
        argv = [sys.executable, str(self.runner.cwd / "app.py"), "-m", f"hydra/launcher={launcher}", *nproc]
        argv += [f"hydra.sweep.dir={self.sweep_dir}", *overrides]
        ran = self.runner.run("bash", "-c", shell, "sh", *argv, env={"FACTS": str(self.facts), **env})
        return ran, [json.loads(file.read_text()) for file in sorted(self.facts.iterdir())]

    def both(self, *overrides: str, shell: str = '"$@"', **env: str) -> tuple[Ran, Ran]:
        """Return how both ended, after their jobs have seen the same."""
        (plain, wanted), (ours, seen) = (self.run(one, *overrides, shell=shell, **env) for one in LAUNCHERS)
        assert wanted, plain.output
        for own, other in zip(seen, wanted, strict=True):
            # A rank has its log where a plain job has no output.
            assert own == {**other, "output": other["output"] or own["output"]}, ours.output
        assert (ours.returncode == 0) == (plain.returncode == 0), ours.output
        return plain, ours


@pytest.fixture
def sweeps(runner: Runner) -> Sweeps:
    return Sweeps(runner)


def needs(*command: str) -> pytest.MarkDecorator:
    """Skip a test where the system does not let this user run a command."""
    try:
        works = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        works = False
    return pytest.mark.skipif(not works, reason=f"{' '.join(command)} is not possible here")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("locale", [ASCII, {**ASCII, "PYTHONUTF8": "1"}], ids=["ascii", "utf8"])
def test_text_under_an_ascii_locale(sweeps: Sweeps, locale: dict[str, str]) -> None:
    """Overrides that are no ASCII come to a job unchanged, name its directory, and are shown in errors."""
    texts = "+x='ä','\N{SNOWMAN}','plain'"
    _, ours = sweeps.both(texts, "+number=${hydra:job.num}", "+fail=true", "hydra.sweep.subdir=${x}", **locale)
    folders = {os.fsencode(one.name) for one in sweeps.sweep_dir.iterdir() if (one / ".hydra").exists()}
    assert folders == {"ä".encode(), "\N{SNOWMAN}".encode(), b"plain"}
    assert "ValueError: bad plain" in ours.output
    assert "3 failed" in ours.output


def test_a_directory_that_is_no_text(sweeps: Sweeps) -> None:
    """A working directory whose name is no UTF-8 can be used."""
    os.mkdir(os.fsencode(sweeps.runner.cwd) + b"/caf\xe9")
    sweeps.both("+number=1", shell="""cd $'caf\\xe9' && "$@" """)


def test_names_as_long_as_the_file_system_takes(sweeps: Sweeps) -> None:
    """A job's directory may have a name of 255 bytes, and a path that just leaves room for Hydra's own files."""
    name = f"+x={'v' * 255}"[: 255 - len(",+number=1")]
    sweeps.both(name, "+number=1", "hydra.sweep.subdir=${hydra.job.override_dirname}")
    room = os.pathconf("/", "PC_PATH_MAX") - len(f"{sweeps.sweep_dir}/") - len("/.ddp/failure_0.pkl.4194304") - 1
    deep = "/".join("d" * 200 for _ in range(30))[:room].rstrip("/")
    sweeps.both("+number=1", f"hydra.sweep.subdir={deep}", f"+x={'v' * 30}")


def test_a_directory_without_room_for_our_files(sweeps: Sweeps) -> None:
    """Where Hydra's files just fit into a path and the launcher's do not, the job fails with the reason."""
    room = os.pathconf("/", "PC_PATH_MAX") - len(f"{sweeps.sweep_dir}/") - len("/.hydra") - 1
    deep = "/".join("d" * 200 for _ in range(30))[:room].rstrip("/")
    ran, _ = sweeps.run("ddp_subprocess", "+number=1", f"hydra.sweep.subdir={deep}")
    assert ran.returncode == 1
    assert "File name too long" in ran.output
    assert "Traceback" not in ran.output


HOSTILE = {
    "limits, signals and flags": (
        "ulimit -n 64 -c 0 && umask 027 && trap '' HUP && export TZ=Nowhere/Odd TMPDIR=/nowhere && "
        'python=$1 && shift && exec nice -n 3 "$python" -O -W error::FutureWarning -X pycache_prefix=cache -X dev "$@"'
    ),
    "closed input and error": '"$@" <&- 2>&-',
    "closed output": '"$@" >&-',
    "ignored and blocked": """trap '' PIPE CHLD && "$@" """,
}


@pytest.mark.parametrize("shell", HOSTILE.values(), ids=HOSTILE)
def test_an_unusual_process(sweeps: Sweeps, shell: str) -> None:
    """A job has the limits, signals, flags and streams that it has under the basic launcher."""
    sweeps.both("+number=1", shell=shell)


NO_NAME = ("unshare", "-U", "--map-user=12345", "--map-group=12345")


@needs(*NO_NAME)
def test_a_user_without_a_name(sweeps: Sweeps) -> None:
    """A user whom the system does not know, without a home or a directory for temporary files, can launch."""
    clean = "env -u HOME -u USER -u LOGNAME XDG_RUNTIME_DIR=/nowhere TMPDIR=/nowhere"
    sweeps.both("+number=1", shell=f'{" ".join(NO_NAME)} {clean} "$@"')


@needs("unshare", "-n", "-u")
def test_a_machine_without_a_network(sweeps: Sweeps) -> None:
    """Neither a loopback device that is up nor a host name that can be resolved is needed for one node."""
    sweeps.both("+number=1", shell="""unshare -n -u sh -c 'hostname no.such.invalid; exec "$@"' sh "$@" """)


FOREIGN_PROC = {
    "unmounted": """unshare -m sh -c 'mount -t tmpfs none /proc && exec "$@"' sh "$@" """,
    "of another namespace": 'unshare -p -f "$@"',
}


@needs("unshare", "-m", "-p", "-f")
@pytest.mark.parametrize("shell", FOREIGN_PROC.values(), ids=FOREIGN_PROC)
def test_without_a_proc_of_our_own(sweeps: Sweeps, shell: str) -> None:
    """Where the processes of a job cannot be seen, and so not be ended, the sweep is refused with the reason."""
    ran, seen = sweeps.run("ddp_subprocess", "+number=1", shell=shell)
    assert (ran.returncode, seen) == (1, [])
    assert "/proc" in ran.output and "hydra/launcher=basic" in ran.output
    assert "Traceback" not in ran.output


@needs("unshare", "-p", "-f", "--mount-proc")
def test_as_the_first_process_of_a_container(sweeps: Sweeps) -> None:
    """A launching process with the number 1 runs its jobs."""
    sweeps.both("+number=1", shell='unshare -p -f --mount-proc "$@"')


def test_the_size_of_the_terminal(sweeps: Sweeps) -> None:
    """A rank knows how wide the terminal is; who asks the log file for it is told what to do."""
    leader, follower = pty.openpty()
    shell = f'exec <>{os.ttyname(follower)} >&0 && stty rows 33 cols 133 && "$@"'
    try:
        sweeps.both("+number=1", shell=shell)
        assert json.loads((sweeps.facts / "1.json").read_text())["columns"] == 133
    finally:
        os.close(leader)
        os.close(follower)
    ran, _ = sweeps.run("ddp_subprocess", "+number=1", "+ask=true")
    assert ran.returncode == 1
    assert "shutil.get_terminal_size()" in ran.output
