"""The requests in an engine: what it must know of them beside vLLM, and how they become requests of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.serial_utils import MsgpackDecoder

from muxserve.engine.leased_scheduler import LeasedScheduler
from muxserve.vllm.image_files import with_pixels
from muxserve.wire import Abort, Admit, HeldRequests


@dataclass(slots=True)
class AdmittedRequest:
    """A request in this engine, under the internal id that vLLM knows."""

    request_id: str
    incarnation: int
    attempt: int
    gateway_epoch: str
    reply_to: str
    emitted: int


def internal_id(request_id: str, incarnation: int) -> str:
    """The id under which vLLM knows this life of the request."""
    return f"{request_id}#{incarnation}"


class EngineRequests:
    """Every request of the engine, by internal id (`there`)."""

    def __init__(self, core: EngineCore) -> None:
        assert isinstance(core.scheduler, LeasedScheduler)
        self._core = core
        self._scheduler = core.scheduler
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._there: dict[str, AdmittedRequest] = {}
        # By request id: the internal id of its last life.
        self._last: dict[str, str] = {}

    @property
    def there(self) -> Mapping[str, AdmittedRequest]:
        """See above."""
        return self._there

    def __len__(self) -> int:
        return len(self._there)

    def __contains__(self, request_id: str) -> bool:
        """Whether some life of the request is here."""
        return request_id in self._last

    def add(self, admit: Admit) -> str:
        """A request enters; returns its internal id."""
        internal = internal_id(admit.request_id, admit.incarnation)
        self._there[internal] = AdmittedRequest(
            admit.request_id,
            admit.incarnation,
            admit.attempt,
            admit.gateway_epoch,
            admit.reply_to,
            len(admit.output_tokens),
        )
        self._last[admit.request_id] = internal
        return internal

    def begin(self, internal: str, admit: Admit, blocks: list[KVCacheBlock] | None) -> None:
        """Give a request that has entered to vLLM, with the `blocks` that it has adopted.

        Raises:
            Exception: vLLM refuses it, for whatever reason.
        """
        scheduler = self._scheduler
        wire_request: EngineCoreRequest = self._decoder.decode(admit.body)
        wire_request.request_id = internal
        if wire_request.mm_features and self._scheduler.phase != "decode":
            wire_request.mm_features = with_pixels(wire_request.mm_features)
        if admit.output_tokens and wire_request.sampling_params is not None:
            # Sent with the first token already.
            wire_request.sampling_params.prompt_logprobs = None
        request, wave = self._core.preprocess_add_request(wire_request)
        if admit.output_tokens:
            scheduler.resume(request, admit.output_tokens)
        if blocks is not None and admit.hand_off is not None:
            scheduler.adopt(request, blocks, admit.hand_off.computed_tokens, admit.hand_off.foreign)
        try:
            self._core.add_request(request, wave)
        except Exception:
            if blocks is not None:
                scheduler.disown(internal)
            raise
        if admit.output_tokens:
            request.events.clear()

    def last(self, request_id: str) -> str:
        """Internal id of the last life of a request; "" if it is not here."""
        return self._last.get(request_id, "")

    def forget(self, internal: str) -> AdmittedRequest:
        """A request leaves."""
        admitted = self._there.pop(internal)
        if self._last.get(admitted.request_id) == internal:
            del self._last[admitted.request_id]
        return admitted

    def clear(self) -> list[str]:
        """All leave; returns their request ids."""
        ids = [admitted.request_id for admitted in self._there.values()]
        self._there.clear()
        self._last.clear()
        return ids

    def meant(self, abort: Abort) -> list[str]:
        """Internal ids of those that are to be dropped and are here."""
        if abort.incarnations:
            named = [internal_id(*life) for life in zip(abort.request_ids, abort.incarnations, strict=False)]
        else:
            named = [self._last.get(request_id, "") for request_id in abort.request_ids]
        return [each for each in named if each in self._there]

    def held(self, lease_id: int) -> HeldRequests:
        """Those with which vLLM goes on, under that lease."""
        with_vllm = self._scheduler.held()
        there = [admitted for internal, admitted in self._there.items() if internal in with_vllm]
        return HeldRequests(lease_id, [each.request_id for each in there], [each.incarnation for each in there])
