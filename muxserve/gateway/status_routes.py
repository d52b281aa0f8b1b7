"""The pages about the server itself: `/health`, `/metrics`, `/fleet`, `/version` and others that stock servers have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from fastapi.openapi.docs import get_swagger_ui_html
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from muxserve.gateway.app import POSTS, Page, ServedApp
from muxserve.gateway.errors import Send, respond, respond_json
from muxserve.gateway.peers import FULL, OWN_METRICS, OtherGateways, joined
from muxserve.gateway.reports import Reports
from muxserve.gateway.status import MAX_AGE_SECONDS, FleetStatus
from muxserve.gateway.vllm_metrics import Lean

FULL_METRICS = "/metrics" + FULL


class StatusRoutes:
    """Answers GET requests about the server."""

    # Without a key: what load balancers and scrapers ask.
    OPEN: Final = frozenset(
        {"/health", "/ping", "/metrics", FULL_METRICS, OWN_METRICS, OWN_METRICS + FULL, "/version"}
        | {"/openapi.json", "/docs"}
    )

    def __init__(
        self,
        status: FleetStatus,
        reports: Reports,
        metrics: Collector,
        own_metrics: Collector,
        peers: OtherGateways,
        vllm_version: str,
        models: Mapping[str, ServedApp],
    ) -> None:
        self._status = status
        # Whether all that is there is asked for -> of this gateway.
        self._own_metrics = {False: Lean(own_metrics), True: own_metrics}
        self._peers = peers
        self._reports = reports
        self._metrics = metrics
        self._vllm_version = vllm_version
        self._models = models

    def table(self) -> dict[str, Page]:
        """By path."""
        return {
            "/health": self.health,
            "/metrics": partial(self.metrics, full=False),
            FULL_METRICS: partial(self.metrics, full=True),
            OWN_METRICS: partial(self.own_metrics, full=False),
            OWN_METRICS + FULL: partial(self.own_metrics, full=True),
            "/fleet": self.fleet,
            "/version": self.version,
            "/ping": self.health,
            "/load": self.load,
            "/openapi.json": self.openapi,
            "/docs": self.docs,
        }

    async def health(self, send: Send) -> None:
        """Readiness, and the state of each model."""
        # Whoever waits for the start should not wait for a cache as well.
        await self._status.refresh(MAX_AGE_SECONDS if self._status.was_ready else 0.0)
        status, body = self._reports.health()
        await respond_json(send, body, status)

    async def fleet(self, send: Send) -> None:
        """Everything that is known."""
        await asyncio.gather(self._status.refresh(), self._status.refresh_gpus())
        await respond_json(send, self._reports.fleet())

    async def version(self, send: Send) -> None:
        """What serves here; `version` is vLLM's, as its own endpoint has it."""
        await respond_json(send, {"version": self._vllm_version, "muxserve": version("muxserve")})

    async def load(self, send: Send) -> None:
        """Requests that this gateway has, in service or waiting, under the key that stock servers have for them."""
        await respond_json(send, {"server_load": self._reports.requests})

    async def openapi(self, send: Send) -> None:
        """What vLLM says of the routes that are passed on to it."""
        served = next(iter(self._models.values()), None)
        # Takes tens of milliseconds the first time.
        document: dict[str, Any] = await asyncio.to_thread(served.openapi) if served else {"paths": {}}
        offered: dict[str, object] = document["paths"]
        paths = {path: of for path, of in offered.items() if path in POSTS or path == "/v1/models"}
        about = {"title": "MuxServe", "version": version("muxserve")}
        await respond_json(send, {**document, "info": about, "paths": paths})

    async def docs(self, send: Send) -> None:
        """`/openapi.json` as a page that a browser shows; it loads Swagger UI from the network."""
        page = bytes(get_swagger_ui_html(openapi_url="openapi.json", title="MuxServe").body)
        await respond(send, 200, page, b"text/html; charset=utf-8")

    async def metrics(self, send: Send, full: bool) -> None:
        """Prometheus text: of the fleet, and of all its gateways; `full` with every series that vLLM has."""
        others = asyncio.ensure_future(self._peers.metrics(full)) if self._peers else None
        await asyncio.gather(self._status.refresh(), self._status.refresh_gpus())
        # Some milliseconds of pure Python: streams must not wait for it.
        text = await asyncio.to_thread(generate_latest, self._metrics)
        own = await asyncio.to_thread(generate_latest, self._own_metrics[full])
        if others is not None:
            each = {**await others, self._peers.index: own.decode()}
            own = (await asyncio.to_thread(joined, sorted(each.items()))).encode()
        await respond(send, 200, text + own, CONTENT_TYPE_LATEST.encode())

    async def own_metrics(self, send: Send, full: bool) -> None:
        """Prometheus text of this gateway alone, for the others."""
        text = await asyncio.to_thread(generate_latest, self._own_metrics[full])
        await respond(send, 200, text, CONTENT_TYPE_LATEST.encode())
