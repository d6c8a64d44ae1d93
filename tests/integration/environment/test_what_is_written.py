"""What the launcher writes: below `.ddp` only, with the modes that the umask gives, and short if a message is long."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from support.runner import Runner

APP = """
import hydra
from pathlib import Path
from hydra.core.hydra_config import HydraConfig

class Odd(Exception):
    def __str__(self):
        return "x" * 3_000_000

class Worse(Exception):
    def __str__(self):
        raise RuntimeError("no words")

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    with open(Path(HydraConfig.get().sweep.dir) / "results.csv", "a") as file:
        file.write(f"{cfg.x}\\n")
    if cfg.x == "line":
        raise ValueError("x" * 3_000_000)
    if cfg.x == "lines":
        raise ValueError("x\\n" * 500_000)
    if cfg.x == "chain":
        try:
            raise KeyError("x" * 3_000_000)
        except KeyError as error:
            raise ValueError("short") from error
    if cfg.x == "note":
        error = ValueError("short")
        error.__notes__ = ["x" * 3_000_000]
        raise error
    if cfg.x == "odd":
        raise Odd()
    if cfg.x == "worse":
        raise Worse()
    if cfg.x == "exit":
        raise SystemExit("x" * 3_000_000)

main()
"""


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o027, 0o077], ids=oct)
def test_the_umask_holds(runner: Runner, umask: int) -> None:
    """Every file and folder has the mode that it leaves, pickles are private, and all of it is below `.ddp`."""
    (runner.cwd / "app.py").write_text(APP)
    before = os.umask(umask)
    try:
        # Run directory and sweep directory are the same one.
        ran = runner.sweep(runner.cwd / "app.py", "+x=worse,fine", "hydra.sweep.subdir=.", nproc=1)
    finally:
        os.umask(before)
    assert ran.returncode == 1
    sweep = runner.cwd / "sweep"
    for path in [sweep, *sweep.rglob("*")]:
        whole = 0o777 if path.is_dir() else 0o600 if path.suffix == ".pkl" or path.name == "config.yaml" else 0o666
        if ".hydra" in path.parts:
            whole = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == whole & ~umask, path
    own = {path.name for path in sweep.iterdir()} - {".ddp", ".hydra", "multirun.yaml", "app.log"}
    assert own == {"results.csv"}
    assert (sweep / "results.csv").read_text().split() == ["worse", "fine"]
    assert (sweep / ".ddp" / "results.csv").read_text().count("\n") == 3
    assert ran.output.rstrip().find(str(sweep / ".ddp" / "results.csv")) > 0


def test_long_messages(runner: Runner) -> None:
    """Wherever a message has megabytes, only the rank's log has them all; the type of the error is still told."""
    (runner.cwd / "app.py").write_text(APP)
    kinds = ["line", "lines", "chain", "note", "odd", "exit"]
    ran = runner.sweep(runner.cwd / "app.py", f"+x={','.join(kinds)}", "hydra.launcher.tee_ranks=all", nproc=1)
    assert ran.returncode == 1
    sweep: Path = runner.cwd / "sweep"
    sizes = {path: path.stat().st_size for path in sweep.rglob("*") if path.is_file() and path.suffix != ".log"}
    assert max(sizes.values()) < 100_000, sizes
    for number in range(len(kinds)):
        assert (sweep / str(number) / ".ddp" / "rank_0.log").stat().st_size >= 1_000_000
    events = [json.loads(line) for line in (sweep / ".ddp" / "journal.jsonl").read_text().splitlines()]
    causes = [event["cause"] for event in events if event["event"] == "JobEnded"]
    assert [cause.split(":")[1].strip() for cause in causes] == [
        "ValueError",
        "ValueError",
        "ValueError",
        "ValueError",
        "Odd",
        "SystemExit",
    ]
