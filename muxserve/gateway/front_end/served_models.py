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
from muxserve.spec import ModelSpec

log = logging.getLogger(__name__)


class OfferedModels:
    """The front ends of one gateway.

    Args:
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
        broker: Broker,
        limiter: ConcurrencyLimiter,
        grammars: GrammarCompilers,
        images: RequestImages,
        left: Callable[[], None],
        gateway: int,
        responses: ResponseStore | None,
    ) -> None:
        self.models: dict[str, ServedApp] = {}
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
        """The models that are offered, each with the directories of its adapters by name."""
        return {name: self._front_ends[name].model.adapters for name in self.models}

    async def build(self, models: Iterable[ModelSpec]) -> None:
        """Offer these models, none of which `is_leaving`; in the order in which they are given. One call at a time.

        Raises:
            ValueError: vLLM refuses a model or its options.
            OSError: a checkpoint cannot be read.
        """
        models = list(models)
        seam.register_architectures(model.path for model in models)
        for model in models:
            client = UnitEngineClient(model, self._broker, self._grammars, self._images)
            try:
                # Reads files and compiles templates: others' streams must not wait for it.
                front_end = await asyncio.to_thread(seam.make_llm, model, client, self._texts)
                served = await seam.serve(front_end, self._texts, self._gateway, self._responses)
            except BaseException:
                self._broker.detach(model.name)
                raise
            seam.go_on(front_end)
            self._front_ends[model.name] = front_end
            self.models[model.name] = served
            log.info("front end of %s is ready", model.name)

    def close(self) -> None:
        """Begin to read no more long texts."""
        self._texts.close()

    def outdated(self, models: Iterable[ModelSpec]) -> list[str]:
        """The models that are offered and not among `models`, or no longer as they are there."""
        wanted = {model.name: _front_end_part(model) for model in models}
        return [name for name in self.models if wanted.get(name) != _front_end_part(self._front_ends[name].model)]

    async def follow_adapters(self, models: Iterable[ModelSpec]) -> None:
        """Offer the adapters that the models have now, of those that are offered already."""
        for model in models:
            front_end = self._front_ends.get(model.name)
            if model.name in self.models and front_end is not None and front_end.model.adapters != model.adapters:
                front_end.model = model
                self.models[model.name] = await seam.with_adapters(front_end, self.models[model.name])
                log.info("adapters of %s: %s", model.name, ", ".join(model.adapters) or "none")

    def withdraw(self, model: str) -> None:
        """Take no more requests of `model`; its front end goes when those that it has are finished."""
        del self.models[model]
        self._leaving[model] = asyncio.ensure_future(self._leave(model))

    def is_leaving(self, model: str) -> bool:
        """Whether a front end of that model was withdrawn and still has requests."""
        return model in self._leaving

    async def _leave(self, model: str) -> None:
        try:
            await self._limiter.empty(model)
        finally:
            self._broker.detach(model)
            await seam.end(self._front_ends.pop(model))
            await seam.forget_models()
            del self._leaving[model]
            log.info("%s is not offered any more", model)
        # One of that name may be in the fleet still: it has a gate again before anybody asks for it.
        await self._limiter.remove(model)
        self._left()


def _front_end_part(model: ModelSpec) -> tuple[object, ...]:
    """What a front end depends on; all else is about engines, which may differ between replicas."""
    return model.path, model.dtype, model.engine_args, model.engines, model.aliases, model.adapter_slots
