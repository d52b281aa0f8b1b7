"""The gateway's sockets, against a plain ROUTER and PUSH."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from muxserve.gateway.routing.fleet_links import TokensSocket
from muxserve.net import sockets
from muxserve.net.peer import Address, AsyncPeer
from muxserve.wire import Cancel, GatewayHello, Lost, Message, Placed, TokensHeader, UnitHello, Unplace, decode, encode
from tests.support.patience import PATIENCE


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gw-") as path:
        yield Path(path)


class Unit:
    """A unit scheduler's socket."""

    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        # As the real one: a connection that is being closed may be made once more before it is, and has the same name.
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        sockets.bind_local(self.router, address)

    async def receive(self) -> tuple[bytes, Message]:
        peer, frame = await asyncio.wait_for(self.router.recv_multipart(), PATIENCE)
        return peer, decode(frame)

    async def send(self, peer: bytes, *frames: bytes) -> None:
        await self.router.send_multipart([peer, *frames])

    async def greet(self, epoch: str) -> bytes:
        """Expect and answer a greeting; returns who it was."""
        peer, hello = await self.receive()
        assert isinstance(hello, GatewayHello)
        await self.send(peer, encode(UnitHello(epoch)))
        return peer

    def die(self) -> None:
        self.router.close()
        self.context.term()


class Linked:
    """A link, and a socket for tokens, that write down what they are told."""

    def __init__(self, directory: Path) -> None:
        self.address = f"ipc://{directory}/unit"
        self.tokens_address = f"ipc://{directory}/tokens"
        self.told: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.tokens = TokensSocket(
            self.context,
            "me",
            self.tokens_address,
            lambda header, frames: self.told.put_nowait(("tokens", (header.entries, frames))),
        )

    def start(self) -> None:
        self.tokens.start()
        self.link = AsyncPeer(
            self.context,
            Address("u0", self.address, "gateway/me"),
            hello=GatewayHello("me", self.tokens_address, 3),
            answer=UnitHello,
            on_up=self._up,
            on_down=lambda: self.told.put_nowait(("down", None)),
            on_message=self._message,
        )

    def close(self) -> None:
        self.link.close()
        self.tokens.close()
        self.context.term()

    def _up(self, answer: Message | None) -> None:
        assert isinstance(answer, UnitHello)
        self.told.put_nowait(("up", answer.epoch))

    def _message(self, message: Message) -> None:
        if isinstance(message, Lost) and message.reason == "trouble":
            raise ValueError("a handler that fails")
        self.told.put_nowait(("message", message))

    async def next(self) -> tuple[str, Any]:
        return await asyncio.wait_for(self.told.get(), PATIENCE)


@pytest.fixture
async def linked(directory: Path) -> AsyncIterator[Linked]:
    linked = Linked(directory)
    linked.start()
    try:
        yield linked
    finally:
        linked.close()


async def test_it_greets_and_talks(linked: Linked) -> None:
    unit = Unit(linked.address)
    try:
        peer = await unit.greet("first")
        assert peer == b"gateway/me"
        assert await linked.next() == ("up", "first")
        linked.link.send(Cancel(["a"]))
        assert (await unit.receive())[1] == Cancel(["a"])
        await unit.send(peer, encode(Lost(["b"], [0], "died")))
        assert await linked.next() == ("message", Lost(["b"], [0], "died"))
    finally:
        unit.die()


async def test_nonsense_and_failing_handlers_stop_nothing(linked: Linked) -> None:
    unit = Unit(linked.address)
    try:
        peer = await unit.greet("first")
        assert await linked.next() == ("up", "first")
        await unit.send(peer, b"nonsense")
        await unit.send(peer, b"")
        await unit.send(peer, encode(Lost([], [], "trouble")))
        await unit.send(peer, encode(Lost(["b"], [0], "died")))
        assert await linked.next() == ("message", Lost(["b"], [0], "died"))
    finally:
        unit.die()


async def test_what_was_meant_for_a_dead_unit_never_reaches_the_next(linked: Linked) -> None:
    unit = Unit(linked.address)
    await unit.greet("first")
    assert await linked.next() == ("up", "first")
    unit.die()
    linked.link.send(Cancel(["into the void"]))  # it has not noticed yet
    assert await linked.next() == ("down", None)
    assert not linked.link.up
    linked.link.send(Cancel(["nor this"]))
    unit = Unit(linked.address)
    try:
        await unit.greet("second")
        assert await linked.next() == ("up", "second")
        linked.link.send(Cancel(["but this"]))
        assert (await unit.receive())[1] == Cancel(["but this"])
    finally:
        unit.die()


async def test_a_unit_that_does_not_know_us_is_greeted_again(linked: Linked) -> None:
    unit = Unit(linked.address)
    try:
        peer = await unit.greet("first")
        assert await linked.next() == ("up", "first")
        # As a new one does that is sent something by a gateway which has not noticed yet.
        await unit.send(peer, encode(UnitHello("second")))
        await unit.greet("second")
        assert await linked.next() == ("up", "second")
    finally:
        unit.die()


async def test_the_global_scheduler_comes_and_goes(directory: Path) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    address = f"ipc://{directory}/scheduler"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = AsyncPeer(
        context,
        Address("the global scheduler", address, "gateway/me"),
        on_up=lambda _: told.put_nowait("up"),
        on_down=lambda: told.put_nowait("down"),
        on_message=lambda message: told.put_nowait(type(message).__name__),
    )
    try:
        for _ in range(3):
            scheduler = Unit(address)
            assert await asyncio.wait_for(told.get(), PATIENCE) == "up"
            link.send(Unplace(["r"]))
            peer, message = await scheduler.receive()
            assert (peer, message) == (b"gateway/me", Unplace(["r"]))
            await scheduler.send(peer, encode(Placed("r", "u0")))
            assert await asyncio.wait_for(told.get(), PATIENCE) == "Placed"
            scheduler.die()
            assert await asyncio.wait_for(told.get(), PATIENCE) == "down"
    finally:
        link.close()
        context.term()


async def test_many_deaths(linked: Linked) -> None:
    for n in range(10):
        unit = Unit(linked.address)
        await unit.greet(str(n))
        assert await linked.next() == ("up", str(n))
        unit.die()
        assert await linked.next() == ("down", None)


async def test_tokens_of_ones_own_only_and_bursts_in_order(linked: Linked) -> None:
    context = zmq.asyncio.Context()
    push = context.socket(zmq.PUSH)
    sockets.connect(push, linked.tokens_address)
    try:
        await push.send_multipart([b"nonsense", b"x"])
        await push.send_multipart([encode(Cancel(["no tokens"]))])
        await push.send_multipart([encode(TokensHeader("another", "m", 0, [("r", 1, 0)])), b"not mine"])
        for n in range(500):
            await push.send_multipart([encode(TokensHeader("me", "m", 0, [("r", 1, n)])), b"batch", b"aux"])
        for n in range(500):
            assert await linked.next() == ("tokens", ([("r", 1, n)], [b"batch", b"aux"]))
    finally:
        push.close(linger=0)
        context.term()


async def test_a_socket_file_left_behind_is_replaced(directory: Path) -> None:
    (directory / "tokens").write_text("stale")
    linked = Linked(directory)
    linked.start()
    linked.close()
