"""The rendezvous port of a job: reserve it while the job runs, and recognize clashes."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.errors import StartError

_TAKEN = re.compile(r"eaddrinuse|address already in use", re.IGNORECASE)
_SPAWNS = re.compile(r"torch[/.]multiprocessing[/.]spawn")


@dataclass
class ReservedPort:
    """A reserved port, held by a socket that is bound to it and does not listen.

    Rank 0's store can still listen on it, because both sockets set SO_REUSEADDR. The system assigns a bound port
    neither to `bind(0)` of another process nor to a client's connection.

    Attributes:
        address: Address at which rank 0 listens.
        number: The port.
    """

    address: str
    number: int
    _holder: socket.socket | None

    def release(self) -> None:
        """Release the port. May be called twice."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None


def reserve_port(address: str | None, number: int | None) -> ReservedPort:
    """Reserve a free port for one start of a job.

    Args:
        address: The option `master_addr`; None for 127.0.0.1, or ::1 if that cannot be bound.
        number: The option `master_port`; None for any free port.

    Raises:
        StartError: if the address or port cannot be bound.
    """
    if address is not None and number is not None:
        # The user chose both: the address may be an alias of this machine, or one that cannot be bound here.
        return ReservedPort(address, number, None)
    return _reserve((address,) if address is not None else ("127.0.0.1", "::1"), number)


def reserve_port_for_nodes(address: str, number: int | None) -> ReservedPort:
    """Reserve a free port of this machine at which other nodes reach rank 0.

    Args:
        address: Name or address of this machine, as the other nodes know it. It need not be bindable here, for example
            behind NAT; rank 0 listens on all addresses.
        number: The option `master_port`; None for any free port.

    Raises:
        StartError: if the port cannot be bound.
    """
    if number is not None:
        return ReservedPort(address, number, None)
    port = _reserve(("0.0.0.0", "::"), None)
    port.address = address
    return port


def _reserve(hosts: Sequence[str], number: int | None) -> ReservedPort:
    tried = []
    for host in hosts:
        try:
            family, *_, place = socket.getaddrinfo(host, number or 0, type=socket.SOCK_STREAM)[0]
            holder = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            tried.append(f"{host}: {getattr(error, 'strerror', None) or error}")
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise StartError(
                    f"No port can be reserved: {tried[-1]}. Raise the limit (`ulimit -n`), or run fewer jobs at once "
                    "(hydra.launcher.max_parallel_jobs)."
                ) from None
            continue
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(place)
        except OSError as error:
            holder.close()
            tried.append(f"{host}, port {number or 'any'}: {error.strerror}")
            if error.errno == errno.EADDRINUSE:
                # The address works: trying another one would only hide that the port is taken.
                break
            continue
        return ReservedPort(host, holder.getsockname()[1], holder)
    raise StartError(
        f"No port can be reserved for the ranks to meet ({'; '.join(tried)}). Choose another with "
        "hydra.launcher.master_port and hydra.launcher.master_addr."
    )


def check_other_node(address: str, host: str) -> None:
    """Check, on another node, that the address of rank 0's node resolves, and not to this machine.

    Args:
        address: MASTER_ADDR of the ranks.
        host: Host name of rank 0's node.

    Raises:
        StartError: if ranks of this node could not find rank 0.
    """
    try:
        found = {str(place[0]) for *_, place in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise StartError(
            f"Rank 0 is on {host}, but its address {address} is not known here: {why}. Name one by which all nodes "
            "find it (hydra.launcher.master_addr)."
        ) from None
    if host != socket.gethostname() and all(map(_is_loopback, found)):
        raise StartError(
            f"Rank 0 is on {host}, but its address {address} means this machine here ({', '.join(sorted(found))}). "
            "Name one by which all nodes find it (hydra.launcher.master_addr)."
        )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_port_clash(text: str, port: int) -> bool:
    """Return whether the last output of a rank reports that this port was in use.

    The message of torch's TCPStore: `The server socket has failed to bind. port: 29500, useIpv6: false, code: -98,
    name: EADDRINUSE, message: address already in use`.
    """
    return says_taken(text) and re.search(rf"\b{port}\b", text) is not None


def says_taken(text: str) -> bool:
    """Return whether a text reports that a port was in use."""
    return _TAKEN.search(text) is not None


def is_of_spawned(text: str) -> bool:
    """Return whether a traceback is from a process that a rank started by torch.multiprocessing.spawn."""
    return _SPAWNS.search(text) is not None
