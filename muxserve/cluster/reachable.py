"""Whether somebody listens on a Unix socket."""

from __future__ import annotations

import asyncio
import socket

_PAUSE_SECONDS = 0.02


async def until_reachable(address: str) -> None:
    """Until a process listens at `address`, which is ZeroMQ's `ipc://PATH`."""
    while not reachable(address):
        await asyncio.sleep(_PAUSE_SECONDS)


def reachable(address: str) -> bool:
    """Whether a process listens at `address` now. A file that a dead one has left is not enough."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.removeprefix("ipc://"))
        except OSError:
            return False
    return True
