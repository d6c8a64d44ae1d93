"""Python's logging in a rank: rank 0 logs as a job of the basic launcher does, the others into files of their own."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from conftest import Runner

SIMPLE = {"simple": {"format": "%(levelname)s %(name)s %(message)s"}}
CONSOLE = {"console": {"class": "logging.StreamHandler", "formatter": "simple", "stream": "ext://sys.stdout"}}


def logging_config(**parts: Any) -> dict[str, Any]:
    """Return a config of Python's logging with a console."""
    handlers = {**CONSOLE, **parts.pop("handlers", {})}
    defaults = {"root": {"handlers": ["console"]}, "disable_existing_loggers": False}
    return {"version": 1, "formatters": SIMPLE, "handlers": handlers, **defaults, **parts}


# --- levels and handlers are those of the basic launcher

STATE = """
import json, logging, os, sys
import hydra

log = logging.getLogger(__name__)
for name in ("a", "a.b", "quiet"):
    logging.getLogger(name)
logging.getLogger("quiet").setLevel(logging.ERROR)


def state(logger):
    handlers = [
        (type(one).__name__, one.level, getattr(one.formatter, "_fmt", None), getattr(one, "baseFilename", None))
        for one in logger.handlers
    ]
    return logger.level, logger.disabled, logger.propagate, handlers


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    loggers = {name: one for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)}
    states = {name: state(one) for name, one in {"root": logging.root, **loggers}.items() if "ddp" not in name}
    for level in (logging.DEBUG, logging.INFO, logging.ERROR):
        log.log(level, "said")
    with open(f"state_{os.environ.get('RANK', 'basic')}.json", "w") as file:
        json.dump(states, file)


if __name__ == "__main__":
    main()
"""

JOB = {
    "bare": logging_config(),
    "no_handlers": logging_config(root={"level": "WARNING", "handlers": None}),
    "levels": logging_config(
        root={"level": "ERROR", "handlers": ["console"]},
        loggers={"a.b": {"level": "DEBUG", "handlers": ["console"], "propagate": False}, "__main__": {"level": "INFO"}},
    ),
    "alone": logging_config(disable_existing_loggers=True, loggers={"a": {"level": "INFO"}}),
    "filed": logging_config(
        handlers={
            "file": {
                "class": "logging.handlers.RotatingFileHandler",
                "formatter": "simple",
                "filename": "${hydra.runtime.output_dir}/${hydra.job.name}.txt",
            }
        },
        root={"handlers": ["console", "file"]},
    ),
}
SWEEP = {
    "loud": logging_config(
        root={"level": "DEBUG", "handlers": ["console"]}, loggers={"a": {"level": "ERROR", "handlers": ["console"]}}
    ),
    "filed": logging_config(
        handlers={
            "file": {"class": "logging.FileHandler", "formatter": "simple", "filename": "sweep.txt", "mode": "w"}
        },
        root={"level": "INFO", "handlers": ["console"]},
        loggers={"a": {"handlers": ["file"]}},
        disable_existing_loggers=True,
    ),
}


def write_configs(conf: Path, kind: str, configs: dict[str, Any]) -> None:
    """Write a group of logging configs."""
    folder = conf / "hydra" / kind
    folder.mkdir(parents=True)
    for name, config in configs.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("hydra/job_logging=disabled",),
        ("hydra/job_logging=stdout", "hydra/hydra_logging=disabled", "hydra.verbose=[a.b]"),
        ("hydra/job_logging=bare",),
        ("hydra/job_logging=alone", "hydra/hydra_logging=none", "hydra.verbose=true"),
        ("hydra/job_logging=no_handlers", "hydra.verbose=a"),
        ("hydra/job_logging=levels",),
        ("hydra/job_logging=filed", "hydra/hydra_logging=loud"),
        ("hydra/job_logging=bare", "hydra/hydra_logging=filed"),
        ("hydra/job_logging=none", "hydra/hydra_logging=filed"),
        ("hydra/job_logging=colorlog", "hydra/hydra_logging=colorlog"),
    ],
    ids=lambda options: " ".join(one.removeprefix("hydra").lstrip("/.") for one in options) or "default",
)
def test_loggers_are_those_of_the_basic_launcher(runner: Runner, options: tuple[str, ...]) -> None:
    """Level, handlers and the rest of every logger are the same in rank 0; rank 1 differs in the files alone."""
    if "colorlog" in str(options) and find_spec("hydra_plugins.hydra_colorlog") is None:
        pytest.skip("hydra_colorlog is not installed")
    app = runner.cwd / "app.py"
    app.write_text(STATE)
    write_configs(runner.cwd / "conf", "job_logging", JOB)
    write_configs(runner.cwd / "conf", "hydra_logging", SWEEP)
    (runner.cwd / "conf" / "config.yaml").write_text("x: 0\n")
    basic = runner.python(app, "-m", f"hydra.sweep.dir={runner.cwd / 'sweep'}", *options)
    assert basic.returncode == 0, basic.output
    shutil.rmtree(runner.cwd / "sweep")
    ours = runner.sweep(app, *options)
    assert ours.returncode == 0, ours.output
    states = {who: json.loads((runner.cwd / f"state_{who}.json").read_text()) for who in ("basic", "0", "1")}
    assert states["0"] == states["basic"]
    ddp = runner.cwd / "sweep" / "0" / ".ddp"
    for _, _, _, handlers in states["1"].values():
        for handler in handlers:
            if handler[3] is not None:
                path = Path(handler[3])
                assert path.parent == ddp
                assert path.name.startswith("rank_1.")
                handler[3] = None
    for _, _, _, handlers in states["0"].values():
        for handler in handlers:
            handler[3] = None
    assert states["1"] == states["0"]


# --- each rank > 0 has files of its own

HANDLERS = """
import logging
from pathlib import Path


def make(target, **options):
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    return logging.FileHandler(target, **options)


class Opens(logging.Handler):
    def __init__(self, where, by_path=False):
        super().__init__()
        self.file = Path(where).open("w") if by_path else open(where, "w")

    def emit(self, record):
        self.file.write(self.format(record) + "\\n")
        self.file.flush()


class Sub(logging.FileHandler):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.stream.write("from " + __import__("os").environ["RANK"] + "\\n")
"""
WRITES = """
import logging, os
import hydra


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    for _ in range(3):
        logging.getLogger().info("from %s", os.environ["RANK"])
    with open(f"own_{os.environ['RANK']}.txt", "w") as file:
        file.write("the program's\\n")


if __name__ == "__main__":
    main()
"""
DIR = "${hydra.runtime.output_dir}"
LONG = "é" * 118 + ".txt"
FILES: dict[str, dict[str, Any]] = {
    "plain": {"class": "logging.FileHandler", "filename": f"{DIR}/log.txt", "mode": "w"},
    "same_name": {"class": "logging.FileHandler", "filename": "logs/log.txt", "mode": "w"},
    "third_of_the_name": {"()": "own_handlers.make", "target": "more/logs/log.txt"},
    "like_the_output": {"class": "logging.FileHandler", "filename": f"{DIR}/log"},
    "joined": {"class": "logging.FileHandler", "filename": "logs.log.txt"},
    "rotating": {"class": "logging.handlers.RotatingFileHandler", "filename": "r.txt", "maxBytes": 8, "backupCount": 2},
    "timed": {"class": "logging.handlers.TimedRotatingFileHandler", "filename": "t.txt", "delay": True},
    "watched": {"class": "logging.handlers.WatchedFileHandler", "filename": "w.txt"},
    "long": {"class": "logging.FileHandler", "filename": f"{DIR}/{LONG}"},
    "long_too": {"class": "logging.FileHandler", "filename": f"logs/{LONG}"},
    "factory": {"()": "own_handlers.make", "target": f"{DIR}/made/f.txt", "mode": "w"},
    "opens": {"()": "own_handlers.Opens", "where": "o.txt"},
    "opens_by_path": {"()": "own_handlers.Opens", "where": f"{DIR}/p.txt", "by_path": True},
    "sub": {"class": "own_handlers.Sub", "filename": "s.txt"},
    "device": {"class": "logging.FileHandler", "filename": "/dev/null"},
}


@pytest.mark.parametrize("chdir", [False, True])
def test_each_rank_has_log_files_of_its_own(runner: Runner, chdir: bool) -> None:
    """Whatever the handler and the name of its file: rank 0's is the config's, and no rank writes another's."""
    app = runner.cwd / "app.py"
    app.write_text(WRITES)
    (runner.cwd / "own_handlers.py").write_text(HANDLERS)
    handlers = {name: {"formatter": "simple", **handler} for name, handler in FILES.items()}
    config = logging_config(
        formatters={"simple": {"format": "%(message)s"}},
        handlers=handlers,
        root={"level": "INFO", "handlers": ["console", *handlers]},
    )
    write_configs(runner.cwd / "conf", "job_logging", {"many": config})
    (runner.cwd / "conf" / "config.yaml").write_text("x: 0\n")
    run_dir = runner.cwd / "sweep" / "0"
    work_dir = run_dir if chdir else runner.cwd
    (work_dir / "logs").mkdir(parents=True)
    ran = runner.sweep(app, "hydra/job_logging=many", f"hydra.job.chdir={chdir}", nproc=3)
    assert ran.returncode == 0, ran.output
    ddp = run_dir / ".ddp"

    def lines(path: Path) -> list[str]:
        return path.read_text().splitlines()

    originals = ("log", "log.txt", "made/f.txt", "p.txt", LONG)
    relative = ("logs/log.txt", "more/logs/log.txt", "logs.log.txt", "t.txt", "w.txt", "o.txt", f"logs/{LONG}")
    for path in (*(run_dir / name for name in originals), *(work_dir / name for name in relative)):
        assert lines(path) == ["from 0"] * 3, path
    assert lines(work_dir / "s.txt") == ["from 0"] * 4
    assert [lines(work_dir / f"r.txt{end}") for end in ("", ".1", ".2")] == [["from 0"]] * 3
    for rank in (1, 2):
        own = {path.name: lines(path) for path in ddp.glob(f"rank_{rank}.*")}
        printed = own.pop(f"rank_{rank}.log")
        assert printed.count(f"from {rank}") == 3
        assert own.pop(f"rank_{rank}.s.txt") == [f"from {rank}"] * 4
        for end in ("", ".1", ".2"):
            assert own.pop(f"rank_{rank}.r.txt{end}") == [f"from {rank}"]
        assert len(own) == len(originals) + len(relative), own
        assert all(text == [f"from {rank}"] * 3 for text in own.values()), own
        assert {f"rank_{rank}.{name}" for name in ("log.txt", "t.txt", "w.txt", "o.txt", "p.txt", "f.txt")} <= set(own)
        # What the program itself opens is its own.
        assert (work_dir / f"own_{rank}.txt").exists()
    assert os.listdir(runner.cwd / "sweep" / "0" / ".hydra")


def test_a_queue_in_front_of_the_files(runner: Runner) -> None:
    """A listener that writes from a thread of its own writes each rank's file."""
    app = runner.cwd / "app.py"
    app.write_text(WRITES.replace("    with open(", "    logging.getLogger().handlers[0].stop()\n    with open("))
    (runner.cwd / "own_handlers.py").write_text(
        "import logging, logging.handlers, queue\n\n\n"
        "class Queued(logging.handlers.QueueHandler):\n"
        "    def __init__(self, path):\n"
        "        super().__init__(queue.Queue())\n"
        "        self.listener = logging.handlers.QueueListener(self.queue, logging.FileHandler(path, delay=True))\n"
        "        self.listener.start()\n\n"
        "    def stop(self):\n        self.listener.stop()\n"
    )
    handlers = {"queued": {"()": "own_handlers.Queued", "path": f"{DIR}/q.txt"}}
    config = logging_config(handlers=handlers, root={"level": "INFO", "handlers": ["queued"]})
    write_configs(runner.cwd / "conf", "job_logging", {"queued": config})
    (runner.cwd / "conf" / "config.yaml").write_text("x: 0\n")
    ran = runner.sweep(app, "hydra/job_logging=queued")
    assert ran.returncode == 0, ran.output
    run_dir = runner.cwd / "sweep" / "0"
    for rank, path in enumerate((run_dir / "q.txt", run_dir / ".ddp" / "rank_1.q.txt")):
        assert path.read_text().splitlines() == [f"from {rank}"] * 3
