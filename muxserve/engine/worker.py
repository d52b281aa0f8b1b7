"""vLLM's CPU worker and model runner on the shared pool."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.utils import bind_kv_cache

from muxserve.engine import attention
from muxserve.engine.binding import current

attention.register()

# Attribute that `PhaseScheduler` sets on vLLM's `NewRequestData`: tokens the request had generated before it came here.
RESUMED_OUTPUT = "muxserve_output_token_ids"


class PooledCPUModelRunner(CPUModelRunner):
    """Binds every layer to the whole pool and lets a request start with output tokens it already has."""

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager | None = None,
    ) -> dict[str, torch.Tensor]:
        return self._bind_pool(kv_cache_config)

    def rebind_pool(self) -> None:
        """Bind the layers to the pool of a restarted memory manager, which is another piece of memory."""
        self.kv_caches.clear()
        self._bind_pool(self.kv_cache_config)

    def _bind_pool(self, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
        group = kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        view = current().view
        pool = torch.from_numpy(view.pool).view(spec.dtype).view(-1, 1, spec.block_size, 2 * spec.head_size)
        kv_caches = dict.fromkeys(group.layer_names, pool)
        bind_kv_cache(
            kv_caches,
            self.compilation_config.static_forward_context,
            self.kv_caches,
            1,
            kv_cache_groups=kv_cache_config.kv_cache_groups,
        )
        return kv_caches

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        view = current().view
        for block in block_ids:
            view.pool[view.page_table[block].reshape(-1)] = 0

    def _update_states(self, scheduler_output: SchedulerOutput):
        # A request known to the runner before its first step takes vLLM's path of streaming sessions, which asks
        # `_update_streaming_request` for its state.
        for data in scheduler_output.scheduled_new_reqs:
            output_token_ids: list[int] | None = getattr(data, RESUMED_OUTPUT, None)
            if output_token_ids:
                self.requests[data.req_id] = self._resumed_state(data, output_token_ids)
        return super()._update_states(scheduler_output)

    def _update_streaming_request(self, req_id: str, new_req_data: NewRequestData) -> CachedRequestState:
        if getattr(new_req_data, RESUMED_OUTPUT, None):
            return self.requests[req_id]
        return super()._update_streaming_request(req_id, new_req_data)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any):
        # A prompt chunk before the last samples a token that is thrown away. vLLM then winds the request's generator
        # back by its CUDA offset, which a CPU generator does not have (stock vLLM on CPU fails there).
        batch = self.input_batch
        discarded = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]
        rewound = [index for index in discarded.tolist() if batch.generators.pop(index, None) is not None]
        result = super()._bookkeeping_sync(*args, **kwargs)
        for index in rewound:
            state = self.requests[batch.req_ids[index]]
            state.generator = self._generator_after(state.sampling_params, len(state.output_token_ids))
            batch.generators[index] = state.generator
        return result

    def _generator_after(self, params: SamplingParams, tokens: int) -> torch.Generator:
        """A seeded request's generator as it is after `tokens` sampled tokens."""
        generator = torch.Generator(device=self.device)
        generator.manual_seed(params.seed)
        # vLLM's CPU sampler draws one integer per sampled token.
        for _ in range(tokens):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return generator

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


class PooledCPUWorker(cpu_worker.CPUWorker):
    """`worker_cls` of engines on CPU."""

    def init_device(self) -> None:
        # CPUWorker names its runner class; there is no hook to choose another.
        cpu_worker.CPUModelRunner = PooledCPUModelRunner
        super().init_device()

    def rebind_pool(self) -> None:
        """See `PooledCPUModelRunner.rebind_pool`."""
        self.model_runner.rebind_pool()
