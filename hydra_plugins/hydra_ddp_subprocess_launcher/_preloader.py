"""The preloader: a spawner that has imported modules, so that ranks which are forked from it need not.

It is started as the user's program is, by the same interpreter with the same flags. A module that cannot be shared is
found out when it has been imported, and cannot be taken back: then the preloader starts over without it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import NoReturn

from . import _as_main, _forked, _importing, _native, _process, _spawner
from ._short_end import ShortEnd
from ._signals import send_signal
from ._specs import PreloaderSpec

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
    spec = PreloaderSpec(**json.loads(os.environ.pop(SPEC_VARIABLE)))
    own = {descriptor, output, errors}
    for one in own:
        os.set_inheritable(one, False)
    _process.become_subreaper()
    _process.name_process("ddp-preloader")
    # It owns nothing as yet, and may be busy for long.
    _process.signal_at_parents_end(launcher, signal.SIGKILL)
    sys.path[:0] = _as_main.own_path(spec.program, os.getcwd())
    _as_main.prepare_main(spec.program)
    fault = _importing.copied_fault("what starts with the interpreter (sitecustomize, a .pth file)", {0, 1, 2, *own})
    if fault is not None:
        _tell_fault(descriptor, "everything", fault)
        _start_over(spec, [], environment, (descriptor, launcher, output, errors))
    for name in spec.modules:
        _tell(descriptor, {"importing": name})
        fault = _importing.import_module(name, frozenset(spec.varying), spec.program)
        if fault is not None:
            _tell_fault(descriptor, name, fault)
            left = [module for module in spec.modules if module != name]
            _start_over(spec, left, environment, (descriptor, launcher, output, errors))
    earlier = {name: value for name, value in environment.items() if name != SPEC_VARIABLE}
    state = _forked.FreshState.look(earlier, but=own)
    start = _serve(descriptor, launcher, errors)
    _forked.become_rank(start, state, output)
    end.shared = frozenset(sys.modules)
    _as_main.run_main(start.program, end.note)


def _serve(descriptor: int, launcher: int, errors: int) -> _forked.RankStart:
    """Be a spawner; return in a forked rank alone."""
    main = sys.modules["__main__"]
    gc.collect()
    _native.freeze_all_but([main, vars(main)])
    for stream in (sys.stdout, sys.stderr):
        # A module may have closed it, or put something else in its place.
        with contextlib.suppress(Exception):
            stream.flush()
    _turn_output(errors)
    _tell(descriptor, {"preloaded": True})
    try:
        with socket.socket(fileno=descriptor) as sock:
            _spawner.serve(sock, launcher, _forked.fork_rank)
    except _forked.RankBegins as begins:
        return begins.start
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
        _spawner.send_note(sock, json.dumps(news, ensure_ascii=False))


def _tell_fault(descriptor: int, what: str, fault: str) -> None:
    # Such as a path of several thousand letters.
    _tell(descriptor, {"left_out": what, "why": _importing.one_line(fault)})


def _start_over(
    spec: PreloaderSpec, modules: list[str], environment: dict[str, str], descriptors: tuple[int, int, int, int]
) -> NoReturn:
    """Be a new process with fewer modules; without any, the small spawner."""
    while _process.has_children():
        send_signal(_process.descendants(_process.own_children()), signal.SIGKILL)
        list(_process.reap())
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
    argv = _spawner.spawner_command(descriptor, launcher)
    os.execve(argv[0], argv, environment)
