"""TCP with CURVE: who gets in, who does not, and who notices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from muxserve.net import sockets
from muxserve.net.sockets import NetworkError
from muxserve.spec import Keys
from tests.support.patience import PATIENCE
from tests.support.ports import free_port

HOST = "127.0.0.1"
PATIENCE_MS = PATIENCE * 1000
# Long enough for a message that would come; only for what must not come.
MOMENT_MS = 300


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        made.linger = 0
        yield made
        made.destroy(linger=0)


def server(context: zmq.Context[Any], keys: Keys) -> tuple[zmq.Socket[bytes], str]:
    router = context.socket(zmq.ROUTER)
    port = sockets.bind_tcp(router, HOST, 0, keys)
    return router, sockets.tcp_address(HOST, port)


def client(context: zmq.Context[Any], name: str) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.identity = name.encode()
    return dealer


def attempt(socket: zmq.Socket[bytes]) -> None:
    """Send something; a socket that has been turned away for good by now would wait for ever to do so."""
    with contextlib.suppress(zmq.Again):
        socket.send(b"let me in", zmq.NOBLOCK)


def watched(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    failed |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    return socket.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_SUCCEEDED)


def event_of(monitor: zmq.Socket[bytes]) -> int:
    assert monitor.poll(PATIENCE_MS), "nothing happened"
    return int(recv_monitor_message(monitor)["event"])


def test_keys_are_new_each_time_and_are_not_shown() -> None:
    one, other = sockets.new_keys(), sockets.new_keys()
    assert len({one.server_public, one.server_secret, one.client_public, one.client_secret, other.server_public}) == 5
    assert one.server_secret not in repr(one)
    assert one.client_secret not in str(one)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Keys) == one


@pytest.mark.parametrize("tcp_first", [False, True])
def test_one_router_serves_unix_sockets_without_keys_and_tcp_with(
    context: zmq.Context[Any], tmp_path: Path, tcp_first: bool
) -> None:
    keys = sockets.new_keys()
    router = context.socket(zmq.ROUTER)
    path = f"ipc://{tmp_path}/s"
    if not tcp_first:
        sockets.bind_local(router, path)
    address = sockets.tcp_address(HOST, sockets.bind_tcp(router, HOST, 0, keys))
    if tcp_first:
        sockets.bind_local(router, path)
    near, far = client(context, "near"), client(context, "far")
    sockets.connect(near, path, keys)
    sockets.connect(far, address, keys)
    near.send(b"1")
    far.send(b"2")
    heard = set()
    for _ in range(2):
        assert router.poll(PATIENCE_MS)
        heard.add(tuple(router.recv_multipart()))
    assert heard == {(b"near", b"1"), (b"far", b"2")}
    for name, socket in ((b"near", near), (b"far", far)):
        router.send_multipart([name, b"hello"])
        assert socket.poll(PATIENCE_MS)
        assert socket.recv() == b"hello"


def test_a_stranger_without_keys_gets_nowhere(context: zmq.Context[Any]) -> None:
    router, address = server(context, sockets.new_keys())
    stranger = client(context, "stranger")
    monitor = watched(stranger)
    stranger.connect(address)
    attempt(stranger)
    assert event_of(monitor) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert not router.poll(MOMENT_MS)


def test_tcp_without_keys_is_not_let_in_behind_a_socket_that_has_them(context: zmq.Context[Any]) -> None:
    """Its Unix sockets need none, TCP always does, even where somebody has bound it plainly."""
    router, _ = server(context, sockets.new_keys())
    port = router.bind_to_random_port(f"tcp://{HOST}")
    stranger = client(context, "stranger")
    stranger.connect(sockets.tcp_address(HOST, port))
    attempt(stranger)
    assert not router.poll(MOMENT_MS)


def test_a_stranger_who_knows_the_public_key_gets_nowhere(context: zmq.Context[Any]) -> None:
    keys = sockets.new_keys()
    router, address = server(context, keys)
    public, secret = (each.decode() for each in zmq.curve_keypair())
    stranger = client(context, "stranger")
    monitor = watched(stranger)
    sockets.connect(stranger, address, Keys(keys.server_public, "", public, secret))
    attempt(stranger)
    assert event_of(monitor) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert not router.poll(MOMENT_MS)


def test_without_an_authenticator_nobody_is_let_in(context: zmq.Context[Any]) -> None:
    """As when its thread has died: closed, not open."""
    keys = sockets.new_keys()
    router = context.socket(zmq.ROUTER)
    with zmq.Context() as elsewhere:
        sockets.Authenticator.of(elsewhere).allow(keys)
        router.curve_server = True
        router.curve_secretkey = keys.server_secret.encode()
        router.zap_domain = keys.server_public.encode()
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        port = router.bind_to_random_port(f"tcp://{HOST}")
        ours = client(context, "ours")
        sockets.connect(ours, sockets.tcp_address(HOST, port), keys)
        attempt(ours)
        assert not router.poll(MOMENT_MS)


def test_a_client_notices_the_wrong_server(context: zmq.Context[Any]) -> None:
    keys = sockets.new_keys()
    router, address = server(context, sockets.new_keys())
    ours = client(context, "ours")
    monitor = watched(ours)
    sockets.connect(ours, address, keys)
    attempt(ours)
    assert event_of(monitor) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert not router.poll(MOMENT_MS)


def test_two_fleets_in_one_process_do_not_let_in_each_others_clients(context: zmq.Context[Any]) -> None:
    keys, others = sockets.new_keys(), sockets.new_keys()
    router, address = server(context, keys)
    server(context, others)
    other = client(context, "other")
    sockets.connect(other, address, Keys(keys.server_public, "", others.client_public, others.client_secret))
    attempt(other)
    assert not router.poll(MOMENT_MS)
    ours = client(context, "ours")
    sockets.connect(ours, address, keys)
    ours.send(b"y")
    assert router.poll(PATIENCE_MS)
    assert router.recv_multipart() == [b"ours", b"y"]


def test_probe_says_what_is_wrong(context: zmq.Context[Any], tmp_path: Path) -> None:
    keys = sockets.new_keys()
    _router, address = server(context, keys)
    sockets.probe(address, keys, PATIENCE)
    with pytest.raises(NetworkError, match="not of this fleet"):
        sockets.probe(address, sockets.new_keys(), PATIENCE)
    public, secret = (each.decode() for each in zmq.curve_keypair())
    with pytest.raises(NetworkError, match="does not let us in"):
        sockets.probe(address, Keys(keys.server_public, "", public, secret), PATIENCE)
    free = free_port()
    with pytest.raises(NetworkError, match=f"nobody listens at tcp://{HOST}:{free}"):
        sockets.probe(sockets.tcp_address(HOST, free), keys, 0.2)


def test_errors_name_the_address_and_what_to_do(context: zmq.Context[Any]) -> None:
    keys = sockets.new_keys()
    _, address = server(context, keys)
    port = int(address.rsplit(":", 1)[1])
    with pytest.raises(NetworkError, match=f"port {port} of {HOST} is taken"):
        sockets.bind_tcp(context.socket(zmq.ROUTER), HOST, port, keys)
    with pytest.raises(NetworkError, match=r"192\.0\.2\.1 is no address of this machine"):
        sockets.bind_tcp(context.socket(zmq.ROUTER), "192.0.2.1", 0, keys)
    with pytest.raises(NetworkError, match="give its address"):
        sockets.bind_tcp(context.socket(zmq.ROUTER), "no such host", 0, keys)
    with pytest.raises(NetworkError, match="no keys"):
        sockets.connect(context.socket(zmq.DEALER), address, None)
    with pytest.raises(NetworkError, match=r"192\.0\.2\.1"):
        sockets.free_port("192.0.2.1")


def test_a_failed_bind_leaves_the_socket_open_for_others(context: zmq.Context[Any], tmp_path: Path) -> None:
    router = context.socket(zmq.ROUTER)
    with pytest.raises(NetworkError):
        sockets.bind_tcp(router, "192.0.2.1", 0, sockets.new_keys())
    sockets.bind_local(router, f"ipc://{tmp_path}/s")
    near = client(context, "near")
    sockets.connect(near, f"ipc://{tmp_path}/s")
    near.send(b"x")
    assert router.poll(PATIENCE_MS)


def test_addresses() -> None:
    assert sockets.tcp_address("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert sockets.tcp_address("node-a", 5) == "tcp://node-a:5"
    assert sockets.tcp_address("fe80::1", 5) == "tcp://[fe80::1]:5"
    assert sockets.machine_id() == sockets.machine_id() != ""


async def test_it_works_with_contexts_for_asyncio() -> None:
    keys = sockets.new_keys()
    context = zmq.asyncio.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    dealer.identity = b"d"
    sockets.connect(dealer, sockets.tcp_address(HOST, sockets.bind_tcp(router, HOST, 0, keys)), keys)
    await dealer.send(b"x")
    assert await asyncio.wait_for(router.recv_multipart(), PATIENCE) == [b"d", b"x"]
    router.close(linger=0)
    dealer.close(linger=0)
    # The authenticator does not keep its context from ending.
    await asyncio.wait_for(asyncio.to_thread(context.term), PATIENCE)
