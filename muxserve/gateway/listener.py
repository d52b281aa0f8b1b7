"""The socket that the endpoint listens on, and what its connections may take."""

from __future__ import annotations

import resource
import socket
import sys
from typing import NamedTuple

from muxserve.deployment import GatewayDeployment

# A client that takes none of what it was sent for so long, or whose machine has vanished, is gone. Otherwise it would
# keep its place at its model for ever, and as many of them as may be in service would keep everybody else out.
STALL_SECONDS = 60.0
# After so long without a word it is asked whether it is there: one that waits for a long answer has nothing to say.
IDLE_SECONDS = 60
PROBE_SECONDS = 15
BACKLOG = 2048
# Sockets to units and engines, logs, libraries.
OTHER_FILES = 256


def bind(gateway: GatewayDeployment, stall_seconds: float = STALL_SECONDS) -> socket.socket:
    """A socket bound to the endpoint's address, not listening yet: clients are refused until all is ready.

    Its connections inherit how long a client may take nothing, `stall_seconds`.

    Raises:
        OSError: the address is not one of this machine's, or is in use.
    """
    where = f"{gateway.host}:{gateway.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            gateway.host, gateway.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * stall_seconds))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        if gateway.count > 1:  # each has a socket of its own there, over which the kernel spreads the connections
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror or error}") from None
    return listener


def raise_file_limit() -> Room:
    """Let the process have as many connections as the system allows: each takes a file descriptor, and the usual limit
    is less than what may wait and be in service. Returns for how many there is room then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return room(hard)


class Room(NamedTuple):
    """How many connections a process may serve, and how many may wait to be accepted."""

    connections: int
    backlog: int


def room(files: int) -> Room:
    """What a process may have that may open so many files.

    The event loop accepts all that wait at once, and closes them without a word when there is no descriptor left. So as
    many as may wait are kept free, and some for everything else; who comes beyond that is answered and sent away.
    """
    if files < 0:  # no limit
        return Room(sys.maxsize, BACKLOG)
    free = min(BACKLOG + OTHER_FILES, files // 2)
    return Room(files - free, max(1, free - min(OTHER_FILES, free // 2)))
