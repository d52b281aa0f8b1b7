"""Ports for servers that tests start, and that are told their port before they listen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A loopback port that nobody uses now.

    Not one of those that the kernel gives to whoever connects or asks for any port: until the server listens, other
    tests, which run beside these, would be given it.
    """
    highest = int(_RANGE.read_text().split()[0]) - 1 if _RANGE.exists() else 0
    if highest < _LOWEST:
        return _bound(0)
    while True:
        try:
            return _bound(random.SystemRandom().randint(_LOWEST, highest))
        except OSError:
            continue


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])
