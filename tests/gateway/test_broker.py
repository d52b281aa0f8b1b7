"""The broker's sockets: units of this machine and of others, and the global scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from muxserve.gateway.routing.broker import Broker
from muxserve.gateway.routing.requests import Failure, Output, Tracked
from muxserve.gateway.status.measure import Measures
from muxserve.net.sockets import NetworkError, bind_local, bind_tcp, connect, new_keys, tcp_address
from muxserve.spec import FleetSpec, GatewaySpec, UnitEntry
from muxserve.wire import GatewayHello, Message, Place, Submit, TokensHeader, UnitHello, decode, encode
from tests.gateway.unit_specs import model, unit_spec
from tests.gateway.world import Out
from tests.support.patience import PATIENCE
from tests.support.requests import asking

KEYS = new_keys()
HOST = "127.0.0.1"


class Front:
    """A model's front end that writes down what it is given."""

    def __init__(self) -> None:
        self.tokens: asyncio.Queue[list[int]] = asyncio.Queue()

    def decode(self, frames: list[bytes]) -> tuple[object, list[Output]]:
        outputs: list[Any] = [Out("", msgspec.msgpack.decode(frames[0]))]
        return None, outputs

    def deliver(self, batch: object, engine: int, outputs: list[Output]) -> None:
        for output in outputs:
            self.tokens.put_nowait(output.new_token_ids)

    def fail(self, front_id: str, message: str, failure: Failure) -> list[str]:
        return [front_id]


class Peers:
    """Sockets of units and their engines, and of the global scheduler."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.sockets: list[zmq.asyncio.Socket] = []

    def socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        socket.linger = 0
        self.sockets.append(socket)
        return socket

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()
        self.context.term()


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gw-") as path:
        yield Path(path)


async def receive(router: zmq.asyncio.Socket) -> tuple[bytes, Message]:
    peer, frame = await asyncio.wait_for(router.recv_multipart(), PATIENCE)
    return peer, decode(frame)


def entry(directory: Path, name: str, address: str = "") -> UnitEntry:
    (directory / name).mkdir(exist_ok=True)
    one = unit_spec(directory / name, [model("m")], unit=name)
    return UnitEntry(one, address or one.unit_address, "", ["m"], remote=bool(address))


def fleet(directory: Path, *units: UnitEntry, **changes: Any) -> FleetSpec:
    return FleetSpec(
        run_dir=str(directory),
        gateway=GatewaySpec(HOST, 1),
        models=[model("m")],
        units=list(units),
        **{"keys": KEYS, "tokens_host": HOST, **changes},
    )


def broker_of(fleet: FleetSpec) -> Broker:
    broker = Broker(fleet, 0, "me", Measures(fleet.models, CollectorRegistry()))
    broker.attach("m", Front())
    return broker


async def test_a_unit_of_another_machine_is_reached_with_keys(directory: Path, peers: Peers) -> None:
    router = peers.socket(zmq.ROUTER)
    port = bind_tcp(router, HOST, 0, KEYS)
    remote, local = entry(directory, "far", tcp_address(HOST, port)), entry(directory, "near")
    near = peers.socket(zmq.ROUTER)
    bind_local(near, local.unit_address)
    front = Front()
    broker = broker_of(fleet(directory, remote, local))
    broker.attach("m", front)
    broker.start()
    try:
        peer, hello = await receive(router)
        assert isinstance(hello, GatewayHello)
        assert hello.reply_to.startswith(f"tcp://{HOST}:")
        _, other = await receive(near)
        assert isinstance(other, GatewayHello)
        assert other.reply_to.startswith("ipc://")
        # Only the far one answers, so that it is the one that is up.
        await router.send_multipart([peer, encode(UnitHello("far1"))])
        broker.submit(Tracked("me-1", "front", asking("m", 3, 9), arrival=0.0))
        _, submit = await receive(router)
        assert isinstance(submit, Submit)
        header = encode(TokensHeader("me", "m", 0, [("me-1", 0, 0)]))
        stranger, engine = peers.socket(zmq.PUSH), peers.socket(zmq.PUSH)
        connect(stranger, hello.reply_to, new_keys())
        connect(engine, hello.reply_to, KEYS)
        with contextlib.suppress(zmq.Again):  # it may have been turned away for good by now
            await stranger.send_multipart([header, msgspec.msgpack.encode([6])], zmq.NOBLOCK)
        await engine.send_multipart([header, msgspec.msgpack.encode([7])])
        assert await asyncio.wait_for(front.tokens.get(), PATIENCE) == [7]
    finally:
        broker.close()


async def test_a_unit_that_moved_to_another_address_is_linked_anew(directory: Path, peers: Peers) -> None:
    first, second = peers.socket(zmq.ROUTER), peers.socket(zmq.ROUTER)
    addresses = [f"ipc://{directory}/{name}.sock" for name in ("first", "second")]
    bind_local(first, addresses[0]), bind_local(second, addresses[1])
    at_first = fleet(directory, msgspec.structs.replace(entry(directory, "u0"), unit_address=addresses[0]))
    broker = broker_of(at_first)
    broker.start()
    try:
        peer, _ = await receive(first)
        await first.send_multipart([peer, encode(UnitHello("one"))])
        broker.submit(Tracked("me-1", "front", asking("m", 3, 9), arrival=0.0))
        assert (await receive(first))[1].request_id == "me-1"  # type: ignore[union-attr]
        at_second = fleet(directory, msgspec.structs.replace(entry(directory, "u0"), unit_address=addresses[1]))
        broker.learn(at_second)
        assert not broker.unit_is_up("u0")
        peer, _ = await receive(second)
        await second.send_multipart([peer, encode(UnitHello("two"))])
        again = (await receive(second))[1]
        assert isinstance(again, Submit)
        assert (again.request_id, again.attempt) == ("me-1", 1)
    finally:
        broker.close()


async def test_of_units_that_cannot_be_linked_the_others_do_not_suffer(directory: Path, peers: Peers) -> None:
    router = peers.socket(zmq.ROUTER)
    near = entry(directory, "near")
    bind_local(router, near.unit_address)
    # Not linked before: with a host of its own that it does not have, and without keys for the network.
    nowhere = entry(directory, "nowhere", "tcp://127.0.0.1:9")
    broker = broker_of(fleet(directory, tokens_host="203.0.113.7"))
    broker.start()
    try:
        with pytest.raises(NetworkError, match=r"203\.0\.113\.7"):
            broker.learn(fleet(directory, nowhere, near, tokens_host="203.0.113.7"))
        with pytest.raises(NetworkError, match="no keys"):
            broker.learn(fleet(directory, nowhere, near, keys=None))
        peer, _ = await receive(router)
        await router.send_multipart([peer, encode(UnitHello("one"))])
        while not broker.unit_is_up("near"):
            await asyncio.sleep(0)
        broker.submit(Tracked("me-1", "front", asking("m", 3, 9), arrival=0.0))
        while isinstance(asked := (await receive(router))[1], GatewayHello):
            pass
        assert isinstance(asked, Submit)
    finally:
        broker.close()


async def test_the_global_scheduler_is_linked_while_it_is_needed(directory: Path, peers: Peers) -> None:
    units = [entry(directory, "u0"), entry(directory, "u1")]
    alone, both = fleet(directory, units[0]), fleet(directory, *units)
    router = peers.socket(zmq.ROUTER)
    bind_local(router, both.scheduler_address)
    broker = broker_of(alone)
    broker.start()
    try:
        assert broker.scheduler_word == "not needed"
        broker.learn(both)
        while broker.scheduler_word == "down":
            await asyncio.sleep(0)
        broker.submit(Tracked("me-1", "front", asking("m", 3, 9), arrival=0.0))
        peer, place = await receive(router)
        assert peer == b"gateway/me"
        assert isinstance(place, Place)
        assert (place.request_id, place.demand) == ("me-1", 4)
        router.close()
        while broker.scheduler_word == "up":
            await asyncio.sleep(0)
        broker.learn(alone)
        assert broker.scheduler_word == "not needed"
    finally:
        broker.close()
