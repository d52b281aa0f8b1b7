"""Every vLLM internal that the gateway relies on, in one place.

`check()` runs when a gateway starts and in the tests: when the pinned version moves, it says in one sentence what is no
longer as it was.
"""

from __future__ import annotations

from muxserve.vllm.pin import FINISH_ABORT, Internal, differences, refuse

INTERNALS: list[Internal] = [
    ("vllm.v1.engine.core_client", "EngineCoreClient.make_async_mp_client", ("vllm_config",)),
    ("vllm.v1.engine.core_client", "EngineCoreClient.get_output_async", ()),
    ("vllm.v1.engine.core_client", "EngineCoreClient.add_request_async", ("request",)),
    ("vllm.v1.engine.core_client", "EngineCoreClient.abort_requests_async", ("request_ids",)),
    ("vllm.v1.engine.core_client", "EngineCoreClient.get_supported_tasks_async", ()),
    (
        "vllm.v1.engine.async_llm",
        "AsyncLLM.from_vllm_config",
        ("vllm_config", "usage_context", "stat_loggers", "disable_log_stats"),
    ),
    ("vllm.v1.engine.async_llm", "AsyncLLM._run_output_handler", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.shutdown", ()),
    (
        "vllm.entrypoints.anthropic.serving",
        "AnthropicServingMessages.message_stream_converter",
        ("generator",),
    ),
    ("vllm.renderers.base", "_SwappableExecutor.submit", ("fn",)),
    ("vllm.renderers.base", "BaseRenderer._tokenize_prompt", ("prompt", "params")),
    ("vllm.renderers", "TokenizeParams", ("truncate_prompt_tokens", "truncation_side")),
    ("vllm.utils.async_utils", "make_async", ("func", "executor")),
    ("vllm.v1.engine.output_processor", "OutputProcessor.abort_requests", ("request_ids", "internal")),
    ("vllm.v1.engine.output_processor", "OutputProcessor.propagate_error", ("e",)),
    ("vllm.v1.engine.output_processor", "RequestState", ("request_id", "parent_req", "queue", "request_index")),
    ("vllm.v1.engine.output_processor", "RequestOutputCollector.put", ("output",)),
    (
        "vllm.v1.engine",
        "EngineCoreRequest",
        (
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "mm_features",
            "prompt_embeds",
            "resumable",
            "priority",
            "lora_request",
            "cache_salt",
        ),
    ),
    ("vllm.v1.engine", "EngineCoreOutputs", ("outputs", "engine_index", "scheduler_stats", "timestamp")),
    (
        "vllm.v1.engine",
        "EngineCoreOutput",
        (
            "request_id",
            "new_token_ids",
            "new_logprobs",
            "new_prompt_logprobs_tensors",
            "new_sampling_mask",
            "pooling_output",
            "finish_reason",
            "prefill_stats",
        ),
    ),
    ("vllm.v1.metrics.stats", "PrefillStats", ("num_cached_tokens",)),
    ("vllm.v1.outputs", "LogprobsLists.slice_request", ("req_idx", "num_positions")),
    ("vllm.v1.outputs", "SamplingMaskLists.slice_request", ("req_idx", "num_positions")),
    ("vllm.v1.serial_utils", "MsgpackEncoder.encode", ("obj",)),
    ("vllm.v1.serial_utils", "MsgpackDecoder.decode", ("bufs",)),
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger.__init__", ("vllm_config", "engine_indexes")),
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger._gauge_cls", ()),
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger._counter_cls", ()),
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger._histogram_cls", ()),
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger._perf_metrics_cls", ()),
    ("vllm.v1.metrics.loggers", "PrometheusStatLogger.log_metrics_info", ("type", "config_obj")),
    ("vllm.v1.metrics.perf", "PerfMetricsProm._counter_cls", ()),
    ("vllm.entrypoints.launchers.app", "build_app", ("args", "supported_tasks", "model_config")),
    (
        "vllm.entrypoints.launchers.api_server.app_state",
        "init_app_state",
        ("engine_client", "state", "args", "supported_tasks"),
    ),
    ("vllm.entrypoints.openai.models.serving", "OpenAIServingModels.show_available_models", ()),
    ("vllm.entrypoints.openai.models.protocol", "BaseModelPath", ("name", "model_path")),
    (
        "vllm.entrypoints.openai.responses.serving",
        "OpenAIServingResponses.create_responses",
        ("request", "raw_request"),
    ),
    (
        "vllm.entrypoints.openai.responses.serving",
        "OpenAIServingResponses.retrieve_responses",
        ("response_id", "starting_after", "stream"),
    ),
    ("vllm.entrypoints.openai.responses.serving", "OpenAIServingResponses.cancel_responses", ("response_id",)),
    (
        "vllm.entrypoints.openai.responses.serving",
        "OpenAIServingResponses.responses_background_stream_generator",
        ("response_id", "starting_after"),
    ),
    (
        "vllm.entrypoints.openai.responses.serving",
        "OpenAIServingResponses.create_error_response",
        ("message", "err_type", "status_code", "param"),
    ),
    ("vllm.entrypoints.openai.responses.protocol", "serialize_messages", ("msgs",)),
    ("vllm.renderers.online_renderer", "OpenAIMessage.from_dict", ()),
    ("vllm.renderers.online_renderer", "OnlineRenderer.render_chat", ("request",)),
    ("vllm.renderers.online_renderer", "OnlineRenderer.render_responses", ("request",)),
    (
        "vllm.entrypoints.openai.chat_completion.batch_serving",
        "OpenAIServingChatBatch.render_batch_chat_request",
        ("request",),
    ),
    ("vllm.entrypoints.openai.parser.harmony_utils", "get_encoding", ()),
    ("vllm.model_executor.models.registry", "_LazyRegisteredModel.load_model_cls", ()),
    ("vllm.model_executor.models.registry", "_RegisteredModel.from_model_cls", ("model_cls",)),
    ("vllm.envs", "enable_envs_cache", ()),
    ("vllm.config", "ParallelConfig", ("_api_process_count",)),
    ("vllm.engine.arg_utils", "EngineArgs.create_model_config", ()),
    ("vllm.config", "ModelConfig.supports_multimodal_inputs", ()),
    ("vllm.multimodal.registry", "MultiModalRegistry.create_processor", ("model_config",)),
    ("vllm.multimodal.processing", "BaseProcessingInfo.allowed_mm_limits", ()),
    ("vllm.multimodal.processing", "BaseMultiModalProcessor.get_dummy_mm_inputs", ("mm_counts",)),
    ("vllm.multimodal.media", "MEDIA_CONNECTOR_REGISTRY.register", ("name",)),
    ("vllm.multimodal.media", "MediaConnector.load_from_url", ("url",)),
    ("vllm.multimodal.media", "MediaConnector.load_from_url_async", ("url",)),
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec", ("data", "identifier", "mm_position", "mm_hash")),
    (
        "vllm.sampling_params",
        "SamplingParams._validate_structured_outputs",
        ("model_config", "structured_outputs_config", "tokenizer"),
    ),
    ("vllm.sampling_params", "SamplingParams.bad_words_token_ids", ()),
    ("vllm.sampling_params", "SamplingParams.all_stop_token_ids", ()),
    ("vllm.v1.structured_output.request", "get_structured_output_key", ("params",)),
    ("vllm.v1.structured_output.backend_types", "StructuredOutputBackend.allocate_token_bitmask", ("max_num_seqs",)),
    ("vllm.v1.structured_output.backend_types", "StructuredOutputGrammar.fill_bitmask", ("bitmask",)),
    ("vllm.exceptions", "VLLMValidationError", ("message", "parameter")),
    ("vllm.exceptions", "GracefulHTTPError", ("message", "http_status")),
]

# vLLM's caches, by module and name, whose keys or values are of one model: paths, tokenizers, their methods, templates.
MODEL_CACHES = (
    ("vllm.tokenizers.registry", "cached_get_tokenizer"),
    ("vllm.tokenizers.registry", "cached_resolve_tokenizer_args"),
    ("vllm.renderers.hf", "_PROCESSOR_CHAT_TEMPLATES"),
    ("vllm.renderers.hf", "_CONTENT_FORMATS"),
    ("vllm.renderers.hf", "_cached_resolve_chat_template_kwargs"),
    ("vllm.renderers.hf", "_detect_content_format"),
    ("vllm.renderers.hf", "_detect_developer_role_support"),
    ("vllm.utils.func_utils", "_supports_kw"),
    ("vllm.transformers_utils.processor", "cached_get_processor"),
    ("vllm.transformers_utils.processor", "cached_get_feature_extractor"),
    ("vllm.transformers_utils.processor", "cached_get_image_processor"),
    ("vllm.transformers_utils.processor", "cached_get_video_processor"),
    ("vllm.transformers_utils.processor", "get_processor_kwargs_type"),
    ("vllm.transformers_utils.processor", "get_processor_kwargs_keys"),
    ("vllm.transformers_utils.config", "get_sentence_transformer_tokenizer_config"),
    ("vllm.transformers_utils.config", "get_pooling_config"),
    ("vllm.transformers_utils.config", "checkpoint_has_lm_head"),
    ("vllm.transformers_utils.repo_utils", "list_repo_files"),
    ("vllm.transformers_utils.utils", "maybe_model_redirect"),
)
INTERNALS += [(module, name, ()) for module, name in MODEL_CACHES]


def problems(installed: str | None = None) -> list[str]:
    """What differs from the vLLM that the gateway was written for, in words; empty when all is well.

    Args:
        installed: the installed version, if not to be asked of vLLM.
    """
    from vllm.v1.engine import FinishReason

    found = differences(INTERNALS, installed)
    if int(FinishReason.ABORT) != FINISH_ABORT:
        found.append(f"FinishReason.ABORT is {int(FinishReason.ABORT)}, not {FINISH_ABORT}")
    return found


def check() -> None:
    """Refuse to go on with a vLLM that the gateway does not fit.

    Raises:
        RuntimeError: says what differs and which version to install.
    """
    refuse(problems())
