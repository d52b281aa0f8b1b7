"""Pages about the server cost one rendering, however many ask for them: scrapers without a key are no flood."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from muxserve.gateway.http.errors import Message
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.status.routes import StatusRoutes

READERS = 50


class Counted(Collector):
    """A gauge of a model, that counts how often it was looked at."""

    def __init__(self, name: str) -> None:
        self.looks = 0
        self._name = name

    def collect(self) -> Iterator[Metric]:
        self.looks += 1
        family = GaugeMetricFamily(self._name, "x", labels=["model_name"])
        family.add_metric(["m"], self.looks)
        yield family


class Asked:
    """What pages ask of the fleet, with how often."""

    def __init__(self) -> None:
        self.refreshes = self.reports = self.documents = 0
        self.was_ready, self.draining = True, False

    async def refresh(self, max_age: float = 0.0) -> None:
        self.refreshes += 1
        await asyncio.sleep(0)

    refresh_gpus = refresh

    def health(self) -> tuple[int, dict[str, object]]:
        self.reports += 1
        return 200, {"number": self.reports}

    def fleet(self) -> dict[str, object]:
        self.reports += 1
        return {"number": self.reports}

    def openapi(self) -> dict[str, Any]:
        self.documents += 1
        return {"paths": {}}


class NoPeers:
    index = 0

    def __bool__(self) -> bool:
        return False

    async def metrics(self, full: bool) -> dict[int, str]:
        return {}


class Pages:
    def __init__(self) -> None:
        self.asked, self.fleet, self.own = Asked(), Counted("muxserve_fleet"), Counted("muxserve_own")
        asked: Any = self.asked
        peers: Any = NoPeers()
        app: Any = None
        self.models = {"m": ServedApp(app, {}, self.asked.openapi, model="m")}
        self.routes = StatusRoutes(asked, asked, self.fleet, self.own, peers, "0", self.models)

    async def get(self, path: str) -> bytes:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        if path == "/models/m/metrics":
            await self.routes.model_metrics("m", {"headers": []}, send)
        else:
            await self.routes.table()[path]({"headers": []}, send)
        body: bytes = sent[1]["body"]
        return body


@pytest.mark.parametrize(
    "path", ["/metrics", "/metrics/full", "/metrics/own", "/metrics/own/full", "/models/m/metrics"]
)
async def test_many_scrapers_share_one_text(path: str) -> None:
    pages = Pages()
    texts = await asyncio.gather(*(pages.get(path) for _ in range(READERS)))
    texts += [await pages.get(path) for _ in range(READERS)]
    assert len(set(texts)) == 1
    assert pages.own.looks == 1
    assert pages.fleet.looks == (0 if "own" in path else 1)


@pytest.mark.parametrize(
    ("path", "count"), [("/health", "reports"), ("/fleet", "reports"), ("/openapi.json", "documents")]
)
async def test_so_do_those_who_ask_for_state(path: str, count: str) -> None:
    pages = Pages()
    await asyncio.gather(*(pages.get(path) for _ in range(READERS)))
    assert getattr(pages.asked, count) == 1


@pytest.mark.parametrize(("was_ready", "draining"), [(False, False), (True, True)])
async def test_health_is_never_old_where_somebody_waits_for_a_change(was_ready: bool, draining: bool) -> None:
    pages = Pages()
    pages.asked.was_ready, pages.asked.draining = was_ready, draining
    first = await pages.get("/health")
    assert await pages.get("/health") != first


async def test_of_models_that_are_gone_no_text_is_kept() -> None:
    pages = Pages()
    await pages.get("/models/m/metrics")
    for number in range(40):
        name = f"passing-{number}"
        _, served = pages.models.popitem()
        pages.models[name] = served

        async def send(message: Message) -> None:
            pass

        await pages.routes.model_metrics(name, {"headers": []}, send)
        assert {*pages.routes._of_model} == {name}
