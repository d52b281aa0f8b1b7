"""Addresses and keys: how processes of several machines reach each other.

On one machine they talk over Unix sockets in a directory that only the user may enter. Between machines they talk over
TCP with CURVE: the server proves itself by its public key, and lets in whoever has the fleet's client key.
"""

from __future__ import annotations

import msgspec


class Keys(msgspec.Struct, frozen=True):
    """One fleet's CURVE keys, Z85. Every process of the fleet has all of them, and nobody else has any."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        return f"Keys({self.server_public})"


class Listen(msgspec.Struct, frozen=True):
    """Where a unit listens for other machines: the address under which they reach it, and its ports."""

    host: str
    unit_port: int
    migrator_port: int
    # The port of the unit's host, if that is a process of its own.
    host_port: int = 0
