"""vLLM's CPU worker with its own KV cache and attention."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from muxserve.engine.cpu import ngrams, weight_packing
from muxserve.engine.cpu.resuming import ResumingOnHost
from muxserve.engine.cpu.worker import HostWorker

_ATTENTION = {
    AttentionBackendEnum.CPU_ATTN: "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
    AttentionBackendEnum.CPU_MLA: "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend",
}


class PrivateCPUModelRunner(ResumingOnHost, CPUModelRunner):
    """vLLM's runner, whose requests may begin with output tokens."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        if vllm_config.speculative_config is not None:
            ngrams.prepare()
        super().__init__(vllm_config, device)


class PrivateCPUWorker(HostWorker):
    """`worker_cls` of engines on CPU with a cache of their own."""

    runner_class = PrivateCPUModelRunner

    def init_device(self) -> None:
        # Adapters are as on the pool; attention, and how weights are read, are not.
        weight_packing.left_to_vllm = True
        for backend, stock in _ATTENTION.items():
            register_backend(backend, stock)
        super().init_device()
