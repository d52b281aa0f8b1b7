"""The memory manager's protocol byte by byte, for clients that misbehave."""

from __future__ import annotations

import os
import socket
import struct

HEADER = struct.Struct("<IHHQIIII")
MAGIC, VERSION = 0x4D4D584D, 2
HELLO, STEP, POST, HAND_OFF, ADOPT, DROP, STATISTICS, ADD_MODEL = 1, 2, 3, 4, 5, 6, 8, 10
OK, INVALID, EXHAUSTED = 0, 15, 16


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

    def send(self, operation: int, payload: bytes = b"") -> None:
        header = HEADER.pack(MAGIC, VERSION, operation, self.generation, 1, len(payload), 0, 0)
        self.socket.sendall(header + payload)

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

    def reserve(self, count: int) -> int:
        """Reserves blocks of model 0; returns the status."""
        self.send(STEP, struct.pack("<6I", 0, 0, count, 0, 0, 0))
        return self.receive()[0]

    def hand_off(self, key: bytes, *blocks: int, seconds: int = 1000) -> int:
        """Shares blocks of model 0 under `key`; returns the status."""
        head = struct.pack("<IqII", 0, seconds * 10**9, len(blocks), 0)
        self.send(HAND_OFF, head + text(key) + struct.pack(f"<{len(blocks)}i", *blocks))
        return self.receive()[0]
