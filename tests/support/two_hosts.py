"""Two hosts on one machine: own host names, own loopbacks, and a network between them whose cables can be pulled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

# Host names are those of the namespace, and /etc/hosts is a file of its own, so that both know each other by name.
_BOOT = 'ip link set lo up && hostname "$0" && mount --bind "$1" /etc/hosts && echo up && exec cat'
# A mount namespace is entered in its root folder. Nothing here forks, so what is started is the program itself.
_ENTER = """exec nsenter --target {pid} --net --uts --mount -- sh -c 'cd "$0" && exec "$@"' "$PWD" "$@\""""


@dataclass(frozen=True)
class Host:
    """A host. Files and processes are this machine's: only network, host name and /etc/hosts are its own."""

    name: str
    address: str
    # The process that keeps its namespaces.
    pid: int
    # Before a command, has it run there, in the same folder and with the same environment.
    prefix: tuple[str, ...]
    interface: str = "eth0"

    def command(self, *argv: str | Path) -> list[str]:
        return [*self.prefix, *map(str, argv)]

    def processes(self) -> set[int]:
        """Return what runs there, zombies left out."""
        here = os.stat(f"/proc/{self.pid}/ns/net").st_ino
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                # A zombie has no namespaces.
                if entry.name.isdigit() and (entry / "ns/net").stat().st_ino == here:
                    found.add(int(entry.name))
            except OSError:
                continue
        return found - {self.pid}

    def kill_all(self) -> None:
        """Kill what runs there, also what is started meanwhile."""
        while found := self.processes():
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


@dataclass(frozen=True)
class TwoHosts:
    """Hosts `a` and `b`, and the switch between them."""

    a: Host
    b: Host
    switch: int

    def unplug(self, host: Host) -> None:
        """Cut a host off. Its interface stays up: what is sent is lost, and nobody is told.

        As on a real network, a new connection fails with "No route to host" after 3 s, if the other host's hardware
        address is not known, or not any more.
        """
        _run("nsenter", "--target", self.switch, "--net", "ip", "link", "set", host.name, "nomaster")

    def plug_in(self, host: Host) -> None:
        """End `unplug`."""
        _run("nsenter", "--target", self.switch, "--net", "ip", "link", "set", host.name, "master", "bridge", "up")

    def power_off(self, host: Host) -> None:
        """End everything on a host, and nothing of it, not even the end of a connection, reaches the other one."""
        self.unplug(host)
        host.kill_all()


class _Impossible(Exception):
    pass


def _run(*argv: object) -> None:
    ran = subprocess.run(
        [str(word) for word in argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
    )
    if ran.returncode != 0:
        raise _Impossible(f"{' '.join(map(str, argv))}: {ran.stderr.strip()}")


@contextmanager
def _namespaces(name: str, hosts_file: Path) -> Iterator[int]:
    """Network, UTS and mount namespace with one process, which ends with this one even if that is killed."""
    process = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", _BOOT, name, str(hosts_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        if process.stdout.readline() != "up\n":
            raise _Impossible(process.communicate()[1].strip())
        try:
            yield process.pid
        finally:
            process.stdin.close()


@contextmanager
def make_two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make the hosts. They have no names on the machine, so others like them are not in the way."""
    addresses = {"host-a": "10.77.8.1", "host-b": "10.77.8.2"}
    hosts_file = folder / "etc-hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    hosts_file.write_text("\n".join(lines) + "\n")
    with ExitStack() as stack:
        # A namespace for the bridge, too: a firewall of the machine does not look at what passes there.
        switch = stack.enter_context(_namespaces("switch", hosts_file))
        at_switch = ("nsenter", "--target", switch, "--net", "ip", "link")
        _run(*at_switch, "add", "name", "bridge", "type", "bridge")
        _run(*at_switch, "set", "bridge", "up")
        hosts = []
        for name, address in addresses.items():
            pid = stack.enter_context(_namespaces(name, hosts_file))
            host = Host(name, address, pid, ("sh", "-c", _ENTER.format(pid=pid), "sh"))
            stack.callback(host.kill_all)
            _run(*at_switch, "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", pid)
            _run(*at_switch, "set", name, "master", "bridge", "up")
            _run(*host.prefix, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            _run(*host.prefix, "ip", "link", "set", "eth0", "up")
            hosts.append(host)
        yield TwoHosts(*hosts, switch=switch)


@pytest.fixture
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Two hosts, for this test alone; what still runs there at its end is killed."""
    if os.geteuid() != 0:
        pytest.skip("no two hosts: needs root")
    missing = [name for name in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no two hosts: {', '.join(missing)} not found")
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(make_two_hosts(tmp_path_factory.mktemp("two_hosts")))
        except _Impossible as error:
            pytest.skip(f"no two hosts: {error}")
        yield hosts
