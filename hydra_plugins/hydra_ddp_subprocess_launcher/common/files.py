"""Files of a job: where they are, how they are written and read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from .protocol import (
    GroupReport,
    JobEnd,
    LaunchSpec,
    Limits,
    Outcome,
    Payload,
    RankExit,
    RankOptions,
    StopReason,
    TaskId,
)

# Of what is stored for other processes, and of the journal; a new one whenever an older version could not read it.
FORMAT = 2
_KIND = "kind"
_KINDS = {
    kind.__name__: kind
    for kind in (GroupReport, JobEnd, LaunchSpec, Limits, Outcome, Payload, RankExit, RankOptions, TaskId)
}
_EARLIER = "earlier_"
_IS_EARLIER = re.compile(r"earlier_\d+")
_CLAIM = "claim"
_JOURNAL = "journal.jsonl"
_NODES = "nodes"
_RESULTS = "results.csv"
_TIMELINE = "timeline.svg"


@dataclass(frozen=True)
class JobPaths:
    """Every path of a job.

    Attributes:
        run_dir: Run directory, absolute.
    """

    run_dir: str

    @property
    def folder(self) -> str:
        """The one folder of ours in the run directory."""
        return os.path.join(self.run_dir, ".ddp")

    @property
    def payload(self) -> str:
        """What the ranks read."""
        return os.path.join(self.folder, "payload.pkl")

    @property
    def facts(self) -> str:
        """Overrides, command and environment of the ranks, for people."""
        return os.path.join(self.folder, "job.json")

    def earlier(self, number: int) -> str:
        """What an earlier start left in the folder."""
        return os.path.join(self.folder, f"{_EARLIER}{number}")

    @property
    def config(self) -> str:
        """The job's own config, as YAML, not resolved."""
        return os.path.join(self.folder, "config.yaml")

    def log(self, rank: int) -> str:
        """Stdout and stderr of a rank."""
        return os.path.join(self.folder, f"rank_{rank}.log")

    def outcome(self, rank: int) -> str:
        """How a rank's part of the job ended, when it completed."""
        return os.path.join(self.folder, f"outcome_{rank}.pkl")

    def failure(self, rank: int) -> str:
        """How a rank's part of the job ended, when it failed."""
        return os.path.join(self.folder, f"failure_{rank}.pkl")

    @property
    def callbacks(self) -> str:
        """Rank 0's callbacks as `on_job_start` left them; empty once it calls `on_job_end`."""
        return os.path.join(self.folder, "callbacks.pkl")

    def resolved_config(self, rank: int) -> str:
        """The resolved config of a rank, for `check_config`."""
        return os.path.join(self.folder, f"config_{rank}.json")


@dataclass(frozen=True)
class SweepPaths:
    """Every path of a sweep.

    Attributes:
        sweep_dir: Sweep directory, absolute.
    """

    sweep_dir: str

    @property
    def folder(self) -> str:
        """The one folder of ours in the sweep directory; also a job's, where its run directory is that one."""
        return os.path.join(self.sweep_dir, ".ddp")

    @property
    def claim(self) -> str:
        """Is locked while the sweep runs."""
        return os.path.join(self.folder, _CLAIM)

    @property
    def journal(self) -> str:
        """What has happened, a line an event."""
        return os.path.join(self.folder, _JOURNAL)

    @property
    def rendezvous_root(self) -> str:
        """Where the nodes of jobs that run on several tell each other what happens."""
        return os.path.join(self.folder, _NODES)

    @property
    def results(self) -> str:
        """The table of the jobs that are over, for people and programs."""
        return os.path.join(self.folder, _RESULTS)

    @property
    def timeline(self) -> str:
        """Where `hydra-ddp timeline` draws, unless it is told."""
        return os.path.join(self.folder, _TIMELINE)


def make_job_folder(paths: JobPaths) -> None:
    """Make the run directory and an empty folder of ours in it; what an earlier job left there moves aside within it.

    Raises:
        OSError: when the directory cannot be made or written.
    """
    os.makedirs(paths.folder, exist_ok=True)
    of_the_sweep = (_CLAIM, _JOURNAL, _NODES, _RESULTS, _TIMELINE)
    move_aside(paths.folder, [entry for entry in os.listdir(paths.folder) if entry not in of_the_sweep])


def move_aside(folder: str, entries: Sequence[str]) -> str | None:
    """Move entries of a folder into a new `earlier_<n>` in it, and return that; None: there were none to move.

    Args:
        entries: Their names, or paths; what is an earlier one already stays.
    """
    moved = [entry for entry in entries if not os.path.basename(entry).startswith(_EARLIER)]
    if not moved:
        return None
    # Not their count: somebody may have deleted one.
    taken = [int(name.removeprefix(_EARLIER)) for name in os.listdir(folder) if _IS_EARLIER.fullmatch(name)]
    aside = os.path.join(folder, f"{_EARLIER}{max(taken, default=-1) + 1}")
    os.mkdir(aside)
    for entry in moved:
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(folder, entry), os.path.join(aside, os.path.basename(entry)))
    return aside


@contextlib.contextmanager
def _replacing(path: str, mode: int) -> Iterator[int]:
    """Give a descriptor of a temporary file that takes the place of `path` when the block ends well.

    Args:
        mode: Its permissions, of which the umask takes its part.
    """
    # By hand, as `tempfile` would take ten milliseconds of every rank's start.
    temporary = f"{path}.{os.getpid()}"
    # One that is there is of an earlier process with our number, which was killed.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_private(path: str, data: bytes) -> None:
    """Write a file that only this user can read (mode 0600), whole or not at all."""
    with _replacing(path, 0o600) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)


def write_text(path: str, text: str) -> None:
    """Write a file that whoever the umask lets can read, whole or not at all."""
    with (
        _replacing(path, 0o666) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="surrogateescape") as file,
    ):
        file.write(text)


def dump(value: object) -> bytes:
    """Pickle a value of `protocol` as plain data with a format number, so that no version misreads another one's.

    What is a pickle within it, such as a job's value, stays one.
    """
    return pickle.dumps({"format": FORMAT, "content": _as_plain(value)})


def _as_plain(value: Any) -> Any:
    if isinstance(value, tuple(_KINDS.values())) and is_dataclass(value):
        return {_KIND: type(value).__name__, **{own.name: _as_plain(getattr(value, own.name)) for own in fields(value)}}
    if isinstance(value, StopReason):
        return {_KIND: "StopReason", "name": value.name}
    if type(value) is dict:
        # A user's, such as `env_set`, which may have our key.
        return {_KIND: "dict", "content": value}
    return tuple(map(_as_plain, value)) if type(value) is tuple else value


def load(data: bytes, source: str) -> Any:
    """Invert `dump`.

    Args:
        source: Where that was found, for the error.

    Raises:
        LauncherError: if another version of this package has written it.
        Exception: whatever a damaged pickle raises.
    """
    try:
        stored = pickle.loads(data)
    except (ImportError, AttributeError):
        # Before there were format numbers, it named classes by their modules.
        stored = None
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        # It brings Hydra, which `hydra-ddp` does without if it can.
        from .errors import LauncherError

        raise LauncherError(
            f"{source} was written by another version of this package, in a format that this one cannot read. Use that "
            "version, or choose another hydra.sweep.dir."
        )
    return _from_plain(stored["content"])


def _from_plain(value: Any) -> Any:
    if type(value) is dict:
        kind = value[_KIND]
        if kind == "dict":
            return value["content"]
        if kind == "StopReason":
            return StopReason[value["name"]]
        return _KINDS[kind](**{name: _from_plain(part) for name, part in value.items() if name != _KIND})
    return tuple(map(_from_plain, value)) if type(value) is tuple else value


def read_payload(paths: JobPaths, digest: str) -> Payload:
    """Load a payload, of which nothing is unpickled before its digest is checked.

    Raises:
        LauncherError: when it is missing, or not the one that was announced.
    """
    # It brings Hydra, which `hydra-ddp` does without where it can.
    from .errors import LauncherError

    try:
        data = Path(paths.payload).read_bytes()
    except OSError as error:
        raise LauncherError(
            f"The job's payload cannot be read: {error.strerror}: {paths.payload}. The run directory was moved or "
            "emptied since the sweep started this job; start the sweep again."
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise LauncherError(
            f"{paths.payload} is not the payload of this job: its SHA-256 is {found}, announced was {digest}. It was "
            "damaged, or another job took over the run directory; start the sweep again."
        )
    payload = load(data, paths.payload)
    assert isinstance(payload, Payload)
    return payload


def write_outcome(paths: JobPaths, rank: int, outcome: Outcome) -> None:
    """Store how a rank's part of the job ended; the file's name tells a keeper whether it completed."""
    # A job may have emptied its own run directory.
    with contextlib.suppress(FileExistsError):
        os.mkdir(paths.folder)
    write_private(paths.outcome(rank) if outcome.completed else paths.failure(rank), dump(outcome))


def read_outcome(paths: JobPaths, rank: int, run_id: str) -> Outcome | None:
    """Load an outcome; None when the rank stored none, or none that can be trusted and read.

    One with another `run_id` is of another sweep, which took over the run directory: it says nothing about this job.
    """
    for path in (paths.failure(rank), paths.outcome(rank)):
        outcome = _read_outcome_file(path)
        if outcome is not None and outcome.run_id == run_id:
            return outcome
    return None


def find_outcome(paths: JobPaths, rank: int, run_id: str) -> Outcome | None:
    """Load an outcome, also one that a later job in the same run directory has moved aside; None: as `read_outcome`."""
    outcome = read_outcome(paths, rank, run_id)
    if outcome is not None:
        return outcome
    names = [os.path.basename(path) for path in (paths.failure(rank), paths.outcome(rank))]
    for entry in os.listdir(paths.folder) if os.path.isdir(paths.folder) else []:
        for name in names if _IS_EARLIER.fullmatch(entry) else []:
            outcome = _read_outcome_file(os.path.join(paths.folder, entry, name))
            if outcome is not None and outcome.run_id == run_id:
                return outcome
    return None


def _read_outcome_file(path: str) -> Outcome | None:
    outcome = read_stored(path)
    return outcome if isinstance(outcome, Outcome) else None


def read_stored(path: str) -> Any:
    """Load a file of this user's that holds what `dump` has returned; None: there is none, or it cannot be read.

    Raises:
        LauncherError: if another version of this package has written it.
    """
    data = read_own(path)
    if data is None:
        return None
    try:
        return load(data, path)
    except Exception as error:  # (a damaged pickle can raise anything; then it tells nothing)
        if type(error).__name__ == "LauncherError":
            raise
        return None


def read_own_pickle(path: str) -> Any:
    """Unpickle a file of this user's; None: there is none, or it cannot be read."""
    data = read_own(path)
    if data is None:
        return None
    try:
        return pickle.loads(data)
    except Exception:  # noqa: BLE001  (as above)
        return None


def read_own(path: str) -> bytes | None:
    """Return what a file of this user's holds; None: there is none, or it cannot be read."""
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(descriptor)
    # A pickle from somebody else would run their code.
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            return file.read()
        except OSError:
            return None
