"""vLLM's `EngineCoreClient` over the unit: what a stock `AsyncLLM` believes to be its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from muxserve.gateway.front_end.adapters import for_engines
from muxserve.gateway.front_end.images import ImageFile, RequestImages
from muxserve.gateway.grammars.compilers import GrammarCompilers
from muxserve.gateway.http.http_request import current_http
from muxserve.gateway.limits.priorities import RequestLevels
from muxserve.gateway.routing.broker import Broker
from muxserve.gateway.routing.prefix_keys import prefix_keys
from muxserve.gateway.routing.requests import Failure, Output, Tracked
from muxserve.gateway.status.measure import RequestOutcome
from muxserve.gateway.status.vllm_metrics import engine_indexes
from muxserve.replicas.priorities import ServiceClass
from muxserve.spec import ModelSpec
from muxserve.vllm.image_files import LARGEST
from muxserve.wire import RequestSpec


class UnitEngineClient(EngineCoreClient):
    """The engines of one model. Engine 0 of the statistics is its prefill engine, engine 1 its decode engine or that
    of both phases. `tasks` is what the model is offered for; `vocabulary` how many tokens it has an embedding of."""

    def __init__(self, model: ModelSpec, broker: Broker, grammars: GrammarCompilers, images: RequestImages) -> None:
        self.model = model.name
        self._unit_spec = model
        self._grammars = grammars
        self._images = images
        self.broker = broker
        self.tasks: tuple[SupportedTask, ...] = ("generate",)
        self.vocabulary = 0
        self.engine_ranks_managed = [*engine_indexes(model)]
        # Engines die and come back underneath; the client never does.
        self.resources = SimpleNamespace(engine_dead=False)
        self._batches: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        # Which tokens of an image stand for it is a tensor.
        self._encoder = MsgpackEncoder(size_threshold=LARGEST)
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._processor: OutputProcessor | None = None
        broker.attach(model.name, self)

    def bind(self, processor: OutputProcessor) -> None:
        """Tell the client the output processor of its `AsyncLLM`, which keeps the state of each request."""
        self._processor = processor

    # ------------------------------------------------------------ called by AsyncLLM

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._batches.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        front_id = request.request_id
        try:
            self._refuse_unsupported(request)
            params, prompt = request.sampling_params, request.prompt_token_ids
            assert prompt is not None
            self._refuse_unknown_tokens(request, prompt)
            if params is not None:
                await self._grammars.admit(self._unit_spec, params)
            features, images = await self._keep_images(request)
            if not self._has(front_id):
                return  # cancelled meanwhile
            wire_id = self.broker.table.new_id()
            http = current_http.get()
            priority = http.priority if http is not None else RequestLevels()
            tenant = http.tenant if http is not None else None
            salt = tenant.cache_salt(request.cache_salt) if tenant is not None else request.cache_salt
            adapter = for_engines(request.lora_request) if request.lora_request is not None else None
            body = self._encode(request, wire_id, priority, features, salt, adapter)
        except BaseException:
            # AsyncLLM registered the request before it asked us, and does not take it back itself.
            self._end(front_id)
            raise
        # Images, grammars and the model's limit are no part of the way that every request takes.
        plain = not images and (params is None or params.structured_outputs is None)
        if plain and http is not None and not http.waited:
            self.broker.request_delays.append(time.monotonic() - http.arrival)
        service = ServiceClass(
            priority.queue(request.priority),
            priority.scheduling,
            priority.execution,
            group=http.group_of(wire_id) if http is not None else "",
            tenant=tenant.name if tenant is not None else "",
            weight=tenant.weight if tenant is not None else 1.0,
        )
        self.broker.submit(
            Tracked(
                request_id=wire_id,
                front_id=front_id,
                spec=RequestSpec(
                    model=self.model,
                    body=body,
                    prompt_tokens=len(prompt),
                    max_tokens=1 if params is None else params.max_tokens or 0,
                    service=service,
                    traced=http is not None and http.trace is not None,
                ),
                arrival=http.arrival if http is not None else time.monotonic(),
                choice=self._choice(front_id),
                prefix=self._prefix(request, prompt, salt, adapter),
                images=images,
                context=http,
            )
        )

    async def _keep_images(
        self, request: EngineCoreRequest
    ) -> tuple[list[MultiModalFeatureSpec] | None, Sequence[ImageFile]]:
        """Its images as engines get them, and the files that keep these."""
        if not request.mm_features:
            return request.mm_features, ()
        return await self._images.keep(self.model, request.mm_features)

    def _prefix(
        self, request: EngineCoreRequest, prompt: Sequence[int], salt: str | None, adapter: LoRARequest | None
    ) -> bytes:
        """Keys of its prompt's beginnings, where there are replicas of which one may have them."""
        model = self._unit_spec
        if not model.prefix_caching or model.rolling:
            return b""
        if len(self.broker.router.placing.replicas(self.model)) < 2:
            return b""
        images = [(each.mm_position.offset, each.identifier) for each in request.mm_features or ()]
        return prefix_keys(prompt, f"{adapter.lora_name if adapter is not None else ''}/{salt or ''}", images)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.broker.cancel(self.model, request_ids, RequestOutcome.of_cancel)

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return self.tasks

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return self.tasks

    async def is_sleeping_async(self) -> bool:
        return False

    async def is_scheduler_paused_async(self) -> bool:
        return False

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing: the engines are not ours."""

    # ------------------------------------------------------------ called by the broker

    def decode(self, frames: list[bytes]) -> tuple[EngineCoreOutputs, list[Output]]:
        """The `EngineCoreOutputs` of a token message and its outputs."""
        batch: EngineCoreOutputs = self._decoder.decode(frames)
        outputs: list[Any] = batch.outputs
        return batch, outputs

    def deliver(self, batch: Any, engine: int, outputs: list[Output]) -> None:
        """Put `outputs` in place of those of `batch` and hand it to `AsyncLLM`."""
        batch.outputs = outputs
        batch.engine_index = engine
        if outputs or batch.scheduler_stats is not None:
            self._batches.put_nowait(batch)

    def fail(self, front_id: str, message: str, failure: Failure) -> list[str]:
        """End a request, and its siblings if it is one of several choices, with an error for the client.

        Returns the front ids of all that ended, `front_id` included.
        """
        if failure is Failure.NEVER:
            return self._end(front_id, VLLMValidationError(message))
        if failure is Failure.ERROR:
            return self._end(front_id, GracefulHTTPError(message, HTTPStatus.INTERNAL_SERVER_ERROR))
        return self._end(front_id, GracefulHTTPError(message, HTTPStatus.SERVICE_UNAVAILABLE))

    # ------------------------------------------------------------ inside

    def _has(self, front_id: str) -> bool:
        assert self._processor is not None
        return front_id in self._processor.request_states

    def _choice(self, front_id: str) -> int:
        """Which of the choices of its prompt that request is."""
        assert self._processor is not None
        return int(self._processor.request_states[front_id].request_index)

    def _end(self, front_id: str, error: Exception | None = None) -> list[str]:
        assert self._processor is not None
        state = self._processor.request_states.get(front_id)
        if state is None:
            return []
        parent = state.parent_req
        ended: list[str] = self._processor.abort_requests([parent.request_id if parent else front_id], internal=True)
        if error is not None and state.queue is not None:
            state.queue.put(error)
        return ended

    def _encode(
        self,
        request: EngineCoreRequest,
        wire_id: str,
        priority: RequestLevels,
        features: list[MultiModalFeatureSpec] | None,
        salt: str | None,
        adapter: LoRARequest | None,
    ) -> bytes:
        """`request` in vLLM's encoding, with the id that the unit knows it by, the priority that engines give it, what
        they get for its images, the salt of its prefix, and its adapter as they know it."""
        theirs = request.request_id, request.priority, request.lora_request, request.mm_features, request.cache_salt
        request.request_id, request.priority = wire_id, priority.engine(request.priority)
        request.mm_features, request.cache_salt, request.lora_request = features, salt, adapter
        try:
            (frame,) = self._encoder.encode(request)
        finally:
            request.request_id, request.priority, request.lora_request, request.mm_features, request.cache_salt = theirs
        return bytes(frame)

    def _refuse_unknown_tokens(self, request: EngineCoreRequest, prompt: Sequence[int]) -> None:
        """A tokenizer may have tokens of which the model knows nothing; vLLM lets them pass, and engines fail."""
        if max(prompt, default=0) >= self.vocabulary:
            images = [(each.mm_position.offset, each.mm_position.length) for each in request.mm_features or ()]
            for place, token in enumerate(prompt):
                if token >= self.vocabulary and not any(first <= place < first + many for first, many in images):
                    raise VLLMValidationError(f"token {token} of the prompt, at {place}, {self._unknown()}")
        params = request.sampling_params
        for words in (params.bad_words_token_ids or ()) if params is not None else ():
            if max(words, default=0) >= self.vocabulary:
                raise VLLMValidationError(f"token {max(words)} of `bad_words` {self._unknown()}", parameter="bad_words")

    def _unknown(self) -> str:
        return f"is in the tokenizer only: the model knows the tokens below {self.vocabulary}"

    def _refuse_unsupported(self, request: EngineCoreRequest) -> None:
        if request.mm_features and not self._unit_spec.sees_images:
            raise VLLMValidationError("this endpoint serves text; images, audio and video are not supported")
        if request.prompt_embeds is not None:
            raise VLLMValidationError("prompt embeddings are not supported", parameter="prompt_embeds")
        if request.resumable:
            raise VLLMValidationError("streamed input is not supported")
