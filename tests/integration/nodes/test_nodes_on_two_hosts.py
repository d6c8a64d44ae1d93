"""A sweep on two nodes that was started by hand on two hosts, each with its own name, loopback and network."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.notes import BEHAVE, HASTY, behave_environment, finish, notes_of, write_app

if TYPE_CHECKING:
    from support.runner import Runner
    from support.two_hosts import TwoHosts

WORLD = """
import os
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(float(cfg.x * (dist.get_rank() + 1)))
    dist.all_reduce(total)
    if cfg.get("fail") and dist.get_rank() == 3:
        raise RuntimeError("rank 3 gave up")
    if cfg.get("fail"):
        dist.barrier()
    dist.destroy_process_group()
    return total

if __name__ == "__main__":
    main()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(runner: Runner, two_hosts: TwoHosts) -> Iterator[Start]:
    """Start a node on its own host."""
    with ExitStack() as stack:

        def start_it(node: int, app: Path, *overrides: str) -> subprocess.Popen[str]:
            host = (two_hosts.a, two_hosts.b)[node]
            process = runner.start(
                *host.command(
                    sys.executable,
                    app,
                    "-m",
                    "hydra/launcher=ddp_subprocess",
                    "hydra.launcher.nnodes=2",
                    f"hydra.launcher.node_rank={node}",
                    "hydra.launcher.nproc_per_node=2",
                    "hydra.launcher.grace_period_s=5",
                    f"hydra.sweep.dir={runner.cwd / 'sweep'}",
                    *overrides,
                ),
                env=behave_environment(runner, GLOO_SOCKET_IFNAME=host.interface),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start_it


@pytest.mark.sample("name")
@pytest.mark.torch
@pytest.mark.parametrize("by", ["name", "address"])
def test_two_ranks_on_each_of_two_hosts(
    runner: Runner, two_hosts: TwoHosts, start: Start, tmp_path: Path, by: str
) -> None:
    """They add up over gloo, across the network."""
    (app := tmp_path / "app.py").write_text(WORLD)
    head = getattr(two_hosts.a, by)
    nodes = [start(node, app, "+x=1,10", f"hydra.launcher.master_addr={head}") for node in (0, 1)]
    (code, output), (other_code, other) = map(finish, nodes)
    assert (code, other_code) == (0, 0), output + other
    with (runner.cwd / "sweep" / ".ddp" / "results.csv").open() as file:
        assert [float(row["value"]) for row in csv.DictReader(file)] == [10, 100]
    runner.assert_nothing_left()


@pytest.mark.torch
def test_a_failure_on_one_host_ends_the_ranks_on_both(
    runner: Runner, two_hosts: TwoHosts, start: Start, tmp_path: Path
) -> None:
    """Rank and host are named although the others lost their peer, and the next job runs."""
    (app := tmp_path / "app.py").write_text(WORLD)
    overrides = ("+x=1", "+fail=true,false", "hydra.launcher.master_addr=host-a")
    (code, output), (other_code, other) = map(finish, [start(node, app, *overrides) for node in (0, 1)])
    assert (code, other_code) == (1, 1), output + other
    assert "rank 3 (node 1, host-b): RuntimeError: rank 3 gave up" in other
    # On a busy machine it may not have ended by itself when its peers fail, or within a second.
    assert "rank 3 (node 1, host-b) failed" in output
    assert "2 jobs: 1 completed, 1 failed" in output
    runner.assert_nothing_left()


def test_an_address_that_means_each_host_itself(runner: Runner, start: Start) -> None:
    """Ranks of the second host would look for rank 0 on their own: both nodes are told before any rank starts."""
    nodes = [start(node, BEHAVE, "hydra.launcher.master_addr=127.0.0.1") for node in (0, 1)]
    (code, output), (other_code, other) = map(finish, nodes)
    assert (code, other_code) == (1, 1), output + other
    for text in (output, other):
        words = " ".join(text.split())
        assert "Rank 0 is on host-a, but its address 127.0.0.1 means this machine here (127.0.0.1)." in words
        assert "hydra.launcher.master_addr" in words
    assert "node 1 (host-b) has left the sweep" in " ".join(output.split())
    assert notes_of(runner).places() == []


def test_a_name_that_the_other_host_does_not_know(runner: Runner, start: Start) -> None:
    nodes = [start(node, BEHAVE, "hydra.launcher.master_addr=head.invalid") for node in (0, 1)]
    (code, output), (other_code, other) = map(finish, nodes)
    assert (code, other_code) == (1, 1), output + other
    assert "its address head.invalid is not known here" in other
    assert notes_of(runner).places() == []


def test_a_cable_is_pulled(runner: Runner, two_hosts: TwoHosts, start: Start) -> None:
    """Keepers and launching processes talk through files: ranks alone notice, if they need the network."""
    steps = ["+all=sleep:3", "hydra.launcher.master_addr=host-a"]
    nodes = [start(node, BEHAVE, *steps) for node in (0, 1)]
    runner.wait_until(lambda: len(notes_of(runner).places()) == 4)
    two_hosts.unplug(two_hosts.b)
    results = list(map(finish, nodes))
    assert [code for code, _ in results] == [0, 0], results


def test_a_host_loses_its_power(runner: Runner, two_hosts: TwoHosts, start: Start) -> None:
    """Nothing tells of it but its silence: the other host ends its ranks, and leaves."""
    app = write_app(runner, HASTY)
    nodes = [start(node, app, "x=1,2", "+all=hang", "hydra.launcher.master_addr=host-a") for node in (0, 1)]
    runner.wait_until(lambda: len(notes_of(runner).places()) == 4)
    two_hosts.power_off(two_hosts.b)
    code, output = finish(nodes[0])
    assert code == 1, output
    assert "node 1 (host-b)" in output and ("nothing has been heard of" in output or "is silent" in output)
    finish(nodes[1])
    runner.assert_nothing_left()
