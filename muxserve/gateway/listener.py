"""The socket that the endpoint listens on."""

from __future__ import annotations

import socket

from muxserve.deployment import GatewayDeployment


def bind(gateway: GatewayDeployment) -> socket.socket:
    """A socket bound to the endpoint's address, not listening yet: clients are refused until all is ready.

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
        if gateway.count > 1:  # each has a socket of its own there, over which the kernel spreads the connections
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror or error}") from None
    return listener
