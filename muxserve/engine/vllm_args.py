"""vLLM engine arguments of a deployed model; the gateway's front end and the engines must agree on them."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from muxserve.deployment import Deployment, ModelDeployment
from muxserve.deployment.unit import EnginePhase

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKERS = {
    "cpu": "muxserve.engine.cpu.worker.PooledCPUWorker",
    "cuda": "muxserve.engine.cuda.worker.PooledGPUWorker",
}

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
        "gpu_memory_utilization",
        "distributed_executor_backend",
        "worker_cls",
        "scheduler_cls",
        "async_scheduling",
        "scheduler_reserve_full_isl",
        "scheduling_policy",
        "disable_log_stats",
        "kv_transfer_config",
        "speculative_config",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "kv_cache_dtype",
        "attention_backend",
        "attention_config",
        "additional_config",
        "worker_extension_cls",
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


def engine_args(deployment: Deployment, model: str, phase: EnginePhase) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs` for the engine of `model` and `phase`."""
    deployed = deployment.model(model)
    common = frontend_args(deployed)
    return {
        **common,
        "num_gpu_blocks_override": deployed.num_blocks,
        # The pool is the memory manager's. This only keeps vLLM from sizing a cache of its own.
        "kv_cache_memory_bytes": 64 << 20,
        # Room for a whole prompt is checked by the unit scheduler before it admits the request.
        "scheduler_reserve_full_isl": False,
        "tensor_parallel_size": deployment.ranks // deployment.stages,
        "pipeline_parallel_size": deployment.stages,
        "distributed_executor_backend": "uni" if deployment.ranks == 1 else "mp",
        "worker_cls": WORKERS[deployment.device],
        "scheduler_cls": "muxserve.engine.scheduler.PhaseScheduler",
        # When no page is left, requests of the lowest execution level give theirs back, of equals the latest. What
        # waits to be prefilled is in the unit scheduler's order already; the scheduler of an engine of both phases
        # sees to that.
        "scheduling_policy": "fcfs" if phase == "prefill" else "priority",
        "disable_log_stats": False,
        # Requests without a seed must not see the same numbers in both engines of a model.
        "seed": common["seed"] + (1 if phase == "decode" else 0),
        "additional_config": {
            "muxserve": {
                "deployment": os.path.join(deployment.run_dir, "deployment.json"),
                "model": model,
                "phase": phase,
            }
        },
        **(_cuda_args(deployment, deployed) if deployment.device == "cuda" else {}),
    }


def _cuda_args(deployment: Deployment, model: ModelDeployment) -> dict[str, Any]:
    from muxserve.engine.cuda.weights import loader_args

    own = model.engine_args
    return {
        # Without graphs a small model's decode step is mostly the launching of its kernels.
        "enforce_eager": own.get("enforce_eager", False),
        "compilation_config": own.get("compilation_config", {"cudagraph_mode": "PIECEWISE"}),
        "attention_backend": "CUSTOM",
        # An engine takes no share of the GPU for itself: what it needs was set aside before the pool was made.
        "gpu_memory_utilization": 0.01,
        **loader_args(deployment, model.name),
    }


def config_of(options: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration of an engine from what `engine_args` says."""
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from muxserve.engine.binding import Place

    # The rest of a model's own `engine_args` is for the OpenAI server, which is the gateway's business.
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    known = {name: value for name, value in options.items() if name in names}
    config = EngineArgs(**known).create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.additional_config = Place(options["additional_config"])
    return config
