"""The fork server: a spawner that has imported modules, so that ranks forked from it need not.

It is started as the user's program is, by the same interpreter with the same flags. A module that cannot be shared is
found out when it has been imported, and cannot be taken back: then the fork server starts over without it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from ..common import processes
from ..common.processes import set_up_rank
from ..common.protocol import ForkServerSpec, RankOptions, RankSpec
from ..common.signals import send_signal
from . import import_checks, spawner
from .import_checks import open_descriptors
from .keeper import RankForked

# Has the PreloaderSpec, as JSON, in the preloader's own environment alone.
SPEC_VARIABLE = "HYDRA_DDP_PRELOADER"


def main(descriptor: int, launcher: int, output: int, errors: int) -> None:
    """Be the preloader; return in a rank that was forked from it, when its program has ended.

    Args:
        descriptor: Socket on which jobs arrive.
        launcher: Pid of the launching process.
        output: File for what the imports print; stdout and stderr lead to it, too.
        errors: File for what goes wrong later.
    """
    end = ShortEnd()
    environment = dict(os.environ)
    spec = ForkServerSpec(**json.loads(os.environ.pop(SPEC_VARIABLE)))
    own = {descriptor, output, errors}
    for one in own:
        os.set_inheritable(one, False)
    processes.become_subreaper()
    processes.name_process("ddp-preloader")
    # It owns nothing as yet, and may be busy for long.
    processes.signal_at_parents_end(launcher, signal.SIGKILL)
    sys.path[:0] = own_path(spec.program, os.getcwd())
    prepare_main(spec.program)
    fault = import_checks.copied_fault("what starts with the interpreter (sitecustomize, a .pth file)", {0, 1, 2, *own})
    if fault is not None:
        _tell_fault(descriptor, "everything", fault)
        _start_over(spec, [], environment, (descriptor, launcher, output, errors))
    for name in spec.modules:
        _tell(descriptor, {"importing": name})
        fault = import_checks.import_module(name, frozenset(spec.varying), spec.program)
        if fault is not None:
            _tell_fault(descriptor, name, fault)
            left = [module for module in spec.modules if module != name]
            _start_over(spec, left, environment, (descriptor, launcher, output, errors))
    earlier = {name: value for name, value in environment.items() if name != SPEC_VARIABLE}
    state = FreshState.look(earlier, but=own)
    rank = _serve(descriptor, launcher, errors)
    become_rank(rank, state, output)
    end.shared = frozenset(sys.modules)
    run_main(rank.program, end.note)


def _serve(descriptor: int, launcher: int, errors: int) -> ForkedRank:
    """Be a spawner; return in a forked rank alone."""
    main = sys.modules["__main__"]
    gc.collect()
    freeze_all_but([main, vars(main)])
    for stream in (sys.stdout, sys.stderr):
        # A module may have closed it, or put something else in its place.
        with contextlib.suppress(Exception):
            stream.flush()
    _turn_output(errors)
    _tell(descriptor, {"preloaded": True})
    try:
        with socket.socket(fileno=descriptor) as sock:
            spawner.serve(sock, launcher, fork_rank)
    except RankBegins as begins:
        return begins.rank
    except BaseException:  # noqa: BLE001  (nothing of the modules' shall run at its end)
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _turn_output(errors: int) -> None:
    """Let stdout lead nowhere and stderr to a file of the launching process, as of every spawner."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    os.dup2(errors, 2)


def _tell(descriptor: int, news: Mapping[str, object]) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        # Escapes would make it longer than a note can be.
        spawner.send_note(sock, json.dumps(news, ensure_ascii=False))


def _tell_fault(descriptor: int, what: str, fault: str) -> None:
    # Such as a path of several thousand letters.
    _tell(descriptor, {"left_out": what, "why": import_checks.one_line(fault)})


def _start_over(
    spec: ForkServerSpec, modules: list[str], environment: dict[str, str], descriptors: tuple[int, int, int, int]
) -> NoReturn:
    """Be a new process with fewer modules; without any, the small spawner."""
    while processes.has_children():
        send_signal(processes.descendants(processes.own_children()), signal.SIGKILL)
        list(processes.reap())
    descriptor, launcher, output, errors = descriptors
    os.ftruncate(output, 0)
    os.lseek(output, 0, os.SEEK_SET)
    if modules:
        for one in (descriptor, output, errors):
            os.set_inheritable(one, True)
        changed = json.dumps(asdict(spec) | {"modules": modules})
        argv = list(sys.orig_argv)
        os.execve(sys.executable, argv, {**environment, SPEC_VARIABLE: changed})
    _tell(descriptor, {"preloaded": False})
    os.set_inheritable(descriptor, True)
    _turn_output(errors)
    argv = spawner.spawner_command(descriptor, launcher)
    os.execve(argv[0], argv, environment)


_CHUNK = 1 << 16
# As many bytes as multiprocessing takes for its key.
_KEY_BYTES = 32


@dataclass(frozen=True)
class ForkedRank:
    """What a fork is to become.

    Attributes:
        spec: The rank; `program_at` is set.
        log: Descriptor of its log.
        keeper: Pid of its keeper.
    """

    spec: RankSpec
    log: int
    keeper: int

    @property
    def program(self) -> list[str]:
        """The program and its arguments."""
        return list(self.spec.argv[self.spec.program_at :])


class RankBegins(RankForked):
    """Raised in a rank that is to become a program.

    Attributes:
        rank: What the fork is to become.
    """

    def __init__(self, rank: ForkedRank) -> None:
        super().__init__()
        self.rank = rank


def fork_rank(spec: RankSpec) -> int:
    """Start one rank as a fork of this process, and return its pid: as `processes.start_rank`, but for the exec.

    Args:
        spec: The rank; `program_at` is set, and it has no terminal.

    Raises:
        OSError: when the log cannot be opened, no process can be made, or `cwd` cannot be used.
        RankBegins: in the rank.
    """
    assert spec.program_at is not None and not spec.terminal
    # It says what is wrong with it, and in the keeper it does no harm.
    os.chdir(spec.cwd)
    log = os.open(spec.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    rank = ForkedRank(spec, log, os.getpid())
    # One that is sent to the rank must not find the handlers of the keeper.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(log)
    if pid == 0:
        raise RankBegins(rank)
    return pid


@dataclass(frozen=True)
class FreshState:
    """What a process is like after its imports, before it serves as a preloader.

    Attributes:
        descriptors: Those that are open.
        handlers: Of each signal; None: one that was not set from Python.
        actions: Of each signal, as C keeps them.
        mask: Signals that are blocked.
        variables: What the imports have set in the environment; None: removed.
    """

    descriptors: frozenset[int]
    handlers: Mapping[int, Callable[..., Any] | int | None]
    actions: Mapping[int, bytes]
    mask: frozenset[int]
    variables: Mapping[str, str | None]

    @classmethod
    def look(cls, earlier: Mapping[str, str], but: set[int]) -> FreshState:
        """Return what this process is like.

        Args:
            earlier: Environment before the imports.
            but: Descriptors that are for the preloader alone.
        """
        now = dict(os.environ)
        changed = {name: now.get(name) for name in {*earlier, *now} if now.get(name) != earlier.get(name)}
        handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        mask = frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return cls(frozenset(open_descriptors()) - but, handlers, signal_actions(), mask, changed)


def become_rank(rank: ForkedRank, state: FreshState, imports_said: int) -> None:
    """Make this process, a fork, what a new one would be.

    Args:
        rank: What it is to become.
        state: What the preloader was like before it served.
        imports_said: Descriptor of the file with what the imports have printed.
    """
    processes.signal_at_parents_end(rank.keeper, signal.SIGKILL)
    os.setsid()
    _redirect_to_log(rank.log, imports_said)
    _close_all_but({0, 1, 2, *state.descriptors, *rank.spec.held})
    for held in rank.spec.held:
        os.set_inheritable(held, True)
    variables = {**rank.spec.environment, **state.variables}
    _set_environment({name: value for name, value in variables.items() if value is not None})
    processes.forked_with(rank.spec.environment)
    sys.orig_argv[:] = rank.spec.argv
    _forget_missing_folders()
    processes.name_process(os.path.basename(rank.spec.argv[0])[:15])
    show_command(rank.spec.argv, rank.spec.environment)
    _begin_anew()
    _draw_new_randomness()
    set_thread_counts(os.environ)
    _reset_signals(state, rank.spec.options)


def _redirect_to_log(log: int, imports_said: int) -> None:
    """Let stdout and stderr lead to the log, which begins with what the imports have printed."""
    place = 0
    while chunk := os.pread(imports_said, _CHUNK, place):
        place += os.write(log, chunk)
    for descriptor in (1, 2):
        os.dup2(log, descriptor, inheritable=True)


def _close_all_but(kept: set[int]) -> None:
    for descriptor in open_descriptors():
        if descriptor not in kept:
            os.close(descriptor)


def _set_environment(environment: Mapping[str, str]) -> None:
    # By name, so that C's `getenv` finds the same.
    for name in list(os.environ):
        if name not in environment:
            del os.environ[name]
    os.environ.update(environment)


def _forget_missing_folders() -> None:
    """Look again for folders of `sys.path` that were not there at the imports."""
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:
            del sys.path_importer_cache[path]


def _begin_anew() -> None:
    """Let modules know that this is another process, which has just begun."""
    thread, logging = threading.main_thread(), sys.modules.get("logging")
    if hasattr(thread, "_set_native_id"):
        # Before 3.13 only a thread that starts has it set.
        thread._set_native_id()
    began = getattr(logging, "_startTime", None)
    if began is not None:
        # For `%(relativeCreated)d`: seconds, and since 3.13 nanoseconds.
        vars(logging)["_startTime"] = time.time_ns() if isinstance(began, int) else time.time()


def _draw_new_randomness() -> None:
    """Let this process have random states of its own; Python's `random` sees to itself."""
    torch, numpy, multiprocessing = (
        sys.modules.get(name) for name in ("torch", "numpy.random", "multiprocessing.process")
    )
    if torch is not None:
        # Not `torch.seed()`: it would leave the same seed for every CUDA device.
        torch.default_generator.seed()
    if numpy is not None:
        numpy.seed()
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(_KEY_BYTES)


def _reset_signals(state: FreshState, options: RankOptions) -> None:
    for number, handler in state.handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, handler)
    restore_signal_actions(state.actions)
    set_up_rank(options)
    signal.pthread_sigmask(signal.SIG_SETMASK, state.mask)


def own_path(program: Sequence[str], cwd: str) -> list[str]:
    """Return what the interpreter puts before `sys.path` for a program.

    Args:
        program: `-m` and a module, or a script, folder or archive; arguments may follow.
        cwd: Working directory at the start.
    """
    # A folder or archive is where its modules are: that also holds where the script's own folder is kept off.
    if program[0] != "-m" and _is_container(program[0]):
        return [program[0]]
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return []
    return [cwd if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))]


def prepare_main(program: Sequence[str]) -> None:
    """Make `__main__`, a new one, and `sys.argv` what they are before a program's first line."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    space = vars(main)
    space.update(__loader__=importlib.machinery.BuiltinImporter, __annotations__={}, __builtins__=builtins)
    _set_arguments(program)
    if program[0] != "-m" and not _is_container(program[0]):
        compiled = program[0].endswith(".pyc")
        loader = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
        space.update(__file__=program[0], __cached__=None, __loader__=loader("__main__", program[0]))


def _set_arguments(program: Sequence[str]) -> None:
    sys.argv[:] = ["-m", *program[2:]] if program[0] == "-m" else program


def run_main(program: Sequence[str], note: Callable[[BaseException | None], None]) -> None:
    """Run a program to its end in the `__main__` that was prepared, which modules may have got hold of.

    What it raises is left to the interpreter, which knows all about exit codes, SystemExit and Ctrl-C.

    Args:
        program: `-m` and a module, or a script, folder or archive, with its arguments.
        note: Is called with what has ended it, None: it has come to its end. Once more if its `sys.excepthook` exits.

    Raises:
        BaseException: whatever the program raises.
    """
    _set_arguments(program)
    run_module: Any = vars(runpy)["_run_module_as_main"]
    try:
        if program[0] == "-m":
            run_module(program[1])
        elif _is_container(program[0]):
            run_module("__main__", False)
        else:
            exec(_code(program[0]), vars(sys.modules["__main__"]))
    except SystemExit as error:
        note(error)
        raise
    except BaseException as error:
        note(error)
        if hasattr(sys, "excepthook"):
            sys.excepthook = _Hook(sys.excepthook, note)
        raise
    note(None)


class _Hook:
    """Show an exception that ends the program as if the program had been called by nobody.

    Args:
        hook: What the program has for it, or the interpreter's own.
        note: Is called with a SystemExit by which that ends the program instead.
    """

    def __init__(self, hook: Any, note: Callable[[BaseException | None], None]) -> None:
        self._hook = hook
        self._note = note

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Be `sys.excepthook`."""
        sys.excepthook = self._hook
        error.__traceback__ = _without_ours(error, trace)
        try:
            self._hook(kind, error, error.__traceback__)
        except SystemExit as exits:
            self._note(exits)
            raise


def _without_ours(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first call that is the program's."""
    ours = __name__.rsplit(".", 2)[0]
    shown = trace
    while shown is not None:
        code = shown.tb_frame.f_code
        name = str(shown.tb_frame.f_globals.get("__name__"))
        if code.co_filename != "<string>" and not name.startswith(f"{ours}."):
            return shown
        shown = shown.tb_next
    # A script that is no Python has not run at all.
    return None if isinstance(error, SyntaxError) else trace


def _is_container(path: str) -> bool:
    return pkgutil.get_importer(path) is not None


def _code(path: str) -> CodeType:
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file) if path.endswith(".pyc") else None
            file.seek(0)
            source = file.read()
    except OSError as error:
        # The interpreter's words, and its exit code.
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    if code is None:
        code = compile(source, path, "exec", dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


# Of libgomp, Intel's and LLVM's OpenMP; a process may have several, each with a number of threads of its own.
_OPENMP = ("libgomp", "libiomp5", "libomp")
# Names under which builds of OpenBLAS have it, numpy's first.
_OPENBLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
# From Linux's <linux/prctl.h>.
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
# `struct prctl_mm_map`: start and end of code, of data, of the heap, start of the stack, start and end of arguments
# and of environment, auxiliary vector and its size, descriptor of the executable.
_MM_MAP = struct.Struct("=11QQIi")
_NO_DESCRIPTOR = -1
# Places in /proc/self/stat, counted behind name and state: code, stack, data, heap.
_STAT_CODE, _STAT_STACK, _STAT_DATA, _STAT_HEAP = slice(22, 24), 24, slice(41, 43), 43
_READ_WRITE, _PRIVATE_ANONYMOUS = 3, 0x22
# Room for C's `struct sigaction`.
_SIGACTION_SIZE = 512


def set_thread_counts(environment: Mapping[str, str]) -> None:
    """Let OpenMP, OpenBLAS and torch use as many threads as if they had been loaded with this environment.

    They were loaded with one thread each, as no thread outlives a fork.
    """
    wanted = environment.get("OMP_NUM_THREADS", "")
    if not wanted.isdecimal() or int(wanted) < 1:
        return  # Such as `4,2`, for nested teams: one is then always right.
    libraries = [(os.path.basename(path), path) for path in _loaded_libraries()]
    for name, path in libraries:
        if name.startswith(_OPENMP):
            library = _loaded(path)
            # Another number is the choice of a module that was imported. A plugin of such a library has no say in it.
            if hasattr(library, "omp_set_num_threads") and library.omp_get_max_threads() == 1:
                library.omp_set_num_threads(int(wanted))
        elif "openblas" in name:
            chosen = environment.get("OPENBLAS_NUM_THREADS", wanted)
            _set_openblas(_loaded(path), chosen)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() in (1, int(wanted)):
        # As torch does it itself when it is first used: MKL uses no more threads than there are cores.
        core = next((path for name, path in libraries if name.startswith("libtorch_cpu")), None)
        most = getattr(_loaded(core), "mkl_get_max_threads", None) if core is not None else None
        torch.set_num_threads(int(wanted) if most is None else most())


def _set_openblas(library: ctypes.CDLL, wanted: str) -> None:
    setters = (getattr(library, name, None) for name in _OPENBLAS_SETTERS)
    setter = next((one for one in setters if one is not None), None)
    if setter is not None and wanted.isdecimal():
        setter(max(1, min(int(wanted), os.cpu_count() or 1)))


def signal_actions() -> dict[int, bytes]:
    """Return what the kernel does at each signal, as C keeps it: `signal.getsignal` knows of no handler in C."""
    found = {}
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        for number in signal.valid_signals():
            action = ctypes.create_string_buffer(_SIGACTION_SIZE)
            if libc.sigaction(ctypes.c_int(number), None, action) == 0:
                found[int(number)] = action.raw
    return found


def restore_signal_actions(earlier: Mapping[int, bytes]) -> None:
    """Let the kernel do what `signal_actions` has returned."""
    now = signal_actions()
    for number, action in earlier.items():
        if now[number] != action:
            ctypes.CDLL(None).sigaction(ctypes.c_int(number), ctypes.create_string_buffer(action, len(action)), None)


def freeze_all_but(kept: Sequence[object]) -> None:
    """Let the collector leave alone what there is now, so that it need not be copied for having been looked at.

    Args:
        kept: These are a program's, whose last objects it finds only if it looks at them.
    """
    tracked = [one for one in kept if gc.is_tracked(one)]
    for one in tracked:
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(one))
    gc.freeze()
    for one in tracked:
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(one))


class _LoadedObject(ctypes.Structure):
    # How `struct dl_phdr_info` begins.
    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _loaded_libraries() -> list[str]:
    """Return the libraries of this process, by the names under which the linker finds them without a look at the disk.

    Another version may have been installed since then.
    """
    found = []

    def take(loaded: Any, _size: int, _data: object) -> int:
        found.append(os.fsdecode(loaded.contents.name or b""))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LoadedObject), ctypes.c_size_t, ctypes.c_void_p)
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).dl_iterate_phdr(callback(take), None)
    return [name for name in found if name]


def _loaded(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)


def show_command(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let `ps`, and whoever looks for a process by its environment, see these in place of those of the preloader.

    Where the kernel was built without it, they go on to see the preloader's.
    """
    command = b"".join(os.fsencode(part) + b"\0" for part in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        libc: Any = ctypes.CDLL(None, use_errno=True)
        fields = [int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
        libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
        libc.mmap.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int],
            ctypes.c_long,
        ]
        start = libc.mmap(None, len(command) + len(variables), _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            return
        ctypes.memmove(start, command + variables, len(command) + len(variables))
        split, end = start + len(command), start + len(command) + len(variables)
        areas = (*fields[_STAT_CODE], *fields[_STAT_DATA], fields[_STAT_HEAP], libc.sbrk(0), fields[_STAT_STACK])
        packed = _MM_MAP.pack(*areas, start, split, split, end, 0, 0, _NO_DESCRIPTOR)
        libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(packed), ctypes.c_ulong(len(packed)), ctypes.c_ulong(0))


class ShortEnd:
    """Ends the process when the program, its threads and its `atexit` functions are done.

    Make it before anything else registers with `atexit`, as it has to be the last one. Where it would not be, the
    program ends by Ctrl-C or a daemon thread still runs, the interpreter goes the long way.

    Attributes:
        shared: Names of the modules that are left alone.
        code: Exit code of the process; None: not known.
    """

    def __init__(self) -> None:
        self.shared: Collection[str] = ()
        self.code: int | None = None
        # Such as coverage, which starts with the interpreter.
        others: int = vars(atexit)["_ncallbacks"]()
        if others == 0:
            atexit.register(self._end)
        else:
            atexit.register(gc.unfreeze)

    def note(self, error: BaseException | None) -> None:
        """Take note of what ended the program; None: it has come to its end."""
        if error is None:
            self.code = 0
        elif isinstance(error, SystemExit):
            code = error.code
            self.code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        elif not isinstance(error, KeyboardInterrupt):
            self.code = 1

    def _end(self) -> None:
        try:
            _flush()
        except Exception:  # noqa: BLE001  (a stream may be anything; the interpreter has an exit code for this)
            self.code = None
        # A thread that goes on would find its modules empty. The interpreter lets it have no turn any more.
        if self.code is None or len(sys._current_frames()) > 1:
            gc.unfreeze()
            return
        # All of them have been called; they know the program's names.
        vars(atexit)["_clear"]()
        _empty(self.shared)
        with contextlib.suppress(Exception):
            _flush()
        # What C code has printed.
        ctypes.CDLL(None).fflush(None)
        os._exit(self.code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _empty(shared: Collection[str]) -> None:
    """Let go of what the program's own modules hold, so that its files are written and its objects deleted."""
    # A traceback that was printed knows all names, too.
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    _write_files()
    modules = []
    for name in reversed(list(sys.modules)):
        if name == "__main__" or name not in shared:
            with contextlib.suppress(TypeError):
                modules.append(weakref.ref(sys.modules.pop(name)))
    # As the interpreter does it: first what is in reach of nobody else, all at once and with its globals in place,
    gc.collect()
    # then what is, a name at a time.
    for reference in modules:
        module = reference()
        if module is not None:
            _clear(vars(module))
            del module
    gc.collect()


def _write_files() -> None:
    """Write what is buffered for files: the collector may close one before its buffer is written."""
    for found in gc.get_objects():
        if issubclass(type(found), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(Exception):
                found.flush()


def _clear(space: dict[str, Any]) -> None:
    for private in (True, False):
        for key in list(space):
            if key != "__builtins__" and (key[:1] == "_" and key[1:2] != "_") == private:
                space[key] = None
