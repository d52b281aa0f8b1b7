"""Every vLLM internal that the CUDA engine relies on beyond those of `muxserve.vllm.engine_internals`, in one place."""

from __future__ import annotations

from muxserve.vllm.pin import Internal, differences, refuse

_FLASH = "vllm.v1.attention.backends.flash_attn"
_LOADER = "vllm.model_executor.model_loader"
_QUANTISED = "vllm.model_executor.layers.quantization"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SECOND = "vllm.v1.worker.gpu"
_TRITON_MLA = "vllm.v1.attention.backends.mla.triton_mla"

INTERNALS: list[Internal] = [
    # attention
    (_FLASH, "FlashAttentionBackend.forward_includes_kv_cache_update", ()),
    (_FLASH, "FlashAttentionBackend.get_supported_kernel_block_sizes", ("kv_cache_spec",)),
    (_FLASH, "FlashAttentionBackend.get_preferred_block_size", ("default_block_size",)),
    (
        _FLASH,
        "FlashAttentionMetadata",
        (
            "num_actual_tokens",
            "max_query_len",
            "query_start_loc",
            "max_seq_len",
            "seq_lens",
            "block_table",
            "slot_mapping",
            "scheduler_metadata",
            "max_num_splits",
            "causal",
        ),
    ),
    (
        _FLASH,
        "FlashAttentionMetadataBuilder.__init__",
        ("kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    (
        _FLASH,
        "FlashAttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    (
        _FLASH,
        "FlashAttentionMetadataBuilder._get_scheduler_metadata",
        (
            "aot_schedule",
            "batch_size",
            "cu_query_lens",
            "max_query_len",
            "seqlens",
            "max_seq_len",
            "causal",
            "max_num_splits",
        ),
    ),
    (_FLASH, "_get_sliding_window_configs", ("vllm_config",)),
    (_FLASH, "FlashAttentionMetadataBuilder._store_scheduler_metadata", ("scheduler_metadata",)),
    (_FLASH, "FlashAttentionMetadataBuilder._cudagraph_support", ()),
    (_FLASH, "FlashAttentionMetadataBuilder.supports_update_block_table", ()),
    (_FLASH, "FlashAttentionImpl.__init__", ("num_heads", "num_kv_heads", "kv_sharing_target_layer_name")),
    (_FLASH, "FlashAttentionImpl.forward", ("layer", "query", "kv_cache", "attn_metadata", "output")),
    ("vllm.v1.attention.backends.fa_utils", "get_flash_attn_version", ()),
    (
        "vllm.vllm_flash_attn.flash_attn_interface",
        "flash_attn_varlen_func",
        ("seqused_k", "block_table", "num_splits", "window_size", "return_softmax_lse"),
    ),
    ("vllm.vllm_flash_attn.flash_attn_interface", "get_scheduler_metadata", ("cache_seqlens", "page_size")),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata", ("query_start_loc", "seq_lens", "slot_mapping")),
    ("vllm.v1.attention.backend", "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE", ()),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CUSTOM", ()),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.TRITON_MLA", ()),
    (_TRITON_MLA, "TritonMLABackend.supported_kv_cache_dtypes", ()),
    (_TRITON_MLA, "TritonMLABackend.get_supported_kernel_block_sizes", ("kv_cache_spec",)),
    (_TRITON_MLA, "TritonMLAMetadataBuilder.__init__", ("kv_cache_spec", "layer_names", "vllm_config", "device")),
    (_TRITON_MLA, "TritonMLAMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata", "fast_build")),
    (_TRITON_MLA, "TritonMLAImpl.forward_mqa", ("q", "kv_c_and_k_pe_cache", "attn_metadata", "layer")),
    (_TRITON_MLA, "decode_attention_fwd", ()),
    (_TRITON_MLA, "_compute_num_kv_splits", ("max_seq_len", "sm_count")),
    (_MLA, "MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size", ("vllm_config",)),
    (_MLA, "MLACommonMetadata", ("num_decodes", "decode", "prefill")),
    (_MLA, "MLACommonImpl.forward_mha", ("kv_c_and_k_pe_cache", "attn_metadata", "k_scale", "output", "output_scale")),
    (_MLA, "MLAAttention.update_kv_cache", ("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype")),
    (_MLA, "MLAAttention.process_weights_after_loading", ("act_dtype",)),
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec", ("block_size", "head_size", "dtype")),
    ("vllm.utils.torch_utils", "canonicalize_singleton_dim_strides", ()),
    # runner
    (_RUNNER, "GPUModelRunner.initialize_kv_cache_tensors", ("kernel_block_sizes", "kv_cache_allocation_context")),
    (_RUNNER, "GPUModelRunner._zero_block_ids", ("block_ids",)),
    (_RUNNER, "GPUModelRunner._init_kv_zero_meta", ()),
    (_RUNNER, "GPUModelRunner.capture_model", ()),
    (_RUNNER, "GPUModelRunner.profile_run", ()),
    (_RUNNER, "GPUModelRunner.profile_cudagraph_memory", ()),
    # the second runner
    (
        f"{_SECOND}.model_runner",
        "init_kv_cache",
        ("forward_context", "kv_cache_config", "kernel_block_sizes", "attn_groups"),
    ),
    (f"{_SECOND}.model_runner", "init_model_state", ("vllm_config", "model", "device")),
    (f"{_SECOND}.model_runner", "freeze_gc_for_cudagraph_capture", ()),
    (f"{_SECOND}.model_runner", "GPUModelRunner.add_requests", ("scheduler_output",)),
    (f"{_SECOND}.model_runner", "GPUModelRunner.execute_model", ("scheduler_output",)),
    (f"{_SECOND}.model_runner", "GPUModelRunner.initialize_kv_cache", ("kv_cache_config", "is_profiling")),
    (f"{_SECOND}.model_runner", "GPUModelRunner.capture_model", ("profile_only",)),
    (f"{_SECOND}.model_runner", "GPUModelRunner.profile_run", ()),
    (f"{_SECOND}.model_runner", "GPUModelRunner.profile_cudagraph_memory", ()),
    (f"{_SECOND}.model_runner", "GPUModelRunner.reset_encoder_cache", ()),
    (f"{_SECOND}.block_table", "BlockTables.redirect_writes_to_null_block", ()),
    (f"{_SECOND}.block_table", "BlockTables.apply_staged_writes", ()),
    (f"{_SECOND}.states", "RequestState.apply_staged_writes", ()),
    (f"{_SECOND}.model_states.interface", "ModelState.apply_staged_writes", ()),
    (f"{_SECOND}.sample.sampler", "Sampler.apply_staged_writes", ()),
    (f"{_SECOND}.cudagraph_utils", "CudaGraphManager.release_graphs", ()),
    (f"{_SECOND}.pp_utils", "PPHandler.get_prev_sampled_outputs", ()),
    (f"{_SECOND}.pp_utils", "PendingRecv", ("idx_mapping_np", "need_sampled_mask")),
    ("vllm.v1.worker.utils", "KVBlockZeroer.zero_block_ids", ("block_ids",)),
    ("vllm.v1.worker.utils", "KVBlockZeroer.warmup", ("num_kv_blocks",)),
    ("vllm.v1.outputs", "AsyncModelRunnerOutput.get_output", ()),
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper.clear_all_graphs", ()),
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper._all_instances", ()),
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper.__init__", ("runnable", "vllm_config", "runtime_mode")),
    ("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphWrapper._all_instances", ()),
    ("vllm.distributed.parallel_state", "GraphCaptureContext", ("stream",)),
    ("vllm.distributed.parallel_state", "graph_capture", ("device",)),
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("scheduled_new_reqs", "scheduled_cached_reqs")),
    ("vllm.v1.core.sched.output", "NewRequestData", ("block_ids",)),
    ("vllm.v1.core.sched.output", "CachedRequestData", ("new_block_ids",)),
    # worker
    ("vllm.v1.worker.gpu_worker", "Worker.init_device", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.load_model", ("load_dummy_weights",)),
    ("vllm.v1.worker.gpu_worker", "Worker._make_model_runner", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model", ("scheduler_output",)),
    ("vllm.v1.worker.gpu_worker", "request_memory", ("init_snapshot", "cache_config", "external_weight_memory")),
    ("vllm.v1.worker.workspace", "is_workspace_manager_initialized", ()),
    ("vllm.v1.worker.workspace", "unlock_workspace", ()),
    ("vllm.utils.torch_utils", "current_stream", ()),
    ("vllm.utils.torch_utils", "_patched_set_stream", ("stream",)),
    # weights
    (_LOADER, "register_model_loader", ("load_format",)),
    (_LOADER, "_LOAD_FORMAT_TO_MODEL_LOADER", ()),
    (f"{_LOADER}.weight_cache.ipc_loader", "IpcModelLoader._build_model", ("vllm_config", "model_config", "state")),
    (f"{_LOADER}.weight_cache.ipc_loader", "IpcModelLoader._fetch_entries", ("model_config",)),
    (f"{_LOADER}.weight_cache.ipc_loader", "IpcModelLoader.get_external_weight_memory", ("vllm_config",)),
    (f"{_LOADER}.weight_cache.ipc_loader", "IpcModelLoader._apply_entries", ("model", "state", "device_index")),
    (f"{_LOADER}.weight_cache.ipc_loader", "_materialize_remaining_meta_tensors", ("model", "device")),
    (f"{_LOADER}.utils", "initialize_model", ("vllm_config", "model_config", "prefix")),
    (f"{_LOADER}.utils", "process_weights_after_loading", ("model", "model_config", "target_device")),
    (f"{_LOADER}.reload.meta", "materialize_meta_tensor", ("meta_tensor",)),
    ("vllm.model_executor.utils", "weights_already_processed", ()),
    (f"{_QUANTISED}.base_config", "QuantizeMethodBase.supports_pre_processed_weights", ()),
    (f"{_QUANTISED}.base_config", "QuantizeMethodBase.process_weights_after_loading", ("layer",)),
    ("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase", ()),
    (f"{_LOADER}.weight_cache.protocol", "WeightCacheState", ("entries", "aliases", "attrs")),
    (f"{_LOADER}.weight_cache.protocol", "WeightCacheKey.from_model_config", ("model_config", "pp_size", "pp_rank")),
    ("vllm.distributed", "get_world_group", ()),
    ("vllm.distributed", "get_tp_group", ()),
    ("vllm.distributed", "get_pp_group", ()),
    ("vllm.config.compilation", "PassConfig", ("fuse_allreduce_rms",)),
    ("vllm.config.vllm", "enable_allreduce_rms_fusion", ("cfg",)),
    ("vllm.third_party.pynvml", "nvmlDeviceGetHandleByUUID", ()),
    ("vllm.third_party.pynvml", "nvmlDeviceGetMPSComputeRunningProcesses", ()),
    ("vllm.third_party.pynvml", "nvmlDeviceGetComputeRunningProcesses", ()),
    (
        "vllm.v1.attention.backends.utils",
        "resolve_kv_cache_layout",
        ("vllm_config", "supported_layouts", "kv_cache_specs"),
    ),
    ("vllm.v1.executor.abstract", "Executor.get_supported_kv_cache_layouts", ()),
    ("vllm.v1.executor.abstract", "Executor.set_kv_cache_layout", ("layout_name",)),
    ("vllm.v1.executor.abstract", "Executor.register_failure_callback", ("callback",)),
]

_LAYERS = "vllm.model_executor.layers.mamba"
# Internals of layers that keep states. Importing them touches CUDA, so they are looked at when such a model is loaded.
STATES: list[Internal] = [
    (
        f"{_LAYERS}.gdn.qwen_gdn_linear_attn",
        "QwenGatedDeltaNetAttention._forward_core",
        ("mixed_qkv", "b", "a", "core_attn_out"),
    ),
    (f"{_LAYERS}.gdn.qwen_gdn_linear_attn", "_resolve_gdn_prefill_backend", ("vllm_config",)),
    (f"{_LAYERS}.mamba_mixer2", "MambaMixer2.conv_ssm_forward", ("projected_states", "output")),
    (f"{_LAYERS}.mamba_utils", "is_conv_state_dim_first", ()),
    (f"{_LAYERS}.abstract", "MambaBase.mamba_type", ()),
    (
        "vllm.v1.attention.backends.gdn_attn",
        "GDNAttentionMetadata",
        (
            "num_prefills",
            "num_decodes",
            "num_actual_tokens",
            "non_spec_state_indices_tensor",
            "prefill_state_indices",
        ),
    ),
    (
        "vllm.v1.attention.backends.mamba2_attn",
        "Mamba2AttentionMetadata",
        ("num_prefills", "num_decodes", "num_decode_tokens", "state_indices_tensor_d", "state_indices_tensor_p"),
    ),
    ("vllm.forward_context", "ForwardContext", ("attn_metadata",)),
]


def problems() -> list[str]:
    """What differs from the vLLM that the CUDA engine was written for, in words; empty when all is well."""
    return differences(INTERNALS)


def check_states() -> None:
    """The same of layers that keep states.

    Raises:
        RuntimeError: says what differs and which version to install.
    """
    refuse(differences(STATES))
