"""vLLM's second model runner of GPUs, for engines on the shared pool and for those with a cache of their own.

It keeps requests, block tables and sampling parameters on the GPU. A request with output tokens needs nothing of ours:
vLLM's scheduler gives this runner all tokens of a request, and what is drawn for a token follows from the request's
seed and the token's position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.model_runner as vllm_runner
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from muxserve.engine.cuda.graphs import CapturingRunner, GraphHolder, replaced, without_collecting
from muxserve.engine.cuda.pooled import PooledOnDevice
from muxserve.vllm.args import STATE_PROMPTS


class SecondRunner(CapturingRunner):
    """Mixed in before vLLM's second runner."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        loaded = 0
        made_state = vllm_runner.init_model_state

        def init_model_state(*given: Any) -> Any:
            nonlocal loaded
            loaded = _allocated(self.device)
            return made_state(*given)

        with replaced(vllm_runner, "init_model_state", init_model_state):
            super().load_model(*args, **kwargs)
        self.request_bytes = _allocated(self.device) - loaded
        # Block tables of requests and of a step's batch, and where its tokens are written.
        blocks = -(-self.max_model_len // self.cache_config.block_size)
        self.table_bytes = 2 * 4 * self.max_num_reqs * blocks + 8 * self.max_num_tokens

    def forget_step(self) -> None:
        """A step raised an exception half-way; its requests are dropped, and the next one begins anew."""
        self.execute_model_state = None
        # The scheduler has forgotten what was computed of images, too.
        self.reset_encoder_cache()
        # What the step was to write: with the next one's it would be written to the same rows in no order.
        self.block_tables.apply_staged_writes()
        self.req_states.apply_staged_writes()
        self.model_state.apply_staged_writes()
        if self.sampler is not None:
            self.sampler.apply_staged_writes()

    def _capture(self, **options: Any) -> int:
        with replaced(vllm_runner, "freeze_gc_for_cudagraph_capture", without_collecting):
            return super()._capture(**options)

    def graph_holders(self) -> list[GraphHolder]:
        """Whole graphs are in the runner's manager."""
        manager = self.cudagraph_manager
        return [*super().graph_holders(), *([] if manager is None else [(manager, "graphs")])]

    def drop_graphs(self) -> None:
        super().drop_graphs()
        self.cudagraph_manager.release_graphs()


class SecondPooledRunner(SecondRunner, PooledOnDevice, GPUModelRunner):
    """On the shared pool."""

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        with replaced(vllm_runner, "init_kv_cache", lambda *_, **__: self._bind_pool()):
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.kv_block_zeroer = PageZeroer(self.zero)

    def _init_kv_zero_meta(self) -> None:
        """Nothing to prepare: see `PageZeroer`."""

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if self.pp_handler is not None:
            self._take_tokens(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _take_tokens(self, scheduler_output: SchedulerOutput) -> None:
        """Take the tokens of requests that go on in this step, which the last stage has sent. vLLM takes a step's when
        as many others have begun as there are stages: its own scheduler has a request again no sooner. Under leases the
        next step may be the request's."""
        index_of = self.req_states.req_id_to_index
        going_on = [index_of[each] for each in scheduler_output.scheduled_cached_reqs.req_ids]
        waited_for = [
            number
            for number, sent in enumerate(self.pp_handler.queue)
            if sent is not None and np.isin(sent.idx_mapping_np, going_on).any()
        ]
        # The first is taken in any case.
        for _ in range(max(waited_for, default=0)):
            self.update_pp_decode_requests()

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        if not self.block_tables.redirect_writes_to_null_block:
            self.follow(scheduler_output)
        super().add_requests(scheduler_output)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """vLLM gives its own requests the first blocks of the cache, in which others' KV lies: they write nowhere. A
        step of a model with states has as many prompts as memory was set aside for."""
        tables, scheduling = self.block_tables, self.scheduler_config
        most = scheduling.max_num_seqs
        tables.redirect_writes_to_null_block = True
        if self.states is not None:
            scheduling.max_num_seqs = min(most, STATE_PROMPTS)
        try:
            yield
        finally:
            tables.redirect_writes_to_null_block = False
            scheduling.max_num_seqs = most


class SecondPrivateRunner(SecondRunner, GPUModelRunner):
    """With vLLM's own cache."""


class PageZeroer:
    """In place of vLLM's `KVBlockZeroer`, which knows blocks of a cache, and no pages."""

    def __init__(self, zero: Callable[[Sequence[int]], None]) -> None:
        self._zero = zero

    def warmup(self, num_kv_blocks: int) -> None:
        """There is no kernel to compile."""

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Block 0 has no pages."""
        if real := [each for each in block_ids if each]:
            self._zero(real)


def _allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0
