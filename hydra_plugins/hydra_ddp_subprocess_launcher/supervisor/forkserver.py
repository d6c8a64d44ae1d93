"""The fork server: a spawner that imports modules once, so that the ranks forked from it need not.

It is started like the user's program, by the same interpreter with the same flags. A module that cannot be shared is
only detected after its import, which cannot be undone: the fork server then restarts without it.
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

# Holds the ForkServerSpec as JSON; set only in the environment of the fork server.
SPEC_VARIABLE = "HYDRA_DDP_PRELOADER"


def main(descriptor: int, launcher: int, output: int, errors: int) -> None:
    """Run the fork server; return only in a forked rank, after its program has ended.

    Args:
        descriptor: Socket on which jobs arrive.
        launcher: Pid of the launching process.
        output: Descriptor of the file for the output of the imports, to which stdout and stderr are redirected.
        errors: Descriptor of the file for later errors.
    """
    end = ShortEnd()
    environment = dict(os.environ)
    spec = ForkServerSpec(**json.loads(os.environ.pop(SPEC_VARIABLE)))
    own = {descriptor, output, errors}
    for one in own:
        os.set_inheritable(one, False)
    processes.become_subreaper()
    processes.name_process("ddp-preloader")
    # SIGKILL: it owns no jobs yet, and an import may keep it busy for a long time.
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
    """Run a spawner; return only in a forked rank."""
    main = sys.modules["__main__"]
    gc.collect()
    freeze_all_but([main, vars(main)])
    for stream in (sys.stdout, sys.stderr):
        # A module may have closed or replaced the stream.
        with contextlib.suppress(Exception):
            stream.flush()
    _turn_output(errors)
    _tell(descriptor, {"preloaded": True})
    try:
        with socket.socket(fileno=descriptor) as sock:
            spawner.serve(sock, launcher, fork_rank)
    except RankBegins as begins:
        return begins.rank
    except BaseException:  # noqa: BLE001  (no exit handler of a module may run)
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _turn_output(errors: int) -> None:
    """Redirect stdout to /dev/null and stderr to a file of the launching process, as for every spawner."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    os.dup2(errors, 2)


def _tell(descriptor: int, news: Mapping[str, object]) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        # ASCII escapes could exceed the maximum length of a note.
        spawner.send_note(sock, json.dumps(news, ensure_ascii=False))


def _tell_fault(descriptor: int, what: str, fault: str) -> None:
    # A fault may contain a path of several thousand characters.
    _tell(descriptor, {"left_out": what, "why": import_checks.one_line(fault)})


def _start_over(
    spec: ForkServerSpec, modules: list[str], environment: dict[str, str], descriptors: tuple[int, int, int, int]
) -> NoReturn:
    """Replace this process by a fork server with these modules, or by a plain spawner if there are none."""
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
# The size of multiprocessing's authkey, in bytes.
_KEY_BYTES = 32


@dataclass(frozen=True)
class ForkedRank:
    """A rank that a fork is about to become.

    Attributes:
        spec: Spec of the rank, with `program_at` set.
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
    """Raised in a forked rank to unwind the stack before it runs its program.

    Attributes:
        rank: The rank that the fork becomes.
    """

    def __init__(self, rank: ForkedRank) -> None:
        super().__init__()
        self.rank = rank


def fork_rank(spec: RankSpec) -> int:
    """Start one rank as a fork of this process and return its pid, like `processes.start_rank` without the exec.

    Args:
        spec: Spec of the rank, with `program_at` set and no terminal.

    Raises:
        OSError: if the log cannot be opened, the fork fails, or `cwd` cannot be used.
        RankBegins: in the forked rank.
    """
    assert spec.program_at is not None and not spec.terminal
    # Before the fork, so that a bad `cwd` raises here. Changing the keeper's directory does no harm.
    os.chdir(spec.cwd)
    log = os.open(spec.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    rank = ForkedRank(spec, log, os.getpid())
    # A signal sent to the rank must not run the handlers of the keeper.
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
    """State of the fork server after its imports and before it serves, to be restored in each rank.

    Attributes:
        descriptors: Open descriptors.
        handlers: Python handler of each signal; None if it was not set from Python.
        actions: C `struct sigaction` of each signal.
        mask: Blocked signals.
        variables: Environment variables that the imports changed; None if removed.
    """

    descriptors: frozenset[int]
    handlers: Mapping[int, Callable[..., Any] | int | None]
    actions: Mapping[int, bytes]
    mask: frozenset[int]
    variables: Mapping[str, str | None]

    @classmethod
    def look(cls, earlier: Mapping[str, str], but: set[int]) -> FreshState:
        """Return the state of this process.

        Args:
            earlier: Environment before the imports.
            but: Descriptors to leave out, which only the fork server uses.
        """
        now = dict(os.environ)
        changed = {name: now.get(name) for name in {*earlier, *now} if now.get(name) != earlier.get(name)}
        handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
        mask = frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return cls(frozenset(open_descriptors()) - but, handlers, signal_actions(), mask, changed)


def become_rank(rank: ForkedRank, state: FreshState, imports_said: int) -> None:
    """Reset inherited state, so that the fork looks like a fresh interpreter.

    Args:
        rank: The rank that this process becomes.
        state: State of the fork server before it served.
        imports_said: Descriptor of the file with the output of the imports.
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
    """Redirect stdout and stderr to the log, and copy the output of the imports to its beginning."""
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
    # Variable by variable, so that C's `getenv` agrees.
    for name in list(os.environ):
        if name not in environment:
            del os.environ[name]
    os.environ.update(environment)


def _forget_missing_folders() -> None:
    """Drop cached misses, so that folders of `sys.path` created since the imports are found."""
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:
            del sys.path_importer_cache[path]


def _begin_anew() -> None:
    """Update what modules cache about the process: its thread id and its start time."""
    thread, logging = threading.main_thread(), sys.modules.get("logging")
    if hasattr(thread, "_set_native_id"):
        # Before Python 3.13, only a starting thread sets it.
        thread._set_native_id()
    began = getattr(logging, "_startTime", None)
    if began is not None:
        # For `%(relativeCreated)d`: in seconds; in nanoseconds since Python 3.13.
        vars(logging)["_startTime"] = time.time_ns() if isinstance(began, int) else time.time()


def _draw_new_randomness() -> None:
    """Reseed torch and numpy and renew multiprocessing's authkey; Python's `random` reseeds itself after a fork."""
    torch, numpy, multiprocessing = (
        sys.modules.get(name) for name in ("torch", "numpy.random", "multiprocessing.process")
    )
    if torch is not None:
        # Not `torch.seed()`, which would leave the same seed for every CUDA device.
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
    """Return the entries that the interpreter prepends to `sys.path` for a program.

    Args:
        program: `-m` and a module, or a script, folder or archive; arguments may follow.
        cwd: Working directory at the start.
    """
    # A folder or archive contains the modules itself, so it is prepended even under `-I` and `-P`.
    if program[0] != "-m" and _is_container(program[0]):
        return [program[0]]
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return []
    return [cwd if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))]


def prepare_main(program: Sequence[str]) -> None:
    """Create a new `__main__` and set `sys.argv`, as they are before the first line of a program."""
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
    """Run a program in the `__main__` of `prepare_main`, to which modules may hold references.

    Exceptions propagate to the interpreter, which handles exit codes, SystemExit and Ctrl-C.

    Args:
        program: `-m` and a module, or a script, folder or archive, with its arguments.
        note: Called with the exception that ended the program, or None if it reached its end. Called again if the
            program's `sys.excepthook` exits.

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
    """Show an exception that ends the program without the stack frames of this package.

    Args:
        hook: The `sys.excepthook` of the program, or the default one.
        note: Called with the SystemExit if the hook exits.
    """

    def __init__(self, hook: Any, note: Callable[[BaseException | None], None]) -> None:
        self._hook = hook
        self._note = note

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Handle an uncaught exception, as `sys.excepthook`."""
        sys.excepthook = self._hook
        error.__traceback__ = _without_ours(error, trace)
        try:
            self._hook(kind, error, error.__traceback__)
        except SystemExit as exits:
            self._note(exits)
            raise


def _without_ours(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the program's first frame on."""
    ours = __name__.rsplit(".", 2)[0]
    shown = trace
    while shown is not None:
        code = shown.tb_frame.f_code
        name = str(shown.tb_frame.f_globals.get("__name__"))
        if code.co_filename != "<string>" and not name.startswith(f"{ours}."):
            return shown
        shown = shown.tb_next
    # A script with a syntax error never ran.
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
        # The same message and exit code as the interpreter's.
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    if code is None:
        code = compile(source, path, "exec", dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


# GNU, Intel and LLVM OpenMP; a process may load several, each with its own thread count.
_OPENMP = ("libgomp", "libiomp5", "libomp")
# Names of the function in different builds of OpenBLAS, numpy's first.
_OPENBLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
# From Linux's <linux/prctl.h>.
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
# `struct prctl_mm_map`: start and end of code, data and heap; start of the stack; start and end of the arguments and of
# the environment; the auxiliary vector and its size; descriptor of the executable.
_MM_MAP = struct.Struct("=11QQIi")
_NO_DESCRIPTOR = -1
# Indices into the fields of /proc/self/stat after name and state: code, stack, data, heap.
_STAT_CODE, _STAT_STACK, _STAT_DATA, _STAT_HEAP = slice(22, 24), 24, slice(41, 43), 43
_READ_WRITE, _PRIVATE_ANONYMOUS = 3, 0x22
# Bytes that are enough for C's `struct sigaction`.
_SIGACTION_SIZE = 512


def set_thread_counts(environment: Mapping[str, str]) -> None:
    """Set the thread counts of OpenMP, OpenBLAS and torch to what they would be if loaded with this environment.

    The fork server loads them with one thread each, because threads do not survive a fork.
    """
    wanted = environment.get("OMP_NUM_THREADS", "")
    if not wanted.isdecimal() or int(wanted) < 1:
        return  # For example `4,2` for nested teams: keep one thread, which is always correct.
    libraries = [(os.path.basename(path), path) for path in _loaded_libraries()]
    for name, path in libraries:
        if name.startswith(_OPENMP):
            library = _loaded(path)
            # Any other count was set by an imported module. Plugins of these libraries lack the function.
            if hasattr(library, "omp_set_num_threads") and library.omp_get_max_threads() == 1:
                library.omp_set_num_threads(int(wanted))
        elif "openblas" in name:
            chosen = environment.get("OPENBLAS_NUM_THREADS", wanted)
            _set_openblas(_loaded(path), chosen)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() in (1, int(wanted)):
        # As torch does on first use: MKL uses at most as many threads as there are cores.
        core = next((path for name, path in libraries if name.startswith("libtorch_cpu")), None)
        most = getattr(_loaded(core), "mkl_get_max_threads", None) if core is not None else None
        torch.set_num_threads(int(wanted) if most is None else most())


def _set_openblas(library: ctypes.CDLL, wanted: str) -> None:
    setters = (getattr(library, name, None) for name in _OPENBLAS_SETTERS)
    setter = next((one for one in setters if one is not None), None)
    if setter is not None and wanted.isdecimal():
        setter(max(1, min(int(wanted), os.cpu_count() or 1)))


def signal_actions() -> dict[int, bytes]:
    """Return the C `struct sigaction` of each signal: `signal.getsignal` does not see handlers set in C."""
    found = {}
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        for number in signal.valid_signals():
            action = ctypes.create_string_buffer(_SIGACTION_SIZE)
            if libc.sigaction(ctypes.c_int(number), None, action) == 0:
                found[int(number)] = action.raw
    return found


def restore_signal_actions(earlier: Mapping[int, bytes]) -> None:
    """Restore the signal actions that `signal_actions` returned."""
    now = signal_actions()
    for number, action in earlier.items():
        if now[number] != action:
            ctypes.CDLL(None).sigaction(ctypes.c_int(number), ctypes.create_string_buffer(action, len(action)), None)


def freeze_all_but(kept: Sequence[object]) -> None:
    """Exclude all current objects from garbage collection, so that forks do not copy pages only to scan them.

    Args:
        kept: Objects to keep collectable: they belong to the program, whose last objects are only found through them.
    """
    tracked = [one for one in kept if gc.is_tracked(one)]
    for one in tracked:
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(one))
    gc.freeze()
    for one in tracked:
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(one))


class _LoadedObject(ctypes.Structure):
    # The first fields of `struct dl_phdr_info`.
    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _loaded_libraries() -> list[str]:
    """Return the loaded libraries by the names under which the linker finds them without reading the disk.

    A different version may have been installed on disk since they were loaded.
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
    """Make `ps` and /proc/<pid>/environ show this command and environment instead of the fork server's.

    Without effect if the kernel was built without support for it.
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
    """Exit the process quickly once the program, its threads and its `atexit` functions have finished.

    Create it before anything else registers with `atexit`, because it must run last. If it would not run last, if the
    program ends by Ctrl-C, or if a daemon thread still runs, the interpreter finalizes as usual.

    Attributes:
        shared: Names of the modules that are not cleared.
        code: Exit code of the process; None if unknown.
    """

    def __init__(self) -> None:
        self.shared: Collection[str] = ()
        self.code: int | None = None
        # For example coverage, which starts with the interpreter.
        others: int = vars(atexit)["_ncallbacks"]()
        if others == 0:
            atexit.register(self._end)
        else:
            atexit.register(gc.unfreeze)

    def note(self, error: BaseException | None) -> None:
        """Record the exception that ended the program, or None if it reached its end."""
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
        except Exception:  # noqa: BLE001  (a stream may be any object; the interpreter has an exit code for this)
            self.code = None
        # A thread that still runs would find its modules cleared; the interpreter never schedules it again.
        if self.code is None or len(sys._current_frames()) > 1:
            gc.unfreeze()
            return
        # All callbacks have run; they hold references to the program's objects.
        vars(atexit)["_clear"]()
        _empty(self.shared)
        with contextlib.suppress(Exception):
            _flush()
        # Flush the output of C code.
        ctypes.CDLL(None).fflush(None)
        os._exit(self.code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _empty(shared: Collection[str]) -> None:
    """Clear the program's own modules, so that its files are written and its objects deleted."""
    # The last traceback holds references, too.
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    _write_files()
    modules = []
    for name in reversed(list(sys.modules)):
        if name == "__main__" or name not in shared:
            with contextlib.suppress(TypeError):
                modules.append(weakref.ref(sys.modules.pop(name)))
    # As in the interpreter: first collect, at once and with their globals intact, the modules nothing else refers to,
    gc.collect()
    # then clear the others name by name.
    for reference in modules:
        module = reference()
        if module is not None:
            _clear(vars(module))
            del module
    gc.collect()


def _write_files() -> None:
    """Flush all open files: the garbage collector may close one before its buffer is written."""
    for found in gc.get_objects():
        if issubclass(type(found), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(Exception):
                found.flush()


def _clear(space: dict[str, Any]) -> None:
    for private in (True, False):
        for key in list(space):
            if key != "__builtins__" and (key[:1] == "_" and key[1:2] != "_") == private:
                space[key] = None
