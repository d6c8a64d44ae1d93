"""The launching process's end of spawners: start them, pass jobs to them, receive which keepers have ended."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ..common.protocol import ForkServerSpec, GroupSpec
from ..common.signals import describe_end, describe_exit
from ..job import environment as environment_module
from ..supervisor import forkserver
from ..supervisor.spawner import ENDED, JOB, MAX_DESCRIPTORS, NOTE, folder_of_package, spawner_command

# Seconds for a spawner without keepers to exit.
_END_S = 5.0
# Maximum bytes of a spawner's output to search for its last line.
_MOST_WRITTEN = 1 << 16
# Maximum number of descriptors that a keeper can hold: as many as one message passes, minus the keeper's socket.
MAX_HELD = MAX_DESCRIPTORS - 1


@dataclass(frozen=True)
class KeeperEnded:
    """A keeper ended, and none of its processes is alive unless `left` is set.

    Attributes:
        job: Number of the job.
        code: Exit code of the keeper, or the negative number of a signal. Anything but 0 means that it was lost.
        left: Whether one of its processes could not be ended.
    """

    job: int
    code: int
    left: bool = False


def start_spawner(descriptor: int, errors: int) -> subprocess.Popen[bytes]:
    """Start a spawner that receives jobs on one descriptor, and writes errors to another."""
    return subprocess.Popen(
        spawner_command(descriptor, os.getpid()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=[descriptor],
        start_new_session=True,
    )


class SpawnerLink:
    """The launching process's end of a spawner: start it, pass jobs to it, receive which keepers ended.

    Attributes:
        disconnected: Whether the spawner is gone.
        ready_at: When it became ready, monotonic seconds, or infinite if it is not ready yet.
        ready_by: Deadline to become ready, monotonic seconds, or infinite if there is none.
    """

    def __init__(self, start: Callable[[int, int], subprocess.Popen[bytes]] = start_spawner) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (stays open until the spawner is closed)
        try:
            with theirs:
                self._process = start(theirs.fileno(), self._errors.fileno())
        except OSError:
            ours.close()
            self._errors.close()
            raise
        self._killed = False
        self._ending = ""
        self._sock = ours
        self._sock.setblocking(False)
        self.disconnected = False
        self.ready_at = time.monotonic()
        self.ready_by = math.inf

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    def start_keeper(self, job: int, held: Sequence[int] = ()) -> socket.socket:
        """Request a keeper and return the socket to it.

        Args:
            job: Number of the job.
            held: Descriptors to keep open as long as any process of the job is alive, such as locks; at most MAX_HELD.

        Raises:
            OSError: if the spawner is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # With hundreds of concurrent jobs, its queue can be full for a moment.
            queue = select.poll()
            queue.register(self._sock, select.POLLOUT)
            queue.poll(_END_S * 1000)
            try:
                socket.send_fds(self._sock, [JOB.pack(job)], [theirs.fileno(), *held])
            except OSError:
                ours.close()
                self.disconnected = True
                raise
        return ours

    def receive(self) -> list[KeeperEnded]:
        """Return the reports that have arrived, and set `disconnected` if the spawner is gone."""
        reports = []
        # Read from a spawner that is gone, too, as its last message may say why.
        while True:
            try:
                data = self._sock.recv(ENDED.size)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.disconnected = True
                break
            job, code, left = ENDED.unpack(data)
            if job == NOTE:
                # The text was sent together with its length.
                self.hear_note(self._sock.recv(code))
            else:
                reports.append(KeeperEnded(job, code, left))
        return reports

    def hear_note(self, note: bytes) -> None:
        """Handle a note of the spawner about itself; a plain spawner sends none."""

    def wake(self) -> None:
        """Continue the spawner if it was stopped (SIGSTOP)."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill a spawner that does not answer. Its keepers go on."""
        self._killed = True
        self._process.kill()

    @property
    def ending(self) -> str:
        """How a spawner that is gone ended, and the last line that it wrote."""
        if self._errors.closed:
            return self._ending
        code = self._process.poll()
        how = "did not answer, and was killed" if self._killed else "" if code is None else describe_end(code)
        written = os.pread(self._errors.fileno(), _MOST_WRITTEN, 0).decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(written) if line.strip()), "")
        return ": ".join(filter(None, (how or "could not take it", last)))

    def close(self) -> None:
        """Let the spawner exit, which it does after its last keeper. Kill it on a timeout, as it owns nothing."""
        self._sock.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ending = self.ending
        self._errors.close()


_log = logging.getLogger(__name__)
# Modules that `auto` may preload, in import order. They take most of the time of a start.
_AUTO = ("numpy", "torch", "torch.distributed", "omegaconf", "hydra")
# Maximum seconds for the imports.
_LIMIT_S = 120.0
# Number of lost fork servers after which a sweep does without one. A killed one is replaced, but not one that exits
# during its imports.
_MOST_LOST = 3
# Libraries read these variables when they are loaded. They must not start threads, which a fork would not have, and
# checking for a GPU must not initialise it.
_WHILE_IMPORTING = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# `-c` puts the working directory first on sys.path. Remove it, so that nothing is imported from there.
_BOOTSTRAP = """import sys
if sys.path[:1] == [""]:
    del sys.path[0]
path = list(sys.path)
sys.path.append(sys.argv[1])
from {package} import forkserver
sys.path[:] = path
forkserver.main(*map(int, sys.argv[2:]))
"""


@dataclass(frozen=True)
class RankProgram:
    """The program that all ranks of a sweep run.

    Attributes:
        interpreter: The interpreter and its flags.
        program: `-m` and a module, or a script, folder or archive.
        cwd: Directory in which they start.
    """

    interpreter: tuple[str, ...]
    program: tuple[str, ...]
    cwd: str


class ForkServerLink(SpawnerLink):
    """The launching process's end of a fork server."""

    def __init__(self, program: RankProgram, spec: ForkServerSpec, environment: Mapping[str, str]) -> None:
        super().__init__(functools.partial(_start, program, spec, environment))
        self.ready_at, self.ready_by = math.inf, time.monotonic() + _LIMIT_S
        self._shared = list(spec.modules)
        self._importing = ""
        self._told = False

    def hear_note(self, note: bytes) -> None:
        """Handle a note of the fork server about its modules."""
        news = json.loads(note.decode("utf-8", "replace"))
        if "importing" in news:
            self._importing = news["importing"]
        elif "left_out" in news:
            _log.warning("preload: %s is left out: %s", news["left_out"], news["why"])
            self._shared = [name for name in self._shared if name != news["left_out"]]
        else:
            self.ready_at = time.monotonic()
            names = self._shared if news["preloaded"] else ()
            _log.info("Preloaded: %s", ", ".join(names) or "nothing, each rank is a new interpreter")

    def kill(self) -> None:
        """Kill a fork server that does not answer or is not needed any more."""
        if self.ready_at == math.inf and time.monotonic() > self.ready_by and not self._told:
            self._give_up(f"importing {self._importing} takes more than {_LIMIT_S:g} s")
        self._told = True
        if self.ready_at == math.inf and self._process.poll() is None:
            # It leads a process group, which includes what modules have started. Keepers, which go on, have left it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        super().kill()

    def close(self) -> None:
        """Let the fork server exit. Kill it if it is still importing."""
        if self.ready_at == math.inf and not self.disconnected:
            self.kill()
        super().close()
        if self.ready_at == math.inf and self.disconnected and not self._told:
            code = describe_exit(self._process.returncode)
            self._give_up(f"importing {self._importing or 'its first module'} ended the preloader: {code}")

    def _give_up(self, why: str) -> None:
        _log.warning("preload: %s. From now on each rank is a new interpreter", why)
        self._told = True


def _start(
    program: RankProgram, spec: ForkServerSpec, environment: Mapping[str, str], descriptor: int, errors: int
) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as output:
        descriptors = (descriptor, output.fileno(), errors)
        numbers = (descriptor, os.getpid(), output.fileno(), errors)
        return subprocess.Popen(
            [
                *program.interpreter,
                "-c",
                _BOOTSTRAP.format(package=forkserver.__package__),
                str(folder_of_package()),
                *map(str, numbers),
            ],
            cwd=program.cwd,
            env={**environment, forkserver.SPEC_VARIABLE: json.dumps(asdict(spec))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            start_new_session=True,
        )


class ForkServer:
    """The fork server of a sweep, which all batches share.

    Args:
        modules: Names of the modules to import, or None for `auto`.
    """

    def __init__(self, modules: Sequence[str] | None, program: RankProgram, device_env_var: str) -> None:
        self._modules = modules
        self._program = program
        self._device_env_var = device_env_var
        self._shared: dict[str, str] | None = None
        self._link: ForkServerLink | None = None
        self._said: set[str] = set()
        self._lost = 0

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start the fork server early, so that it imports while the first job is composed.

        Args:
            environment: Environment of the jobs, as far as it is known.
        """
        if self._shared is None:
            self._shared = self._shared_part(environment)
            self.link()

    def admit(self, number: int, spec: GroupSpec) -> GroupSpec:
        """Return the group spec, with forking allowed if possible. Otherwise, log why, once per reason."""
        if self._shared is None or self._given_up:
            return spec
        environment = {**spec.environment, **spec.rank_environments[0]}
        shared = self._shared_part(environment)
        ours = self._shared
        if names := sorted(name for name in {*shared, *ours} if shared.get(name) != ours.get(name)):
            why = f"its environment differs in {', '.join(names)} (hydra.job.env_set) from what was there at the start"
            self._say(number, why)
            return spec
        return replace(spec, program_at=len(self._program.interpreter))

    def link(self) -> SpawnerLink | None:
        """Return the link to the fork server, a new one if the last one was lost, or None if it has been given up."""
        if self._given_up or self._shared is None:
            return None
        if self._link is not None and self._link.disconnected:
            self._lost += 1
            if self._given_up:
                _log.warning(
                    "preload: its process was lost %d times. From now on each rank is a new interpreter", self._lost
                )
                return None
        if self._link is None or self._link.disconnected:
            modules = self._modules if self._modules is not None else [name for name in _AUTO if name in sys.modules]
            varying = (*environment_module.RANK_VARIABLES, self._device_env_var, *_WHILE_IMPORTING)
            spec = ForkServerSpec(tuple(modules), self._program.program, varying)
            environment = {**self._shared, **_WHILE_IMPORTING}
            try:
                self._link = ForkServerLink(self._program, spec, environment)
            except OSError as error:
                # If ranks cannot be started either, they report that themselves.
                _log.warning(
                    "preload: its process cannot be started: %s. From now on each rank is a new interpreter", error
                )
                self._lost = _MOST_LOST
                return None
        return self._link

    @property
    def _given_up(self) -> bool:
        lost_at_imports = self._link is not None and self._link.disconnected and self._link.ready_at == math.inf
        return lost_at_imports or self._lost >= _MOST_LOST

    def _shared_part(self, environment: Mapping[str, str]) -> dict[str, str]:
        own = {self._device_env_var, *_WHILE_IMPORTING}
        own.update(environment_module.RANK_VARIABLES)
        return {name: value for name, value in environment.items() if name not in own}

    def _say(self, number: int, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            _log.warning("#%d : is not preloaded: %s", number, why)

    def close(self) -> None:
        """Let the fork server exit."""
        if self._link is not None and not self._link.disconnected:
            self._link.close()
        self._link = None
