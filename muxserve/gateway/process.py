"""Builds a gateway and runs it until it has drained."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics

from muxserve.deployment import FleetDeployment
from muxserve.engine.vllm_pin import VLLM_VERSION
from muxserve.gateway import seam, vllm_seam
from muxserve.gateway.admission import Keys
from muxserve.gateway.app import Endpoint
from muxserve.gateway.broker import Broker
from muxserve.gateway.engine_client import UnitEngineClient
from muxserve.gateway.gpus import GpuStatus
from muxserve.gateway.listener import bind
from muxserve.gateway.measure import Measures
from muxserve.gateway.pages import Pages
from muxserve.gateway.status import Reports, UnitCollector, UnitStatus
from muxserve.gateway.turnstile import Turnstile
from muxserve.gateway.vllm_metrics import Merged

log = logging.getLogger(__name__)

check = vllm_seam.check

# Of the global registry only what is about the process; the rest carries a model's name that may be another's.
GLOBAL_METRICS = ("process_", "python_", "http_")
# More choices per prompt than anyone asks for in earnest; vLLM's own limit would let one request make 16,384.
MOST_CHOICES = "128"
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 60
CLOSE_SECONDS = 2.0


def serve(fleet: FleetDeployment, index: int, lifeline_fd: int | None, on_up: Callable[[], None]) -> None:
    """See `muxserve.gateway.main.run`."""
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", MOST_CHOICES)
    ours = logging.getLogger("muxserve")
    ours.setLevel(ours.getEffectiveLevel())  # a library that vLLM's routes import turns the root logger down to errors
    disable_created_metrics()  # a third of all series, and nobody reads them
    listener = bind(fleet.gateway)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner, listener:
        runner.run(_serve(fleet, index, listener, lifeline_fd, on_up))


async def _serve(
    fleet: FleetDeployment, index: int, listener: socket.socket, lifeline_fd: int | None, on_up: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    if lifeline_fd is not None:
        loop.add_reader(lifeline_fd, _end_with, lifeline_fd)
    gateway = Gateway(fleet, index)
    try:
        endpoint = await gateway.build()
        # What was built stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        server = Server(endpoint, on_up)
        drain = Drain(gateway, endpoint, server, fleet.gateway.drain_seconds)
        loop.add_signal_handler(signal.SIGTERM, drain.begin)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, drain.begin)
        await server.serve(sockets=[listener])
    finally:
        gateway.close()


class Gateway:
    """Everything that one gateway process holds."""

    def __init__(self, fleet: FleetDeployment, index: int) -> None:
        self.index = index
        self.deployment = deployment = fleet.units[0].deployment
        self.registry = CollectorRegistry()
        self.measures = Measures(deployment.models, self.registry)
        self.broker = Broker(secrets.token_hex(4), deployment.unit_address, deployment.gateway_address, self.measures)
        self.turnstile = Turnstile(deployment.models, self.measures)
        self.unit = UnitStatus(self.broker)
        self.gpus = GpuStatus(deployment)
        self.reports = Reports(deployment, self.broker, self.unit, self.turnstile, self.gpus)

    async def build(self) -> Endpoint:
        """Open the sockets to the unit and build the models' front ends and the endpoint over them."""
        self.broker.start()
        seam.register_architectures(self.deployment.models)
        # All of vLLM's front ends before all of its applications: the former clear global metrics of the latter.
        front_ends = [
            seam.make_llm(model, UnitEngineClient(model.name, self.broker)) for model in self.deployment.models
        ]
        apps: dict[str, Any] = {}
        cards: dict[str, object] = {}
        for front_end in front_ends:
            name = front_end.model.name
            apps[name] = await seam.make_app(front_end)
            cards[name] = await seam.model_card(front_end)
            seam.on_failure(front_end, _front_end_failed)
            log.info("front end of %s is ready", name)
        seam.settle()
        metrics = Merged(
            [
                self.registry,
                UnitCollector(self.deployment, self.unit, self.turnstile),
                self.gpus,
                *(front_end.registry for front_end in front_ends),
                Merged([REGISTRY], GLOBAL_METRICS),
            ]
        )
        pages = Pages(self.unit, self.gpus, self.reports, metrics, VLLM_VERSION)
        return Endpoint(
            apps=apps,
            cards=cards,
            keys=Keys(self.deployment.gateway.api_keys),
            turnstile=self.turnstile,
            measures=self.measures,
            pages=pages.table(),
            open_pages=pages.OPEN,
            max_body_bytes=self.deployment.gateway.max_body_bytes,
        )

    def close(self) -> None:
        """Cancel what is left at the unit, and close the sockets."""
        self.broker.close()


class Server(uvicorn.Server):
    """uvicorn that leaves signals to us and says when it listens."""

    def __init__(self, endpoint: Endpoint, on_up: Callable[[], None]) -> None:
        application: Any = endpoint
        super().__init__(
            uvicorn.Config(
                application,
                access_log=False,
                log_level="warning",
                lifespan="off",
                ws="none",
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._on_up = on_up

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_up()


class Drain:
    """Ends the server: no new requests, running ones get time to finish. A second call ends it at once."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint, server: Server, seconds: float) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self._server = server
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to drain."""
        if self._task is None:
            self._endpoint.draining = self._gateway.reports.draining = True
            log.info("draining: %d requests in service or waiting", self._gateway.turnstile.occupied)
            self._task = asyncio.ensure_future(self._drain())
        else:
            self._end(at_once=True)

    async def _drain(self) -> None:
        empty = self._gateway.turnstile.empty
        try:
            await asyncio.wait_for(empty(), self._seconds)
        except TimeoutError:
            turnstile, broker = self._gateway.turnstile, self._gateway.broker
            log.warning("%d requests did not finish within %.0f s", turnstile.occupied, self._seconds)
            self._endpoint.ended = True
            broker.end_all("the server shut down before the request was finished")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(empty(), CLOSE_SECONDS)
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


def _front_end_failed(model: str, error: BaseException | None) -> None:
    # Its output handler is vLLM's own loop and cannot be started again. A new gateway can.
    log.critical("the front end of %s stopped: %r; the gateway ends", model, error)
    logging.shutdown()
    os._exit(1)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
