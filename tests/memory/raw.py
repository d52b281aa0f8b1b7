"""The memory manager's protocol byte by byte, for clients that misbehave."""

from __future__ import annotations

import os
import socket
import struct

HEADER = struct.Struct("<IHHQIIII")
MAGIC, VERSION = 0x4D4D584D, 2
HELLO, STEP, HAND_OFF, STATISTICS = 1, 2, 4, 8
OK, MALFORMED, BAD_MAGIC, BAD_VERSION, TOO_LARGE, WRONG_GENERATION, NOT_GREETED = range(7)
TOO_MANY_CLIENTS, UNKNOWN_OPERATION, UNKNOWN_MODEL, NOT_OWNER = range(7, 11)
INVALID, EXHAUSTED = 15, 16


def text(value: bytes) -> bytes:
    """As the protocol has it: the length, and zeros up to a multiple of four."""
    return struct.pack("<I", len(value)) + value + bytes(-len(value) % 4)


class RawClient:
    """Speaks the protocol byte by byte."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.generation = 0

    def send(self, operation: int, payload: bytes = b"", **header: int) -> None:
        fields = {
            "magic": MAGIC,
            "version": VERSION,
            "generation": self.generation,
            "sequence": 1,
            "length": len(payload),
            "status": 0,
            **header,
        }
        self.socket.sendall(
            HEADER.pack(
                fields["magic"],
                fields["version"],
                operation,
                fields["generation"],
                fields["sequence"],
                fields["length"],
                fields["status"],
                0,
            )
            + payload
        )

    def receive(self) -> tuple[int, int, bytes]:
        """Status, generation and payload of one frame."""
        header = self.exactly(HEADER.size)
        _, _, _, generation, _, length, status, _ = HEADER.unpack(header)
        return status, generation, self.exactly(length)

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = self.socket.recv(size - len(data))
            if not got:
                raise EOFError
            data += got
        return data

    def hello(self) -> None:
        self.send(HELLO, struct.pack("<I4sI", 3, b"raw", os.getpid()))
        status, self.generation, _ = self.receive()
        assert status == OK

    def step(self, *release: int, reserve: int = 0, model: int = 0, **header: int) -> int:
        payload = struct.pack(f"<6I{len(release)}i", model, 0, reserve, len(release), 0, 0, *release)
        self.send(STEP, payload, **header)
        return self.receive()[0]

    def hand_off(self, key: bytes, *blocks: int, seconds: int = 1000) -> int:
        """Shares blocks of model 0 under `key`; returns the status."""
        head = struct.pack("<IqII", 0, seconds * 10**9, len(blocks), 0)
        self.send(HAND_OFF, head + text(key) + struct.pack(f"<{len(blocks)}i", *blocks))
        return self.receive()[0]

    def closed_by_the_manager(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True
