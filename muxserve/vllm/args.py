"""vLLM engine arguments of a deployed model; the gateway's front end and the engines must agree on them."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from muxserve.spec import ModelSpec, UnitSpec, public_name
from muxserve.spec.unit import EnginePhase
from muxserve.vllm.expert_groups import OneGroup
from muxserve.vllm.language_models import TextOnly

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# oneDNN keeps what it has compiled for a shape, by itself 1,024 shapes of 0.4 MB each in a prefill engine: every length
# of a step is another one. These suffice for each batch size of a decode engine; a prefill engine meets most lengths
# for the first time anyway.
PRIMITIVE_CACHE = 256
LOAD_FORMAT = "muxserve_held"
SCHEDULER = "muxserve.engine.scheduler.PhaseScheduler"
AHEAD_SCHEDULER = "muxserve.engine.ahead.AheadScheduler"
SIMULATED_WORKER = "muxserve.engine.simulated.SimulatedWorker"
# Images that a prompt may have if its model's `engine_args` do not say, and memory in which a gateway keeps images, so
# that those of a conversation are not processed with each of its messages.
IMAGES_PER_PROMPT = 8
IMAGE_CACHE_GIB = 0.25
# So many prompts are in a step of an engine whose layers keep states: theirs are copied for it, and the memory for that
# is set aside.
STATE_PROMPTS = 16
# The largest image that is decoded, in pixels.
MOST_PIXELS = 4096 * 4096
PRIVATE_SCHEDULER = "muxserve.engine.private.scheduler.PrivateScheduler"
PRIVATE_AHEAD_SCHEDULER = "muxserve.engine.private.scheduler.PrivateAheadScheduler"
PRIVATE_WORKERS = {
    "cpu": "muxserve.engine.private.cpu.PrivateCPUWorker",
    "cuda": "muxserve.engine.private.cuda.PrivateGPUWorker",
}
WORKERS = {
    "cpu": "muxserve.engine.cpu.worker.PooledCPUWorker",
    "cuda": "muxserve.engine.cuda.worker.PooledGPUWorker",
}

# What `speculative_config` of a model may say: vLLM's method that needs no other model, and its numbers.
NGRAM = "ngram"
NGRAM_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
# vLLM's short options of the same.
SPECULATION = frozenset({"spec_method", "spec_model", "spec_tokens"})

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
        "scheduler_reserve_full_isl",
        "scheduling_policy",
        "disable_log_stats",
        "kv_transfer_config",
        *SPECULATION,
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "attention_backend",
        "attention_config",
        "additional_config",
        # States lie on the pages of the pool, in a type that was planned for.
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_block_size",
        "mamba_cache_mode",
        "worker_extension_cls",
        # Options of the OpenAI server: one gateway listens for all models.
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
        # Options of images: what they are known by, and where they may come from.
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "enable_mm_embeds",
        "mm_encoder_only",
        "allowed_media_domains",
        "allowed_local_media_path",
    }
)


def frontend_args(model: ModelSpec) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs` for the gateway's front end of `model`."""
    return {
        "enforce_eager": True,
        "seed": 0,
        **({"runner": "pooling"} if model.pooling else {}),
        **(image_args() if model.sees_images else {}),
        **{name: value for name, value in model.engine_args.items() if name != "speculative_config"},
        **(_text_only_args(model) if model.text_only else {}),
        **({"hf_overrides": OneGroup(_overrides(model))} if model.latent and not model.text_only else {}),
        **_pool_args(model),
        "model": model.path,
        "served_model_name": [public_name(model.name), *model.aliases],
        **_adapter_args(model),
        "dtype": model.dtype,
        "max_model_len": model.max_len,
        "max_num_seqs": model.max_num_seqs,
        "max_num_batched_tokens": model.max_num_batched_tokens,
        # Not every pooling model can have it; vLLM knows which can. For models with states engines switch it on
        # when they start: vLLM would have kept states in a way of its own.
        "enable_prefix_caching": _caches_prefixes(model),
        # The hash must not depend on the process: prefill and decode engines share one index.
        "prefix_caching_hash_algo": "sha256_cbor",
        "distributed_executor_backend": "uni",
        # What `engine_args` says of it is for the engines.
        "async_scheduling": False,
    }


def _pool_args(model: ModelSpec) -> dict[str, Any]:
    """What follows from the pages of the pool; a model with a cache of its own has vLLM's defaults."""
    if model.private:
        return {}
    # Without being told vLLM takes other kernels where the CPU has AMX, and they do not know the pool.
    return {"block_size": model.block_tokens, **({"attention_backend": "CPU_MLA"} if model.latent else {})}


def _caches_prefixes(model: ModelSpec) -> bool | None:
    if model.prefix_caching and (model.pooling or model.private):
        return None
    return model.prefix_caching and not model.state_blocks


def image_args() -> dict[str, Any]:
    """vLLM's arguments for a model whose requests may bring images."""
    return {
        "limit_mm_per_prompt": {"image": IMAGES_PER_PROMPT, "video": 0, "audio": 0},
        # Without a cache or prefix caching vLLM would not take hashes, but numbers that several gateways give out.
        "mm_processor_cache_gb": IMAGE_CACHE_GIB,
    }


def _text_only_args(model: ModelSpec) -> dict[str, Any]:
    own = model.engine_args
    return {
        # Mistral's own format, where a checkpoint has both, has other names for everything.
        "config_format": own.get("config_format", "hf"),
        "load_format": own.get("load_format", "hf"),
        "hf_overrides": TextOnly(_overrides(model)),
    }


def _overrides(model: ModelSpec) -> Mapping[str, object]:
    """What `engine_args` change of config.json."""
    overrides = model.engine_args.get("hf_overrides")
    return overrides if isinstance(overrides, Mapping) else {}


def _adapter_args(model: ModelSpec) -> dict[str, Any]:
    slots = model.adapter_slots
    return {} if slots is None else {"enable_lora": True, "max_loras": slots.count, "max_lora_rank": slots.rank}


def engine_args(unit_spec: UnitSpec, model: str, phase: EnginePhase) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs` for the engine of `model` and `phase`."""
    deployed = unit_spec.model(model)
    common = frontend_args(deployed)
    ahead = _ahead(unit_spec, deployed, phase)
    return {
        **common,
        **_cache_args(deployed),
        # Room for a whole prompt is checked by the unit scheduler before it admits the request.
        "scheduler_reserve_full_isl": False,
        # The stages of a simulated engine are in one process.
        "tensor_parallel_size": max(1, unit_spec.ranks // unit_spec.stages),
        "pipeline_parallel_size": unit_spec.stages,
        "distributed_executor_backend": "mp" if max(unit_spec.ranks, unit_spec.stages) > 1 else "uni",
        **_classes(unit_spec, deployed, ahead),
        "async_scheduling": ahead,
        # Both engines of a model are forked from one process; that for prompts is told later to propose nothing.
        **({} if unit_spec.simulated is not None else _speculation(deployed)),
        # Each request brings its images to them; see `muxserve.vllm.image_files`.
        **({"mm_processor_cache_gb": 0} if deployed.sees_images else {}),
        # When no page is left, requests of the lowest execution level give theirs back, of equals the latest. What
        # waits to be prefilled is in the unit scheduler's order already; the scheduler of an engine of both phases
        # sees to that.
        "scheduling_policy": "fcfs" if phase == "prefill" else "priority",
        "disable_log_stats": False,
        # Requests without a seed must not see the same numbers in both engines of a model.
        "seed": common["seed"] + (1 if phase == "decode" else 0),
        "additional_config": {
            "muxserve": {
                "unit_spec": os.path.join(unit_spec.run_dir, "unit.json"),
                "model": model,
                "phase": phase,
            }
        },
        **(_cuda_args(unit_spec, deployed, phase) if unit_spec.device == "cuda" else {}),
    }


def _cache_args(model: ModelSpec) -> dict[str, Any]:
    if model.private:
        return {"kv_cache_memory_bytes": model.kv_bytes}
    # The pool is the memory manager's. The bytes only keep vLLM from sizing a cache of its own.
    return {"num_gpu_blocks_override": model.num_blocks, "kv_cache_memory_bytes": 64 << 20}


def _classes(unit_spec: UnitSpec, model: ModelSpec, ahead: bool) -> dict[str, Any]:
    """Worker and scheduler of an engine."""
    workers = PRIVATE_WORKERS if model.private else WORKERS
    schedulers = (PRIVATE_SCHEDULER, PRIVATE_AHEAD_SCHEDULER) if model.private else (SCHEDULER, AHEAD_SCHEDULER)
    return {
        "worker_cls": workers[unit_spec.device] if unit_spec.simulated is None else SIMULATED_WORKER,
        "scheduler_cls": schedulers[ahead],
    }


def _speculation(model: ModelSpec) -> dict[str, Any]:
    given = model.engine_args.get("speculative_config")
    return {"speculative_config": given} if given else {}


def _ahead(unit_spec: UnitSpec, model: ModelSpec, phase: EnginePhase) -> bool:
    """Whether the engine schedules a step before the last one's tokens are back. A prefill engine waits for a request's
    first token, with which it hands the request over; one that answers with vectors has no next token. On a CPU there
    is nobody beside whom to schedule. With several ranks, states and images it was not tried."""
    asked = bool(model.engine_args.get("async_scheduling", False)) and unit_spec.device == "cuda"
    able = unit_spec.ranks == 1 and unit_spec.simulated is None and not model.pooling
    tried = model.private or (not model.state_blocks and not model.sees_images)
    return asked and able and tried and phase != "prefill"


def _cuda_args(unit_spec: UnitSpec, model: ModelSpec, phase: EnginePhase) -> dict[str, Any]:
    own = model.engine_args
    few = model.state_blocks and phase == "prefill"
    return {
        # Without graphs a small model's decode step is mostly the launching of its kernels.
        "enforce_eager": own.get("enforce_eager", False),
        "compilation_config": _compilation(own.get("compilation_config"), unit_spec, bool(model.latent)),
        **({} if model.private else {"attention_backend": "TRITON_MLA" if model.latent else "CUSTOM"}),
        # An engine takes no share of the GPU for itself: what it needs was set aside before the pool was made.
        "gpu_memory_utilization": 0.01,
        **({"max_num_active_seqs": min(model.max_num_seqs, STATE_PROMPTS)} if few else {}),
        **loader_args(unit_spec, model.name),
    }


def _compilation(own: object, unit_spec: UnitSpec, latent: bool = False) -> object:
    """`compilation_config` of an engine on GPUs: the model's own, or graphs between attention layers; of decode batches
    also with attention, as stock vLLM has them, where that was tried and computes the same.

    The rotary embeddings of models with `latent` attention are left to torch: where it does not compile the model, vLLM
    would have FlashInfer compile a kernel for them at the first step, which needs the CUDA toolkit.

    To see whether it can fuse all-reduce with normalisation, vLLM imports FlashInfer. With 0.32.0 that initialises
    CUDA, and the processes of several ranks could not be forked any more. With 0.33.0 nobody has tried to fuse.
    """
    full = None if unit_spec.gpu is None else unit_spec.gpu.full_graphs
    config = {} if own is None else own
    if not isinstance(config, Mapping):
        return config
    # Without a word of it vLLM would capture whole graphs, which nobody may have tried here.
    config = {"cudagraph_mode": "FULL_AND_PIECEWISE" if full else "PIECEWISE", **config}
    if full is False and config.get("cudagraph_mode") != "NONE":
        config = {**config, "cudagraph_mode": "PIECEWISE"}
    if latent:
        config = {"custom_ops": ["-rotary_embedding"], **config}
    if unit_spec.ranks == 1:
        return config
    passes = config.get("pass_config")
    return {**config, "pass_config": {"fuse_allreduce_rms": False, **(passes if isinstance(passes, Mapping) else {})}}


def config_of(options: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration of an engine from what `engine_args` says."""
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    # The rest of a model's own `engine_args` is for the OpenAI server, which is the gateway's business.
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    known = {name: value for name, value in options.items() if name in names}
    config = EngineArgs(**known).create_engine_config(UsageContext.ENGINE_CONTEXT)
    if config.model_config.use_mla and "block_size" in options:
        # vLLM's platform for CPUs sets them for caches and schedulers of its own. Its kernels can begin behind a cached
        # prefix, though it switches that off.
        config.cache_config.block_size = options["block_size"]
        config.cache_config.enable_prefix_caching = options["enable_prefix_caching"]
        config.scheduler_config.max_num_batched_tokens = options["max_num_batched_tokens"]
    config.additional_config = EnginePlace(options["additional_config"])
    return config


class EnginePlace(Mapping[str, Any]):
    """`vllm_config.additional_config` of an engine: `{"muxserve": {"unit_spec": path, "model": .., "phase": ..}}`.

    Not a dict, because vLLM would hash a dict into the name of the directory where it keeps compiled code, and each
    start of each phase would compile the same model anew.
    """

    def __init__(self, place: Mapping[str, Any]) -> None:
        self._place = dict(place)

    def __getitem__(self, key: str) -> Any:
        return self._place[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def compute_hash(self) -> str:
        """The same for all: the code of a model does not depend on its place."""
        return ""


def loader_args(unit_spec: UnitSpec, model: str) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` with which an engine maps the weights that the model's holder has."""
    return {
        "load_format": LOAD_FORMAT,
        "model_loader_extra_config": {
            "sockets": [unit_spec.weights_socket(model, rank) for rank in range(unit_spec.ranks)]
        },
    }


def environment() -> dict[str, str]:
    """What vLLM must find in the environment before it is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # An engine that may use more threads makes its team after it was forked.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Which variant of a kernel is the fastest is tried once, and not by each engine that starts.
        "TRITON_CACHE_AUTOTUNING": os.environ.get("TRITON_CACHE_AUTOTUNING", "1"),
        "VLLM_MAX_IMAGE_PIXELS": os.environ.get("VLLM_MAX_IMAGE_PIXELS", str(MOST_PIXELS)),
        # MiB of compiled grammars in each engine; vLLM's own 512 MiB may be more than all else in a small one.
        "VLLM_XGRAMMAR_CACHE_MB": os.environ.get("VLLM_XGRAMMAR_CACHE_MB", "64"),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVE_CACHE)),
        # vLLM salts its block hashes with this; engines that share a prefix index must agree, also after a restart.
        "PYTHONHASHSEED": str(int.from_bytes(secrets.token_bytes(4), "little")),
    }
