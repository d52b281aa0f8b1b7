"""vLLM engine arguments of a deployed model; the gateway's front end and the engines must agree on them."""

from __future__ import annotations

from typing import Any

from muxserve.deployment import ModelDeployment

# Set by the unit for every engine; a fleet file cannot override them through `engine_args`.
RESERVED = frozenset(
    {
        "model",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
        "distributed_executor_backend",
        "worker_cls",
        "scheduler_cls",
        "async_scheduling",
        "scheduler_reserve_full_isl",
        "disable_log_stats",
        "kv_transfer_config",
        "speculative_config",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "kv_cache_dtype",
        "attention_backend",
        # Of the OpenAI server: one gateway listens for all models.
        "host",
        "port",
        "uds",
        "api_key",
        "root_path",
        "middleware",
        "ssl_keyfile",
        "ssl_certfile",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "lora_modules",
        "enable_lora",
    }
)


def frontend_args(model: ModelDeployment) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs` for the gateway's front end of `model`."""
    return {
        "enforce_eager": True,
        "seed": 0,
        **model.engine_args,
        "model": model.path,
        "served_model_name": [model.name],
        "dtype": model.dtype,
        "max_model_len": model.max_len,
        "max_num_seqs": model.max_num_seqs,
        "max_num_batched_tokens": model.max_num_batched_tokens,
        "block_size": model.block_tokens,
        "enable_prefix_caching": model.prefix_caching,
        # The hash must not depend on the process: prefill and decode engines share one index.
        "prefix_caching_hash_algo": "sha256_cbor",
        "distributed_executor_backend": "uni",
        # A step runs only under a lease, so the scheduler cannot run one step ahead.
        "async_scheduling": False,
    }


def engine_args(model: ModelDeployment) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs` for an engine of `model`."""
    return {
        **frontend_args(model),
        "num_gpu_blocks_override": model.num_blocks,
        # The pool is the memory manager's. This only keeps vLLM from sizing a cache of its own.
        "kv_cache_memory_bytes": 64 << 20,
        # Room for a whole prompt is checked by the unit scheduler before it admits the request.
        "scheduler_reserve_full_isl": False,
        "worker_cls": "muxserve.engine.cpu.worker.PooledCPUWorker",
        "scheduler_cls": "muxserve.engine.scheduler.PhaseScheduler",
        "disable_log_stats": False,
    }
