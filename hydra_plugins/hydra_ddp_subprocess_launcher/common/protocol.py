"""The data that passes between processes, and the channel that carries it."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Stands for a job's id on a cluster, which is not known before the job runs: letters that no quoting changes.
JOB_ID_TOKEN = "hydra_ddp_job_id_7d4f0c2a"
# With this exit code Python ends a program that has come to its end, but whose last output cannot be written.
OUTPUT_LOST = 120


@dataclass(frozen=True)
class TaskId:
    """Which function of the program a sweep runs, in a form that holds in another process.

    Attributes:
        module: Module that defines it.
        qualname: Its qualified name there.
        nth: How many sweeps of a function with that name the process had begun before.
    """

    module: str
    qualname: str
    nth: int


@dataclass(frozen=True)
class Limits:
    """Time limits of one job.

    Attributes:
        grace_period_s: Seconds from SIGTERM to SIGKILL.
        timeout_s: Seconds that one start of the job may take; None: no limit.
        exit_timeout_s: Seconds the other ranks may go on after the first one ended with 0; None: no limit.
    """

    grace_period_s: float
    timeout_s: float | None = None
    exit_timeout_s: float | None = None


@dataclass(frozen=True)
class RendezvousDir:
    """Where the keepers of a job that runs on several nodes tell each other what happens to their groups.

    Attributes:
        folder: Of this start of the job alone, on a file system that all nodes share.
        node: Number of this node.
        nnodes: Number of nodes.
    """

    folder: str
    node: int
    nnodes: int


@dataclass(frozen=True)
class GroupSpec:
    """All that a keeper needs to start and watch one job's group.

    Attributes:
        argv: Command, the same for every rank.
        cwd: Directory in which every rank starts.
        environment: Variables common to the ranks.
        rank_environments: One mapping a rank, laid over `environment`; its length is the number of ranks of the group.
        log_files: One path a rank: stdout and stderr go there.
        outcome_files: One path a rank: it exists when the rank has stored that its part of the job completed.
        failure_files: One path a rank: it exists when the rank has stored that its part of the job failed.
        limits: Time limits of the job.
        terminal: Whether the last three descriptors that came with the job are stdin, stdout and stderr of rank 0.
        first_rank: Rank of the first of them; the others count up from it.
        meeting: Where the other nodes of the job are met; None: it has one node.
        ignored: Signals that ranks ignore unless they set a handler.
        program_at: Place in `argv` at which the program begins, behind interpreter and flags, where ranks may be forked
            from a preloader; None: a new interpreter for each.
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
    meeting: RendezvousDir | None = None
    ignored: tuple[int, ...] = ()
    program_at: int | None = None

    @property
    def ranks(self) -> range:
        """The ranks of the group."""
        return range(self.first_rank, self.first_rank + len(self.rank_environments))


@dataclass(frozen=True)
class ForkServerSpec:
    """What a preloader does.

    Attributes:
        modules: Names of the modules to import, in order.
        program: What ranks run: `-m` and a module, or a script, folder or archive.
        varying: Names of the variables that each rank has with a value of its own.
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
        code: Exit code; a signal as its negative number.
        after_s: Seconds since the group's start.
        stopped: True when the keeper had begun to end the group before.
    """

    rank: int
    code: int
    after_s: float
    stopped: bool

    @property
    def reached_end(self) -> bool:
        """Whether the program has come to its end, by its exit code."""
        return self.code in (0, OUTPUT_LOST)


@dataclass(frozen=True)
class GroupReport:
    """A keeper's last word about its group; of a job on several nodes, about all its groups.

    Attributes:
        exits: One entry a rank that ran, in the order in which they ended.
        reason: Why the group was ended; None when every rank ended by itself.
        cause: Rank that failed first; None when none did.
        detail: What the reason alone does not tell, such as the message of a failed start; may be empty.
        began_at: The group's start, Unix time in seconds.
        finished: Whether every rank had stored its outcome before the group was ended, if it was.
        left: Whether a process of it could not be ended.
        hosts: Host name of each node; empty: the job has one node.
        first_node: Node that told first that its group is being ended; None: none did.
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
class Outcome:
    """What one rank stored about its part of a job. Values stay pickled until the launcher wants them.

    Attributes:
        completed: False when the user's function raised or called `sys.exit` with a bad code.
        value: Pickled return value (rank 0, completed), else None.
        exception: Pickled exception where it can be rebuilt elsewhere, else None.
        summary: One line: type and message of the exception, or another reason; empty when completed.
        traceback: The exception's formatted traceback with causes; empty when completed.
        failed_at: When the failure was noticed, Unix time in seconds; None when completed.
        remote: Fields that Hydra 1.4 adds to a JobReturn for exceptions from another process; else empty.
        lost: Why the value could not be pickled; empty when it could.
        note: A line for the user, such as that `sys.exit(0)` was called; may be empty.
        run_id: Name of the start of the job to which it belongs (`TORCHELASTIC_RUN_ID`).
        alone: Whether the rank had torch.distributed, but opened no process group with others.
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
    """What the ranks of a job read. The outer layer is plain, so that it can be read before the program's own classes.

    Attributes:
        overrides: Override strings of the job.
        run_dir: Run directory, absolute.
        task: Which function of the program the job runs; None: it lies in `body`.
        task_name: Hydra's name of the job function (`hydra.job.name` unless the user set it).
        sys_path: The launching process's `sys.path`, for a rank without a program; else empty.
        check_config: Whether the rank writes its resolved config for comparison.
        body: Pickled dict: `config`, `callbacks`, `resolvers`, `logging`, and without a program `task_function` and
            `singletons`.
        job_id: What `hydra.job.id` shall be, where that was not known yet when the config was frozen; else None.
        argv: The launching process's `sys.argv`; empty: not known.
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
    """Keeper to launcher: it is there, and then once more, that the ranks run.

    Attributes:
        keeper: Pid of the keeper.
        ranks: One pid a rank; empty: they are still to be started, which may take a while on a dead disk.
    """

    keeper: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Note:
    """Keeper to launcher: a line for the user."""

    text: str


@dataclass(frozen=True)
class Stop:
    """Launcher to keeper: end the group, by SIGTERM first or `at_once`."""

    at_once: bool
    detail: str = ""


@dataclass(frozen=True)
class Forward:
    """Launcher to keeper: send this signal to one rank, or to every rank (None)."""

    signal: int
    rank: int | None = None


@dataclass(frozen=True)
class Preempt:
    """Launcher to keeper: pass this signal on to the ranks that handle it, give them time for it, and end the group."""

    signal: int


_HEADER = struct.Struct("!Q")


class Channel:
    """One end of a stream socketpair. Both ends belong to processes that this package started from one another."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.lost = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether bytes wait for the peer to read."""
        return bool(self._outgoing) and not self.lost

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
                # The peer is gone, but what it said last may wait to be read: `receive` notices the end.
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Any]:
        """Return the whole messages that have arrived; sets `lost` when the peer is gone."""
        while not self.lost:
            try:
                data = self._sock.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.lost = True
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
