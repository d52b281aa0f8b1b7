"""What who loads a model's weights, who keeps them and an engine say to each other: one question, one answer, msgpack.

Weights are told as allocations (what maps a piece of GPU memory) and tensors (places in them). File descriptors of
exported memory follow their message, in the order of the allocations.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

_LENGTH = struct.Struct("<Q")
_MOST = 256 << 20
# The kernel takes 253 in one message.
_AT_ONCE = 128


class Allocation(msgspec.Struct, frozen=True):
    """A piece of memory of `size` bytes.

    `handle` is a CUDA IPC handle of 64 bytes (cuda); the text that tells exported memory from any other, which comes
    with a file descriptor (vmm); or the bytes themselves of what lies on a CPU (bytes).
    """

    kind: Literal["cuda", "vmm", "bytes"]
    handle: bytes
    size: int


class HeldTensor(msgspec.Struct, frozen=True):
    """One tensor: where it lies (`offset` in bytes), and how (`stride` in elements).

    A `param` or a `buffer` has its name in the model; `state` is what a quantisation method has made beside them, named
    by its module and, after a colon, where it hangs there.
    """

    name: str
    kind: Literal["param", "buffer", "state"]
    dtype: str
    shape: list[int]
    stride: list[int]
    allocation: int
    offset: int


class Weights(msgspec.Struct, frozen=True, tag=True):
    """All of a model on one GPU. `aliases` are further names of tensors, `scalars` numbers that a quantisation method
    has read off the weights, named as `state`."""

    gpu: str
    allocations: list[Allocation]
    tensors: list[HeldTensor]
    aliases: dict[str, str]
    scalars: dict[str, float] = {}

    @property
    def descriptors(self) -> int:
        """How many file descriptors belong to them."""
        return sum(allocation.kind == "vmm" for allocation in self.allocations)


class Keep(msgspec.Struct, frozen=True, tag=True):
    """From who has loaded: keep these for engines with this fingerprint. `copied`: behind the descriptors of exported
    memory follow as many of files in the host's memory, with the same bytes."""

    fingerprint: dict[str, str]
    weights: Weights
    copied: bool = False


class AskCopy(msgspec.Struct, frozen=True, tag=True):
    """From who copies weights back to the GPU: what is kept of them in the host's memory."""


class Copied(msgspec.Struct, frozen=True, tag=True):
    """The answer: `weights` as they were, whose pieces of exported memory are gone. A file for each of them follows."""

    fingerprint: dict[str, str]
    weights: Weights


class Ask(msgspec.Struct, frozen=True, tag=True):
    """From an engine: whose weights, by everything that makes them fit."""

    fingerprint: dict[str, str]


class WeightsLost(msgspec.Struct, frozen=True, tag=True):
    """From an engine: the memory cannot be mapped any more, and why."""

    reason: str


class WeightsTaken(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Keep` and `WeightsLost`."""


class WeightsRefused(msgspec.Struct, frozen=True, tag=True):
    """The answer to an engine that wants others than these."""

    error: str


Message: TypeAlias = Ask | AskCopy | Copied | Keep | WeightsLost | WeightsTaken | Weights | WeightsRefused

_decoder = msgspec.msgpack.Decoder(Message)


def send(sock: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message, and the descriptors that belong to it."""
    payload = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(payload)) + payload)
    for start in range(0, len(descriptors), _AT_ONCE):
        socket.send_fds(sock, [b"d"], descriptors[start : start + _AT_ONCE])


def receive(sock: socket.socket) -> Message:
    """The next message. Descriptors that belong to it are still to be received.

    Raises:
        ConnectionError: the other side is gone.
        ValueError: what came is no message of this protocol.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > _MOST:
        raise ValueError(f"a message of {length} bytes is announced; at most {_MOST} are taken")
    message: Message = _decoder.decode(_exactly(sock, length))
    return message


def receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    """The descriptors that belong to the message before; they are the caller's.

    Raises:
        ConnectionError: the other side is gone, or sent others than it had announced.
    """
    found: list[int] = []
    while len(found) < count:
        data, fds, _, _ = socket.recv_fds(sock, 1, _AT_ONCE, socket.MSG_CMSG_CLOEXEC)
        found += fds
        if not data or not fds:
            break
    if len(found) != count:
        close_all(found)
        raise ConnectionError(f"{len(found)} of {count} descriptors came")
    return found


def close_all(descriptors: Sequence[int]) -> None:
    """Close them."""
    for fd in descriptors:
        os.close(fd)


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


def fetch(path: str, fingerprint: dict[str, str], seconds: float) -> tuple[Weights, list[int]]:
    """Ask who listens at `path`, waiting at most `seconds` for it to come up; with the descriptors of the weights.

    Raises:
        TimeoutError: it did not come up.
        RuntimeError: it has other weights; the message says what differs.
    """
    end = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(path)
                send(sock, Ask(fingerprint))
                answer = receive(sock)
                if isinstance(answer, Weights):
                    return answer, receive_descriptors(sock, answer.descriptors)
            except (ConnectionError, FileNotFoundError) as error:
                if time.monotonic() >= end:
                    raise TimeoutError(
                        f"nobody handed weights out at {path} within {seconds:.0f} s ({error}); see the log of the "
                        "process that loads them"
                    ) from error
                time.sleep(0.05)  # the socket appears when the holder has loaded and measured
                continue
        raise RuntimeError(answer.error if isinstance(answer, WeightsRefused) else f"unexpected answer {answer!r}")


def fetch_copy(path: str) -> tuple[Copied, list[int]]:
    """What is kept in the host's memory by who listens at `path`, and its files.

    Raises:
        OSError: nobody is there.
        RuntimeError: there is no copy.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        send(sock, AskCopy())
        answer = receive(sock)
        if isinstance(answer, Copied):
            return answer, receive_descriptors(sock, answer.weights.descriptors)
    raise RuntimeError(answer.error if isinstance(answer, WeightsRefused) else f"unexpected answer {answer!r}")


def say(path: str, message: Keep | WeightsLost, descriptors: list[int] | None = None) -> None:
    """Tell who keeps weights at `path`, and wait until that is done.

    Raises:
        OSError: nobody is there.
        RuntimeError: it does not do that.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        send(sock, message, descriptors or ())
        answer = receive(sock)
    if not isinstance(answer, WeightsTaken):
        raise RuntimeError(f"weights are not kept at {path}: {answer}")
