"""The rendezvous port of a job: chosen once, and reserved while the job runs."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass

from ._errors import StartError


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
    tried = []
    for host in (address,) if address is not None else ("127.0.0.1", "::1"):
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


def is_port_clash(text: str, port: int) -> bool:
    """Return whether a rank's last words say that just this port was taken.

    torch's TCPStore says: `The server socket has failed to bind. port: 29500, useIpv6: false, code: -98, name:
    EADDRINUSE, message: address already in use`.
    """
    lowered = text.lower()
    taken = "eaddrinuse" in lowered or "address already in use" in lowered
    return taken and re.search(rf"\b{port}\b", text) is not None
