"""vLLM's CPU worker and model runner on the shared pool."""

from __future__ import annotations

import glob
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.config import CompilationMode, SpeculativeConfig, VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.utils import bind_kv_cache

from muxserve.engine.binding import bind_worker, current, place_of
from muxserve.engine.cpu import adapters, attention, latent, ngrams, weight_files, weight_packing
from muxserve.engine.cpu.resuming import ResumingOnHost
from muxserve.engine.cpu.states import MappedStates
from muxserve.engine.runner import PooledRunner

adapters.register()
attention.register()
latent.register()
weight_files.register()
weight_packing.register()


class PooledCPUModelRunner(ResumingOnHost, PooledRunner, CPUModelRunner):
    """Binds every layer to the whole pool, and those that keep a state to the slots of states on it."""

    states: MappedStates | None = None
    speculative_config: SpeculativeConfig | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if vllm_config.speculative_config is not None:
            ngrams.prepare()
        super().__init__(vllm_config, device)
        if vllm_config.speculative_config is not None:
            ngrams.compile_search(self.drafter)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """A step without proposals is sampled like any other; vLLM's way for those with some takes longer."""
        known = self.speculative_config
        if not scheduler_output.scheduled_spec_decode_tokens:
            self.speculative_config = None
        try:
            return super()._prepare_inputs(scheduler_output, *args, **kwargs)
        finally:
            self.speculative_config = known

    def propose_draft_token_ids(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Search only where a request of the step takes proposals."""
        if not scheduler_output.num_spec_tokens_to_schedule:
            return [[] for _ in self.input_batch.req_ids]
        return super().propose_draft_token_ids(scheduler_output, *args, **kwargs)

    def propose_nothing(self) -> None:
        """This engine does not speculate, although the one does that was forked from the same process."""
        self.speculative_config = None
        self.num_spec_tokens = self.prev_num_spec_tokens = 0
        self.uniform_decode_query_len = 1

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not get_pp_group().is_first_rank:
            # What comes from the stage before is copied into it. Stock vLLM makes it when it compiles, and an eager
            # engine on CPU does not.
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def load_lora_model(self, model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device) -> torch.nn.Module:
        found = super().load_lora_model(model, vllm_config, device)
        unit_spec, _, _ = place_of(vllm_config)
        adapters.check_files(self.lora_manager, copied=unit_spec.listen is not None)
        return found

    def _make_states(self, specs: dict[str, MambaSpec]) -> MappedStates:
        return MappedStates(specs, self.scheduler_config.max_num_seqs)

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
        self.reset_encoder_cache()
        if self.states is not None:
            self.states.forget()
        self._bind_pool(self.kv_cache_config)

    def _bind_pool(self, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
        if not current().model.kv_heads:
            return {}
        group = kv_cache_config.kv_cache_groups[0]
        spec = group.kv_cache_spec
        view = current().view
        pool = torch.from_numpy(view.pool).view(spec.dtype)
        if current().model.latent:
            pool = pool.view(-1, 1, latent.KERNEL_BLOCK, spec.head_size)
        else:
            pool = pool.view(-1, 1, spec.block_size, 2 * spec.head_size)
        kv_caches = dict.fromkeys(group.layer_names, pool)
        if self.states is not None:
            kv_caches |= self.states.of_layers()
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


class HostWorker(cpu_worker.CPUWorker):
    """A worker on CPU, of one rank or several, with a model runner of ours."""

    runner_class: type[CPUModelRunner]

    def init_device(self) -> None:
        # CPUWorker names its runner class; there is no hook to choose another.
        cpu_worker.CPUModelRunner = self.runner_class
        ranks = self.parallel_config.world_size
        if ranks > 1:
            # Not later: vLLM lets nobody change it once a worker is up.
            torch.set_num_threads(bind_worker(self.vllm_config, self.rank).model.threads)
        if self.compilation_config.mode == CompilationMode.NONE:
            # The embedding of a split vocabulary, and the first request for logprobs, would call a C++ compiler also in
            # eager engines, for seconds.
            torch.compiler.set_stance("force_eager")
        super().init_device()
        if ranks > 1:
            _unlink_shared_memory()

    def forget_step(self) -> None:
        """See `ResumingRunner.forget_step`."""
        self.model_runner.forget_step()


class PooledCPUWorker(HostWorker):
    """`worker_cls` of engines on CPU."""

    runner_class = PooledCPUModelRunner

    def propose_nothing(self) -> None:
        """See `PooledCPUModelRunner.propose_nothing`."""
        self.model_runner.propose_nothing()

    def rebind_pool(self) -> None:
        """See `PooledCPUModelRunner.rebind_pool`."""
        self.model_runner.rebind_pool()


def _unlink_shared_memory() -> None:
    """Take away the names of the memory in which ranks exchange activations: all of them have it open, and after a kill
    nobody would."""
    for path in Path("/dev/shm").glob(f"{glob.escape(os.environ['VLLM_DIST_IDENT'])}-*"):
        path.unlink(missing_ok=True)
