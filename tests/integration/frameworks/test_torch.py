"""With torch itself: a world of gloo ranks, and values that are tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.runner import Runner

pytestmark = pytest.mark.torch

WORLD = """
import sys
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    # Not in a `finally`: rank 0 would hear of the end of the group before rank 1 has told its error.
    value = work(cfg, torch, dist)
    dist.destroy_process_group()
    return value

def work(cfg, torch, dist):
    total = torch.tensor(float(cfg.x * (dist.get_rank() + 1)))
    dist.all_reduce(total)
    if cfg.get("fail") and dist.get_rank() == 1:
        raise RuntimeError("rank 1 gave up")
    if cfg.get("fail"):
        dist.barrier()
    return {"sum": total, "all": [torch.arange(3), dist.get_world_size()]} if cfg.get("nested") else total

if __name__ == "__main__":
    main()
    print("torch in the launching process:", "torch" in sys.modules)
"""


@pytest.mark.sample
def test_ranks_meet_and_a_scalar_tensor_comes_back_as_a_number(runner: Runner, tmp_path: Path) -> None:
    """Two jobs of three ranks add up over gloo; the launching process never needs torch."""
    app = tmp_path / "app.py"
    app.write_text(WORLD)
    ran = runner.sweep(app, "+x=1,10", nproc=3)
    assert ran.returncode == 0, ran.output
    assert [line.split()[3] for line in ran.stdout.splitlines() if line.startswith("  ") and " completed " in line] == [
        "6",
        "60",
    ]
    assert "torch in the launching process: False" in ran.stdout


def test_tensors_within_a_value_come_back(runner: Runner, tmp_path: Path) -> None:
    """A dict with tensors keeps its shape; scalars in it become numbers."""
    app = tmp_path / "app.py"
    app.write_text(WORLD)
    ran = runner.sweep(app, "+x=1", "+nested=true")
    assert ran.returncode == 0, ran.output
    assert "{'sum': 3.0, 'all': [tensor([0, 1, 2]), 2]}" in " ".join(ran.stdout.split())


def test_a_rank_that_raises_frees_the_one_that_waits_for_it(runner: Runner, tmp_path: Path) -> None:
    """Rank 0 waits in a collective; the cause that is told is rank 1's, and the next job runs."""
    app = tmp_path / "app.py"
    app.write_text(WORLD)
    ran = runner.sweep(app, "+x=1", "+fail=true,false")
    assert ran.returncode == 1
    assert "RuntimeError: rank 1 gave up" in ran.stdout
    assert "2 jobs: 1 completed, 1 failed" in ran.stdout
    runner.assert_nothing_left()
