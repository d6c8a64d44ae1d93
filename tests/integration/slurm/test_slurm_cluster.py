"""The SLURM cluster that tests of several nodes run on."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from support.slurm_cluster import SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

    from support.runner import Runner
    from support.slurm_cluster import SlurmCluster


@pytest.mark.sample
def test_srun_on_both_nodes(runner: Runner, slurm: SlurmCluster) -> None:
    """Each node has its own host name; in "shared" mode, this machine's."""
    ran = runner.run("srun", "--nodes=2", "sh", "-c", 'echo "$SLURMD_NODENAME $(hostname)"')
    names = slurm.nodes if slurm.network == "netns" else [socket.gethostname()] * 2
    assert sorted(ran.stdout.splitlines()) == [f"{node} {name}" for node, name in zip(slurm.nodes, names, strict=True)]
    assert [socket.gethostbyname(name) for name in slurm.nodes] == list(slurm.addresses)


def test_nodes_do_not_share_their_loopback(runner: Runner, slurm: SlurmCluster) -> None:
    """Both nodes bind one port, and at 127.0.0.1 each finds its own; this machine has a loopback of its own, too."""
    if slurm.network != "netns":
        pytest.skip("the nodes share this machine's network")
    port = 20000 + os.getpid() % 10000  # Another session may be at this very test.
    code = (
        "import socket\n"
        f"server = socket.create_server(('', {port}))\n"
        "print(socket.gethostname(), flush=True)\n"
        "while True:\n"
        "    server.accept()[0].sendall(socket.gethostname().encode())"
    )
    with runner.start(
        "sbatch", "--nodes=2", "--output=%j.txt", "--wrap", f'srun {sys.executable} -c "{code}"'
    ) as sbatch:
        job = sbatch.communicate()[0].split()[-1]
    output = runner.cwd / f"{job}.txt"
    runner.wait_until(lambda: output.exists() and len(output.read_text().split()) == 2)
    hello = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2]))).recv(100).decode())"
    for node, address in zip(slurm.nodes, slurm.addresses, strict=True):
        for at in ("127.0.0.1", *slurm.nodes):
            ran = runner.run("srun", f"--nodelist={node}", sys.executable, "-c", hello, at, str(port))
            assert ran.stdout.split() == [node if at == "127.0.0.1" else at]
        with socket.create_connection((address, port), timeout=5) as client:
            assert client.recv(100).decode() == node
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert runner.alive()
    slurm.scancel(job)
    slurm.wait_for_state(job, "CANCELLED")
    runner.assert_nothing_left(10)


def test_submitit(slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on 2 nodes with 2 tasks and 2 GPUs each gives back what its tasks return."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)

    def work() -> tuple[object, ...]:
        env = submitit.JobEnvironment()
        return env.global_rank, env.local_rank, env.hostnames, os.environ["CUDA_VISIBLE_DEVICES"]

    executor = submitit.AutoExecutor(folder=tmp_path / "%j", cluster="slurm")
    executor.update_parameters(timeout_min=5, nodes=2, tasks_per_node=2, gpus_per_node=2)
    job = executor.submit(work)
    assert job.results() == [(rank, rank % 2, list(slurm.nodes), "0,1") for rank in range(4)]
    slurm.wait_for_state(job.job_id, "COMPLETED")


# A machine within the machine: own processes, network, /run and so on. Its process 1 is the shell that runs this.
SANDBOX = r"""
set -e
python=$1 script=$2 tests=$3
mount -t tmpfs tmpfs /run
cp -a /etc/slurm /run/slurm && mount --bind /run/slurm /etc/slurm
cp /etc/hosts /run/hosts && mount --bind /run/hosts /etc/hosts
ip link set lo up
"$script" down  # Only files can be there: those of the cluster outside.
cp -a /etc/slurm /run/slurm-before && cp /etc/hosts /run/hosts-before

# What a killed session leaves: a cluster, one of its daemons lost, and a job.
"$script" up --session
sbatch --nodes=2 --output=/dev/null --wrap 'srun sleep 1000'
until pgrep -x sleep; do sleep 0.1; done
[ "$4" != half-dead ] || kill -9 "$(cat /run/hydra-ddp-slurm/ddp-node2.pid)"

HYDRA_DDP_REQUIRE_SLURM=1 "$python" -m pytest -q -n0 -p no:cacheprovider "$tests" -k srun

echo === left over
"$script" status
ip -o link | grep -v LOOPBACK || true
ls -A /run/hydra-ddp-slurm | grep -v '^log$' || true
find /run/netns -type f 2>/dev/null || true
diff -r /etc/slurm /run/slurm-before
diff /etc/hosts /run/hosts-before
for process in /proc/[0-9]*; do
    read -r _ name state _ <"$process/stat" || continue
    [ $process = /proc/1 ] || [ $state = Z ] || echo "$process $name"
done
"""


@pytest.mark.parametrize("before", ["alive", "half-dead"])
def test_a_session_replaces_what_a_killed_one_left_and_leaves_nothing(
    runner: Runner, slurm_cluster: SlurmCluster, before: str
) -> None:
    """A session's cluster is gone when it ends: daemons, jobs, namespaces, interfaces and files."""
    isolate = ("unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    if runner.run(*isolate, "true").returncode != 0:
        pytest.skip("namespaces cannot be made here")
    ran = runner.run(*isolate, "bash", "-c", SANDBOX, "sandbox", sys.executable, SCRIPT, __file__, before)
    assert ran.returncode == 0, ran.output
    assert "1 passed" in ran.stdout
    assert ran.stdout.partition("=== left over\n")[2].splitlines() == ["state down"], ran.stdout
