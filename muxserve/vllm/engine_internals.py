"""Every vLLM internal that the engines rely on, in one place.

`check()` runs before an engine is built and in the tests: when the pinned version moves, it says in one sentence what
is no longer as it was.
"""

from __future__ import annotations

from muxserve.vllm.pin import Internal, differences, refuse

INTERNALS: list[Internal] = [
    ("vllm.v1.structured_output", "StructuredOutputManager.__init__", ("vllm_config",)),
    ("vllm.v1.structured_output", "StructuredOutputManager.grammar_init", ("request",)),
    ("vllm.v1.structured_output", "StructuredOutputManager._create_grammar", ("request",)),
    ("vllm.v1.structured_output", "StructuredOutputManager._fill_bitmasks", ("batch",)),
    ("vllm.v1.structured_output", "StructuredOutputManager.accept_tokens", ("request", "new_token_ids")),
    ("vllm.v1.structured_output", "StructuredOutputManager.clear_backend", ()),
    ("vllm.v1.structured_output.backend_xgrammar", "XgrammarBackend", ("vllm_config", "tokenizer", "vocab_size")),
    ("vllm.v1.structured_output.backend_guidance", "GuidanceBackend", ("vllm_config", "tokenizer", "vocab_size")),
    ("vllm.v1.engine.core", "EngineCore.__init__", ("vllm_config", "executor_class", "log_stats")),
    ("vllm.v1.engine.core", "EngineCore.step", ()),
    ("vllm.v1.engine.core", "EngineCore.step_with_batch_queue", ()),
    ("vllm.v1.engine.core", "EngineCore.post_step", ("model_executed",)),
    ("vllm.v1.engine.core", "EngineCore.preprocess_add_request", ("request",)),
    ("vllm.v1.engine.core", "EngineCore.add_request", ("request", "request_wave")),
    ("vllm.v1.engine.core", "EngineCore.abort_requests", ("request_ids",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("throttle_prefills",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.has_requests", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", ("request_ids", "finished_status")),
    ("vllm.v1.core.sched.scheduler", "Scheduler._drain_deferred_frees", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler._request_blocks_can_be_freed", ("request",)),
    ("vllm.config.vllm", "VllmConfig.max_concurrent_batches", ()),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_after_schedule", ("scheduler_output",)),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_request_with_output", ("request", "new_token_ids")),
    ("vllm.config.scheduler", "SchedulerConfig", ("async_scheduling", "scheduler_cls")),
    ("vllm.v1.core.sched.interface", "PauseState.PAUSED_NEW", ()),
    ("vllm.v1.core.sched.request_queue", "create_request_queue", ("policy",)),
    ("vllm.v1.core.sched.request_queue", "SchedulingPolicy.FCFS", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ("scheduler_output", "model_runner_output")),
    ("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", ("request", "timestamp", "drop_stale_output")),
    ("vllm.v1.core.sched.scheduler", "Scheduler._free_blocks", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler._free_request_blocks", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler._handle_blocked_waiting_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.make_stats", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler._enqueue_waiting_request", ("request",)),
    ("vllm.v1.core.block_pool", "BlockPool.__init__", ("num_gpu_blocks", "enable_caching", "hash_block_size")),
    ("vllm.v1.core.block_pool", "BlockPool.get_cached_block", ("block_hash", "kv_cache_group_ids")),
    ("vllm.v1.core.block_pool", "BlockPool.cache_full_blocks", ("blocks", "num_cached_blocks", "num_full_blocks")),
    ("vllm.v1.core.block_pool", "BlockPool.get_new_blocks", ("num_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.touch", ("blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", ()),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.pop_blocks_for_free", ("request",)),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager", ("kv_cache_spec", "block_pool")),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.get_num_blocks_to_allocate",
        ("request_id", "num_tokens"),
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.allocate_new_blocks",
        ("request_id", "num_tokens", "num_tokens_main_model"),
    ),
    ("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager.pop_blocks_for_free", ("request_id",)),
    (
        "vllm.model_executor.layers.pooler.activations",
        "resolve_classifier_act_fn",
        ("model_config", "static_num_labels"),
    ),
    ("vllm.model_executor.layers.pooler.activations", "PoolerNormalize.forward_chunk", ("pooled_data",)),
    ("vllm.pooling_params", "PoolingParams", ("use_activation", "dimensions", "step_tag_id", "returned_token_ids")),
    ("vllm.v1.outputs", "ModelRunnerOutput", ("sampled_token_ids", "pooler_output")),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager.find_longest_cache_hit",
        ("block_hashes", "max_length"),
    ),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler._mamba_block_aligned_split",
        ("request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens"),
    ),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model", ("scheduler_output",)),
    ("vllm.v1.kv_cache_interface", "MambaSpec", ("shapes", "dtypes", "page_size_padded")),
    ("vllm.v1.kv_cache_interface", "MambaSpec.real_page_size_bytes", ()),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.initialize_kv_cache", ("kv_cache_config",)),
    ("vllm.model_executor.layers.mamba.abstract", "MambaBase.bind_kv_cache", ("kv_cache",)),
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("new_block_ids_to_zero", "scheduled_cached_reqs")),
    (
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.prefix_cache_lookup_enabled", ("request",)),
    ("vllm.v1.core.kv_cache_utils", "resolve_block_hashes", ("block_hashes", "hash_block_size", "block_size")),
    ("vllm.v1.core.kv_cache_utils", "resolve_none_hash_seed", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.initialize_kv_cache_tensors", ("kv_cache_config",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._freeze_gc", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states", ("scheduler_output",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", ("grammar_output",)),
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("num_scheduled_tokens", "finished_req_ids")),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_streaming_request", ("req_id", "new_req_data")),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._init_mrope_positions", ("req_state",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync", ("scheduler_output",)),
    ("vllm.v1.worker.utils", "bind_kv_cache", ("kv_caches", "forward_context", "runner_kv_caches")),
    ("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("output_token_ids", "generator", "block_ids")),
    ("vllm.v1.attention.backends.registry", "register_backend", ("backend",)),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor", ()),
    ("vllm.distributed.parallel_state", "_groups", ()),
    ("vllm.distributed.parallel_state", "GroupCoordinator.destroy", ()),
    ("vllm.distributed.parallel_state", "GroupCoordinator", ("use_message_queue_broadcaster",)),
    ("vllm.distributed.parallel_state", "GroupCoordinator.irecv_tensor_dict", ()),
    ("vllm.distributed.parallel_state", "GroupCoordinator.isend_tensor_dict", ("tensor_dict",)),
    ("vllm.distributed.parallel_state", "get_pp_group", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sync_and_gather_intermediate_tensors", ()),
    ("vllm.model_executor.models.utils", "WeightsMapper", ("orig_to_new_prefix",)),
    ("vllm.model_executor.models.utils", "WeightsMapper.apply", ("weights",)),
    ("vllm.model_executor.models", "ModelRegistry.register_model", ("model_arch", "model_cls")),
    ("vllm.model_executor.models", "ModelRegistry.models", ()),
    ("vllm.config", "ModelConfig", ("hf_overrides", "config_format")),
    ("vllm.v1.core.encoder_cache_manager", "EncoderCacheManager.reset", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reset_encoder_cache", ()),
    ("vllm.v1.request", "Request.has_encoder_inputs", ()),
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec", ("data", "identifier", "mm_position", "mm_hash")),
    ("vllm.multimodal.inputs", "MultiModalKwargsItem", ()),
    ("vllm.v1.serial_utils", "MsgpackEncoder.__init__", ("size_threshold",)),
    ("vllm.v1.serial_utils", "MsgpackEncoder.encode", ("obj",)),
    ("vllm.v1.serial_utils", "MsgpackDecoder.decode", ("bufs",)),
    ("vllm.config.vllm", "VllmConfig", ("additional_config",)),
    ("vllm.config.scheduler", "SchedulerConfig", ("policy",)),
    ("vllm.v1.engine", "EngineCoreRequest", ("priority",)),
    ("vllm.v1.executor.multiproc_executor", "WorkerWrapperBase", ("rpc_rank", "global_rank")),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.start_worker_monitor", ("inline",)),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc", ("method",)),
    ("vllm.v1.executor.multiproc_executor", "WorkerProcHandle", ("proc", "rank")),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", ("all_kwargs",)),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase.execute_model", ("scheduler_output",)),
    ("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition", ("busy_loop_s",)),
    ("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.record_read", ()),
    ("vllm.distributed.device_communicators.shm_broadcast", "ShmRingBuffer", ("name",)),
    ("vllm.utils.system_utils", "get_mp_context", ()),
]

_MLA = "vllm.model_executor.layers.attention.mla_attention"
# What only engines on CPU rely on. Not looked for elsewhere: vLLM's CPU worker changes torch when it is imported.
CPU_INTERNALS: list[Internal] = [
    ("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ()),
    ("vllm.v1.worker.cpu_worker", "CPUModelRunner", ()),
    ("vllm.model_executor.model_loader.weight_utils", "safe_open", ()),
    (
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.load_weights",
        ("model", "model_config"),
    ),
    ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod.process_weights_after_loading", ("layer",)),
    ("vllm.model_executor.parameter", "BasevLLMParameter.weight_loader", ()),
    ("vllm.platforms.interface", "Platform.is_zen_cpu", ()),
    ("vllm.model_executor.model_loader.weight_utils", "safetensors_weights_iterator", ("hf_weights_files",)),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend.forward_includes_kv_cache_update", ()),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder.build", ("common_attn_metadata",)),
    ("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLABackend.get_supported_kernel_block_sizes", ()),
    ("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLAImpl.do_kv_cache_update", ("kv_c_normed", "k_pe", "kv_cache")),
    ("vllm.v1.attention.backends.mla.cpu_mla", "CPUMLAImpl.forward_mqa", ("q", "kv_c_and_k_pe_cache")),
    (_MLA, "MLACommonBaseImpl.forward_mha", ("q", "kv_c_and_k_pe_cache", "attn_metadata", "output_scale")),
    (_MLA, "MLACommonPrefillMetadata", ("block_table", "chunked_context")),
    (_MLA, "MLACommonMetadataBuilder.__init__", ("kv_cache_spec", "layer_names", "metadata_cls")),
    (_MLA, "MLACommonMetadataBuilder.build", ("common_attn_metadata",)),
    (_MLA, "MLACommonMetadata", ("num_decodes", "num_actual_tokens", "decode")),
    (_MLA, "MLAAttention.bind_kv_cache", ("kv_cache",)),
    ("vllm.platforms.cpu", "CpuPlatform.get_punica_wrapper", ()),
    ("vllm.platforms.cpu", "CpuPlatform.register_triton_kernel_overrides", ()),
    ("vllm.logger", "configure_logging_if_needed", ("config",)),
    ("vllm.plugins", "load_general_plugins", ()),
    ("vllm.utils.cpu_resource_utils", "_get_cpu_list", ()),
    ("vllm.v1.sample.logits_processor", "_load_logitsprocs_plugins", ()),
    ("vllm.v1.structured_output", "cached_tokenizer_from_config", ("model_config",)),
    ("vllm.distributed.elastic_ep.elastic_execute", "ElasticEPScalingExecutor", ()),
    ("vllm.model_executor.layers.quantization.online.base", "OnlineQuantizationConfig", ()),
    ("vllm.lora.punica_wrapper.punica_cpu", "PunicaWrapperCPU.add_lora_linear", ("y", "x")),
    ("vllm.lora.punica_wrapper.punica_cpu", "PunicaWrapperCPU.add_lora_embedding", ("y", "x")),
    ("vllm.lora.punica_wrapper.punica_cpu", "PunicaWrapperCPU.add_lora_logits", ("y", "x")),
    ("vllm.lora.worker_manager", "WorkerLoRAManager._load_adapter", ("lora_request",)),
    ("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin.load_lora_model", ("model", "vllm_config")),
    ("vllm._custom_ops", "cpu_attention_with_kv_cache", ("query", "key_cache", "block_table", "scheduler_metadata")),
    ("vllm._custom_ops", "cpu_attn_reshape_and_cache", ("key", "value", "slot_mapping", "isa")),
    ("vllm._custom_ops", "cpu_attn_get_scheduler_metadata", ("num_reqs", "num_kv_heads", "query_start_loc")),
]


def internals(device: str) -> list[Internal]:
    """What engines on `device` (cpu or cuda) rely on."""
    if device == "cpu":
        return INTERNALS + CPU_INTERNALS
    from muxserve.vllm.cuda_internals import INTERNALS as CUDA_INTERNALS

    return INTERNALS + CUDA_INTERNALS


def problems(device: str = "cpu") -> list[str]:
    """What differs from the vLLM that the engines were written for, in words; empty when all is well."""
    return differences(internals(device))


def check(device: str) -> None:
    """Refuse to go on with a vLLM that engines on `device` do not fit.

    Raises:
        RuntimeError: says what differs and which version to install.
    """
    refuse(problems(device))
