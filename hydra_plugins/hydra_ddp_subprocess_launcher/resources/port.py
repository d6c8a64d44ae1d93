"""The rendezvous port of a job: chosen once, and reserved while the job runs."""

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
    """A port that nobody else is given, held by a socket that is bound to it and does not listen.

    Rank 0's store can still listen on it, because both set SO_REUSEADDR. Neither `bind(0)` of another process nor a
    client's connection is given a port that is bound.

    Attributes:
        address: Address at which rank 0 listens.
        number: The port.
    """

    address: str
    number: int
    _holder: socket.socket | None

    def release(self) -> None:
        """Give the port back. May be called twice."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None


def reserve_port(address: str | None, number: int | None) -> ReservedPort:
    """Reserve a free port for one job attempt.

    Args:
        address: Address of the option `master_addr`; None: 127.0.0.1, or ::1 where that cannot be bound.
        number: Port of the option `master_port`; None: any free one.

    Raises:
        StartError: when the address or port cannot be bound.
    """
    if address is not None and number is not None:
        # Both are the user's: the address may be another name of this machine, or not be bound here at all.
        return ReservedPort(address, number, None)
    return _reserve((address,) if address is not None else ("127.0.0.1", "::1"), number)


def reserve_port_for_nodes(address: str, number: int | None) -> ReservedPort:
    """Reserve a free port of this machine at which other nodes reach rank 0.

    Args:
        address: Name or address of this machine, as the other nodes know it. It need not be one that can be bound
            here, such as behind a translation of addresses; rank 0 listens on all.
        number: Port of the option `master_port`; None: any free one.

    Raises:
        StartError: when the port cannot be bound.
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
                # The address is good: another one would only hide that somebody has the port.
                break
            continue
        return ReservedPort(host, holder.getsockname()[1], holder)
    raise StartError(
        f"No port can be reserved for the ranks to meet ({'; '.join(tried)}). Choose another with "
        "hydra.launcher.master_port and hydra.launcher.master_addr."
    )


def check_other_node(address: str, host: str) -> None:
    """Check from another node that the name of rank 0's node is known here, and is not this machine's own.

    Args:
        address: What the ranks will be given as MASTER_ADDR.
        host: Host name of rank 0's node.

    Raises:
        StartError: when ranks of this node could not find rank 0.
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
    """Return whether a rank's last words say that just this port was taken.

    torch's TCPStore says: `The server socket has failed to bind. port: 29500, useIpv6: false, code: -98, name:
    EADDRINUSE, message: address already in use`.
    """
    return says_taken(text) and re.search(rf"\b{port}\b", text) is not None


def says_taken(text: str) -> bool:
    """Return whether words say that some port was taken."""
    return _TAKEN.search(text) is not None


def is_of_spawned(text: str) -> bool:
    """Return whether a traceback is that of a process which a rank has started by torch.multiprocessing.spawn."""
    return _SPAWNS.search(text) is not None
