"""A reserved port is nobody else's, and rank 0 can still listen on it."""

from __future__ import annotations

import socket

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.errors import StartError
from hydra_plugins.hydra_ddp_subprocess_launcher.resources.port import (
    check_other_node,
    is_port_clash,
    reserve_port,
    reserve_port_for_nodes,
)


def test_reserved_ports_differ_and_are_not_given_out() -> None:
    """Ports reserved at one time differ, and `bind(0)` gives none of them to anybody."""
    reserved = [reserve_port(None, None) for _ in range(50)]
    others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
    numbers = {port.number for port in reserved}
    assert len(numbers) == len(reserved)
    assert {port.address for port in reserved} == {"127.0.0.1"}
    assert not numbers & {other.getsockname()[1] for other in others}
    for port in reserved:
        port.release()
    for other in others:
        other.close()


def test_rank_0_can_listen_and_be_reached() -> None:
    """A server with SO_REUSEADDR, such as torch's store, listens on the port while it is reserved."""
    port = reserve_port(None, None)
    place = (port.address, port.number)
    with socket.create_server(place) as server, socket.create_connection(place, timeout=5):
        connection, _ = server.accept()
        connection.close()
    port.release()
    port.release()


def test_a_port_of_the_users_that_is_taken() -> None:
    """A port that cannot be bound is an error that names it and the options."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(StartError, match=rf"port {taken}.*master_port"):
            reserve_port(None, taken)


def test_an_address_and_port_of_the_users_are_taken_as_they_are() -> None:
    """The address may be another name of this machine, which cannot be told here."""
    port = reserve_port("head.cluster.invalid", 29500)
    assert (port.address, port.number) == ("head.cluster.invalid", 29500)
    port.release()


def test_a_port_for_several_nodes() -> None:
    """It is free on all interfaces, whether or not the address is one of this machine; rank 0 can listen on any."""
    port = reserve_port_for_nodes("head.cluster.invalid", None)
    assert port.address == "head.cluster.invalid"
    for host, family in (("127.0.0.1", socket.AF_INET), ("", socket.AF_INET), ("", socket.AF_INET6)):
        dual = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
        if family is socket.AF_INET6 and not dual:
            continue
        with socket.create_server((host, port.number), family=family, dualstack_ipv6=dual):
            pass
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    port.release()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert reserve_port_for_nodes("127.0.0.1", taken).number == taken


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_an_address_that_means_this_machine(address: str) -> None:
    """On another node than rank 0's it would find nobody; on the same one it is right."""
    check_other_node(address, socket.gethostname())
    with pytest.raises(StartError, match=rf"Rank 0 is on node-a, but its address {address} means this machine here"):
        check_other_node(address, "node-a")


def test_an_address_that_another_node_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(StartError, match=r"its address head is not known here: Name or service not known\. Name one"):
        check_other_node("head", "node-a")


def test_an_address_of_another_machine() -> None:
    check_other_node("10.77.8.1", "node-a")


@pytest.mark.parametrize(
    ("text", "clash"),
    [
        ("The server socket has failed to bind. port: 29511, code: -98, name: EADDRINUSE, message: …", True),
        ("OSError: [Errno 98] Address already in use: ('127.0.0.1', 29511)", True),
        ("OSError: [Errno 98] Address already in use: ('0.0.0.0', 6006)", False),
        ("RuntimeError: connection to 127.0.0.1:29511 refused", False),
        ("", False),
    ],
)
def test_what_a_port_clash_looks_like(text: str, clash: bool) -> None:
    """Only words about just this port being in use mean that another port helps."""
    assert is_port_clash(text, 29511) is clash
