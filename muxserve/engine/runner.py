"""What our model runners do alike on every device: on the shared pool they keep a windowed layer's blocks like those of
any other layer, and know where states of sequences are. Over vLLM's first runner they also start a request with output
tokens that it already has; the second one does so itself.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from muxserve.engine.states import STATE_NEWS, StateSlots, split

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Base

    # A base of both runners.
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin as AnyBase
else:
    Base = object
    AnyBase = object

# Attribute that `LeasedScheduler` sets on vLLM's `NewRequestData`: tokens that the request came here with.
RESUMED_OUTPUT = "muxserve_output_token_ids"


class ResumingRunner(Base):
    """Mixed in before vLLM's first runner. A request known to the runner before its first step takes vLLM's path of
    streaming sessions, which asks `_update_streaming_request` for its state."""

    def forget_step(self) -> None:
        """A step raised an exception half-way; its requests are dropped, and the next one begins anew."""
        self.execute_model_state = None
        # The scheduler has forgotten what was computed of images, too.
        self.reset_encoder_cache()
        # With asynchronous scheduling: tokens that the next step was to begin with.
        self.input_batch.prev_sampled_token_ids = None
        self.input_batch.prev_req_id_to_index = None
        self.input_batch.sampled_token_ids_cpu = None
        self.input_batch.async_copy_ready_event = None

    def _update_states(self, scheduler_output: Any) -> Any:
        for data in scheduler_output.scheduled_new_reqs:
            output_token_ids: list[int] | None = getattr(data, RESUMED_OUTPUT, None)
            if output_token_ids:
                self.requests[data.req_id] = self._resumed_state(data, output_token_ids)
        return super()._update_states(scheduler_output)

    def _update_streaming_request(self, req_id: str, new_req_data: NewRequestData) -> CachedRequestState:
        if getattr(new_req_data, RESUMED_OUTPUT, None):
            state = self.requests[req_id]
            if self.uses_mrope:  # where images have positions of their own
                self._init_mrope_positions(state)
            return state
        return super()._update_streaming_request(req_id, new_req_data)

    def _generator_after(self, params: SamplingParams, tokens: int) -> torch.Generator:
        """A seeded request's generator as it is after `tokens` sampled tokens."""
        raise NotImplementedError

    def _resumed_state(self, data: NewRequestData, output_token_ids: list[int]) -> CachedRequestState:
        generator = None
        params = data.sampling_params
        if params is not None and params.sampling_type == SamplingType.RANDOM_SEED:
            generator = self._generator_after(params, len(output_token_ids))
        return CachedRequestState(
            req_id=data.req_id,
            prompt_token_ids=data.prompt_token_ids,
            prompt_embeds=data.prompt_embeds,
            prompt_is_token_ids=data.prompt_is_token_ids,
            mm_features=data.mm_features,
            sampling_params=params,
            pooling_params=data.pooling_params,
            generator=generator,
            block_ids=data.block_ids,
            num_computed_tokens=data.num_computed_tokens,
            output_token_ids=list(output_token_ids),
            lora_request=data.lora_request,
        )


class PooledLayers(AnyBase):
    """Mixed in before a runner of vLLM, whose layers then keep K and V, latents and states in the shared pool."""

    # The layers that keep a state, by name, and where the states are.
    state_specs: dict[str, MambaSpec]
    states: StateSlots | None = None
    _block_tokens: int

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self._block_tokens = self.cache_config.block_size
        super().load_model(*args, **kwargs)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """As vLLM's, but a layer with a sliding window keeps the blocks of the whole sequence: all layers share one
        table of blocks. What the layer computes does not change.

        Without the layers that keep a state: the scheduler counts blocks of each sequence for them, and no tokens. A
        block has as many tokens as was planned; vLLM would have made a page as large as a state."""
        self.cache_config.block_size = self._block_tokens
        self.cache_config.mamba_page_size_padded = None
        specs, self.state_specs = split(super().get_kv_cache_spec())
        return {name: whole_sequence(spec) for name, spec in specs.items()}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        """With the layers that keep a state as a group of their own, in which a slot counts as a block."""
        if self.state_specs:
            self.states = self._make_states(self.state_specs)
            group = KVCacheGroupSpec([*self.state_specs], next(iter(self.state_specs.values())))
            kv_cache_config = replace(kv_cache_config, kv_cache_groups=[*kv_cache_config.kv_cache_groups, group])
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)

    def _make_states(self, specs: dict[str, MambaSpec]) -> StateSlots:
        """Slots for the states of as many sequences as can be in a step."""
        raise NotImplementedError

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Keeps snapshots of the states as they are behind this step; one that vLLM makes to warm up has none."""
        result = super().execute_model(scheduler_output, *args, **kwargs)
        if self.states is not None and hasattr(scheduler_output, STATE_NEWS):
            self.states.keep(scheduler_output)
        return result

    def follow(self, scheduler_output: Any) -> None:
        """Know of the blocks and states of a step's requests, before vLLM is told of them."""
        if self.states is not None:
            self.states.follow(scheduler_output)
            self.states.restore(scheduler_output)


class PooledRunner(ResumingRunner, PooledLayers):
    """The same of vLLM's first runner."""

    def _update_states(self, scheduler_output: Any) -> Any:
        self.follow(scheduler_output)
        return super()._update_states(scheduler_output)


def whole_sequence(spec: KVCacheSpec) -> KVCacheSpec:
    """`spec` without its sliding window, if it has one."""
    if type(spec) is not SlidingWindowSpec:
        return spec
    kept = {each.name for each in fields(FullAttentionSpec)} - {"sliding_window"}
    return FullAttentionSpec(**{each.name: getattr(spec, each.name) for each in fields(spec) if each.name in kept})
