"""Fast start, seen from the launching process: what is preloaded, where, and which jobs can have it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from . import _environment
from ._preloader import SPEC_VARIABLE
from ._signals import describe_exit
from ._spawner import folder_of_package
from ._spawner_link import SpawnerLink
from ._specs import GroupSpec, PreloaderSpec

_log = logging.getLogger(__name__)
# What `auto` may preload, in the order of the imports: where the time of a start goes.
_AUTO = ("numpy", "torch", "torch.distributed", "omegaconf", "hydra")
# Seconds that the imports may take.
_LIMIT_S = 120.0
# Preloaders of a sweep that may be lost: one that is killed is no reason to do without, one that ends by itself is.
_MOST_LOST = 3
# Libraries read these when they are loaded. None of them may start threads, which a fork would not have; and to ask
# whether there is a GPU must not initialise it.
_WHILE_IMPORTING = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# First nothing that would be found in the directory where it is started, as with `-c`.
_BOOTSTRAP = """import sys
if sys.path[:1] == [""]:
    del sys.path[0]
path = list(sys.path)
sys.path.append(sys.argv[1])
from {package} import _preloader
sys.path[:] = path
_preloader.main(*map(int, sys.argv[2:]))
"""


@dataclass(frozen=True)
class RankProgram:
    """What all ranks of a sweep run.

    Attributes:
        interpreter: The interpreter and its flags.
        program: `-m` and a module, or a script, folder or archive.
        cwd: Directory in which they start.
    """

    interpreter: tuple[str, ...]
    program: tuple[str, ...]
    cwd: str


class PreloaderLink(SpawnerLink):
    """The launching process's end of a preloader.

    Args:
        program: What its ranks run.
        spec: What it does.
        environment: All its variables.
    """

    def __init__(self, program: RankProgram, spec: PreloaderSpec, environment: Mapping[str, str]) -> None:
        super().__init__(functools.partial(_start, program, spec, environment))
        self.ready_at, self.ready_by = math.inf, time.monotonic() + _LIMIT_S
        self._shared = list(spec.modules)
        self._importing = ""
        self._told = False

    def hear_note(self, note: bytes) -> None:
        """Take what the preloader says of its modules."""
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
        """End a preloader that does not answer, or is not wanted any more."""
        if self.ready_at == math.inf and time.monotonic() > self.ready_by and not self._told:
            self._give_up(f"importing {self._importing} takes more than {_LIMIT_S:g} s")
        self._told = True
        if self.ready_at == math.inf and self._process.poll() is None:
            # It leads a group, to which what modules have started belongs. Keepers, which go on, have left it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        super().kill()

    def close(self) -> None:
        """Let it end; it is killed where it is busy with imports."""
        if self.ready_at == math.inf and not self.lost:
            self.kill()
        super().close()
        if self.ready_at == math.inf and self.lost and not self._told:
            code = describe_exit(self._process.returncode)
            self._give_up(f"importing {self._importing or 'its first module'} ended the preloader: {code}")

    def _give_up(self, why: str) -> None:
        _log.warning("preload: %s. From now on each rank is a new interpreter", why)
        self._told = True


def _start(
    program: RankProgram, spec: PreloaderSpec, environment: Mapping[str, str], descriptor: int, errors: int
) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as output:
        descriptors = (descriptor, output.fileno(), errors)
        numbers = (descriptor, os.getpid(), output.fileno(), errors)
        return subprocess.Popen(
            [
                *program.interpreter,
                "-c",
                _BOOTSTRAP.format(package=__package__),
                str(folder_of_package()),
                *map(str, numbers),
            ],
            cwd=program.cwd,
            env={**environment, SPEC_VARIABLE: json.dumps(asdict(spec))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            start_new_session=True,
        )


class Preload:
    """The preloader of a sweep, which is kept over its batches.

    Args:
        modules: Names of the modules; None: `auto`.
        program: What ranks run.
        device_env_var: The visible-devices variable.
    """

    def __init__(self, modules: Sequence[str] | None, program: RankProgram, device_env_var: str) -> None:
        self._modules = modules
        self._program = program
        self._device_env_var = device_env_var
        self._shared: dict[str, str] | None = None
        self._link: PreloaderLink | None = None
        self._said: set[str] = set()
        self._lost = 0

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start the preloader early, beside the composing of the first job.

        Args:
            environment: What jobs have, as far as that is known.
        """
        if self._shared is None:
            self._shared = self._shared_part(environment)
            self.link()

    def admit(self, number: int, spec: GroupSpec) -> GroupSpec:
        """Return a group with the permission to be forked, if it can be; else say why not, once a reason."""
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
        """Return the preloader, a new one if the last one was lost; None: it has been given up."""
        if self._given_up or self._shared is None:
            return None
        if self._link is not None and self._link.lost:
            self._lost += 1
            if self._given_up:
                _log.warning(
                    "preload: its process was lost %d times. From now on each rank is a new interpreter", self._lost
                )
                return None
        if self._link is None or self._link.lost:
            modules = self._modules if self._modules is not None else [name for name in _AUTO if name in sys.modules]
            varying = (*_environment.RANK_VARIABLES, self._device_env_var, *_WHILE_IMPORTING)
            spec = PreloaderSpec(tuple(modules), self._program.program, varying)
            environment = {**self._shared, **_WHILE_IMPORTING}
            try:
                self._link = PreloaderLink(self._program, spec, environment)
            except OSError as error:
                # Whether that is in the way of ranks as well, these say themselves.
                _log.warning(
                    "preload: its process cannot be started: %s. From now on each rank is a new interpreter", error
                )
                self._lost = _MOST_LOST
                return None
        return self._link

    @property
    def _given_up(self) -> bool:
        lost_at_imports = self._link is not None and self._link.lost and self._link.ready_at == math.inf
        return lost_at_imports or self._lost >= _MOST_LOST

    def _shared_part(self, environment: Mapping[str, str]) -> dict[str, str]:
        own = {self._device_env_var, *_WHILE_IMPORTING}
        own.update(_environment.RANK_VARIABLES)
        return {name: value for name, value in environment.items() if name not in own}

    def _say(self, number: int, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            _log.warning("#%d : is not preloaded: %s", number, why)

    def close(self) -> None:
        """Let the preloader end."""
        if self._link is not None and not self._link.lost:
            self._link.close()
        self._link = None
