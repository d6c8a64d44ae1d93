"""A sweep on two nodes that was started by hand: two launching processes, here on one machine, act as one."""

from __future__ import annotations

import csv
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.notes import (
    BEHAVE,
    HASTY,
    Notes,
    alive,
    assert_nothing_left,
    behave_environment,
    descendants,
    finish,
    notes_of,
    write_app,
)

if TYPE_CHECKING:
    import subprocess

    from support.runner import Runner

HOST = socket.gethostname()


class Nodes:
    """The launching processes of two nodes, with notes of what their ranks did."""

    def __init__(self, runner: Runner, stack: ExitStack) -> None:
        self.runner = runner
        self.notes: Notes = notes_of(runner)
        self.app: Path = BEHAVE
        self.sweep_dir = runner.cwd / "sweep"
        self._stack = stack

    def start(self, node: int, *overrides: str, nproc: int | str = 2, **env: str) -> subprocess.Popen[str]:
        """Start one node, in a session of its own, as a terminal would."""
        process = self.runner.start(
            sys.executable,
            self.app,
            "-m",
            "hydra/launcher=ddp_subprocess",
            "hydra.launcher.nnodes=2",
            f"hydra.launcher.node_rank={node}",
            f"hydra.launcher.nproc_per_node={nproc}",
            "hydra.launcher.master_addr=127.0.0.1",
            "hydra.launcher.grace_period_s=5",
            f"hydra.sweep.dir={self.sweep_dir}",
            *overrides,
            env=behave_environment(self.runner, **env),
            start_new_session=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def run(self, *overrides: str, nproc: int | str = 2, **env: str) -> tuple[tuple[int, str], tuple[int, str]]:
        """Run both nodes to their ends, and return the exit code and the output of each."""
        first, second = (self.start(node, *overrides, nproc=nproc, **env) for node in (0, 1))
        return finish(first), finish(second)

    def wait_for(self, *names: str) -> None:
        self.runner.wait_until(lambda: all(map(self.notes.has, names)), what=f"{names}")

    def table(self) -> list[dict[str, str]]:
        with (self.sweep_dir / ".ddp" / "results.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture
def nodes(runner: Runner) -> Iterator[Nodes]:
    """Two nodes; what is left of them is killed."""
    with ExitStack() as stack:
        yield Nodes(runner, stack)


def bodies(*ranks: int, job: int = 0) -> list[str]:
    return [f"body_{job}_{rank}" for rank in ranks]


def keeper_of(launching: subprocess.Popen[str]) -> int:
    """Return the keeper of the one job below a launching process."""
    found = [pid for pid in descendants(launching.pid) if name_of(pid) == "ddp-keeper"]
    assert len(found) == 1, found
    return found[0]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# --- what goes well


@pytest.mark.sample
def test_values_and_places(nodes: Nodes) -> None:
    """Jobs run one after the other on all ranks of both nodes; values are in order, and rank 0's."""
    (code, output), (other_code, other) = nodes.run("+all=[meet,square]", "x=5,1,4", "hydra.launcher.tee_ranks=[]")
    assert (code, other_code) == (0, 0), output + other
    assert [row["value"] for row in nodes.table()] == ["9", "1", "4"]
    assert "3 jobs, 1 at a time, 2 ranks each on each of 2 nodes" in output
    assert "3 jobs: 3 completed, 0 failed" in output
    assert "Node 1 of 2: following node 0" in other
    assert re.findall(r"#(\d) : completed", other) == ["0", "1", "2"]
    assert nodes.notes.places() == [(job, rank) for job in range(3) for rank in range(4)]
    names = ("LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK")
    for job in range(3):
        found = [nodes.notes.environment(job, rank) for rank in range(4)]
        assert [tuple(one[name] for name in names) for one in found] == [
            ("0", "0", "0", "0"),
            ("1", "0", "0", "1"),
            ("0", "1", "1", "2"),
            ("1", "1", "1", "3"),
        ]
        for one in found:
            sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
            assert [one[name] for name in sizes] == ["4", "2", "2", "4"]
        together = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "HYDRA_DDP_PAYLOAD_SHA256")
        assert len({tuple(one[name] for name in together) for one in found}) == 1
    assert_nothing_left(nodes.runner)


@pytest.mark.parametrize("first", [0, 1])
def test_either_may_come_first(nodes: Nodes, first: int) -> None:
    """Who comes first waits, and says so; what an earlier run in the directory left does not mislead it."""
    assert [code for code, _ in nodes.run("x=1")] == [0, 0]
    early = nodes.start(first, "x=1", BEHAVE_AGAIN="1")
    time.sleep(6)
    late = nodes.start(1 - first, "x=1", BEHAVE_AGAIN="1")
    code, output = finish(early)
    assert (code, finish(late)[0]) == (0, 0), output
    assert ("Waiting for node 1 (hydra.launcher.nnodes=2)" if first == 0 else "Waiting for node 0 in") in output


def test_ranks_by_each_jobs_own_config(nodes: Nodes) -> None:
    """The world differs between jobs, alike on both nodes."""
    nodes.app = write_app(nodes.runner, config="config_path='.', config_name='main'")
    (nodes.runner.cwd / "main.yaml").write_text("x: 0\nn: 1\n")
    (code, output), (other_code, other) = nodes.run("n=1,2", "+all=meet", nproc="${n}")
    assert (code, other_code) == (0, 0), output + other
    assert nodes.notes.places() == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert nodes.notes.environment(0, 1)["LOCAL_RANK"] == "0"


def test_batches(nodes: Nodes) -> None:
    """A sweeper that hands over one batch after the other does so on both nodes."""
    (code, output), (other_code, other) = nodes.run("x=1,2,3", "+all=square", "hydra.sweeper.max_batch_size=2")
    assert (code, other_code) == (0, 0), output + other
    assert [row["value"] for row in nodes.table()] == ["1", "0", "1"]


def test_jobs_in_the_sweep_directory_itself(nodes: Nodes) -> None:
    """What an earlier job left there moves aside; where the nodes meet stays."""
    (code, output), (other_code, other) = nodes.run("x=1,2", "hydra.sweep.subdir=.")
    assert (code, other_code) == (0, 0), output + other


def test_devices_of_each_node(nodes: Nodes) -> None:
    """Each node gives out its own."""
    first = nodes.start(0, "hydra.launcher.devices=[0,1]", nproc="auto")
    second = nodes.start(1, "hydra.launcher.devices=[4,5]", nproc="auto")
    codes = [finish(first), finish(second)]
    assert [code for code, _ in codes] == [0, 0], codes
    found = [nodes.notes.environment(0, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(4)]
    assert found == ["0,1", "0,1", "4,5", "4,5"]


def test_several_devices_for_a_rank(nodes: Nodes) -> None:
    """Each node gives its rank as many as the job's own config asks for."""
    per_rank = "hydra.launcher.devices_per_rank=${oc.select:wide,1}"
    first = nodes.start(0, "hydra.launcher.devices=[0,1,2]", per_rank, "+wide=2", nproc="auto")
    second = nodes.start(1, "hydra.launcher.devices=[4,5]", per_rank, "+wide=2", nproc="auto")
    codes = [finish(first), finish(second)]
    assert [code for code, _ in codes] == [0, 0], codes
    assert nodes.notes.places() == [(0, 0), (0, 1)]
    assert [nodes.notes.environment(0, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["0,1", "4,5"]


def test_a_dry_run_shows_the_ranks_of_all_nodes(nodes: Nodes) -> None:
    """It needs no other node, starts nothing, and does not ask for the address of another machine."""
    process = nodes.start(0, "x=1,2", "hydra.launcher.dry_run=true", "hydra.launcher.master_addr=head.invalid")
    code, output = finish(process)
    assert code == 0, output
    lines = [line for line in output.splitlines() if line.startswith("cd ")]
    assert [re.search(r" RANK=(\d)", line)[1] for line in lines] == list("01230123")  # type: ignore[index]
    assert all("MASTER_ADDR=head.invalid" in line and "WORLD_SIZE=4" in line for line in lines)
    assert not nodes.sweep_dir.exists()


def test_resumed(nodes: Nodes) -> None:
    """What has completed is not run again on any node."""
    codes = nodes.run("x=1,2", "+j1.r3=raise", "+all=square")
    assert [code for code, _ in codes] == [1, 1], codes
    (code, output), (other_code, other) = nodes.run(
        "x=1,2", "+j1.r3=ok", "+all=square", "hydra.launcher.resume=unfinished", BEHAVE_AGAIN="1"
    )
    # The config of both has changed by the fixed step.
    assert (code, other_code) == (0, 0), output + other
    (code, output), (other_code, other) = nodes.run(
        "x=1,2", "+j1.r3=ok", "+all=square", "hydra.launcher.resume=unfinished"
    )
    assert (code, other_code) == (0, 0), output + other
    assert re.findall(r"#(\d) : completed", other) == ["0", "1"]


# --- failures


@pytest.mark.sample
def test_a_failure_on_the_second_node(nodes: Nodes) -> None:
    """It ends the ranks of the first one, is named with its node, and the next job runs."""
    steps = ["+j0.r3=[wait:body_0_0,raise]", "+j0.all=hang", "+all=square"]
    (code, output), (other_code, other) = nodes.run("x=1,5", *steps)
    assert (code, other_code) == (1, 1)
    cause = f"rank 3 (node 1, {HOST}): ValueError: broken: plain"
    assert f"rank 3 (node 1, {HOST}) failed with exit code 1; ranks 0, 1, 2 were then ended by the launcher." in output
    assert cause in other
    assert nodes.table()[0]["cause"] == cause
    assert "Run again only what failed, on each node with its own node_rank:" in output
    assert [(row["status"], row["value"]) for row in nodes.table()] == [("FAILED", ""), ("COMPLETED", "9")]
    assert_nothing_left(nodes.runner)


def test_a_job_that_does_not_compose(nodes: Nodes) -> None:
    """It fails on both nodes, and the others run."""
    app = write_app(nodes.runner, config="config_path='conf', config_name='main'")
    conf = nodes.runner.cwd / "conf"
    (conf / "part").mkdir(parents=True)
    (conf / "main.yaml").write_text("defaults: [{part: good}, _self_]\nx: 0\nnproc: ${part.n}\n")
    (conf / "part" / "good.yaml").write_text("n: 2\n")
    (conf / "part" / "bad.yaml").write_text("n: none\n")
    nodes.app = app
    codes = nodes.run("part=bad,good", nproc="${nproc}")
    assert [code for code, _ in codes] == [1, 1], codes
    for _, output in codes:
        assert "nproc_per_node='none' cannot be used" in output
    assert nodes.notes.places() == [(1, rank) for rank in range(4)]


def test_restarts(nodes: Nodes) -> None:
    """The groups of all nodes start again, together."""
    before = "import os\nif 'RANK' in os.environ and os.environ['HYDRA_DDP_ATTEMPT'] != '0': os.environ['FIXED'] = '1'"
    nodes.app = write_app(nodes.runner, before)
    text = nodes.app.read_text().replace(
        "return behave.act(cfg)",
        "value = behave.act(cfg)\n"
        "    if os.environ['RANK'] == '2' and 'FIXED' not in os.environ: raise ValueError('once')\n"
        "    behave.run_step('meet', cfg)\n    return value",
    )
    nodes.app.write_text(text)
    (code, output), (other_code, other) = nodes.run(
        "x=3", "+all=square", "hydra.launcher.max_restarts=1", BEHAVE_AGAIN="1"
    )
    assert (code, other_code) == (0, 0), output + other
    assert "restart 1 of 1" in output
    for rank in range(4):
        found = nodes.notes.environment(0, rank)
        assert (found["HYDRA_DDP_ATTEMPT"], found["TORCHELASTIC_RESTART_COUNT"]) == ("1", "1")
    assert (nodes.sweep_dir / "0" / ".ddp" / "earlier_0" / "rank_3.log").exists()


def test_a_port_that_was_taken(nodes: Nodes) -> None:
    """The groups of both nodes start once more on another port."""
    nodes.app = write_app(nodes.runner, "import os")
    text = nodes.app.read_text().replace(
        "return behave.act(cfg)",
        "port = os.environ['MASTER_PORT']\n"
        "    if os.environ['HYDRA_DDP_ATTEMPT'] == '0':\n"
        "        if os.environ['RANK'] != '0': behave.run_step('hang', cfg)\n"
        "        raise RuntimeError(f'bind failed. port: {port}, name: EADDRINUSE')\n"
        "    return behave.act(cfg)",
    )
    nodes.app.write_text(text)
    (code, output), (other_code, other) = nodes.run("+all=[meet,return:1]")
    assert (code, other_code) == (0, 0), output + other
    assert "was taken, starting again on another" in output


def test_too_many_failures(nodes: Nodes) -> None:
    """Jobs that the first node does not run, the second one does not wait for."""
    codes = nodes.run("x=1,2,3", "+r2=raise", "hydra.launcher.max_failures=1")
    assert [code for code, _ in codes] == [1, 1], codes
    # Of its ranks some may be stopped before they get to their body.
    assert {job for job, _ in nodes.notes.places()} == {0}
    assert re.findall(r"#(\d) : FAILED", codes[1][1]) == ["0", "1", "2"]


# --- who is stopped


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_on_one_node(nodes: Nodes, node: int, number: signal.Signals) -> None:
    """All ranks on both end; the other node says what came to pass, and leaves, too."""
    both = [nodes.start(each, "x=1,2", "+all=hang") for each in (0, 1)]
    nodes.wait_for(*bodies(0, 1, 2, 3))
    both[node].send_signal(number)
    code, output = finish(both[node])
    assert code == 128 + number, output
    other_code, other = finish(both[1 - node])
    assert other_code == 1, other
    assert f"on node {node} ({HOST}): {number.name}" in (other if node == 1 else output), other + output
    if node == 1:
        assert f"It runs on 2 nodes, but a node was stopped (on node 1 ({HOST}): {number.name})" in " ".join(
            other.split()
        )
        assert "2 jobs: 0 completed, 2 failed" in other
        assert f"{number.name}: stopping the running job (once more: kill at once)" in output
    else:
        assert f"Node 1 cannot go on: node 0 ({HOST}) has left the sweep" in other
    assert nodes.notes.places() == [(0, rank) for rank in range(4)]
    assert_nothing_left(nodes.runner)


@pytest.mark.parametrize("node", [0, 1])
def test_killed_at_once(nodes: Nodes, node: int) -> None:
    """A second Ctrl-C on any node waits for none of its ranks."""
    both = [nodes.start(each, "+all=[ignore,note:ready,hang]", "hydra.launcher.grace_period_s=100") for each in (0, 1)]
    nodes.wait_for("ready", *bodies(0, 1, 2, 3))
    time.sleep(0.5)
    both[node].send_signal(signal.SIGINT)
    time.sleep(1)
    both[node].send_signal(signal.SIGINT)
    assert finish(both[node], 30)[0] == 130
    both[1 - node].send_signal(signal.SIGINT)
    time.sleep(1)
    both[1 - node].send_signal(signal.SIGINT)
    assert finish(both[1 - node], 30)[0] == 130
    assert_nothing_left(nodes.runner)


@pytest.mark.parametrize("node", [0, 1])
def test_stopped_after_its_own_ranks_have_ended(nodes: Nodes, node: int) -> None:
    """The ranks of the other one are not left to themselves."""
    own, others = ((0, 1), (2, 3)) if node == 0 else ((2, 3), (0, 1))
    both = [nodes.start(each, *(f"+r{rank}=hang" for rank in others)) for each in (0, 1)]
    nodes.wait_for(*bodies(*others), *(f"end_0_{rank}" for rank in own))
    time.sleep(2)
    both[node].send_signal(signal.SIGINT)
    assert finish(both[node], 30)[0] == 130
    assert finish(both[1 - node], 30)[0] == 1
    assert_nothing_left(nodes.runner)


@pytest.mark.parametrize("node", [0, 1])
def test_stopped_before_the_other_one_comes(nodes: Nodes, node: int) -> None:
    """Who waits for the others can be stopped as always."""
    waiting = nodes.start(node)
    folder = nodes.sweep_dir / ".ddp" / "nodes"
    nodes.runner.wait_until(lambda: folder.exists() and (node == 1 or (folder / "session").exists()))
    time.sleep(0.3)
    waiting.send_signal(signal.SIGINT)
    assert finish(waiting, 20)[0] == 130
    assert_nothing_left(nodes.runner)


# --- who is killed


@pytest.mark.parametrize("node", [0, 1])
def test_a_launching_process_is_killed(nodes: Nodes, node: int) -> None:
    """Its keeper tells the other node at once, which starts nothing more."""
    both = [nodes.start(each, "x=1,2", "+all=hang") for each in (0, 1)]
    nodes.wait_for(*bodies(0, 1, 2, 3))
    both[node].kill()
    code, output = finish(both[1 - node], 30)
    assert code == 1, output
    assert f"the launching process is gone on node {node} ({HOST})" in output
    if node == 1:
        assert f"the job was ended because the launching process is gone (on node 1 ({HOST}))" in output
    assert_nothing_left(nodes.runner)


@pytest.mark.parametrize("node", [0, 1])
def test_a_launching_process_is_killed_between_jobs(nodes: Nodes, node: int) -> None:
    """Its silence is noticed, and nobody waits for it for ever."""
    nodes.app = write_app(nodes.runner, HASTY)
    # Of the other node, whose part of the job is over, nothing is left but the launching process.
    both = [nodes.start(each, "x=1,2", "+all=ok", "+j1.all=wait:never") for each in (0, 1)]
    nodes.wait_for("end_0_3")
    both[node].kill()
    code, output = finish(both[1 - node], 60)
    assert code == 1, output
    assert re.search(rf"nothing has been heard of node {node} \({HOST}\) for long|launching process is gone", output)
    assert_nothing_left(nodes.runner)


@pytest.mark.parametrize("node", [0, 1])
def test_a_keeper_is_killed(nodes: Nodes, node: int) -> None:
    """The job fails on both nodes, and the next one runs on both."""
    both = [nodes.start(each, "x=1,2", "+j0.all=hang", "+all=meet") for each in (0, 1)]
    nodes.wait_for(*bodies(0, 1, 2, 3))
    os.kill(keeper_of(both[node]), signal.SIGKILL)
    (code, output), (other_code, other) = finish(both[0]), finish(both[1])
    assert (code, other_code) == (1, 1), output + other
    if node == 1:
        assert f"because the process that kept it was lost (on node 1 ({HOST}))" in output
    else:
        assert "The process that kept this job was killed" in output
    assert [row["status"] for row in nodes.table()] == ["FAILED", "COMPLETED"]
    assert_nothing_left(nodes.runner)


def test_all_of_a_node_is_killed(nodes: Nodes) -> None:
    """As when its power fails: the other one notices the silence, and ends."""
    nodes.app = write_app(nodes.runner, HASTY)
    both = [nodes.start(each, "x=1,2", "+all=hang") for each in (0, 1)]
    nodes.wait_for(*bodies(0, 1, 2, 3))
    below = list(descendants(both[1].pid))
    os.kill(both[1].pid, signal.SIGKILL)
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    code, output = finish(both[0], 60)
    assert code == 1, output
    assert re.search(rf"node 1 \({HOST}\)", output)
    assert "is silent" in output or "nothing has been heard of" in output
    assert_nothing_left(nodes.runner)


def test_launching_process_keeper_and_spawner_are_killed(nodes: Nodes) -> None:
    """Nobody is left who could tell; no rank outlives them for long all the same."""
    nodes.app = write_app(nodes.runner, HASTY)
    both = [nodes.start(each, "+all=hang") for each in (0, 1)]
    nodes.wait_for(*bodies(0, 1, 2, 3))
    keeper = keeper_of(both[1])
    spawners = [pid for pid in descendants(both[1].pid) if name_of(pid) == "ddp-spawner"]
    for pid in (both[1].pid, *spawners, keeper):
        os.kill(pid, signal.SIGKILL)
    code, output = finish(both[0], 60)
    assert code == 1, output
    nodes.runner.wait_until(lambda: not alive(nodes.runner))


# --- what does not fit together


def test_other_jobs_on_the_second_node(nodes: Nodes) -> None:
    """Nothing is run with values that differ; both say so."""
    first, second = nodes.start(0, "x=1,2"), nodes.start(1, "x=1,3")
    (code, output), (other_code, other) = finish(first), finish(second)
    assert (code, other_code) == (1, 1)
    said = "Job 1 of node 0 has the overrides x=2, here it has x=3. Start all nodes with the same command"
    assert said in other
    assert f"node 1 ({HOST}) has left the sweep ({said}" in output
    assert nodes.notes.places() == [(0, rank) for rank in range(4)]
    assert_nothing_left(nodes.runner)


@pytest.mark.parametrize("node", [0, 1])
def test_fewer_jobs_on_one_node(nodes: Nodes, node: int) -> None:
    """The other one is not left to wait."""
    both = [nodes.start(each, "x=1" if each == node else "x=1,2") for each in (0, 1)]
    results = [finish(one) for one in both]
    assert results[node][0] == 0, results[node][1]
    code, output = results[1 - node]
    assert code == 1
    assert f"node {node} ({HOST}) has left the sweep (its process has ended)" in output


@pytest.mark.parametrize("node", [0, 1])
def test_one_number_twice(nodes: Nodes, node: int) -> None:
    """The third process is sent away, and disturbs nobody."""
    both = [nodes.start(each, "+all=wait:go") for each in (0, 1)]
    nodes.wait_for(*bodies(0, 1, 2, 3))
    code, output = finish(nodes.start(node))
    assert code == 1
    if node == 0:
        assert "in use" in output or "another" in output
    else:
        assert "Another process takes part in this sweep as node 1, or has done so" in output
    (nodes.notes.folder / "go.json").write_text("{}")
    results = [finish(one) for one in both]
    assert [code for code, _ in results] == [0, 0], results


def test_another_number_of_nodes(nodes: Nodes) -> None:
    first, second = nodes.start(0), nodes.start(1, "hydra.launcher.nnodes=3")
    code, output = finish(second)
    assert code == 1
    assert "hydra.launcher.nnodes=3 here, but 2 at node 0" in output
    first.send_signal(signal.SIGINT)
    assert finish(first)[0] == 130


def test_a_directory_that_each_node_would_name_differently(nodes: Nodes) -> None:
    process = nodes.start(0, "hydra.sweep.dir='multirun/${now:%H-%M-%S}'")
    code, output = finish(process)
    assert code == 1
    assert "needs hydra.sweep.dir to be set: each node would find another one" in output
    assert "Traceback" not in output


def test_a_sampling_sweeper(nodes: Nodes) -> None:
    """Each node would choose other values."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    code, output = finish(nodes.start(0, "hydra/sweeper=optuna", "x=1,2"))
    assert code == 1
    assert "needs Hydra's own sweeper" in output and "ddp_submitit_slurm" in output


def test_a_node_with_too_few_devices(nodes: Nodes) -> None:
    """The job cannot run there: both nodes say why, and end."""
    first = nodes.start(0, "hydra.launcher.devices=[0,1]", nproc="auto")
    second = nodes.start(1, "hydra.launcher.devices=[4]", nproc="auto")
    (code, output), (other_code, other) = finish(first), finish(second)
    assert (code, other_code) == (1, 1)
    assert "Job 0 cannot be started on this node: A job of 2 ranks does not fit" in other
    assert f"node 1 ({HOST}) has left the sweep (Job 0 cannot be started on this node" in output
    assert nodes.notes.places() == []


def test_a_node_that_waits_for_its_devices(nodes: Nodes) -> None:
    """However long that takes, the other one is told when it is stopped meanwhile."""
    with_lock = nodes.runner.start(
        sys.executable,
        BEHAVE,
        "-m",
        "hydra/launcher=ddp_subprocess",
        "hydra.launcher.devices=[nodes_by_hand_7]",
        f"hydra.sweep.dir={nodes.runner.cwd / 'other'}",
        "+all=hang",
        env=behave_environment(nodes.runner),
    )
    try:
        nodes.wait_for("body_0_0")
        nodes.app = write_app(nodes.runner, HASTY)
        first = nodes.start(0, "hydra.launcher.devices=[nodes_by_hand_1]", nproc=1, BEHAVE_AGAIN="1")
        second = nodes.start(1, "hydra.launcher.devices=[nodes_by_hand_7]", nproc=1, BEHAVE_AGAIN="1")
        # Longer than silence may last.
        time.sleep(12)
        assert first.poll() is None and second.poll() is None
        second.send_signal(signal.SIGINT)
        code, output = finish(second)
        assert code == 130
        assert output.count("Waiting for device nodes_by_hand_7: it ") == 1
        code, output = finish(first)
        assert code == 1
        assert f"node 1 ({HOST}) has left the sweep" in output
    finally:
        with_lock.terminate()
        finish(with_lock)


def test_nobody_is_blamed_for_a_long_job(nodes: Nodes) -> None:
    """A job that takes longer than silence may last is not taken for silence."""
    nodes.app = write_app(nodes.runner, HASTY)
    results = nodes.run("+all=[sleep:12,return:1]")
    assert [code for code, _ in results] == [0, 0], results
