"""Peers of a polled loop, against a plain ROUTER that dies and comes back. Those of an event loop are in
tests/gateway/test_link.py."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from muxserve.net.heartbeat import heartbeat_file
from muxserve.net.peer import Address, Peer
from muxserve.net.process import Signals
from muxserve.net.server import RouterLoop
from muxserve.net.sockets import bind_local
from muxserve.wire import AnyMessage, Cancel, GatewayHello, Message, UnitHello, decode, encode
from tests.support.patience import PATIENCE

HELLO = GatewayHello("me", "ipc:///tokens", 0)


class Ends:
    """A peer with its poller, and the process at the other end."""

    def __init__(self, directory: Path) -> None:
        self.address = f"ipc://{directory}/router"
        self.context: zmq.Context[Any] = zmq.Context()
        self.poller = zmq.Poller()
        self.peers: list[Peer] = []
        self.router: zmq.Socket[Any] | None = None

    def peer(self, **more: Any) -> Peer:
        made = Peer(self.context, self.poller, Address("the other end", self.address, "us"), **more)
        self.peers.append(made)
        return made

    def come_up(self) -> None:
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        # As real ones: a connection that is being closed may be made once more before it is, and has the same name.
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        bind_local(self.router, self.address)

    def die(self) -> None:
        assert self.router is not None
        self.router.close()
        self.router = None

    def hears(self) -> Message:
        assert self.router is not None
        assert self.router.poll(PATIENCE * 1000)
        identity, frame = self.router.recv_multipart()
        assert identity == b"us"
        return decode(frame)

    def says(self, message: Message) -> None:
        assert self.router is not None
        self.router.send_multipart([b"us", encode(message)])

    def turn(self, peer: Peer) -> tuple[list[AnyMessage], bool]:
        """What is heard next, and whether the connection has ended."""
        ready = dict(self.poller.poll(PATIENCE * 1000))
        assert ready, "nothing happens"
        heard = list(peer.messages()) if peer.socket in ready else []
        return heard, peer.monitor in ready and peer.ended()

    def until_ended(self, peer: Peer) -> None:
        while not self.turn(peer)[1]:
            pass

    def until_up(self, peer: Peer) -> list[AnyMessage]:
        heard = []
        while not peer.up:
            heard += self.turn(peer)[0]
        return heard

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        if self.router is not None:
            self.router.close()
        self.context.term()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_each_process_is_greeted_and_hears_nothing_of_what_was_for_another(ends: Ends) -> None:
    peer = ends.peer(hello=HELLO, answer=UnitHello)
    assert not peer.send(Cancel(["nobody has answered"]))
    for life in ("first", "second"):
        ends.come_up()
        assert ends.hears() == HELLO
        assert not peer.up
        ends.says(UnitHello(life))
        assert ends.until_up(peer) == [UnitHello(life)]
        assert peer.send(Cancel([life]))
        assert ends.hears() == Cancel([life])
        ends.die()
        peer.send(Cancel(["into the void"]))  # it has not noticed yet
        ends.until_ended(peer)
        assert not peer.up
        assert not peer.send(Cancel(["nor this"]))


def test_an_answer_that_was_not_asked_for_is_asked_for(ends: Ends) -> None:
    peer = ends.peer(hello=HELLO, answer=UnitHello)
    ends.come_up()
    assert ends.hears() == HELLO
    ends.says(UnitHello("first"))
    ends.until_up(peer)
    ends.says(UnitHello("second"))
    assert ends.turn(peer)[0] == []
    assert ends.hears() == HELLO
    ends.says(UnitHello("second"))
    heard: list[AnyMessage] = []
    while not heard:
        heard += ends.turn(peer)[0]
    assert heard == [UnitHello("second")]


def test_what_is_kept_reaches_the_next_process_which_is_greeted_too(ends: Ends) -> None:
    peer = ends.peer(hello=HELLO, keeps=True)
    assert peer.send(Cancel(["before anybody is there"]))
    ends.come_up()
    assert ends.hears() == Cancel(["before anybody is there"])
    ends.until_up(peer)
    assert ends.hears() == HELLO
    ends.die()
    ends.until_ended(peer)
    assert peer.send(Cancel(["for the next"]))
    ends.come_up()
    assert ends.hears() == Cancel(["for the next"])
    ends.until_up(peer)
    assert ends.hears() == HELLO


def test_a_loop_takes_in_what_there_is_and_says_who_is_gone(tmp_path: Path, ends: Ends) -> None:
    loop = RouterLoop(Signals(()), heartbeat_file(tmp_path, "loop"), ends.address)
    try:
        peer = ends.peer(keeps=True)
        for number in range(3):
            peer.send(Cancel([str(number)]))
        peer.socket.send(b"nonsense")
        peer.socket.send_multipart([b"too", b"many", b"frames"])
        peer.send(Cancel(["last"]))
        heard: list[Message] = []
        while Cancel(["last"]) not in heard:
            assert loop.wait(float("inf")) is not None
            heard += [message for identity, message in loop.messages() if identity == b"us"]
        assert heard == [*(Cancel([str(number)]) for number in range(3)), Cancel(["last"])]
        assert loop.inbox.dropped == {"frame": 1, "frames": 1}
        assert loop.send(b"us", UnitHello("e"))
        assert not loop.send(b"nobody", UnitHello("e"))
    finally:
        loop.close()
        signal.set_wakeup_fd(-1)
