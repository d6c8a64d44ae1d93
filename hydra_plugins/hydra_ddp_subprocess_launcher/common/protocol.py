"""Messages and files that processes exchange, and the channel for the messages."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Placeholder for a job's cluster id, which is unknown before the job runs; it needs no quoting.
JOB_ID_TOKEN = "hydra_ddp_job_id_7d4f0c2a"
# Python's exit code if a program reached its end, but its last output could not be written.
OUTPUT_LOST = 120


@dataclass(frozen=True)
class TaskId:
    """Identify the function of the program that a sweep runs, in a form that is valid in another process.

    Attributes:
        module: Module that defines it.
        qualname: Its qualified name there.
        nth: Number of sweeps of a function with that name that the process started before this one.
    """

    module: str
    qualname: str
    nth: int


@dataclass(frozen=True)
class Limits:
    """Time limits of one job.

    Attributes:
        grace_period_s: Seconds from SIGTERM to SIGKILL.
        timeout_s: Maximum seconds of one start of the job; None for no limit.
        exit_timeout_s: Maximum seconds from the first rank's exit with code 0 to the last rank's exit; None for no
            limit.
    """

    grace_period_s: float
    timeout_s: float | None = None
    exit_timeout_s: float | None = None


@dataclass(frozen=True)
class RendezvousDir:
    """Directory in which the keepers of a multi-node job exchange the state of their groups.

    Attributes:
        folder: The directory, used by this start of the job only, on a file system that all nodes share.
        node: Number of this node.
        nnodes: Number of nodes.
    """

    folder: str
    node: int
    nnodes: int


@dataclass(frozen=True)
class RankOptions:
    """Setup of every rank's process besides its command and environment; see `processes.set_up_rank`.

    Attributes:
        ignored_signals: Signals to ignore unless the program sets a handler.
    """

    ignored_signals: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankSpec:
    """The process of one rank.

    Attributes:
        argv: Its command.
        cwd: Directory in which it starts.
        environment: All its variables.
        log_file: File to which stdout and stderr are appended.
        options: How to set up the process.
        held: Descriptors that it keeps open without using them, such as locks on its devices.
        terminal: Descriptors of its stdin, stdout and stderr; if empty, it has no stdin and writes to its log.
        program_at: Index in `argv` of the program, after interpreter and flags, if it may be forked from the fork
            server; else None.
    """

    argv: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    log_file: str
    options: RankOptions = RankOptions()
    held: tuple[int, ...] = ()
    terminal: tuple[int, ...] = ()
    program_at: int | None = None


@dataclass(frozen=True)
class LaunchSpec:
    """One start of a job: what its ranks run, where, and in which environment. Shared by all nodes of the job.

    Attributes:
        number: Number of the job.
        overrides: Its override strings.
        run_dir: Run directory, absolute.
        sweep_dir: Sweep directory, absolute.
        argv: Command of its ranks.
        cwd: Directory in which they start.
        env_set: `hydra.job.env_set`, into which Hydra has merged `env_copy`.
        nproc: Number of ranks on each node.
        devices_per_rank: Devices that each rank uses, if there are any.
        nnodes: Number of nodes.
        run_id: Name of this start, unique on the machine, and in the environment of each of its processes.
        attempt: Number of earlier starts of the job, for any reason.
        restart_count: Number of earlier restarts after a failure (see `max_restarts`).
        max_restarts: Maximum number of restarts of the job.
        master_addr: Address at which rank 0 listens.
        master_port: Port at which rank 0 listens.
        devices: Ids of the job's devices; None to leave the visible-devices variable unchanged.
        device_env_var: Name of the visible-devices variable.
        locked: Names under which the devices are locked.
        payload_digest: SHA-256 of the payload, hexadecimal; None if there is no payload.
        limits: Time limits.
        rank_options: How to set up the process of every rank.
        terminal: Whether rank 0 uses the terminal.
        rendezvous_dir: Directory in which its nodes find each other, absolute; empty for a single node.
        hosts: Host names of its nodes on a cluster; empty if it runs on no cluster.
    """

    number: int
    overrides: tuple[str, ...]
    run_dir: str
    sweep_dir: str
    argv: tuple[str, ...]
    cwd: str
    env_set: Mapping[str, str]
    nproc: int
    devices_per_rank: int
    nnodes: int
    run_id: str
    attempt: int
    restart_count: int
    max_restarts: int
    master_addr: str
    master_port: int
    devices: tuple[str, ...] | None
    device_env_var: str
    locked: tuple[str, ...]
    payload_digest: str | None
    limits: Limits
    rank_options: RankOptions = RankOptions()
    terminal: bool = False
    rendezvous_dir: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.nnodes * self.nproc


@dataclass(frozen=True)
class GroupSpec:
    """What a keeper needs to start and watch the group of one job.

    Attributes:
        argv: Command, the same for every rank.
        cwd: Directory in which every rank starts.
        environment: Variables common to the ranks.
        rank_environments: One mapping per rank that updates `environment`; its length is the number of ranks in the
            group.
        log_files: One path per rank, for stdout and stderr.
        outcome_files: One path per rank; the file exists once the rank has stored that its part of the job completed.
        failure_files: One path per rank; the file exists once the rank has stored that its part of the job failed.
        limits: Time limits of the job.
        terminal: Whether the last three descriptors that came with the job are stdin, stdout and stderr of rank 0.
        first_rank: Lowest rank of the group; the others are consecutive.
        rendezvous: Where to meet the other nodes of the job; None for a single node.
        rank_options: How to set up the process of every rank.
        program_at: Index in `argv` of the program, after interpreter and flags, if ranks may be forked from the fork
            server; None to start a new interpreter for each.
    """

    argv: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    rank_environments: tuple[Mapping[str, str], ...]
    log_files: tuple[str, ...]
    outcome_files: tuple[str, ...]
    failure_files: tuple[str, ...]
    limits: Limits
    terminal: bool = False
    first_rank: int = 0
    rendezvous: RendezvousDir | None = None
    rank_options: RankOptions = RankOptions()
    program_at: int | None = None

    @property
    def ranks(self) -> range:
        """The ranks of the group."""
        return range(self.first_rank, self.first_rank + len(self.rank_environments))

    def rank(self, rank: int, held: tuple[int, ...], terminal: tuple[int, ...]) -> RankSpec:
        """Return the spec of one rank of the group.

        Args:
            rank: The rank.
            held: Descriptors that it keeps open without using them.
            terminal: Descriptors of its stdin, stdout and stderr; if empty, it writes to its log.
        """
        index = rank - self.first_rank
        return RankSpec(
            argv=self.argv,
            cwd=self.cwd,
            environment={**self.environment, **self.rank_environments[index]},
            log_file=self.log_files[index],
            options=self.rank_options,
            held=held,
            terminal=terminal,
            program_at=self.program_at,
        )


@dataclass(frozen=True)
class ForkServerSpec:
    """What a fork server imports, and for which program.

    Attributes:
        modules: Names of the modules to import, in order.
        program: What ranks run: `-m` and a module, or a script, folder or archive.
        varying: Names of the environment variables whose value differs between ranks.
    """

    modules: Sequence[str]
    program: Sequence[str]
    varying: Sequence[str]


class StopReason(Enum):
    """Why a keeper ended its group before every rank had exited by itself."""

    RANK_FAILED = "a rank failed"
    FAILED_RANK_HUNG = "a rank failed, and did not end"
    TIMEOUT = "the time limit (timeout_min) was reached"
    EXIT_TIMEOUT = "ranks went on after the first had ended (exit_timeout_s)"
    TEARDOWN_TIMEOUT = "every rank had stored its outcome, but not all ended"
    ORDERED = "the launcher ordered it"
    SIGNALLED = "its keeper got a signal"
    LAUNCHER_LOST = "the launching process is gone"
    START_FAILED = "a rank could not be started"
    PREEMPTED = "the cluster wants its nodes back"
    KEEPER_LOST = "the process that kept it was lost"
    NODE_FAILED = "another node of it failed"
    NODE_LOST = "another node of it is silent"


@dataclass(frozen=True)
class RankExit:
    """How one rank's process ended.

    Attributes:
        rank: The rank.
        code: Exit code; the negative number of a signal.
        after_s: Seconds since the start of the group.
        stopped: Whether the keeper had already begun to end the group.
    """

    rank: int
    code: int
    after_s: float
    stopped: bool

    @property
    def reached_end(self) -> bool:
        """Whether the program reached its end, judging by its exit code."""
        return self.code in (0, OUTPUT_LOST)


@dataclass(frozen=True)
class GroupReport:
    """A keeper's final report on its group, or on all groups of a multi-node job.

    Attributes:
        exits: One entry per rank that ran, in the order of their exits.
        reason: Why the group was ended; None if every rank exited by itself.
        cause: Rank that failed first; None if none did.
        detail: Detail of the reason, such as the message of a failed start; may be empty.
        began_at: Start of the group, Unix time in seconds.
        finished: Whether every rank had stored its outcome before the group was ended, if it was.
        left: Whether a process of the group could not be ended.
        hosts: Host name of each node; empty for a single node.
        first_node: Node that first reported that its group is being ended; None if none did.
    """

    exits: tuple[RankExit, ...]
    reason: StopReason | None
    cause: int | None
    detail: str = ""
    began_at: float = 0.0
    finished: bool = False
    left: bool = False
    hosts: tuple[str, ...] = ()
    first_node: int | None = None


@dataclass(frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        completed: Whether it completed.
        cause: Why it failed, one line; empty if it completed.
        spec: Its last start; None if it was never started.
        report: The keepers' report on that start; None if it was never started, or its keeper was lost.
    """

    completed: bool
    cause: str = ""
    spec: LaunchSpec | None = None
    report: GroupReport | None = None


@dataclass(frozen=True)
class Outcome:
    """How one rank's part of a job ended, as the rank stored it. Values stay pickled until the launcher needs them.

    Attributes:
        completed: False if the user's function raised or called `sys.exit` with a nonzero code.
        value: Pickled return value of a completed rank 0, else None.
        exception: Pickled exception if another process can unpickle it, else None.
        summary: One line: type and message of the exception, or another reason; empty if completed.
        traceback: The exception's formatted traceback with causes; empty if completed.
        failed_at: When the failure was noticed, Unix time in seconds; None if completed.
        remote: Fields that Hydra 1.4 adds to a JobReturn for exceptions from another process; else empty.
        lost: Why the value could not be pickled; empty if it could.
        note: A line for the user, such as that `sys.exit(0)` was called; may be empty.
        run_id: Name of the job's start to which it belongs (`TORCHELASTIC_RUN_ID`).
        alone: Whether the rank imported torch.distributed, but opened no process group with other ranks.
    """

    completed: bool
    value: bytes | None = None
    exception: bytes | None = None
    summary: str = ""
    traceback: str = ""
    failed_at: float | None = None
    remote: Mapping[str, object] | None = None
    lost: str = ""
    note: str = ""
    run_id: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Payload:
    """Input of the ranks of a job. Only `body` needs the program's classes; the rest can be read before their import.

    Attributes:
        overrides: Override strings of the job.
        run_dir: Run directory, absolute.
        task: Function of the program that the job runs; None if it is in `body`.
        task_name: Hydra's name of the job function (`hydra.job.name` unless the user set it).
        sys_path: The launching process's `sys.path`, for a rank without a program; else empty.
        check_config: Whether the rank writes its resolved config for comparison.
        body: Pickled dict: `config`, `callbacks`, `resolvers`, `logging`, and without a program `task_function` and
            `singletons`.
        job_id: Value for `hydra.job.id` if it was unknown when the config was frozen; else None.
        argv: The launching process's `sys.argv`; empty if unknown.
    """

    overrides: tuple[str, ...]
    run_dir: str
    task: TaskId | None
    task_name: str
    sys_path: tuple[str, ...]
    check_config: bool
    body: bytes
    job_id: str | None = None
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Started:
    """Keeper to launcher: the keeper has started; sent again when the ranks have.

    Attributes:
        keeper: Pid of the keeper.
        ranks: One pid per rank; empty if they are not started yet, which may take a while on a dead disk.
    """

    keeper: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """Keeper to launcher: a line for the user."""

    text: str


@dataclass(frozen=True)
class Stop:
    """Launcher to keeper: end the group, with SIGTERM first or `at_once`."""

    at_once: bool
    detail: str = ""


@dataclass(frozen=True)
class Forward:
    """Launcher to keeper: send a signal to one rank, or to every rank (None)."""

    signal: int
    rank: int | None = None


@dataclass(frozen=True)
class Preempt:
    """Launcher to keeper: forward a signal to the ranks that handle it, give them time, then end the group."""

    signal: int


_HEADER = struct.Struct("!Q")


class Channel:
    """One end of a stream socketpair. Both ends belong to processes of this package, so that pickles are trusted."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.disconnected = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether bytes wait for the peer to read."""
        return bool(self._outgoing) and not self.disconnected

    def send(self, message: object) -> None:
        """Queue a message and send what the socket takes now."""
        data = pickle.dumps(message)
        self._outgoing += _HEADER.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self.wants_to_write:
            try:
                sent = self._sock.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                # The peer is gone, but its last messages may still be unread: `receive` detects the end.
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Any]:
        """Return the complete messages that have arrived, and set `disconnected` if the peer is gone."""
        while not self.disconnected:
            try:
                data = self._sock.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.disconnected = True
            self._incoming += data
        messages = []
        while len(self._incoming) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._incoming)
            end = _HEADER.size + length
            if len(self._incoming) < end:
                break
            messages.append(pickle.loads(bytes(self._incoming[_HEADER.size : end])))
            del self._incoming[:end]
        return messages

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
