"""The example application: a real DDP training, alone, under torchrun and as a sweep of the launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.documented import ROOT, quick_start

if TYPE_CHECKING:
    from support.runner import Runner

pytestmark = pytest.mark.torch

TRAIN = ROOT / "example_app" / "train.py"
VALIDATION_SAMPLES = 359
# Sums depend on how many threads share them, and on a busy machine threads cost much time waiting for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def messages(run_dir: Path) -> list[str]:
    """What the app logged in a run directory, without the prefix that has the time."""
    return [line.split(" - ", 1)[1] for line in (run_dir / "train.log").read_text().splitlines()]


def final_accuracy(run_dir: Path) -> float:
    """The one final accuracy in a run's log; it must be the share of all validation samples, each counted once."""
    *_, last_epoch, final = messages(run_dir)
    counts = re.fullmatch(r"epoch (\d+)/\1: loss [\d.]+, (\d+) of (\d+) right", last_epoch)
    accuracy = re.fullmatch(r"final accuracy ([\d.]+)", final)
    assert counts is not None, last_epoch
    assert accuracy is not None, final
    assert int(counts[3]) == VALIDATION_SAMPLES
    assert float(accuracy[1]) == pytest.approx(int(counts[2]) / VALIDATION_SAMPLES, abs=1e-4)
    return float(accuracy[1])


def test_a_sweep_of_two_ranks_each_finds_an_accurate_model(runner: Runner) -> None:
    """The four jobs that README starts leave a run directory with a checkpoint each; the best accuracy is over 0.95."""
    import torch

    program, *options = quick_start()
    assert ROOT / program == TRAIN
    ran = runner.python(TRAIN, *options, f"hydra.sweep.dir={runner.cwd / 'sweep'}")

    assert ran.returncode == 0, ran.output
    run_dirs = sorted(path.parent for path in runner.cwd.glob("sweep/*/train.log"))
    assert [path.name for path in run_dirs] == ["0", "1", "2", "3"]
    for run_dir in run_dirs:
        assert messages(run_dir)[0].endswith("2 rank(s) on " + ("cuda" if torch.cuda.device_count() >= 2 else "cpu"))
    checkpoints = [torch.load(path / "checkpoint.pt", map_location="cpu") for path in run_dirs]
    assert [(saved["config"]["lr"], saved["config"]["model"]["name"]) for saved in checkpoints] == [
        (0.1, "mlp"),
        (0.1, "cnn"),
        (0.01, "mlp"),
        (0.01, "cnn"),
    ]
    assert all(tensor.isfinite().all() for saved in checkpoints for tensor in saved["model"].values())
    assert max(map(final_accuracy, run_dirs)) > 0.95


def test_a_job_of_the_launcher_trains_as_under_torchrun(runner: Runner) -> None:
    """A job of the launcher and the same command under torchrun log the same losses and accuracies."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    under_torchrun = runner.cwd / "torchrun"
    overrides = ("optimizer=adam", "lr=0.01")
    reference = runner.run(*torchrun, TRAIN, f"hydra.run.dir={under_torchrun}", *overrides, env=ONE_THREAD)
    assert reference.returncode == 0, reference.output

    ran = runner.sweep(TRAIN, *overrides, env=ONE_THREAD)

    assert ran.returncode == 0, ran.output
    assert messages(runner.cwd / "sweep" / "0") == messages(under_torchrun)
    assert final_accuracy(under_torchrun) > 0.95


def test_one_process_trains_without_the_launcher(runner: Runner) -> None:
    """Plain `python train.py` trains with one rank to an accuracy over 0.95 and leaves a checkpoint."""
    run_dir = runner.cwd / "alone"

    ran = runner.python(TRAIN, f"hydra.run.dir={run_dir}", env=ONE_THREAD)

    assert ran.returncode == 0, ran.output
    assert "1 rank(s)" in messages(run_dir)[0]
    assert (run_dir / "checkpoint.pt").stat().st_size > 0
    assert final_accuracy(run_dir) > 0.95


def test_the_same_seed_gives_the_same_training(runner: Runner) -> None:
    """Two jobs with the same seed log the same losses; another seed logs others."""
    ran = runner.python(TRAIN, "-m", f"hydra.sweep.dir={runner.cwd}", "epochs=2", "seed=1,1,2", env=ONE_THREAD)

    assert ran.returncode == 0, ran.output
    first, second, other = (messages(runner.cwd / name) for name in "012")
    assert first == second != other
