"""What a gateway and its grammar compiler tell each other: msgpack, each message behind its length."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from muxserve.spec import ModelSpec

_LENGTH = struct.Struct("!I")

Outcome = Literal["accepted", "refused", "slow", "failed"]


class Constraints(msgspec.Struct, frozen=True):
    """What a request restricts its answer to: a grammar, and the rest that concerns its first token."""

    # The fields of a structured output that are set.
    structured: dict[str, Any]
    # Token ids: the only ones, if not None; those that are excluded; those that end the answer.
    allowed: list[int] | None = None
    excluded: list[int] = []
    stops: list[int] = []
    # Fewer tokens than this and it cannot end.
    min_tokens: int = 0


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Compile a grammar for `model`, within so much CPU time and memory."""

    job: int
    model: ModelSpec
    constraints: Constraints
    cpu_seconds: float
    memory_bytes: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Nobody wants that job any more."""

    job: int


class CompileResult(msgspec.Struct, frozen=True):
    """How a job ended.

    `refused`: the grammar is no good, or takes too much memory; `slow`: it took more than its CPU time; `failed`: the
    compiler cannot do it, whatever the grammar. `spent`: the compiler has taken much memory, and another one is to take
    its place.
    """

    job: int
    outcome: Outcome
    # Why not, for the client.
    reason: str = ""
    # Fields of the structured output that engines are to be given instead.
    changes: dict[str, Any] = {}
    spent: bool = False


Command = Compile | Drop
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_results = msgspec.msgpack.Decoder(CompileResult)


def frame(message: Command | CompileResult) -> bytes:
    """`message` as it is sent."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def command(body: bytes) -> Command:
    """What the gateway said."""
    return _commands.decode(body)


def result(body: bytes) -> CompileResult:
    """What the compiler said."""
    return _results.decode(body)


class Frames:
    """Cuts a stream of bytes into the messages that it is made of."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with `data`."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body
