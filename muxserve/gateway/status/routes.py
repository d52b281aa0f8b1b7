"""The pages about the server itself: `/health`, `/metrics`, `/fleet`, `/version` and others that stock servers have."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
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

from muxserve.gateway.http.changes import described
from muxserve.gateway.http.errors import Page, Scope, Send, respond, respond_json
from muxserve.gateway.http.peers import FULL, OWN_METRICS, OtherGateways, joined
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.limits.tenants import USAGE_PATH
from muxserve.gateway.status.fleet_status import MAX_AGE_SECONDS, FleetStatus
from muxserve.gateway.status.reports import Reports
from muxserve.gateway.status.shared_answer import RenderedAnswer, SharedAnswer
from muxserve.gateway.status.vllm_metrics import WAITING, JoinedMetrics, Lean, folded

FULL_METRICS = "/metrics" + FULL
# Seconds for which a rendered text of metrics serves all who ask.
TEXT_SECONDS = 1.0
_PROMETHEUS = CONTENT_TYPE_LATEST.encode()
_MODEL = "model_name"
_WAITING_AT_GATEWAYS = ("muxserve_gateway_requests_waiting", "muxserve_gateway_requests_unplaced")
# What the gateway answers besides, for GET.
_BESIDE = {
    "/models/{model}/metrics": "Prometheus text of one model, over all gateways",
    "/models/{model}/v1/models": "The model, as /v1/models shows it",
    "/v1/models/{model}": "One entry of /v1/models",
    USAGE_PATH: "What tenants used",
}


class StatusRoutes:
    """Answers GET requests about the server. Nothing that takes long is rendered for each who asks."""

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
        # Whether all that is there is asked for -> of the fleet, and of this gateway.
        self._fleet_metrics: dict[bool, Collector] = {False: Lean(metrics), True: metrics}
        self._own_metrics: dict[bool, Collector] = {False: Lean(own_metrics), True: own_metrics}
        self._peers = peers
        self._reports = reports
        self._vllm_version = vllm_version
        self._models = models
        # Who made a change and sees that it is followed must not read of the fleet as it was before.
        self._health = SharedAnswer(self._render_health, MAX_AGE_SECONDS, lambda: status.fleet)
        self._fleet = SharedAnswer(self._render_fleet, MAX_AGE_SECONDS, lambda: status.fleet)
        self._profile = SharedAnswer(self._render_profile, MAX_AGE_SECONDS, lambda: status.fleet)
        self._openapi = SharedAnswer(self._render_openapi, math.inf, self._served_paths)
        self._own = {full: SharedAnswer(partial(self._render_own, full), TEXT_SECONDS) for full in (False, True)}
        self._all = {full: SharedAnswer(partial(self._render_metrics, full), TEXT_SECONDS) for full in (False, True)}
        self._of_model: dict[str, SharedAnswer] = {}

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

    async def health(self, scope: Scope, send: Send) -> None:
        """Readiness, and the state of each model."""
        # Whoever waits for the start, or is to notice the end, should not wait for a cache as well.
        fresh = not self._status.was_ready or self._reports.draining
        await self._health.send(scope, send, fresh)

    async def fleet(self, scope: Scope, send: Send) -> None:
        """Everything that is known."""
        await self._fleet.send(scope, send)

    async def profile(self, scope: Scope, send: Send) -> None:
        """A profile: what prefill and decode steps cost, corrected by measured ones."""
        await self._profile.send(scope, send)

    async def version(self, scope: Scope, send: Send) -> None:
        """What serves here; `version` is vLLM's, as its own endpoint has it."""
        await respond_json(send, {"version": self._vllm_version, "muxserve": version("muxserve")})

    async def load(self, scope: Scope, send: Send) -> None:
        """Requests that this gateway has, in service or waiting, under the key that stock servers have for them."""
        await respond_json(send, {"server_load": self._reports.requests})

    async def openapi(self, scope: Scope, send: Send) -> None:
        """What can be asked here: vLLM's routes of all models, as vLLM describes them, and the gateway's own."""
        await self._openapi.send(scope, send)

    async def docs(self, scope: Scope, send: Send) -> None:
        """`/openapi.json` as a page that a browser shows; it loads Swagger UI from the network."""
        page = bytes(get_swagger_ui_html(openapi_url="openapi.json", title="MuxServe").body)
        await respond(send, 200, page, b"text/html; charset=utf-8")

    async def metrics(self, scope: Scope, send: Send, full: bool) -> None:
        """Prometheus text: of the fleet, and of all its gateways; `full` with every series that vLLM has."""
        await self._all[full].send(scope, send)

    async def own_metrics(self, scope: Scope, send: Send, full: bool) -> None:
        """Prometheus text of this gateway alone, for the others."""
        await self._own[full].send(scope, send)

    async def model_metrics(self, model: str, scope: Scope, send: Send) -> None:
        """Prometheus text of one model, over all gateways: what a stock server of that model would say of itself."""
        if model not in self._of_model:
            self._of_model = {name: answer for name, answer in self._of_model.items() if name in self._models}
            self._of_model[model] = SharedAnswer(partial(self._render_model, model), TEXT_SECONDS)
        await self._of_model[model].send(scope, send)

    # ------------------------------------------------------------ what is shared

    async def _render_health(self) -> RenderedAnswer:
        await self._status.refresh(MAX_AGE_SECONDS if self._status.was_ready else 0.0)
        status, body = self._reports.health()
        return RenderedAnswer(msgspec.json.encode(body), status=status)

    async def _render_fleet(self) -> RenderedAnswer:
        await asyncio.gather(self._status.refresh(), self._status.refresh_gpus())
        return RenderedAnswer(msgspec.json.encode(self._reports.fleet()))

    async def _render_profile(self) -> RenderedAnswer:
        await self._status.refresh()
        return RenderedAnswer(msgspec.json.encode(self._reports.profile()))

    async def _render_openapi(self) -> RenderedAnswer:
        # Takes tens of milliseconds the first time.
        return await asyncio.to_thread(self._described, [*self._models.values()])

    def _served_paths(self) -> frozenset[frozenset[str]]:
        return frozenset(each.posts for each in self._models.values())

    def _described(self, models: Iterable[ServedApp]) -> RenderedAnswer:
        paths: dict[str, object] = {}
        schemas: dict[str, object] = {}
        for posts, each in {served.posts: served for served in models}.items():
            document = each.openapi()
            schemas |= document.get("components", {}).get("schemas", {})
            paths |= {path: of for path, of in document["paths"].items() if path in posts or path == "/v1/models"}
        for path, words in {**self._own_paths(), **_BESIDE}.items():
            paths.setdefault(path, {"get": {"summary": words, "responses": {"200": {"description": "OK"}}}})
        paths |= described()
        about = {"title": "MuxServe", "version": version("muxserve")}
        document = {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas}}
        return RenderedAnswer(msgspec.json.encode(document))

    def _own_paths(self) -> dict[str, str]:
        """The pages, with what each says of itself."""
        found = {}
        for path, page in self.table().items():
            words = (page.func if isinstance(page, partial) else page).__doc__ or ""
            found[path] = " ".join(words.split()).partition(". ")[0].rstrip(".")
        return {path: words for path, words in found.items() if not path.startswith(OWN_METRICS)}

    async def _render_metrics(self, full: bool) -> RenderedAnswer:
        others = asyncio.ensure_future(self._peers.metrics(full)) if self._peers else None
        await asyncio.gather(self._status.refresh(), self._status.refresh_gpus())
        # Some milliseconds of pure Python: streams must not wait for it.
        text = await asyncio.to_thread(generate_latest, self._fleet_metrics[full])
        own = (await self._own[full].get()).body
        if others is not None:
            each = {**await others, self._peers.index: own.decode()}
            own = (await asyncio.to_thread(joined, sorted(each.items()))).encode()
        return RenderedAnswer(text + own, _PROMETHEUS)

    async def _render_own(self, full: bool) -> RenderedAnswer:
        return RenderedAnswer(await asyncio.to_thread(generate_latest, self._own_metrics[full]), _PROMETHEUS)

    async def _render_model(self, model: str) -> RenderedAnswer:
        others, _ = await asyncio.gather(self._peers.metrics(full=False), self._status.refresh())
        version = self._models[model].model if model in self._models else model
        return RenderedAnswer(await asyncio.to_thread(self._model_text, version, [*others.values()]), _PROMETHEUS)

    def _model_text(self, model: str, others: list[str]) -> bytes:
        parsed = [_Families(text_string_to_metric_families(text)) for text in others]
        joined_metrics = JoinedMetrics(lambda: [self._fleet_metrics[False], self._own_metrics[False], *parsed])
        families: dict[str, Metric] = {}
        for family in joined_metrics.collect():
            family.samples = [each for each in family.samples if each.labels.get("model_name") == model]
            if family.samples:
                families[family.name] = folded(family, ())
        # Requests wait at the gateways, too, before any unit hears of them.
        waiting = sum(_total(families, name) for name in (WAITING, *_WAITING_AT_GATEWAYS))
        families[WAITING] = GaugeMetricFamily(WAITING, "Number of requests waiting to be processed.", labels=[_MODEL])
        families[WAITING].add_sample(WAITING, {_MODEL: model}, waiting)
        return generate_latest(_Families(families.values()))


class _Families(Collector):
    """Metrics that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _total(families: Mapping[str, Metric], name: str) -> float:
    return sum(each.value for each in families[name].samples) if name in families else 0.0
