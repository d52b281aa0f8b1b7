"""Everything that one gateway process holds, and how it follows changes of the fleet."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.registry import Collector

from muxserve.gateway.batches.loads import FleetLoads
from muxserve.gateway.batches.routes import apps as batch_apps
from muxserve.gateway.batches.work import GatewayBatches
from muxserve.gateway.front_end import seam
from muxserve.gateway.front_end.images import RequestImages
from muxserve.gateway.front_end.served_models import OfferedModels
from muxserve.gateway.grammars.compiler_process import Helper
from muxserve.gateway.grammars.compilers import GrammarCompilers
from muxserve.gateway.http.app import Access, GatewayApp
from muxserve.gateway.http.changes import ChangeRoutes
from muxserve.gateway.http.keys import KeyRoutes
from muxserve.gateway.http.own_paths import OwnPaths
from muxserve.gateway.http.peers import OtherGateways
from muxserve.gateway.http.responses import ResponseRoutes, ResponseStore
from muxserve.gateway.limits.admission import ApiKeys
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.limits.priorities import Priorities
from muxserve.gateway.limits.tenants import Tenancy
from muxserve.gateway.routing.broker import Broker
from muxserve.gateway.routing.model_names import ModelNames
from muxserve.gateway.routing.predicted_wait import PredictedWaits
from muxserve.gateway.status.collector import FleetCollector, GatewayCollector
from muxserve.gateway.status.fleet_status import FleetStatus
from muxserve.gateway.status.live import LiveView
from muxserve.gateway.status.measure import Measures
from muxserve.gateway.status.reports import Reports
from muxserve.gateway.status.routes import StatusRoutes
from muxserve.gateway.status.ui import LivePage
from muxserve.gateway.status.vllm_metrics import JoinedMetrics, VllmGauges
from muxserve.net.process import words
from muxserve.net.sockets import NetworkError
from muxserve.spec import (
    FleetSpec,
    FollowedFleet,
    ModelSpec,
    followed_file,
    load_fleet,
    public_name,
    save_followed,
)
from muxserve.vllm.pin import VLLM_VERSION

if TYPE_CHECKING:
    from muxserve.gateway.status.tracing import Tracing

log = logging.getLogger(__name__)

# OpenTelemetry's own names for where traces go.
TRACE_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# A change of the fleet that could not be followed is tried again after so long.
AGAIN_SECONDS = 2.0
# The global registry's metrics of the process; all others carry a model's name that may be another's.
GLOBAL_METRICS = ("process_",)


class Gateway:
    """One gateway of a fleet.

    Args:
        fleet: as it stands when the process starts.
        index: which of its gateways this is.
        nurseries: what forks grammar compilers, if that was forked already.

    Raises:
        OSError: responses or batches are to be kept in a place that cannot be written.
    """

    def __init__(self, fleet: FleetSpec, index: int, nurseries: Iterable[Helper] = ()) -> None:
        self.fleet = fleet
        self.index = index
        self.registry = CollectorRegistry()
        self.measures = Measures(fleet.models, self.registry)
        self.tenancy = Tenancy(fleet, index, self.registry)
        waits = PredictedWaits()
        self.tracing = _tracing()
        self.broker = Broker(fleet, index, secrets.token_hex(4), self.measures, waits, self.tracing)
        self.limiter = ConcurrencyLimiter(fleet.models, index, fleet.gateway.count, self.measures, waits)
        self.status = FleetStatus(fleet, self.broker)
        self.grammars = GrammarCompilers(fleet.gateway.grammars, nurseries)
        self.reports = Reports(self.status, index, self.limiter, self.grammars)
        kept = fleet.gateway.responses
        self.responses: ResponseStore | None = None
        if kept is not None:
            self.responses = ResponseStore(kept, index, fleet.gateway.count, taking_over=fleet.takes_over)
        self.batches: GatewayBatches | None = None
        if fleet.gateway.batches is not None:
            loads = FleetLoads(self.status, self.limiter, self.measures)
            self.batches = GatewayBatches(fleet.gateway.batches, self._built, loads)
        images = RequestImages(Path(fleet.run_dir) / "images", index)
        self.offered = OfferedModels(
            fleet, self.broker, self.limiter, self.grammars, images, self._has_left, index, self.responses
        )
        self._endpoint: GatewayApp | None = None
        self._changed = asyncio.Event()
        self._to_offer = asyncio.Event()
        # Models that vLLM refused, and why; they are not tried again before the fleet changes.
        self._refused: dict[str, tuple[ModelSpec, str]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def build(self) -> GatewayApp:
        """Open the sockets to the units and build the models' front ends and the endpoint over them."""
        self.broker.start()
        self.grammars.begin()
        for model in self.fleet.models:
            if self.fleet.answers(model.name):
                await self._offer(model)
        self._to_offer.set()
        if not self.offered.models:
            raise ValueError("; ".join(reason for _, reason in self._refused.values()))
        seam.settle()
        process = JoinedMetrics(lambda: [REGISTRY], GLOBAL_METRICS)
        queues, fleet = GatewayCollector(self.status, self.limiter), FleetCollector(self.status)
        engines = VllmGauges(self.status)

        def own() -> list[Collector]:
            return [self.registry, queues, *self.offered.registries(), process]

        def of_units() -> list[Collector]:
            return [fleet, engines, *(unit.gpus for unit in self.status.units.values() if unit.gpus is not None)]

        peers = OtherGateways(self.fleet, self.index)
        pages = StatusRoutes(
            self.status,
            self.reports,
            JoinedMetrics(of_units),
            JoinedMetrics(own),
            peers,
            VLLM_VERSION,
            self.offered.models,
        )
        page = LivePage(
            LiveView(self.status, self.reports, self.limiter, self.measures, peers, self.broker.unit_timeline),
            Path(self.fleet.run_dir),
        )
        changes = ChangeRoutes(
            self.fleet.run_dir, lambda: self._endpoint is not None and bool(self._endpoint.access.keys)
        )
        keys = KeyRoutes(self.tenancy, lambda: [tenant.name for tenant in self.fleet.tenants])
        shown = self.fleet.gateway.http.ui
        files = page.pages() if shown else {}
        self._endpoint = GatewayApp(
            self.offered.models,
            Access(self._keys(), Priorities(self.fleet.priority_levels()), self.tenancy),
            OwnPaths(
                pages=pages.table() | files,
                open=pages.OPEN | files.keys(),
                model_pages={"/metrics": pages.model_metrics},
                apps=(page.apps() if shown else {}) | changes.apps() | keys.apps(),
                caller_apps=batch_apps(self.batches.routes if self.batches is not None else None),
            ),
            self.limiter,
            self.measures,
            self.fleet.gateway,
            self.tracing,
            ResponseRoutes(self.responses, self.index, self.offered.apps, peers),
        )
        self._endpoint.names = ModelNames.of(self.fleet)
        self._endpoint.fallbacks = self.fleet.fallbacks
        self._endpoint.models_sleep = bool(self.fleet.residency)
        self._endpoint.refused = self.status.refused
        self._endpoint.other_fleet = self.fleet.other_fleet
        self._tell_followed()
        tasks = [self._follow(), self._keep_offering(), self.tenancy.keep()]
        if self.responses is not None:
            tasks.append(self.responses.keep())
        if self.batches is not None:
            self.batches.start()
        self._tasks = [asyncio.ensure_future(task) for task in tasks]
        return self._endpoint

    @property
    def waits_to_listen(self) -> bool:
        """Whether another fleet answers at the endpoint's address until all models here have been up."""
        return self.fleet.takes_over and self.fleet.other_fleet is None

    async def is_ready(self) -> bool:
        """Whether every model has been up."""
        await self.status.refresh(0.0)
        ready, _ = self.status.look()
        return ready and all(unit.answered for unit in self.status.units.values())

    def fleet_changed(self) -> None:
        """Read the fleet's file again, as soon as everything is built."""
        self._changed.set()

    def close(self) -> None:
        """Cancel what is left at the units, and close the sockets."""
        for task in self._tasks:
            task.cancel()
        if self.batches is not None:
            self.batches.close()
        self.grammars.close()
        self.offered.close()
        self.broker.close()
        self.tenancy.close()
        if self.responses is not None:
            self.responses.close()
        if self.tracing is not None:
            self.tracing.close()

    async def _follow(self) -> None:
        followed = True
        while True:
            await self._changed.wait()
            self._changed.clear()
            followed = self._take_in(followed)
            if not followed:
                # Keys may have been taken away with it.
                asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._changed.set)

    def _take_in(self, followed: bool) -> bool:
        """Be the gateway of the fleet that its file has; whether it is. `followed`: whether it was the last time."""
        try:
            fleet = load_fleet(self.fleet.file)
        except (OSError, msgspec.MsgspecError) as error:
            log.error("%s cannot be read, so nothing changes before it can: %s", self.fleet.file, error)
            return False
        try:
            if fleet != self.fleet or not followed:
                self._adopt(fleet)
        except Exception:  # what is served already goes on
            log.exception("a change of the fleet could not be followed, and is tried again")
            return False
        return True

    def _adopt(self, fleet: FleetSpec) -> None:
        """Be the gateway of `fleet` from now on. Front ends that this takes are built by and by."""
        assert self._endpoint is not None
        self.fleet = fleet
        self.offered.learn(fleet)
        self._endpoint.names = ModelNames.of(fleet)
        self._endpoint.fallbacks = fleet.fallbacks
        for model in fleet.models:
            self.limiter.add(model)
            self.measures.add(model)
        self.tenancy.learn(fleet)
        self._endpoint.access.keys = self._keys()
        self._endpoint.access.priorities = Priorities(fleet.priority_levels())
        self._endpoint.other_fleet = fleet.other_fleet
        self.status.learn(fleet)
        try:
            self.broker.learn(fleet)
        except NetworkError as error:
            log.error("units of other machines cannot reach this gateway: %s", error)
        self._forget_models()
        self._refused = {}
        self._tell_refused()
        self._tell_followed()
        self._to_offer.set()
        log.info("%d units and %d models in generation %d", len(fleet.units), len(fleet.models), fleet.generation)

    # ------------------------------------------------------------ front ends, one after the other

    async def _keep_offering(self) -> None:
        """Offer the models that the fleet has now. Whatever takes long here holds up nothing else."""
        while True:
            await self._to_offer.wait()
            self._to_offer.clear()
            try:
                await self._offer_all()
            except Exception:  # what is served already goes on, and so does what comes with the next change
                log.exception("what the fleet has now cannot be offered")

    async def _offer_all(self) -> None:
        while True:
            self.offered.learn(self.fleet)
            await self.offered.follow_names()
            self._tell_followed()
            model = next((each for each in self.offered.unbuilt() if not self._is_refused(each)), None)
            if model is None:
                return
            await self._offer(model)

    async def _offer(self, model: ModelSpec) -> None:
        """Build a model's front end. The others are offered without one that vLLM refuses."""
        try:
            await self.offered.build(model)
        except Exception as error:
            self._refused[model.name] = model, str(error) if _is_plain(error) else words(error)
            log.error("%s cannot be offered: %s", model.name, error, exc_info=not _is_refusal(error))
        else:
            self._refused.pop(model.name, None)
        self._tell_refused()

    def _tell_refused(self) -> None:
        self.status.refused = {name: reason for name, (_, reason) in self._refused.items()}
        if self._endpoint is not None:
            self._endpoint.refused = self.status.refused

    def _tell_followed(self) -> None:
        """The author of a change waits until all gateways go by it."""
        refused = self.status.refused
        offered = self.offered
        followed = FollowedFleet(os.getpid(), self.fleet.generation, offered.adapters(), refused, offered.leaving)
        try:
            save_followed(followed, followed_file(self.fleet.run_dir, self.index))
        except OSError as error:
            log.warning("nobody will know which models this gateway offers: %s", error)

    def _is_refused(self, model: ModelSpec) -> bool:
        return model.name in self._refused and self._refused[model.name][0] == model

    def _built(self) -> GatewayApp:
        assert self._endpoint is not None, "batches run when it is built"
        return self._endpoint

    def _keys(self) -> ApiKeys:
        issued = self.tenancy.keys
        own = (self.fleet.gateway.api_keys, self.fleet.key_levels, self.fleet.tenants)
        return ApiKeys(*own) if issued is None else ApiKeys(*own, issued.find)

    def _has_left(self) -> None:
        """The last request of a model that was withdrawn has ended. It may be offered again by now."""
        for model in self.fleet.models:
            self.limiter.add(model)
        self._forget_models()
        self._to_offer.set()

    def _forget_models(self) -> None:
        """Show nothing of models that the fleet has no longer and that have no request any more."""
        for name in self.measures.models - {model.name for model in self.fleet.models} - self.offered.apps.keys():
            self.measures.remove(name)
            if all(public_name(name) != public_name(model.name) for model in self.fleet.models):
                self.tenancy.forget(public_name(name))


def _tracing() -> Tracing | None:
    """What makes spans, if the environment names where they go."""
    if not any(os.environ.get(name) for name in TRACE_ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED") == "true":
        return None
    try:
        from muxserve.gateway.status import tracing

        return tracing.Tracing(tracing.otlp())
    except ImportError as error:
        log.error("there are no traces: %s; pip install 'muxserve[otel]'", error)
        return None


def _is_plain(error: Exception) -> bool:
    """Whether the words of `error` are one line, and say it all."""
    text = str(error)
    return _is_refusal(error) and bool(text.strip()) and "\n" not in text


def _is_refusal(error: Exception) -> bool:
    """Whether the words of `error` are for the user."""
    return isinstance(error, (OSError, ValueError))
