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
class RankOptions:
    """How the process of every rank is set up, beside its command and environment. `processes.set_up_rank` does it.

    Attributes:
        ignored_signals: Signals that it ignores unless the program sets a handler.
    """

    ignored_signals: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankSpec:
    """The process of one rank.

    Attributes:
        argv: Its command.
        cwd: Directory in which it starts.
        environment: All its variables.
        log_file: Stdout and stderr are appended to it.
        options: How it is set up.
        held: Descriptors that it only holds, such as locks on its devices.
        terminal: Descriptors of its stdin, stdout and stderr; empty: no stdin, and its log.
        program_at: Index in `argv` of the program, behind interpreter and flags, if it may be a fork of the fork
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
    """One start of a job: what its ranks run, where, and in which environment. All nodes of the job know it.

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
        run_id: Name of this start, unique on the machine; every process of it has it in its environment.
        attempt: Starts of the job before this one, for whatever reason.
        restart_count: Restarts after a failure (`max_restarts`) before this attempt.
        max_restarts: Restarts the job may have in all.
        master_addr: Address at which rank 0 listens.
        master_port: Port at which rank 0 listens.
        devices: Ids of the job's devices; None: leave the visible-devices variable as it is.
        device_env_var: Name of the visible-devices variable.
        locked: Names under which the devices are locked.
        payload_digest: SHA-256 of the payload, hexadecimal; None: there is none.
        limits: Time limits.
        rank_options: How the process of every rank is set up.
        terminal: Whether rank 0 has the terminal.
        rendezvous_dir: Directory in which its nodes find each other, absolute; empty: it has one node.
        hosts: Host names of its nodes on a cluster; empty: it is on none.
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
        rendezvous: Where the other nodes of the job are met; None: it has one node.
        rank_options: How the process of every rank is set up.
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
    rendezvous: RendezvousDir | None = None
    rank_options: RankOptions = RankOptions()
    program_at: int | None = None

    @property
    def ranks(self) -> range:
        """The ranks of the group."""
        return range(self.first_rank, self.first_rank + len(self.rank_environments))

    def rank(self, rank: int, held: tuple[int, ...], terminal: tuple[int, ...]) -> RankSpec:
        """Return the process of one rank of the group.

        Args:
            held: Descriptors that it only holds.
            terminal: Descriptors of its stdin, stdout and stderr; empty: it has its log.
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
class JobEnd:
    """The end of a job.

    Attributes:
        completed: Whether it completed.
        cause: Why it did not, one line; empty when it did.
        spec: Its last start; None: it was not started.
        report: What the keepers reported of that; None: it was not started, or its keeper was lost.
    """

    completed: bool
    cause: str = ""
    spec: LaunchSpec | None = None
    report: GroupReport | None = None


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
                # The peer is gone, but what it said last may wait to be read: `receive` notices the end.
                self._outgoing.clear()
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Any]:
        """Return the whole messages that have arrived; sets `disconnected` when the peer is gone."""
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
