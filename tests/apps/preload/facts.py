"""A program that notes what its process is like, so that a forked rank can be compared with a new interpreter."""

from __future__ import annotations

import gc
import json
import locale
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

# Hydra 1.4 warns of the argument.
VERSION_BASE: Any = {"version_base": None} if hasattr(hydra.version, "base_at_least") else {}
STREAM = ("name", "mode", "encoding", "errors", "line_buffering", "write_through", "newlines")
STATUS = ("Name", "SigBlk", "SigIgn", "SigCgt", "Threads", "NoNewPrivs", "Umask")


def stream(one: Any) -> dict[str, str]:
    facts = {name: str(getattr(one, name, None)) for name in STREAM}
    asked = (one.isatty(), one.fileno(), one.seekable(), type(one), type(one.buffer))
    return facts | {"asked": str(asked)}


def descriptors() -> list[tuple[str, str, bool]]:
    """Return what each is, the first three by their numbers."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if not target.startswith("/proc/"):
            name = str(number) if number < 3 else "more"
            found.append((name, target.split(":")[0], os.get_inheritable(number)))
    return sorted(found)


def own_names() -> dict[str, str]:
    return {name: repr(value).split(" at 0x")[0] for name, value in globals().items() if name.startswith("__")}


def process() -> dict[str, Any]:
    return {
        "main": own_names() | {"is this": str(vars(sys.modules["__main__"]) is globals())},
        "command": (sys.argv, sys.orig_argv, sys.executable, Path("/proc/self/cmdline").read_text().split("\0")),
        "interpreter": (str(sys.flags), sys.warnoptions, str(sys._xoptions), list(map(str, warnings.filters))),
        "path": sys.path,
        "hooks": (sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold()),
        "streams": {name: stream(getattr(sys, name)) for name in ("stdin", "stdout", "stderr")},
        "environ": dict(sorted(os.environ.items())),
        "kernel's environ": sorted(Path("/proc/self/environ").read_text().split("\0")),
        "signals": {int(n): str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
        "status": [x for x in Path("/proc/self/status").read_text().splitlines() if x.split(":")[0] in STATUS],
        "descriptors": descriptors(),
        "session": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.getcwd()),
        "threads": ([one.name for one in threading.enumerate()], threading.current_thread() is threading.main_thread()),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "locale": (locale.getlocale(), locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding()),
        "resources": [resource.getrlimit(n) for n in range(10)] + sorted(os.sched_getaffinity(0)) + [os.nice(0)],
        "multiprocessing": (multiprocessing.current_process().name, multiprocessing.get_start_method(allow_none=True)),
        "logging": (str(logging.getLogger().handlers), logging.getLogger().level),
    }


AT_START = process() if "RANK" in os.environ else {}


@hydra.main(config_path=None, **VERSION_BASE)
def main(cfg: DictConfig) -> None:
    facts = {"start": AT_START, "modules": sorted(sys.modules), "job": {"cwd": os.getcwd(), "argv": sys.argv}}
    facts["imported by"] = {"hydra": hydra.__dict__.get("__file__"), "threads": len(os.listdir("/proc/self/task"))}
    Path(f"{os.environ['FACTS']}_{os.environ['RANK']}").write_text(json.dumps(facts, indent=1, default=str))


if __name__ == "__main__":
    main()
