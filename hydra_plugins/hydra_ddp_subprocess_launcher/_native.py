"""What a forked rank has to tell C libraries and the kernel, which have read the preloader's command and environment.

The preloader imports this module, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
