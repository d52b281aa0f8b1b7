"""What the processes that hold weights do in one way with one version of vLLM and in another way with the next."""

from __future__ import annotations

from vllm.config import CacheConfig, ModelConfig, VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheKey
from vllm.v1.executor.abstract import Executor

from muxserve.vllm.since import since


def weight_key(model_config: ModelConfig, cache_config: CacheConfig | None = None) -> WeightCacheKey:
    """vLLM's key of the weights of this rank's part of tensors and layers.

    Args:
        cache_config: of the engine; since 0.33.0 the key has the type of the KV cache.
    """
    tensors, layers = get_tp_group(), get_pp_group()
    if since("0.33.0"):
        return WeightCacheKey.from_model_config(
            model_config,
            cache_config=cache_config,
            tp_size=tensors.world_size,
            tp_rank=tensors.rank_in_group,
            pp_size=layers.world_size,
            pp_rank=layers.rank_in_group,
        )
    else:
        return WeightCacheKey.from_model_config(
            model_config,
            tp_size=tensors.world_size,
            tp_rank=tensors.rank_in_group,
            pp_size=layers.world_size,
            pp_rank=layers.rank_in_group,
        )


def publish_layout(executor: Executor, layout_name: str, config: VllmConfig) -> None:
    """Tell workers the layout of vLLM's KV cache that was settled."""
    if since("0.33.0"):
        executor.set_kv_cache_layout(layout_name, config.parallel_config.cp_kv_cache_interleave_size)
    else:
        executor.set_kv_cache_layout(layout_name)
