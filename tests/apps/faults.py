"""A Hydra program in which one process fails in one way at one moment of a job; see fault_steps.py."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import threading
from typing import Any

import fault_steps
import hydra
from fault_steps import JOB, NOTES, PLAN, RANK
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig


def fail_while_storing() -> None:
    """Have the fault happen between the writing of this rank's outcome and its taking its place."""
    replace = os.replace

    def replace_or_fail(source: str, target: str) -> None:
        if "outcome_" in str(target):
            fault_steps.at("store")
        replace(source, target)

    os.replace = replace_or_fail  # type: ignore[assignment]


def raise_in_launcher(number: int, _frame: object) -> None:
    raise RuntimeError("fault in the launching process")


@hydra.main(version_base=None, config_path=None, config_name="faults")
def main(cfg: DictConfig) -> Any:
    fail_while_storing()
    atexit.register(fault_steps.at, "after")
    if PLAN.get("when") == "thread":
        threading.Thread(target=fault_steps.at, args=("thread",)).start()
    fault_steps.note(f"ready_{JOB}_{RANK}")
    fault_steps.at("function")
    if PLAN.get("peers") == "hang" and PLAN["by"] != RANK:
        fault_steps.sleep_for_ever()
    if PLAN.get("witness"):
        fault_steps.wait_for(NOTES / "go.json")
    return cfg.x


ConfigStore.instance().store(name="faults", node={"x": 0})
# Signals that would leave core files behind are sent on purpose; all that is started from here inherits this.
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if RANK >= 0:
    fault_steps.at("import")

if __name__ == "__main__":
    if RANK < 0:
        signal.signal(signal.SIGALRM, raise_in_launcher)
        if "FAULT_BLOCK" in os.environ:
            fault_steps.block_signals()
    main()
