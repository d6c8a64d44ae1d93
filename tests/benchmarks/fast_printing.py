"""What it costs the launching process to watch ranks that print as fast as they can: 8 jobs of 4 ranks at once.

    python tests/benchmarks/fast_printing.py

Prints the share of one core that the launching process uses while they do, on a terminal with a board and into a file,
with `tee_ranks` at its default and at `all`. The target is 25 %.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SECONDS = 12
APP = f"""
import time
import hydra
from hydra.core.config_store import ConfigStore

ConfigStore.instance().store(name="fast", node={{"x": 0}})


@hydra.main(version_base=None, config_path=None, config_name="fast")
def main(cfg):
    end, number = time.time() + {SECONDS}, 0
    while time.time() < end:
        print(f"step {{number}}: loss {{1 / (number + 1):.5f}} and some more words", flush=True)
        number += 1


if __name__ == "__main__":
    main()
"""


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_all(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        return


def measure(folder: Path, where: str, tee_ranks: str) -> tuple[float, int]:
    """Return the share of a core, and the bytes that all ranks printed."""
    sweep = folder / f"{where}-{len(tee_ranks)}"
    argv = [
        *(sys.executable, str(folder / "app.py"), "-m", "hydra/launcher=ddp_subprocess"),
        *("hydra.launcher.nproc_per_node=4", "hydra.launcher.max_parallel_jobs=8", "x=range(8)"),
        *(f"hydra.launcher.tee_ranks={tee_ranks}", f"hydra.sweep.dir={sweep}"),
    ]
    env = {**os.environ, "TERM": "xterm-256color"}
    if where == "terminal":
        ours, theirs = pty.openpty()
        process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        threading.Thread(target=read_all, args=(ours,), daemon=True).start()
    else:
        with (folder / "out.txt").open("w") as out:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
    logs = sweep / "7" / ".ddp" / "rank_3.log"
    while not (logs.exists() and logs.stat().st_size):
        time.sleep(0.1)
    before, began = processor_seconds(process.pid), time.monotonic()
    time.sleep(SECONDS / 2)
    share = (processor_seconds(process.pid) - before) / (time.monotonic() - began)
    process.wait()
    return share, sum(log.stat().st_size for log in sweep.glob("*/.ddp/rank_*.log"))


def main() -> None:
    print("share of one core of the launching process, with 8 jobs of 4 ranks that print as fast as they can")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "app.py").write_text(APP)
        for where in ("terminal", "file"):
            for tee_ranks in ("[0]", "all"):
                share, printed = measure(Path(folder), where, tee_ranks)
                print(f"{share:7.1%}  {where}, tee_ranks={tee_ranks}; the ranks printed {printed / 1e6:.0f} MB")
    print("target: under 25 %")


if __name__ == "__main__":
    main()
