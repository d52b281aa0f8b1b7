"""The CUDA engine's runner and attention on a CPU, with FlashAttention in plain torch: everything but the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import vllm.v1.worker.cpu_worker as cpu_worker
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import cpu_gdn_attention_core
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from muxserve.engine.cuda import states
from muxserve.engine.cuda.attention import PooledFlashBackend
from muxserve.engine.cuda.latent import PooledLatentBackend, PooledLatentImpl
from muxserve.engine.cuda.runner import PooledGPUModelRunner
from tests.engine.ahead_on_host import AheadOnHost
from tests.engine_cuda import paged_reference

fa_utils.flash_attn_varlen_func = paged_reference.flash_attn_varlen_func
triton_mla.decode_attention_fwd = paged_reference.decode_attention_fwd
triton_mla._compute_num_kv_splits = lambda *_: 1  # it asks Triton


class StandInBackend(PooledFlashBackend):
    """Under the name of the one backend that vLLM's CPU platform takes."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class StandInLatentBackend(PooledLatentBackend):
    """The same for latent attention, with what vLLM has on CPUs for prompts."""

    supported_dtypes = [torch.float32, torch.bfloat16]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_impl_cls() -> type[PooledLatentImpl]:
        return StandInLatentImpl


class StandInLatentImpl(PooledLatentImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        CPUMLAImpl.__init__(self, *args, **kwargs)  # type: ignore[arg-type]
        self._sm_count = 4


class StandInDeltaNet(states.DeltaNetCore):
    """With all steps computed by what vLLM has on CPUs, where states are transposed: it rounds otherwise than we."""

    def __init__(self, layer: Any, place: states.StatePlace, held: states.PagedStates) -> None:
        super().__init__(layer, replace(place, tile=0), held)

    def stock(self, *given: torch.Tensor) -> None:
        layer = self.layer
        if self.metadata() is None:
            return
        inputs, matrices = layer.kv_cache
        turned = matrices.mT.contiguous()
        layer.kv_cache = inputs, turned.view(matrices.shape)
        cpu_gdn_attention_core(*given, layer.prefix)
        matrices.copy_(turned.mT)


states.DeltaNetCore = StandInDeltaNet
QwenGatedDeltaNetAttention.forward_cpu = QwenGatedDeltaNetAttention.forward_cuda


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
register_backend(AttentionBackendEnum.CPU_MLA, f"{__name__}.StandInLatentBackend")
