"""Files of jobs and sweeps: their paths, and how to write and read them."""

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

# Format of the files stored for other processes, and of the journal; increased whenever an older version could not read
# them.
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
    """All paths of a job.

    Attributes:
        run_dir: Run directory, absolute.
    """

    run_dir: str

    @property
    def folder(self) -> str:
        """The folder of this package in the run directory."""
        return os.path.join(self.run_dir, ".ddp")

    @property
    def payload(self) -> str:
        """The payload that the ranks read."""
        return os.path.join(self.folder, "payload.pkl")

    @property
    def facts(self) -> str:
        """Overrides, command and environment of the ranks, for people."""
        return os.path.join(self.folder, "job.json")

    def earlier(self, number: int) -> str:
        """Folder with the files of an earlier start."""
        return os.path.join(self.folder, f"{_EARLIER}{number}")

    @property
    def config(self) -> str:
        """The job's own config, as YAML, not resolved."""
        return os.path.join(self.folder, "config.yaml")

    def log(self, rank: int) -> str:
        """Stdout and stderr of a rank."""
        return os.path.join(self.folder, f"rank_{rank}.log")

    def outcome(self, rank: int) -> str:
        """Outcome of a rank's part of the job, if it completed."""
        return os.path.join(self.folder, f"outcome_{rank}.pkl")

    def failure(self, rank: int) -> str:
        """Outcome of a rank's part of the job, if it failed."""
        return os.path.join(self.folder, f"failure_{rank}.pkl")

    @property
    def callbacks(self) -> str:
        """Rank 0's pickled callbacks after `on_job_start`; empty once rank 0 calls `on_job_end`."""
        return os.path.join(self.folder, "callbacks.pkl")

    def resolved_config(self, rank: int) -> str:
        """The resolved config of a rank, for `check_config`."""
        return os.path.join(self.folder, f"config_{rank}.json")


@dataclass(frozen=True)
class SweepPaths:
    """All paths of a sweep.

    Attributes:
        sweep_dir: Sweep directory, absolute.
    """

    sweep_dir: str

    @property
    def folder(self) -> str:
        """The folder of this package in the sweep directory; also that of a job with the same run directory."""
        return os.path.join(self.sweep_dir, ".ddp")

    @property
    def claim(self) -> str:
        """File of the sweep lock, locked while the sweep runs."""
        return os.path.join(self.folder, _CLAIM)

    @property
    def journal(self) -> str:
        """The journal: one line per event."""
        return os.path.join(self.folder, _JOURNAL)

    @property
    def rendezvous_root(self) -> str:
        """Folder with the rendezvous directories of multi-node jobs."""
        return os.path.join(self.folder, _NODES)

    @property
    def results(self) -> str:
        """The table of finished jobs, for people and programs."""
        return os.path.join(self.folder, _RESULTS)

    @property
    def timeline(self) -> str:
        """Default output file of `hydra-ddp timeline`."""
        return os.path.join(self.folder, _TIMELINE)


def make_job_folder(paths: JobPaths) -> None:
    """Create the run directory and this package's folder in it, and move files of an earlier job aside within it.

    Raises:
        OSError: if the directory cannot be created or written.
    """
    os.makedirs(paths.folder, exist_ok=True)
    of_the_sweep = (_CLAIM, _JOURNAL, _NODES, _RESULTS, _TIMELINE)
    move_aside(paths.folder, [entry for entry in os.listdir(paths.folder) if entry not in of_the_sweep])


def move_aside(folder: str, entries: Sequence[str]) -> str | None:
    """Move entries of a folder into a new `earlier_<n>` in it; return its path, or None if there was nothing to move.

    Args:
        folder: The folder.
        entries: Names or paths of the entries; `earlier_<n>` folders stay where they are.
    """
    moved = [entry for entry in entries if not os.path.basename(entry).startswith(_EARLIER)]
    if not moved:
        return None
    # Not the number of folders: the user may have deleted one.
    taken = [int(name.removeprefix(_EARLIER)) for name in os.listdir(folder) if _IS_EARLIER.fullmatch(name)]
    aside = os.path.join(folder, f"{_EARLIER}{max(taken, default=-1) + 1}")
    os.mkdir(aside)
    for entry in moved:
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(folder, entry), os.path.join(aside, os.path.basename(entry)))
    return aside


@contextlib.contextmanager
def _replacing(path: str, mode: int) -> Iterator[int]:
    """Yield the descriptor of a temporary file that replaces `path` if the block succeeds.

    Args:
        path: The file to replace.
        mode: Permissions of the file, before the umask.
    """
    # Not by `tempfile`, whose import would add ten milliseconds to the start of every rank.
    temporary = f"{path}.{os.getpid()}"
    # An existing file is from a killed process with the same pid.
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
    """Atomically write a file that only this user can read (mode 0600)."""
    with _replacing(path, 0o600) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)


def write_text(path: str, text: str) -> None:
    """Atomically write a text file with the permissions that the umask allows."""
    with (
        _replacing(path, 0o666) as descriptor,
        os.fdopen(os.dup(descriptor), "w", encoding="utf-8", errors="surrogateescape") as file,
    ):
        file.write(text)


def dump(value: object) -> bytes:
    """Pickle a value of `protocol` as plain data with a format number, so that no version misreads another's files.

    Pickles within it, such as a job's value, stay pickled.
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
    """Load a value that `dump` returned.

    Args:
        data: The bytes of `dump`.
        source: Where they were found, for the error message.

    Raises:
        LauncherError: if another version of this package wrote it in another format.
        Exception: whatever a damaged pickle raises.
    """
    try:
        stored = pickle.loads(data)
    except (ImportError, AttributeError):
        # Before there were format numbers, pickles referred to classes by their modules.
        stored = None
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        # Import here: it imports Hydra, which `hydra-ddp` avoids if it can.
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
    """Load a payload; check its digest before unpickling anything.

    Args:
        paths: Paths of the job.
        digest: Expected SHA-256, hexadecimal.

    Raises:
        LauncherError: if it is missing, or its digest differs.
    """
    # Import here: it imports Hydra, which `hydra-ddp` avoids if it can.
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
    """Store the outcome of a rank's part of the job; the file name shows the keeper whether it completed."""
    # The job may have emptied its own run directory.
    with contextlib.suppress(FileExistsError):
        os.mkdir(paths.folder)
    write_private(paths.outcome(rank) if outcome.completed else paths.failure(rank), dump(outcome))


def read_outcome(paths: JobPaths, rank: int, run_id: str) -> Outcome | None:
    """Load the outcome of a rank, or None if the rank stored none, or none that can be trusted and read.

    An outcome with another `run_id` is ignored: it is from another sweep that took over the run directory.
    """
    for path in (paths.failure(rank), paths.outcome(rank)):
        outcome = _read_outcome_file(path)
        if outcome is not None and outcome.run_id == run_id:
            return outcome
    return None


def find_outcome(paths: JobPaths, rank: int, run_id: str) -> Outcome | None:
    """Load an outcome like `read_outcome`, including one that a later job in the same run directory moved aside."""
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
    """Load a file that `dump` wrote and this user owns, or None if it does not exist or cannot be read.

    Raises:
        LauncherError: if another version of this package wrote it in another format.
    """
    data = read_own(path)
    if data is None:
        return None
    try:
        return load(data, path)
    except Exception as error:  # (a damaged pickle can raise anything; it counts as unreadable)
        if type(error).__name__ == "LauncherError":
            raise
        return None


def read_own_pickle(path: str) -> Any:
    """Unpickle a file that this user owns, or return None if it does not exist or cannot be read."""
    data = read_own(path)
    if data is None:
        return None
    try:
        return pickle.loads(data)
    except Exception:  # noqa: BLE001  (as above)
        return None


def read_own(path: str) -> bytes | None:
    """Return the content of a file that this user owns, or None if it does not exist or cannot be read."""
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(descriptor)
    # A pickle from another user could run arbitrary code.
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            return file.read()
        except OSError:
            return None
