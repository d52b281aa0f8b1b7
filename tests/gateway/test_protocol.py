"""Clients that send little, slowly, or too much, and those of a gateway that leaves: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from muxserve.gateway.http import body, protocol
from muxserve.gateway.http.errors import App, Receive, Scope, Send, respond
from muxserve.gateway.process import BACKLOG, OTHER_FILES, GatewayServer, bind, loop_factory, room
from muxserve.spec import FleetSpec, GatewaySpec, HttpSpec
from tests.gateway.endpoint import endpoint_of
from tests.gateway.unit_specs import model
from tests.support.patience import PATIENCE

ASK = b'{"model": "m"}'


class Serving:
    """A server of one model in a thread. `app` is the model's application."""

    def __init__(self, app: App, queue: int = 8, files: int = 20_000) -> None:
        models = [model("m", max_concurrency=1, max_queue=queue)]
        fleet = FleetSpec("", GatewaySpec("127.0.0.1", 0, http=HttpSpec(max_body_bytes=2 << 20)), models, [])
        self.registry = CollectorRegistry()
        self.endpoint = endpoint_of(fleet, app, registry=self.registry)
        self.limiter = self.endpoint._limiter
        self.listener = bind(GatewaySpec("127.0.0.1", 0, count=2))
        self.port = int(self.listener.getsockname()[1])
        up = threading.Event()
        self.server = GatewayServer(self.endpoint, up.set, room(files), GatewaySpec("127.0.0.1", 0))
        self.loop: asyncio.AbstractEventLoop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert up.wait(PATIENCE)

    def _run(self) -> None:
        self.loop.close()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve(sockets=[self.listener]))

    def do(self, what: Callable[[], Any]) -> Any:
        """The result of `what` in the server's thread; of its coroutine, if it is one."""
        done: Future[Any] = Future()

        async def run() -> None:
            result = what()
            done.set_result(await result if asyncio.iscoroutine(result) else result)

        asyncio.run_coroutine_threadsafe(run(), self.loop)
        return done.result(PATIENCE)

    def close(self) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        self.listener.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def rejected(self, reason: str) -> float:
        return sum(
            self.registry.get_sample_value("muxserve_requests_rejected_total", {"model_name": name, "reason": reason})
            or 0.0
            for name in ("", "m")
        )


@contextmanager
def serving(app: App, **more: Any) -> Iterator[Serving]:
    running = Serving(app, **more)
    try:
        yield running
    finally:
        running.close()


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await respond(send, 200, b"%d" % len(message["body"]))


def post(content: bytes = ASK, path: bytes = b"/v1/completions", length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path, size, content)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    return answer


def one_answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of the next answer."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    (length,) = (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    content = b""
    while len(content) < length:
        content += connection.recv(length - len(content))
    return head, content


def error(answer: bytes) -> dict[str, Any]:
    found = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert isinstance(found, dict)
    return found


# ---------------------------------------------------------------- heads


@pytest.mark.parametrize("sent", [b"P", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "], ids=["byte", "half"])
def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    with serving(fine) as running, running.connect() as client:
        client.sendall(sent)
        answer = rest(client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert "did not come within 0.1 s" in error(answer)["message"]


def test_a_head_that_comes_byte_by_byte_is_not_waited_for_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    with serving(fine) as running, running.connect() as client:
        client.settimeout(0.02)
        answer = b""
        for byte in post() * 1000:
            try:
                client.sendall(bytes([byte]))
                answer += client.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer:
                break
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_says_nothing_ends_like_an_idle_one() -> None:
    with serving(fine) as running:
        running.server.config.timeout_keep_alive = 0.1  # type: ignore[assignment]
        with running.connect() as client:
            assert rest(client) == b""


def test_slow_heads_leave_requests_before_and_after_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may keep a connection, and begin its next request while it is still answered."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    going_on = threading.Event()

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.to_thread(going_on.wait, PATIENCE)
        await fine(scope, receive, send)

    with serving(patient) as running:
        with running.connect() as client:
            client.sendall(post())
            client.sendall(b"POST /v1/comp")
            with running.connect() as slow:
                slow.sendall(b"P")
                assert rest(slow).startswith(b"HTTP/1.1 408 ")  # so that the other one's time is up as well
            going_on.set()
            answer = rest(client)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.count(b"HTTP/1.1") == 1
        with running.connect() as client:
            for _ in range(3):
                client.sendall(post())
                assert one_answer(client)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("what", ["one header", "many headers", "path", "trailers", "one trailer", "chunk extension"])
def test_heads_and_trailers_are_bounded(what: str) -> None:
    begin = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    chunked = begin + b"Transfer-Encoding: chunked\r\n\r\n"
    first, more = {
        "one header": (begin + b"X-A: ", b"a" * 100),
        "many headers": (begin, b"a: b\r\n" * 20),
        "path": (b"POST /", b"a" * 100),
        "trailers": (chunked + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 20),
        "one trailer": (chunked + b"2\r\n{}\r\n0\r\na: ", b"a" * 100),
        "chunk extension": (chunked + b"2;a=", b"a" * 100),
    }[what]
    sent = 0
    with serving(fine) as running, running.connect() as client:
        client.sendall(first)
        # What buffers hold is on its way before the client learns that the connection has ended.
        while sent < 64 << 20:
            try:
                client.sendall(more * 100)
            except ConnectionError:
                break
            sent += len(more) * 100
        assert sent < 64 << 20


def test_a_head_that_is_too_large_is_answered() -> None:
    with serving(fine) as running, running.connect() as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\n" + b"X-A: a\r\n" * 1000 + b"\r\n")
        answer = rest(client)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert "65536 bytes" in error(answer)["message"]
        with running.connect() as other:
            other.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"X-A: a\r\n" * 500 + b"\r\n")
            assert one_answer(other)[0].startswith(b"HTTP/1.1 200 ")


# ---------------------------------------------------------------- bodies


def test_what_nobody_reads_any_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer was there before the body."""
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.1)
    with serving(fine) as running, running.connect() as client:
        client.sendall(post(b"{", b"/nothing", 1000))
        head, _ = one_answer(client)
        assert head.startswith(b"HTTP/1.1 404 ")
        with contextlib.suppress(ConnectionError):  # it has been cut off already
            client.sendall(b" ")  # it goes on to send, but slowly
            assert rest(client) == b""


def test_a_body_that_comes_too_slowly_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "STALL_SECONDS", 0.3)
    with serving(fine) as running, running.connect() as client:
        client.settimeout(0.05)
        client.sendall(post(b"{", length=10_000))
        answer = b""
        while not answer:
            client.sendall(b" ")  # more often than every 0.3 s
            try:
                answer = client.recv(65536)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_bodies_that_wait_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MEMORY_BYTES", 0)
    large = b'{"model": "m", "user": "%s"}' % (b"x" * (2 << 20))[:-100]
    going_on = threading.Event()

    async def patient(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.to_thread(going_on.wait, PATIENCE)
        await fine(scope, receive, send)

    # 32 MiB, of which large ones may take 24.
    with serving(patient, queue=100) as running:
        clients = [running.connect() for _ in range(13)]
        try:
            for client in clients:
                client.sendall(post(large))
            waiting = running.limiter.gates["m"]
            # One is in service, and counts no more.
            running.do(lambda: until(lambda: waiting.inside == 1 and waiting.waiting == 12))
            for claimed in (large, large):
                with running.connect() as late:
                    late.sendall(post(claimed))
                    head, content = one_answer(late)
                    assert head.startswith(b"HTTP/1.1 503 ")
                    assert b"retry-after: 1" in head
                    assert "as many request bodies" in json.loads(content)["error"]["message"]
            assert running.rejected("memory") == 2
            # Small ones have a part to themselves.
            small = running.connect()
            clients.append(small)
            small.sendall(post())
            running.do(lambda: until(lambda: waiting.waiting == 13))
            going_on.set()
            for client in clients:
                assert one_answer(client)[0].startswith(b"HTTP/1.1 200 ")
            assert running.endpoint.bodies.used == 0
        finally:
            for client in clients:
                client.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# ---------------------------------------------------------------- a gateway that leaves


def test_whoever_has_connected_when_a_gateway_leaves_is_served_by_it() -> None:
    with serving(fine) as running, running.connect() as kept:
        kept.sendall(post())
        assert b"connection: close" not in one_answer(kept)[0].lower()
        # In the kernel's queue when it is told to leave, unknown to the event loop.
        waiting: list[socket.socket] = []

        async def leave() -> None:
            waiting.extend(running.connect() for _ in range(5))
            running.endpoint.draining = True
            await running.server.stop_listening()

        running.do(leave)
        with pytest.raises(ConnectionRefusedError):
            running.connect()
        for client in [kept, *waiting]:
            with client:
                client.sendall(post())
                answer = rest(client)
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("files", [16, 400, 1024, 4096, 20_000, 1 << 20])
def test_all_that_may_wait_find_a_descriptor(files: int) -> None:
    connections, backlog = room(files)
    assert connections >= files // 2
    assert 1 <= backlog <= BACKLOG
    assert connections + backlog < files
    assert files < 1024 or files - connections - backlog >= OTHER_FILES


def test_more_connections_than_there_is_room_for_are_answered() -> None:
    """Where they take the last descriptor, the event loop closes what it accepts without a word."""
    most = room(40).connections
    with serving(fine, files=40) as running, ExitStack() as open_ones:
        clients = [open_ones.enter_context(running.connect()) for _ in range(most + 5)]
        connected = running.server.server_state.connections
        running.do(lambda: until(lambda: len(connected) == len(clients)))
        for client in clients[:5]:
            client.sendall(post())
            refused = rest(client)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in refused
            assert error(refused)["code"] == 503
        assert running.rejected("connections") == 5
        running.do(lambda: until(lambda: len(connected) == most))
        clients[-1].sendall(post())
        assert one_answer(clients[-1])[0].startswith(b"HTTP/1.1 200 ")
