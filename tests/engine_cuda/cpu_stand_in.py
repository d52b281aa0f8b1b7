"""The CUDA engine's runner and attention on a CPU, with FlashAttention in plain torch: everything but the kernels."""

from __future__ import annotations

import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from muxserve.engine.cpu.ahead import AheadOnHost
from muxserve.engine.cuda.attention import PooledFlashBackend
from muxserve.engine.cuda.runner import PooledGPUModelRunner
from tests.engine_cuda import paged_reference

fa_utils.flash_attn_varlen_func = paged_reference.flash_attn_varlen_func


class StandInBackend(PooledFlashBackend):
    """Under the name of the one backend that vLLM's CPU platform takes."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class StandInRunner(PooledGPUModelRunner, AheadOnHost, CPUModelRunner):
    """Our runner over vLLM's for CPU, where ours is over vLLM's for GPUs otherwise."""


class StandInWorker(cpu_worker.CPUWorker):
    def init_device(self) -> None:
        cpu_worker.CPUModelRunner = StandInRunner
        super().init_device()

    def schedule_ahead(self) -> None:
        self.model_runner.schedule_ahead()

    def rebind_pool(self) -> None:
        self.model_runner.rebind_pool()


register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.StandInBackend")
