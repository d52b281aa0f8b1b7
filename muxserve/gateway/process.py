"""Builds a gateway and runs it until it has drained."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from prometheus_client import disable_created_metrics

from muxserve.gateway.gateway import Gateway
from muxserve.gateway.grammars import compiler_process
from muxserve.gateway.http.app import GatewayApp, with_cors
from muxserve.gateway.http.peers import bind_beside
from muxserve.gateway.http.protocol import GuardedProtocol
from muxserve.net.heartbeat import Heartbeat, heartbeat_file
from muxserve.spec import FleetSpec, GatewaySpec
from muxserve.vllm import gateway_internals

log = logging.getLogger(__name__)

# A client that takes none of what it was sent for so long, or whose machine has vanished, is gone. Otherwise it would
# keep its place at its model for ever, and as many of them as may be in service would keep everybody else out.
STALL_SECONDS = 60.0
# After so long without a word it is asked whether it is there: one that waits for a long answer has nothing to say.
IDLE_SECONDS = 60
PROBE_SECONDS = 15
BACKLOG = 2048
# Sockets to units and engines, logs, libraries.
OTHER_FILES = 256


def bind(gateway: GatewaySpec, stall_seconds: float = STALL_SECONDS, taking_over: bool = False) -> socket.socket:
    """A socket bound to the endpoint's address, not listening yet: clients are refused until all is ready. A fleet that
    is `taking_over` shares the address with the one that has it; no other fleet can have an address that is in use.

    Its connections inherit how long a client may take nothing, `stall_seconds`.

    Raises:
        OSError: the address is not one of this machine's, or is in use.
    """
    where = f"{gateway.host}:{gateway.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            gateway.host, gateway.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * stall_seconds))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        # Each gateway has a socket of its own there, over which the kernel spreads the connections.
        shared = gateway.count > 1 or taking_over
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        listener.bind(address)
        # So has the fleet that takes over from this one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {where}: {error.strerror or error}") from None
    return listener


def raise_file_limit() -> Room:
    """Let the process have as many connections as the system allows: each takes a file descriptor, and the usual limit
    is less than what may wait and be in service. Returns for how many there is room then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return room(hard)


class Room(NamedTuple):
    """How many connections a process may serve, and how many may wait to be accepted."""

    connections: int
    backlog: int


def room(files: int) -> Room:
    """The room of a process that may open `files` files.

    The event loop accepts all that wait at once, and closes them without a word when there is no descriptor left. So
    descriptors for all that may wait are kept free, and some for everything else; who comes beyond that is answered and
    sent away.
    """
    if files < 0:  # no limit
        return Room(sys.maxsize, BACKLOG)
    free = min(BACKLOG + OTHER_FILES, files // 2)
    return Room(files - free, max(1, free - min(OTHER_FILES, free // 2)))


check = gateway_internals.check

# More choices per prompt than anyone asks for in earnest; vLLM's own limit would let one request make 16,384.
MOST_CHOICES = "128"
KEEP_ALIVE_SECONDS = 60
CLOSE_SECONDS = 2.0
# After its last answer a gateway beside others waits so long for the next request of a client whose stream had begun
# before: it does not know that its connection is to end, and would send the request as that is closed.
QUIET_SECONDS = 1.0
# What a client gets for its handshake that is accepted last.
HANDSHAKE_SECONDS = 5.0
# So often a gateway that takes over looks whether all models have been up.
READY_SECONDS = 0.2
# So often it is looked whether the certificate was renewed.
CERTIFICATE_SECONDS = 2.0


def serve(fleet: FleetSpec, index: int, lifeline_fd: int | None, on_up: Callable[[], None]) -> None:
    """See `muxserve.gateway.main.run`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what may have changed meanwhile is read as soon as that can be
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", MOST_CHOICES)
    if fleet.needs_key and os.environ.pop("VLLM_API_KEY", ""):
        # vLLM's routes would want it beside the fleet's own keys, of which a request can bring one only.
        log.warning("VLLM_API_KEY is not used: the fleet file has its own keys")
    ours = logging.getLogger("muxserve")
    ours.setLevel(ours.getEffectiveLevel())  # a library that vLLM's routes import turns the root logger down to errors
    disable_created_metrics()  # a third of all series, and nobody reads them
    room = raise_file_limit()
    nurseries = [compiler_process.fork_nursery() for _ in range(2)]  # one to spare, while there is one thread
    listener = bind(fleet.gateway, taking_over=fleet.takes_over)
    with asyncio.Runner(loop_factory=loop_factory()) as runner, listener:
        runner.run(_serve(fleet, index, nurseries, listener, room, lifeline_fd, on_up))


async def _serve(
    fleet: FleetSpec,
    index: int,
    nurseries: list[compiler_process.Helper],
    listener: socket.socket,
    room: Room,
    lifeline_fd: int | None,
    on_up: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()
    if lifeline_fd is not None:
        loop.add_reader(lifeline_fd, _end_with, lifeline_fd)
    # What was imported stays, and the collector need not look at it again and again. Models may go.
    gc.collect()
    gc.freeze()
    gateway = Gateway(fleet, index, nurseries)
    loop.add_signal_handler(signal.SIGHUP, gateway.fleet_changed)
    following: asyncio.Task[None] | None = None
    beating = loop.create_task(Heartbeat(heartbeat_file(fleet.run_dir, f"gateway-{index}")).keep())
    if fleet.file.exists():
        gateway.fleet_changed()
    try:
        endpoint = await gateway.build()
        server = GatewayServer(endpoint, on_up, room, fleet.gateway)
        beside = bind_beside(fleet, index)
        drain = ServerDrain(gateway, endpoint, server, fleet.gateway.drain_seconds, fleet.gateway.count > 1)
        loop.add_signal_handler(signal.SIGTERM, drain.begin)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, drain.begin)
        following = loop.create_task(server.follow_certificate())
        while gateway.waits_to_listen and not server.should_exit and not await gateway.is_ready():
            await asyncio.sleep(READY_SECONDS)
        await server.serve_at(listener, beside)
    finally:
        gateway.close()
        beating.cancel()
        if following is not None:
            following.cancel()


class GatewayServer(uvicorn.Server):
    """uvicorn that leaves signals to us, says when it listens, and has room for a number of connections. With TLS, also
    without for the other gateways, and with the certificate that its file has at present."""

    def __init__(self, endpoint: GatewayApp, on_up: Callable[[], None], room: Room, settings: GatewaySpec) -> None:
        self._tls = settings.tls
        application: Any = with_cors(endpoint, settings.http.cors_origins)
        super().__init__(
            uvicorn.Config(
                application,
                access_log=False,
                log_level="warning",
                lifespan="off",
                ws="none",
                server_header=False,
                backlog=room.backlog,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                http=GuardedProtocol,
                ssl_certfile=self._tls.cert if self._tls is not None else None,
                ssl_keyfile=self._tls.key if self._tls is not None else None,
            )
        )
        endpoint.crowded = lambda: len(self.server_state.connections) > room.connections
        self._on_up = on_up
        self._listeners: list[socket.socket] = []
        self._beside: socket.socket | None = None

    async def serve_at(self, listener: socket.socket, beside: socket.socket) -> None:
        """Serve clients at `listener`, and other gateways, which speak no TLS, at `beside`, until it is to end."""
        self._beside = beside
        await self.serve(sockets=[listener])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._listeners = list(sockets or ())
        if self._beside is not None:
            loop = asyncio.get_running_loop()
            self.servers.append(
                await loop.create_server(self._protocol, sock=self._beside, backlog=self.config.backlog)
            )
        if self.started:
            self._on_up()

    async def stop_listening(self) -> None:
        """Take no further connection at the endpoint's address, the first socket; those that are there go on."""
        if not self._listeners:
            return  # it has not begun
        listener, server = self._listeners[0], self.servers[0]
        # The kernel resets what has connected and was not accepted yet when the last descriptor is closed, so another
        # one is kept until the loop's is, and the queue is emptied just before.
        last = listener.dup()
        last.setblocking(False)
        server.close()
        while listener.fileno() >= 0:
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        taken: list[socket.socket] = []
        with last, contextlib.suppress(OSError):
            while True:
                taken.append(last.accept()[0])
        for connection in taken:
            connection.setblocking(False)
        context = self.config.ssl
        patience = HANDSHAKE_SECONDS if context is not None else None
        await asyncio.gather(
            *(
                loop.connect_accepted_socket(self._protocol, each, ssl=context, ssl_handshake_timeout=patience)
                for each in taken
            ),
            return_exceptions=True,  # one may have left, or speak no TLS
        )

    async def follow_certificate(self) -> None:
        """Take certificate and key anew whenever their files have changed, for connections that come later."""
        if self._tls is None:
            return
        files = Path(self._tls.cert), Path(self._tls.key)
        known = _changed(files)
        while True:
            await asyncio.sleep(CERTIFICATE_SECONDS)
            now = _changed(files)
            if now == known:
                continue
            known = now
            try:
                assert self.config.ssl is not None, "uvicorn loads it before it serves"
                self.config.ssl.load_cert_chain(*files)
                log.info("took the certificate anew from %s", files[0])
            except (OSError, ssl.SSLError) as error:
                log.error("the certificate before stays, since %s cannot be used: %s", files[0], error)

    def _protocol(self) -> asyncio.Protocol:
        return GuardedProtocol(self.config, self.server_state, self.lifespan.state)


def _changed(files: Iterable[Path]) -> list[int]:
    """When these files were changed last; 0 of one that is away."""
    return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]


class ServerDrain:
    """Ends the server: no new requests, running ones get time to finish. A second call ends it at once.

    Where other gateways listen at the same address (`beside`, or those of a fleet that has taken over), new connections
    are left to them, and what still comes over one that is there is served, as its last. A gateway that is alone goes
    on to listen, and answers that the server is shutting down.
    """

    def __init__(
        self, gateway: Gateway, endpoint: GatewayApp, server: GatewayServer, seconds: float, beside: bool
    ) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self._server = server
        self._seconds = seconds
        self._beside = beside
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to drain."""
        if self._task is None:
            self._beside |= self._gateway.fleet.handed_over
            self._endpoint.draining = self._gateway.reports.draining = True
            self._endpoint.refusing = not self._beside
            log.info("draining: %d requests in service or waiting", self._gateway.limiter.occupied)
            self._task = asyncio.ensure_future(self._drain())
        else:
            self._end(at_once=True)

    async def _drain(self) -> None:
        if self._beside:
            await self._server.stop_listening()

        async def empty() -> None:
            await self._gateway.limiter.empty()
            await self._endpoint.until_others_answered()

        try:
            async with asyncio.timeout(self._seconds):
                await empty()
                if self._beside:
                    await asyncio.sleep(min(QUIET_SECONDS, self._seconds / 2))
                    await empty()
        except TimeoutError:
            limiter, broker = self._gateway.limiter, self._gateway.broker
            log.warning("%d requests did not finish within %.0f s", limiter.occupied, self._seconds)
            self._endpoint.ended = True
            broker.end_all("the server shut down before the request was finished")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await empty()
        self._end(at_once=False)

    def _end(self, at_once: bool) -> None:
        self._server.should_exit = True
        if at_once:
            self._server.force_exit = True
        else:
            # Connections that are still sending a request must not hold up the end.
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._end, True)


def _end_with(lifeline_fd: int) -> None:
    if not os.read(lifeline_fd, 1):
        log.warning("the controller is gone")
        os._exit(1)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes the loop that a gateway runs in; None for Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
