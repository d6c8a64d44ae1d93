"""What people use beside a launcher: coloured logs, Hydra's own callbacks, sweepers that go on from values."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING

import hydra.experimental.callbacks
import pytest

from support.notes import Notes, behave, write_talk

if TYPE_CHECKING:
    from support.runner import Runner

CALLBACKS = "hydra.experimental.callbacks"
COLOUR = re.compile(r"\x1b\[\d+(?:;\d+)*m")
CYAN_TIME = r"\[\x1b\[36m[\d, :-]+\x1b\[0m\]"


def processes(notes: Notes) -> tuple[int, int]:
    """Return how many processes were ranks, and how many were not."""
    ranks = len(notes.ranks())
    return ranks, len(notes.all("process")) - ranks


# --- coloured logs

# Each process that runs the program leaves a file.
NOTE = "import pathlib\npathlib.Path(f'process_{os.getpid()}').write_text(os.environ.get('RANK', 'none'))"


def noted(runner: Runner) -> list[str]:
    """Return the rank of each process that ran the program."""
    return sorted(file.read_text() for file in runner.cwd.glob("process_*"))


@pytest.mark.skipif(importlib.util.find_spec("colorlog") is None, reason="hydra-colorlog is not installed")
def test_colorlog(runner: Runner) -> None:
    """The launcher's lines and the ranks' are coloured; in the log files of Hydra there are no colours."""
    body = "import logging\nlogging.getLogger('mine').warning('rank %s', os.environ['RANK'])"
    app = write_talk(runner, before=NOTE, body=body)
    # Its log file is in the working directory, and not in the run directory.
    options = ("hydra/hydra_logging=colorlog", "hydra/job_logging=colorlog", "hydra.job.chdir=true")
    ran = runner.sweep(app, *options, "x=0,1")
    assert ran.returncode == 0, ran.output
    assert len(re.findall(rf"^{CYAN_TIME}\[\x1b\[35mHYDRA\x1b\[0m\] \t#1 : x=1 : completed", ran.stdout, re.M)) == 1
    for job in (0, 1):
        folder = runner.cwd / "sweep" / str(job)
        for rank, file in ((0, folder / "app.log"), (1, folder / ".ddp/rank_1.app.log")):
            line = rf"{CYAN_TIME}\[\x1b\[34mmine\x1b\[0m\]\[\x1b\[33mWARNING\x1b\[0m\] - rank {rank}\x1b\[0m\n"
            assert re.fullmatch(line, (folder / f".ddp/rank_{rank}.log").read_text())
            assert re.fullmatch(rf"\[[\d, :-]+\]\[mine\]\[WARNING\] - rank {rank}\n", file.read_text())
        assert sorted(path.name for path in folder.iterdir()) == [".ddp", ".hydra", "app.log"]
    assert noted(runner) == ["0", "0", "1", "1", "none"]


@pytest.mark.skipif(importlib.util.find_spec("colorlog") is None, reason="hydra-colorlog is not installed")
def test_colorlog_without_colours(runner: Runner) -> None:
    """`NO_COLOR` reaches the ranks, too."""
    app = write_talk(runner, before=NOTE, body="import logging\nlogging.getLogger('mine').warning('said')")
    colours = ("hydra/hydra_logging=colorlog", "hydra/job_logging=colorlog")
    ran = runner.sweep(app, *colours, nproc=1, env={"NO_COLOR": "1"})
    assert ran.returncode == 0, ran.output
    assert COLOUR.search(ran.output) is None
    assert "[mine][WARNING] - said" in (runner.cwd / "sweep/0/.ddp/rank_0.log").read_text()
    assert noted(runner) == ["0", "none"]


# --- Hydra's own callbacks


@pytest.mark.sample
@pytest.mark.skipif(
    not hasattr(hydra.experimental.callbacks, "PickleJobInfoCallback"), reason="Hydra 1.4 has these no more"
)
def test_the_callbacks_that_hydra_has(runner: Runner) -> None:
    """Both run once a job, in rank 0: value or error in its log, config and JobReturn in its files."""
    ran, notes = behave(
        runner,
        "x=0,1",
        "+j0.r0=return:5",
        "+j0.r1=return:7",
        "+j1.r0=raise",
        f"+hydra.callbacks.log._target_={CALLBACKS}.LogJobReturnCallback",
        f"+hydra.callbacks.info._target_={CALLBACKS}.PickleJobInfoCallback",
    )
    assert ran.returncode == 1
    folders = [runner.cwd / "sweep" / job for job in "01"]
    said = [(folder / "behave.log").read_text() for folder in folders]
    assert said[0].count("Succeeded with return value: 5") == 1
    assert said[1].count("ValueError: broken: plain") == 1
    for text, folder in zip(said, folders, strict=True):
        assert text.count("Saving job configs in") == text.count("Saving job_return in") == 1
        assert "JobReturnCallback" not in (folder / ".ddp/rank_1.log").read_text()
        assert "Saving" not in (folder / ".ddp/rank_1.log").read_text()
        assert pickle.loads((folder / ".hydra/config.pickle").read_bytes()).x == int(folder.name)
    stored = pickle.loads((folders[0] / ".hydra/job_return.pickle").read_bytes())
    assert (stored.return_value, stored.status.name) == (5, "COMPLETED")
    assert processes(notes) == (4, 1)


# --- sweepers that go on from values


def test_a_sweeper_that_samples_batch_by_batch(runner: Runner) -> None:
    """Each batch follows from rank 0's values of those before; both ranks of a job have one x, and jobs count on."""
    ran, notes = behave(
        runner, "hydra/sweeper=climbing", "hydra.sweeper.n_trials=5", "hydra.sweeper.batch_size=2", "+r0=square"
    )
    assert ran.returncode == 0, ran.output
    assert notes.places() == [(job, rank) for job in range(5) for rank in (0, 1)]
    climbed = json.loads(Path(runner.cwd, "sweep/climbed.json").read_text())
    assert [trial["first"] for trial in climbed["trials"]] == [0, 2, 4]
    xs = [x for trial in climbed["trials"] for x in trial["x"]]
    assert [{notes.read(f"body_{job}_{rank}")["x"] for rank in (0, 1)} for job in range(5)] == [{x} for x in xs]
    values = [value for trial in climbed["trials"] for value in trial["values"]]
    assert values == [(x - 2) ** 2 for x in xs]
    assert climbed["best_value"] == min(values) < values[0]
    assert processes(notes) == (10, 1)
