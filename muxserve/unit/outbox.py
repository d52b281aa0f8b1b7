"""What the unit scheduler sends, and to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxserve.wire import Message


@dataclass(slots=True)
class Outbox:
    """Messages to send, in order, each with the ZeroMQ identity of its receiver."""

    messages: list[tuple[bytes, Message]] = field(default_factory=list)

    def send(self, peer: bytes, message: Message) -> None:
        self.messages.append((peer, message))


def shown(peer: bytes) -> str:
    """A peer's identity for people; identities that ZeroMQ made up are not text."""
    return peer.decode(errors="backslashreplace")
