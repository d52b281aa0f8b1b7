"""The pages about the server itself: `/health`, `/metrics`, `/fleet`, `/version` and others that stock servers have."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Final

import msgspec
from fastapi.openapi.docs import get_swagger_ui_html
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from muxserve.gateway.app import Page, ServedApp
from muxserve.gateway.changes import described
from muxserve.gateway.collector import PLACES
from muxserve.gateway.errors import Send, respond, respond_json
from muxserve.gateway.peers import FULL, OWN_METRICS, OtherGateways, joined
from muxserve.gateway.reports import Reports
from muxserve.gateway.status import MAX_AGE_SECONDS, FleetStatus
from muxserve.gateway.tenants import USAGE_PATH
from muxserve.gateway.vllm_metrics import JoinedMetrics, Lean, folded

FULL_METRICS = "/metrics" + FULL
# What the gateway answers besides, for GET.
_BESIDE = {
    "/models/{model}/metrics": "Prometheus text of one model, over all gateways",
    "/models/{model}/v1/models": "The model, as /v1/models shows it",
    "/v1/models/{model}": "One entry of /v1/models",
    USAGE_PATH: "What tenants used",
}


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
        self._own_metrics: dict[bool, Collector] = {False: Lean(own_metrics), True: own_metrics}
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
            "/fleet/profile": self.profile,
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

    async def profile(self, send: Send) -> None:
        """A profile: what prefill and decode steps cost, corrected by those that were taken."""
        await self._status.refresh()
        await respond_json(send, msgspec.to_builtins(self._reports.profile()))

    async def version(self, send: Send) -> None:
        """What serves here; `version` is vLLM's, as its own endpoint has it."""
        await respond_json(send, {"version": self._vllm_version, "muxserve": version("muxserve")})

    async def load(self, send: Send) -> None:
        """Requests that this gateway has, in service or waiting, under the key that stock servers have for them."""
        await respond_json(send, {"server_load": self._reports.requests})

    async def openapi(self, send: Send) -> None:
        """What can be asked here: vLLM's routes of all models, as vLLM describes them, and the gateway's own."""
        served = {each.posts: each for each in self._models.values()}
        # Takes tens of milliseconds the first time.
        documents = [await asyncio.to_thread(each.openapi) for each in served.values()]
        paths: dict[str, object] = {}
        schemas: dict[str, object] = {}
        for posts, document in zip(served, documents, strict=True):
            schemas |= document.get("components", {}).get("schemas", {})
            paths |= {path: of for path, of in document["paths"].items() if path in posts or path == "/v1/models"}
        for path, words in {**self._own_paths(), **_BESIDE}.items():
            paths.setdefault(path, {"get": {"summary": words, "responses": {"200": {"description": "OK"}}}})
        paths |= described()
        about = {"title": "MuxServe", "version": version("muxserve")}
        await respond_json(
            send, {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas}}
        )

    def _own_paths(self) -> dict[str, str]:
        """The pages, with what each says of itself."""
        found = {}
        for path, page in self.table().items():
            words = (page.func if isinstance(page, partial) else page).__doc__ or ""
            found[path] = " ".join(words.split()).partition(". ")[0].rstrip(".")
        return {path: words for path, words in found.items() if not path.startswith(OWN_METRICS)}

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

    async def model_metrics(self, model: str, send: Send) -> None:
        """Prometheus text of one model, over all gateways: what a stock server of that model would say of itself."""
        others, _ = await asyncio.gather(self._peers.metrics(full=False), self._status.refresh())
        text = await asyncio.to_thread(self._model_text, model, [*others.values()])
        await respond(send, 200, text, CONTENT_TYPE_LATEST.encode())

    def _model_text(self, model: str, others: list[str]) -> bytes:
        parsed = [_Families(text_string_to_metric_families(text)) for text in others]
        joined_metrics = JoinedMetrics(lambda: [self._metrics, self._own_metrics[False], *parsed])
        families: dict[str, Metric] = {}
        for family in joined_metrics.collect():
            family.samples = [each for each in family.samples if each.labels.get("model_name") == model]
            if family.samples:
                families[family.name] = folded(family, ())
        # Requests wait at the gateways and in the units, before any engine hears of them.
        counts = {
            "vllm:num_requests_running": _sum(families, "muxserve_unit_requests", {*PLACES} - {"queued"}),
            "vllm:num_requests_waiting": _sum(families, "muxserve_unit_requests", {"queued"})
            + _sum(families, "muxserve_gateway_requests_waiting")
            + _sum(families, "muxserve_gateway_requests_unplaced"),
        }
        for name, count in counts.items():
            text = families[name].documentation if name in families else "Requests of the model."
            families[name] = GaugeMetricFamily(name, text, labels=["model_name"])
            families[name].add_sample(name, {"model_name": model}, count)
        return generate_latest(_Families(families.values()))


class _Families(Collector):
    """Metrics that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _sum(families: Mapping[str, Metric], name: str, places: Collection[str] = ()) -> float:
    samples = families[name].samples if name in families else []
    return sum(each.value for each in samples if not places or each.labels["place"] in places)
