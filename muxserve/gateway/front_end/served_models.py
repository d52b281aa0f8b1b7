"""The models that a gateway offers: their stock front ends, which come and go while the others serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from prometheus_client.registry import Collector

from muxserve.gateway.front_end import seam
from muxserve.gateway.front_end.engine_client import UnitEngineClient
from muxserve.gateway.front_end.images import RequestImages
from muxserve.gateway.front_end.long_texts import LongTexts
from muxserve.gateway.grammars.compilers import GrammarCompilers
from muxserve.gateway.http.responses import ResponseStore
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.routing.broker import Broker
from muxserve.spec import FleetSpec, ModelSpec, public_name

log = logging.getLogger(__name__)


class OfferedModels:
    """The front ends of one gateway: `models` has those that clients reach, by the names that they ask for, and `apps`
    all of them, by version; some are candidates, or leave.

    Args:
        fleet: says which version of a model answers, and under which names.
        broker: what they send requests to.
        limiter: says when a model's last request has ended.
        grammars: checks what structured outputs ask for.
        images: keeps those that requests bring.
        left: called when one that was withdrawn is gone.
        gateway: which gateway this is.
        responses: keeps what they make.
    """

    def __init__(
        self,
        fleet: FleetSpec,
        broker: Broker,
        limiter: ConcurrencyLimiter,
        grammars: GrammarCompilers,
        images: RequestImages,
        left: Callable[[], None],
        gateway: int,
        responses: ResponseStore | None,
    ) -> None:
        self.models: dict[str, ServedApp] = {}
        self.apps: dict[str, ServedApp] = {}
        self._fleet = fleet
        self._broker = broker
        self._limiter = limiter
        self._grammars = grammars
        self._images = images
        self._texts = LongTexts()
        self._left = left
        self._gateway = gateway
        self._responses = responses
        self._front_ends: dict[str, seam.ModelFrontEnd] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}

    def registries(self) -> Iterable[Collector]:
        """vLLM's metrics of each model."""
        # Read in another thread, while models may come and go.
        return [front_end.registry for front_end in list(self._front_ends.values())]

    def adapters(self) -> dict[str, dict[str, str]]:
        """The versions that are offered, or could be, each with the directories of its adapters by name."""
        return {name: self._front_ends[name].model.adapters for name in self.apps if name not in self._leaving}

    @property
    def leaving(self) -> tuple[str, ...]:
        """The versions that were withdrawn and still have requests."""
        return tuple(self._leaving)

    def learn(self, fleet: FleetSpec) -> None:
        """From now on offer what `fleet` has, as far as its front ends are built. One that it has not, has otherwise or
        has retired takes no more requests, and goes when those that it has are finished."""
        self._fleet = fleet
        wanted = {each.name: _front_end_part(each) for each in fleet.models if not fleet.is_retired(each.name)}
        outdated = [
            name
            for name in self.apps
            if name not in self._leaving and wanted.get(name) != _front_end_part(self._front_ends[name].model)
        ]
        for name in outdated:
            self._leaving[name] = asyncio.ensure_future(self._leave(name))
        self._offer()

    def unbuilt(self) -> list[ModelSpec]:
        """The models of the fleet that have no front end and are to have one. One that comes back as something else has
        to wait until it is gone."""
        there, models = self.apps.keys() | self._leaving.keys(), self._fleet.models
        return [each for each in models if each.name not in there and not self._fleet.is_retired(each.name)]

    async def build(self, model: ModelSpec) -> None:
        """Build a front end of `model`, which has none, and offer it; a candidate is offered to nobody before the fleet
        says so, and has to answer a request. One call at a time.

        Raises:
            ValueError: vLLM refuses the model or its options, or it has not answered.
            OSError: a checkpoint cannot be read.
        """
        seam.register_architectures({model.path: model.text_only})
        client = UnitEngineClient(model, self._broker, self._grammars, self._images)
        try:
            # Reads files and compiles templates: others' streams must not wait for it.
            front_end = await asyncio.to_thread(seam.make_llm, model, client, self._texts)
            front_end.names = self._fleet.names_of(model)
            served = await seam.serve(front_end, self._texts, self._gateway, self._responses)
        except BaseException:
            self._broker.detach(model.name)
            raise
        seam.go_on(front_end)
        if model.name in self._fleet.candidates:
            try:
                await seam.check(front_end)
            except BaseException:
                self._broker.detach(model.name)
                await seam.end(front_end)
                raise
        self._front_ends[model.name] = front_end
        self.apps[model.name] = served
        self._offer()
        log.info("front end of %s is ready", model.name)

    def close(self) -> None:
        """Begin to read no more long texts."""
        self._texts.close()

    async def follow_names(self) -> None:
        """Offer models under the names, and with the adapters, that the fleet gives them now."""
        for model in self._fleet.models:
            if model.name not in self.apps or model.name in self._leaving:
                continue
            front_end, names = self._front_ends[model.name], self._fleet.names_of(model)
            if front_end.model.adapters != model.adapters or front_end.names != names:
                front_end.model, front_end.names = model, names
                self.apps[model.name] = await seam.with_names(front_end, self.apps[model.name])
                self._offer()
                log.info("%s is served as %s", model.name, ", ".join([*names, *model.adapters]))

    def _offer(self) -> None:
        """Have clients reach the versions that the fleet says, and no others."""
        offered = {
            public_name(name): served
            for name, served in self.apps.items()
            if name not in self._leaving and self._fleet.answers(name)
        }
        for name in self.models.keys() - offered.keys():
            del self.models[name]
        self.models.update(offered)

    async def _leave(self, model: str) -> None:
        try:
            await self._limiter.empty(model)
        finally:
            self._broker.detach(model)
            del self.apps[model]
            await seam.end(self._front_ends.pop(model))
            await seam.forget_models()
            del self._leaving[model]
            log.info("%s is not offered any more", model)
        # One of that name may be in the fleet still: it has a gate again before anybody asks for it.
        await self._limiter.remove(model)
        self._left()


def _front_end_part(model: ModelSpec) -> tuple[object, ...]:
    """What a front end depends on; all else is about engines, which may differ between replicas, or can change."""
    return model.path, model.dtype, model.engine_args, model.engines, model.adapter_slots
