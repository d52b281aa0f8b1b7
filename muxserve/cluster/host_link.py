"""The connection between a unit's host in a process of its own and the controller: its messages, and both ends.

ZeroMQ, as everywhere in a fleet: a Unix socket in the unit's directory, and TCP with CURVE where the unit listens for
other machines. The host numbers what happens and keeps it until the controller has heard it; the controller numbers its
commands and repeats them until they are answered, and the host carries each out once. So a connection that breaks loses
nothing and does nothing twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import zmq

from muxserve import wire
from muxserve.cluster.events import BaseEvent, Event, PartId
from muxserve.cluster.supervision import GaveUp
from muxserve.gpu.budget import Needs
from muxserve.net.inbox import Inbox
from muxserve.net.peer import Address, AsyncPeer
from muxserve.net.reader import Reader
from muxserve.net.server import bound_router
from muxserve.net.sockets import tcp_address
from muxserve.spec import UnitSpec
from muxserve.wire.base import Message

log = logging.getLogger(__name__)

# A host that does not answer for this long will not answer any more; most commands take seconds.
ASK_SECONDS = 60.0
# Events kept for a controller that connects late: far more than a unit has before it is up.
_MOST_UNHEARD = 10_000
# Answers kept for a controller that has not heard them.
_MOST_ANSWERS = 256
_LINGER_MS = 1_000

# ---------------------------------------------------------------- messages


class Sized(BaseEvent, frozen=True):
    """The sizes of the unit's pools are known: the unit as it is from now on."""

    unit_spec: UnitSpec


HostEvent = Event | Sized


class HostCommand(msgspec.Struct, frozen=True, tag=True, tag_field="do"):
    """Base of what a host is asked to do. `UnitHandle` says what each means."""


class StartModel(HostCommand, frozen=True):
    """Answered when the model's engines are up."""

    model: str


class StopModel(HostCommand, frozen=True):
    """Answered when they have ended."""

    model: str


class JoinUnit(HostCommand, frozen=True):
    """Serve what `unit_spec` says from now on, among it the new model."""

    model: str
    unit_spec: UnitSpec
    needs: Sequence[Needs]


class StartMigrator(HostCommand, frozen=True):
    """Have a migrator, if there is none."""


class Tell(HostCommand, frozen=True):
    """Pass a message on to the unit scheduler."""

    message: wire.AnyMessage


class ReadState(HostCommand, frozen=True):
    """Answered with the unit scheduler's `state`, when there is one that answers."""


AnyCommand = StartModel | StopModel | JoinUnit | StartMigrator | Tell | ReadState


class Follow(Message):
    """Controller -> host: its greeting. The host says what the controller has not heard yet, and all that follows."""


class Followed(Message):
    """Host -> controller: the answer to the greeting. Numbers are those of this life of the host."""

    life: str


class Said(Message):
    """Host -> controller: an event. Numbers count from 1."""

    number: int
    event: HostEvent


class EventsHeard(Message):
    """Controller -> host: all events up to this number have come."""

    number: int


class AskHost(Message):
    """Controller -> host: a command."""

    number: int
    command: AnyCommand


class Answer(Message):
    """Host -> controller: the command of this number has been carried out, or there was a `problem`, with `part` if
    one of the unit's parts could not be kept alive."""

    number: int = 0
    problem: str = ""
    part: PartId | None = None
    state: dict[str, Any] | None = None

    def check(self, model: str) -> None:
        """Whether the host has done what was asked of it for `model`.

        Raises:
            GaveUp: it has not.
        """
        if self.problem:
            raise GaveUp(self.part or PartId("engine", model), self.problem)


decode = msgspec.msgpack.Decoder(Follow | Followed | Said | EventsHeard | AskHost | Answer).decode


# ---------------------------------------------------------------- the two ends

# What a host does with a command; it returns the unit's state if that was asked for.
CarryOut = Callable[[AnyCommand], Awaitable[dict[str, Any] | None]]


class HostEnd:
    """The host's end, made inside a running event loop.

    Raises:
        NetworkError: the unit's TCP address cannot be listened on.
        zmq.ZMQError: its Unix socket cannot be.
    """

    def __init__(self, unit_spec: UnitSpec) -> None:
        self._do: asyncio.Future[CarryOut] = asyncio.get_running_loop().create_future()
        self._life = uuid.uuid4().hex
        self._controller = b""
        self._said = 0
        self._unheard: deque[Said] = deque(maxlen=_MOST_UNHEARD)
        self._all_heard = asyncio.Event()
        # By number, in the order in which they came; None: still being carried out.
        self._answers: dict[int, Answer | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        listen, keys = unit_spec.listen, unit_spec.keys
        tcp = (listen.host, listen.host_port, keys) if listen is not None and keys is not None else None
        try:
            self._router = bound_router(self._context, unit_spec.host_address, tcp)
        except Exception:
            self._context.term()
            raise
        self._inbox: Inbox[Any] = Inbox(log, decode)
        self._reader = Reader(self._router, self._take, self._inbox, "the controller")

    def obey(self, do: CarryOut) -> None:
        """Have `do` carry out commands, those that have come already as well."""
        self._do.set_result(do)

    def say(self, event: HostEvent) -> None:
        """Have the controller hear of an event, now or when it connects."""
        self._said += 1
        self._all_heard.clear()
        self._unheard.append(Said(self._said, event))
        self._send(self._unheard[-1])

    async def until_heard(self, seconds: float) -> None:
        """Until the controller has heard everything, but no longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._unheard:
                    await self._all_heard.wait()

    async def close(self) -> None:
        """Give up commands under way, and close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reader.close()
        self._router.close(linger=_LINGER_MS)
        self._context.term()

    def _take(self, frames: list[bytes]) -> None:
        match self._inbox.read(frames[-1], "the controller"):
            case Follow():
                self._controller = frames[0]
                for message in (Followed(self._life), *self._unheard):
                    self._send(message)
            case EventsHeard(number):
                while self._unheard and self._unheard[0].number <= number:
                    self._unheard.popleft()
                if not self._unheard:
                    self._all_heard.set()
            case AskHost(number, command):
                self._asked(number, command)

    def _asked(self, number: int, command: AnyCommand) -> None:
        if number in self._answers:
            if answer := self._answers[number]:
                self._send(answer)
            return
        self._answers[number] = None
        done = [each for each, answer in self._answers.items() if answer is not None]
        for each in done[:-_MOST_ANSWERS]:
            del self._answers[each]
        # Beside: a model takes its time to start, and others need not wait for it.
        task = asyncio.create_task(self._carry_out(number, command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, number: int, command: AnyCommand) -> None:
        try:
            answer = Answer(number, state=await (await self._do)(command))
        except GaveUp as failure:
            answer = Answer(number, str(failure), failure.part)
        except Exception as error:
            # Somebody waits for the answer.
            log.exception("a command failed: %s", type(command).__name__)
            answer = Answer(number, f"{type(error).__name__}: {error}")
        self._answers[number] = answer
        self._send(answer)

    def _send(self, message: Message) -> None:
        # A controller that is not there is sent it when it has connected again.
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart((self._controller, wire.encode(message)), zmq.NOBLOCK)
        self._reader.look()


class ControllerEnd:
    """The controller's end, for one life of a host. Made inside a running event loop.

    Args:
        unit_spec: says where the host listens.
        on_event: called with each event, once and in order.
    """

    def __init__(self, unit_spec: UnitSpec, on_event: Callable[[HostEvent], None]) -> None:
        self._on_event = on_event
        self._life = ""
        self._heard = 0
        self._asked: dict[int, tuple[AskHost, asyncio.Future[Answer]]] = {}
        self._number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        listen = unit_spec.listen
        address = unit_spec.host_address if listen is None else tcp_address(listen.host, listen.host_port)
        self._peer = AsyncPeer(
            self._context,
            Address(f"the host of {unit_spec.unit}", address, "controller", unit_spec.keys),
            on_message=self._take,
            on_up=self._followed,
            hello=Follow(),
            answer=Followed,
            decode=decode,
        )

    async def ask(self, command: AnyCommand, seconds: float = ASK_SECONDS) -> Answer:
        """Have the host do something within `seconds`; returns its answer, with a `problem` if it came to nothing."""
        self._number += 1
        ask = AskHost(self._number, command)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[ask.number] = ask, future
        if self._peer.up:
            self._peer.send(ask)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return Answer(problem=f"its host has not answered within {seconds:g} s")
        finally:
            del self._asked[ask.number]

    def give_up(self, why: str) -> None:
        """Nobody will answer what has been asked so far."""
        for _, future in self._asked.values():
            if not future.done():
                future.set_result(Answer(problem=why))

    def close(self, why: str) -> None:
        """Close the connection; what was asked is answered with the problem `why`."""
        self.give_up(why)
        self._peer.close()
        self._context.term()

    def _followed(self, answer: object) -> None:
        assert isinstance(answer, Followed)
        if self._life not in ("", answer.life):
            # The next life has the address of the last one, and is for whoever follows it.
            self._peer.close()
            return
        self._life = answer.life
        for ask, _ in self._asked.values():
            self._peer.send(ask)

    def _take(self, message: object) -> None:
        match message:
            case Said(number, event):
                if number > self._heard:
                    self._heard = number
                    self._on_event(event)
                self._peer.send(EventsHeard(number))
            case Answer(number):
                _, future = self._asked.get(number, (None, None))
                if future is not None and not future.done():
                    future.set_result(message)
