"""A Hydra callback with a state of its own that notes each of its calls."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class RecordingCallback(Callback):
    """Append a line for every event; what `on_multirun_start` stores must be there in the later calls."""

    def __init__(self) -> None:
        self.stored = "nothing yet"

    def _record(self, event: str, **facts: object) -> None:
        line = {"event": event, "pid": os.getpid(), "rank": os.environ.get("RANK"), "stored": self.stored, **facts}
        with open(Path(os.environ["BEHAVE_DIR"]) / "callbacks.jsonl", "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._record("on_run_start")

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._record("on_run_end")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.stored = f"stored in process {os.getpid()}"
        self._record("on_multirun_start")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._record("on_multirun_end")

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._record("on_job_start", num=config.hydra.job.num, task_function="task_function" in kwargs)

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        self._record("on_job_end", num=config.hydra.job.num, status=job_return.status.name)
