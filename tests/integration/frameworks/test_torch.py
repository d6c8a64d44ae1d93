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


FORMS = """
import os
import hydra

def open_file(dist, rank, size, name):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{name}", rank=rank, world_size=size)
    # Else one could be gone before the other has connected.
    dist.barrier()

if os.environ.get("HOW") == "early":
    import torch.distributed
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    if cfg.how == "plain":
        return
    import torch.distributed as dist
    if cfg.how == "closed":
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
    if cfg.how == "file":
        open_file(dist, int(os.environ["RANK"]), 2, "meet")
        dist.destroy_process_group()
    if cfg.how == "alone":
        open_file(dist, 0, 1, f"meet_{os.environ['RANK']}")
    if cfg.how == "forked":
        pid = os.fork()
        if pid == 0:
            open_file(dist, int(os.environ["RANK"]), 2, "forked")
            os._exit(0)
        os.waitpid(pid, 0)

if __name__ == "__main__":
    main()
"""


def test_ranks_that_form_no_group(runner: Runner, tmp_path: Path) -> None:
    """Jobs whose ranks had torch.distributed and met nowhere carry a warning that says what to set; no other does."""
    app = tmp_path / "app.py"
    app.write_text(FORMS)
    forms = ["plain", "imported", "closed", "file", "alone", "forked", "early"]
    how = [
        "+how=" + ",".join(forms),
        "+hydra.job.env_set.HOW=${oc.select:how,none}",
        "hydra.launcher.max_parallel_jobs=2",
    ]
    ran = runner.sweep(app, *how)
    assert ran.returncode == 0, ran.output
    warned = [line for line in ran.output.splitlines() if "no process group" in line]
    assert all("'hydra.launcher.nproc_per_node=${trainer.devices}'" in line for line in warned)
    at_the_end = [line for line in warned if line.startswith("Warning: ")]
    assert [line.partition(": its ranks")[0] for line in at_the_end] == ["Warning: jobs 1, 4"]
    assert sorted(line.partition("#")[2][0] for line in warned if line not in at_the_end) == ["1", "4"]
    # A resumed sweep, in which they count as done, says so again.
    again = runner.sweep(app, *how, "hydra.launcher.resume=unfinished")
    assert again.returncode == 0 and "Warning: jobs 1, 4: its ranks" in again.stdout, again.output


OPENS_EARLY = """
import os
import sys
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    import torch.distributed as dist
    return float(dist.get_world_size())

if __name__ == "__main__":
    if "RANK" in os.environ:
        import torch.distributed as dist
        dist.init_process_group("gloo")
    elif "guarded" not in str(sys.argv):
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=0, world_size=1)
    main()
"""


def test_a_group_that_is_opened_before_main(runner: Runner, tmp_path: Path) -> None:
    """In ranks it is theirs; in the launching process it is refused before any job, with the line that opened it."""
    app = tmp_path / "app.py"
    app.write_text(OPENS_EARLY)
    ran = runner.sweep(app, "+x=guarded")
    assert ran.returncode == 0 and "no process group" not in ran.output, ran.output
    ran = runner.sweep(app, "+x=other", f"hydra.sweep.dir={tmp_path / 'refused'}")
    assert ran.returncode != 0
    assert f"is open in the launching process ({app}:14, 17)" in ran.output
    assert '"RANK" in os.environ' in ran.output
    assert not (tmp_path / "refused").exists()
