"""What is to be sent, and to whom."""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.wire import Message


@dataclass(frozen=True, slots=True)
class ToUnit:
    """A unit scheduler, reached over a socket of its own."""

    name: str


@dataclass(frozen=True, slots=True)
class ToClient:
    """A gateway or the controller, by its identity at the global scheduler's ROUTER."""

    identity: bytes


Destination = ToUnit | ToClient


class Outbox:
    """Messages in the order in which they are to be sent. Those for the controller are kept until it has greeted."""

    def __init__(self) -> None:
        self._messages: list[tuple[Destination, Message]] = []
        self._controller: ToClient | None = None
        self._kept: list[Message] = []

    def to_unit(self, unit: str, message: Message) -> None:
        """For the scheduler of that unit."""
        self._messages.append((ToUnit(unit), message))

    def to_client(self, identity: bytes, message: Message) -> None:
        """For a gateway, or whoever has asked."""
        self._messages.append((ToClient(identity), message))

    def to_controller(self, message: Message) -> None:
        """For the controller."""
        if self._controller is None:
            self._kept.append(message)
        else:
            self._messages.append((self._controller, message))

    def controller_is(self, identity: bytes) -> None:
        """The controller has greeted."""
        self._controller = ToClient(identity)
        for message in self._kept:
            self._messages.append((self._controller, message))
        self._kept = []

    def returned(self, identity: bytes, message: Message) -> None:
        """There is nobody of that identity (any more); messages for the controller wait for the next one."""
        if self._controller == ToClient(identity):
            self._controller = None
            self._kept.append(message)

    def take(self) -> list[tuple[Destination, Message]]:
        """Everything, and begin anew."""
        messages, self._messages = self._messages, []
        return messages
