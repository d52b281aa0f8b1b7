"""Which names of vLLM's classes our subclasses replace.

vLLM calls a method of ours that shadows one of its own by accident, with its own arguments. So each name that is meant
to replace one of vLLM's is declared here, attributes included. A test refuses all others, and declared names that vLLM
no longer has.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping

# The names that each of our classes replaces; a mixin has the names that it replaces wherever it is mixed in.
OVERRIDES: dict[str, tuple[str, ...]] = {
    "muxserve.engine.block_pool.PooledBlockPool": (
        "cache_full_blocks",
        "evict_blocks",
        "free_blocks",
        "get_cached_block",
        "get_new_blocks",
        "get_num_free_blocks",
        "get_usage",
        "reset_prefix_cache",
        "touch",
    ),
    "muxserve.engine.cpu.adapters.MaskedPunica": ("add_lora_embedding", "add_lora_linear", "add_lora_logits"),
    "muxserve.engine.cpu.attention.PooledCPUBackend": (
        "forward_includes_kv_cache_update",
        "get_builder_cls",
        "get_impl_cls",
        "get_name",
    ),
    "muxserve.engine.cpu.attention.PooledCPUImpl": ("forward", "sinks"),
    "muxserve.engine.cpu.attention.PooledCPUMetadataBuilder": ("build",),
    "muxserve.engine.cpu.latent.PooledLatentBackend": (
        "get_builder_cls",
        "get_impl_cls",
        "get_supported_kernel_block_sizes",
        "supports_block_size",
    ),
    "muxserve.engine.cpu.latent.PooledLatentImpl": ("do_kv_cache_update",),
    "muxserve.engine.cpu.latent.PooledLatentMetadataBuilder": ("build",),
    "muxserve.engine.cpu.resuming.ResumingOnHost": ("_bookkeeping_sync",),
    "muxserve.engine.cpu.worker.PooledCPUModelRunner": (
        "_prepare_inputs",
        "_zero_block_ids",
        "initialize_kv_cache_tensors",
        "intermediate_tensors",
        "load_lora_model",
        "load_model",
        "num_spec_tokens",
        "prev_num_spec_tokens",
        "propose_draft_token_ids",
        "speculative_config",
        "uniform_decode_query_len",
    ),
    "muxserve.engine.cpu.worker.HostWorker": ("init_device",),
    "muxserve.engine.cuda.attention.PooledFlashBackend": (
        "forward_includes_kv_cache_update",
        "get_builder_cls",
        "get_impl_cls",
        "get_name",
        "get_preferred_block_size",
        "get_supported_kernel_block_sizes",
        "supported_kv_cache_dtypes",
        "supports_attn_type",
        "supports_mm_prefix",
        "supports_non_causal",
        "supports_rswa",
        "supports_sink",
    ),
    "muxserve.engine.cuda.attention.PooledFlashImpl": ("fa4_hd256", "forward", "sinks", "vllm_flash_attn_version"),
    "muxserve.engine.cuda.attention.PooledFlashMetadataBuilder": (
        "_cudagraph_support",
        "aot_schedule",
        "aot_sliding_window",
        "build",
        "num_heads_kv",
        "num_heads_q",
        "scheduler_metadata",
        "supports_update_block_table",
    ),
    "muxserve.engine.cuda.first_runner.FirstPooledRunner": (
        "_freeze_gc",
        "_init_kv_zero_meta",
        "_zero_block_ids",
        "initialize_kv_cache_tensors",
    ),
    "muxserve.engine.cuda.first_runner.FirstPrivateRunner": ("_freeze_gc",),
    "muxserve.engine.cuda.graphs.CapturingRunner": ("capture_model",),
    "muxserve.engine.cuda.latent.PooledLatentBackend": ("get_builder_cls", "get_impl_cls", "supported_kv_cache_dtypes"),
    "muxserve.engine.cuda.latent.PooledLatentImpl": ("do_kv_cache_update",),
    "muxserve.engine.cuda.latent.PooledLatentMetadataBuilder": ("build", "metadata_cls"),
    "muxserve.engine.cuda.pooled.PooledOnDevice": ("kv_caches", "load_model"),
    "muxserve.engine.cuda.resuming.ResumingOnDevice": ("_bookkeeping_sync",),
    "muxserve.engine.cuda.second_runner.SecondPooledRunner": (
        "_init_kv_zero_meta",
        "add_requests",
        "execute_model",
        "initialize_kv_cache",
        "kv_block_zeroer",
    ),
    "muxserve.engine.cuda.second_runner.SecondRunner": ("execute_model_state", "load_model"),
    "muxserve.engine.cuda.weight_holder.HolderWorker": (
        "compile_or_warm_up_model",
        "init_device",
        "load_model",
    ),
    "muxserve.engine.cuda.weight_loader.HeldWeightsLoader": (
        "_build_model",
        "_fetch_entries",
        "download_model",
        "get_external_weight_memory",
    ),
    "muxserve.engine.cuda.worker.PooledGPUWorker": (
        "_make_model_runner",
        "compile_or_warm_up_model",
        "determine_available_memory",
        "execute_model",
        "init_device",
    ),
    "muxserve.engine.grammars.EngineGrammars": (
        "_create_grammar",
        "_fill_bitmasks",
        "accept_tokens",
        "backend",
        "executor",
        "grammar_init",
        "tokenizer",
    ),
    "muxserve.engine.latent.ByLayer": ("forward_mha", "forward_mqa"),
    "muxserve.engine.rank_worker.RankWorker": ("execute_model", "init_device", "init_worker"),
    "muxserve.engine.ranks.RankedExecutor": ("_init_executor", "collective_rpc", "start_worker_monitor"),
    "muxserve.engine.ranks._Patience": ("busy_loop_s", "notify", "record_read"),
    "muxserve.engine.leased_scheduler.LeasedScheduler": (
        "_free_blocks",
        "_handle_blocked_waiting_request",
        "add_request",
        "has_requests",
        "kv_holding_waiting",
        "make_spec_decoding_stats",
        "make_stats",
        "waiting",
    ),
    "muxserve.engine.private.cpu.PrivateCPUWorker": ("init_device",),
    "muxserve.engine.private.cuda.PrivateGPUWorker": ("determine_available_memory", "init_device"),
    "muxserve.engine.private.cuda.PrivateHolderWorker": ("init_device",),
    "muxserve.engine.private.scheduler.PrivateScheduler": (
        "finished_req_ids",
        "max_num_scheduled_tokens",
        "processed_step_seq",
        "schedule",
        "update_from_output",
    ),
    "muxserve.engine.runner.PooledLayers": (
        "execute_model",
        "get_kv_cache_spec",
        "initialize_kv_cache",
        "load_model",
    ),
    "muxserve.engine.runner.PooledRunner": ("_update_states",),
    "muxserve.engine.runner.ResumingRunner": (
        "_update_states",
        "_update_streaming_request",
        "execute_model_state",
    ),
    "muxserve.engine.scheduler.PhaseScheduler": (
        "_mamba_block_aligned_split",
        "_preempt_request",
        "defer_block_free",
        "finished_req_ids",
        "max_num_scheduled_tokens",
        "need_mamba_block_aligned_split",
        "needs_kv_cache_zeroing",
        "num_spec_tokens",
        "processed_step_seq",
        "schedule",
        "update_draft_token_ids",
        "update_from_output",
    ),
    "muxserve.engine.simulated.SimulatedWorker": (
        "compile_or_warm_up_model",
        "execute_model",
        "get_kv_cache_spec",
        "get_supported_kv_cache_layouts",
        "init_device",
        "load_model",
        "sample_tokens",
    ),
    "muxserve.engine.simulated_stages.StagedOutput": ("get_output",),
    "muxserve.engine.states.StatefulBlocks": (
        "allocate_new_blocks",
        "block_pool",
        "find_longest_cache_hit",
        "get_num_blocks_to_allocate",
        "pop_blocks_for_free",
    ),
    "muxserve.gateway.front_end.images.DataUrls": ("load_from_url", "load_from_url_async"),
    "muxserve.gateway.front_end.engine_client.UnitEngineClient": (
        "abort_requests_async",
        "add_request_async",
        "dp_engines_running",
        "get_output_async",
        "get_supported_tasks",
        "get_supported_tasks_async",
        "is_sleeping_async",
        "shutdown",
    ),
    "muxserve.gateway.status.vllm_metrics.stat_logger.<locals>.ModelPerfMetrics": ("_counter_cls",),
    "muxserve.gateway.status.vllm_metrics.stat_logger.<locals>.ModelStatLogger": (
        "_counter_cls",
        "_gauge_cls",
        "_histogram_cls",
        "_perf_metrics_cls",
        "log_metrics_info",
        "record",
    ),
}


def problems(classes: Iterable[type], declared: Mapping[str, tuple[str, ...]] = OVERRIDES) -> list[str]:
    """What is wrong with the names of our classes `classes`, in words; empty when all is well. Names with two
    underscores on both sides are Python's, and are left out."""
    found: dict[tuple[str, str], str] = {}
    used: set[tuple[str, str]] = set()
    for ours, name, theirs in _shadowed(classes):
        if name in declared.get(ours, ()):
            used.add((ours, name))
        else:
            found[ours, name] = f"{ours}.{name} shadows {theirs}.{name}: rename it, or declare it in OVERRIDES"
    for ours, names in declared.items():
        for name in names:
            if (ours, name) not in used:
                found[ours, name] = f"{ours}.{name} is declared in OVERRIDES, and replaces nothing of vLLM's"
    return [found[key] for key in sorted(found)]


def is_ours_over_vllm(cls: type) -> bool:
    """Whether the class is ours, and derived from one of vLLM's."""
    return _package(cls) == "muxserve" and any(_package(base) == "vllm" for base in cls.__mro__)


def _shadowed(classes: Iterable[type]) -> Iterator[tuple[str, str, str]]:
    """Our class, also one that is only mixed in, a name that it has, and the class of vLLM's that has it too."""
    for cls in classes:
        stock: dict[str, type] = {}
        for base in reversed(cls.__mro__):
            if _package(base) == "vllm":
                stock |= dict.fromkeys(_names(base), base)
        for base in cls.__mro__:
            if _package(base) == "muxserve":
                for name in _names(base) & set(stock):
                    yield _path(base), name, _path(stock[name])


def _names(cls: type) -> set[str]:
    """Methods and attributes that the class has itself, and those that its methods give to its objects."""
    names = {*vars(cls), *vars(cls).get("__annotations__", {}), *_assigned(cls)} - {"_abc_impl"}
    return {name for name in names if not (name.startswith("__") and name.endswith("__"))}


def _assigned(cls: type) -> Iterator[str]:
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # made without a source file
        return
    for method in body.body if isinstance(body, ast.ClassDef) else ():
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not method.args.args:
            continue
        this = method.args.args[0].arg
        for node in ast.walk(method):
            match node:
                case ast.Attribute(ast.Name(id), attr, ast.Store()) if id == this:
                    yield attr


def _package(cls: type) -> str:
    return str(cls.__module__).partition(".")[0]  # that of some classes is a descriptor


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
