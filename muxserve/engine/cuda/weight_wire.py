"""What the holder of a model's weights and an engine say to each other: one question, one answer, msgpack.

Weights are told as allocations (a handle that maps a piece of GPU memory) and tensors (places in them).
"""

from __future__ import annotations

import socket
import struct
from typing import Literal, TypeAlias

import msgspec

_LENGTH = struct.Struct("<Q")
_MOST = 256 << 20


class Allocation(msgspec.Struct, frozen=True):
    """A piece of memory: `handle` is a CUDA IPC handle of 64 bytes, or the bytes themselves of what lies on a CPU."""

    kind: Literal["cuda", "bytes"]
    handle: bytes
    size: int


class HeldTensor(msgspec.Struct, frozen=True):
    """One parameter or buffer: where it lies (`offset` in bytes), and how (`stride` in elements)."""

    name: str
    kind: Literal["param", "buffer"]
    dtype: str
    shape: list[int]
    stride: list[int]
    allocation: int
    offset: int


class Weights(msgspec.Struct, frozen=True, tag=True):
    """The answer. `aliases` are further names of tensors that a model ties."""

    gpu: str
    allocations: list[Allocation]
    tensors: list[HeldTensor]
    aliases: dict[str, str]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """The question: whose weights, by everything that makes them fit."""

    fingerprint: dict[str, str]


class WeightsRefused(msgspec.Struct, frozen=True, tag=True):
    """The answer to an engine that wants others than these."""

    error: str


Message: TypeAlias = Ask | Weights | WeightsRefused

_decoder = msgspec.msgpack.Decoder(Message)


def send(sock: socket.socket, message: Message) -> None:
    """Send one message."""
    payload = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(sock: socket.socket) -> Message:
    """The next message.

    Raises:
        ConnectionError: the other side is gone.
        ValueError: what came is no message of this protocol.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > _MOST:
        raise ValueError(f"a message of {length} bytes is announced; at most {_MOST} are taken")
    return _decoder.decode(_exactly(sock, length))


def _exactly(sock: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    done = 0
    while done < size:
        got = sock.recv_into(view[done:])
        if not got:
            raise ConnectionError("the other side has closed the connection")
        done += got
    return bytes(buffer)
