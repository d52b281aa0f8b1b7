"""vLLM's CPU worker with its own KV cache and attention."""

from __future__ import annotations

import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.config import CompilationMode, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from muxserve.engine.binding import bind_worker
from muxserve.engine.cpu import ngrams, weight_packing
from muxserve.engine.cpu.ahead import AheadOnHost
from muxserve.engine.cpu.resuming import ResumingOnHost
from muxserve.engine.cpu.worker import unlink_shared_memory

_ATTENTION = {
    AttentionBackendEnum.CPU_ATTN: "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
    AttentionBackendEnum.CPU_MLA: "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend",
}


class PrivateCPUModelRunner(ResumingOnHost, AheadOnHost, CPUModelRunner):
    """vLLM's runner, whose requests may begin with output tokens."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if vllm_config.speculative_config is not None:
            ngrams.prepare()
        super().__init__(vllm_config, device)


class PrivateCPUWorker(cpu_worker.CPUWorker):
    """`worker_cls` of engines on CPU with a cache of their own."""

    def init_device(self) -> None:
        # Adapters are as on the pool; attention, and how weights are read, are not.
        weight_packing.left_to_vllm = True
        for backend, stock in _ATTENTION.items():
            register_backend(backend, stock)
        # CPUWorker names its runner class; there is no hook to choose another.
        cpu_worker.CPUModelRunner = PrivateCPUModelRunner
        ranks = self.parallel_config.world_size
        if ranks > 1:
            # Not later: vLLM lets nobody change it once a worker is up.
            torch.set_num_threads(bind_worker(self.vllm_config, self.rank).model.threads)
        if self.compilation_config.mode == CompilationMode.NONE:
            # Else also eager engines would call a C++ compiler, for seconds.
            torch.compiler.set_stance("force_eager")
        super().init_device()
        if ranks > 1:
            unlink_shared_memory()

    def schedule_ahead(self) -> None:
        """See `AheadOnHost.schedule_ahead`."""
        self.model_runner.schedule_ahead()

    def forget_step(self) -> None:
        """See `ResumingRunner.forget_step`."""
        self.model_runner.forget_step()
