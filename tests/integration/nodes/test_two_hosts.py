"""The two hosts that tests of several nodes run on."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.runner import APPS, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.runner import Runner
    from support.two_hosts import Host, TwoHosts

# Say where it listens, then send back what it is sent.
SERVER = """
import socket
server = socket.create_server(("", 5000))
print(socket.gethostname(), flush=True)
while True:
    client = server.accept()[0]
    while data := client.recv(100):
        client.sendall(data)
"""
# Send a word and wait for it.
CLIENT = """
import os, socket, sys
try:
    with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as server:
        server.sendall(b"hello")
        print(socket.gethostname(), os.getcwd(), server.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def server(runner: Runner, two_hosts: TwoHosts) -> Iterator[subprocess.Popen[str]]:
    """A server on host A."""
    with runner.start(*two_hosts.a.command(sys.executable, "-c", SERVER)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "host-a\n"
        yield process
        process.kill()


def ask(runner: Runner, host: Host, address: str, patience_s: float = 10) -> str:
    ran = runner.run(*host.command(sys.executable, "-c", CLIENT, address, str(patience_s)))
    assert ran.stderr == ""
    return ran.stdout.strip()


@pytest.mark.sample
def test_they_meet_by_address_and_by_name_alone(
    runner: Runner, two_hosts: TwoHosts, server: subprocess.Popen[str], tmp_path: Path
) -> None:
    """B reaches A at its address and name, where it was started; not at 127.0.0.1, where A finds itself."""
    assert ask(runner, two_hosts.b, two_hosts.a.address) == f"host-b {tmp_path} hello"
    assert ask(runner, two_hosts.b, "host-a") == f"host-b {tmp_path} hello"
    assert ask(runner, two_hosts.b, "127.0.0.1") == ask(runner, two_hosts.b, "localhost") == "ConnectionRefusedError"
    assert ask(runner, two_hosts.a, "127.0.0.1") == f"host-a {tmp_path} hello"
    two_hosts.a.kill_all()
    assert server.wait(PATIENCE_S) == -9


def test_a_cable_that_is_pulled_and_put_back(
    runner: Runner, two_hosts: TwoHosts, server: subprocess.Popen[str]
) -> None:
    """Without the cable nothing comes back, not even an error; with it all is as before."""
    two_hosts.unplug(two_hosts.a)
    assert ask(runner, two_hosts.b, "host-a", 1) == "TimeoutError"
    assert server.poll() is None
    two_hosts.plug_in(two_hosts.a)
    assert ask(runner, two_hosts.b, "host-a").endswith("hello")
    two_hosts.power_off(two_hosts.a)
    assert server.wait(PATIENCE_S) == -9
    assert two_hosts.a.processes() == set()
    assert ask(runner, two_hosts.b, "host-a", 1) == "TimeoutError"


LEAVES = """
import subprocess, time

def test_one(two_hosts):
    subprocess.Popen(two_hosts.a.command("sleep", "1000"))
    subprocess.Popen(two_hosts.b.command("setsid", "sleep", "1000"))
    while not two_hosts.a.processes() or not two_hosts.b.processes():
        time.sleep(0.01)
    {end}
"""


@pytest.mark.parametrize("end", ["assert False", "import os; os.kill(os.getpid(), 9)"])
def test_nothing_is_left(runner: Runner, two_hosts: TwoHosts, tmp_path: Path, end: str) -> None:
    """Whether a test fails or the session is killed, beside hosts of another session, the hosts are gone.

    What ran on them is gone, too, but for a killed session, which cannot end it.
    """
    (tmp_path / "conftest.py").write_text("from support.two_hosts import two_hosts\n")
    (tmp_path / "test_leaves.py").write_text(LEAVES.format(end=end))
    before = subprocess.check_output(["ip", "-o", "link"], text=True)
    ran = runner.python(
        *("-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path / "test_leaves.py"),
        env={"PYTHONPATH": str(APPS.parent)},
    )
    if end == "assert False":
        assert "1 failed" in ran.stdout, ran.output
    else:
        runner.wait_until(lambda: sorted(runner.alive().values()) == ["sleep 1000 "] * 2)
        subprocess.run(["kill", "-9", *map(str, runner.alive())], check=True)
    runner.assert_nothing_left()
    assert subprocess.check_output(["ip", "-o", "link"], text=True) == before
