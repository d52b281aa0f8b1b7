"""What the planner must know of a model, from its Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from muxserve.costs.language_models import LANGUAGE_MODELS, SEEING, seeing

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# What the KV cache may be kept in: the type that is computed in, or one of 8 bits.
KV_ITEM_BYTES = {**ITEM_BYTES, "fp8_e4m3": 1, "fp8_e5m2": 1}

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "model_dim")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_MAX_LEN = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "n_ctx",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")

# Rope types whose position limit in config.json is already the scaled one; vLLM multiplies for all others.
_SCALED_ROPES = {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"}

# Keys that only models with state space, linear or mixed layers have.
_HYBRID_KEYS = (
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_layer_indices",
    "attn_layer_period",
    "full_attention_interval",
    "full_attn_idxs",
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_cfg",
    "ssm_state_size",
    "time_step_rank",
    "block_types",
    "_block_types",
)
_HYBRID_TYPES = {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "recurrent_gemma", "xlstm", "jamba"}
_POOLING = ("ForSequenceClassification", "ForTokenClassification", "RewardModel", "Model")
_GENERATING = ("LMHeadModel", "ChatModel", "ChatGLMModel")  # although they are called so
_NEITHER = (
    "ForMaskedLM",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "ForNextSentencePrediction",
)
# Bits of a weight by what a checkpoint's `quant_algo` or `quant_method` contains. Formats of 4-bit floats have a scale
# of 8 bits for 16 or 32 weights.
_KNOWN_BITS = (("nvfp4", 4.5), ("mxfp4", 4.25), ("mxfp8", 8.25), ("fp8", 8.0), ("int8", 8.0))
# With multi-head latent attention in vLLM.
_LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"}
_LATENT_ROPES = {"yarn", "deepseek_yarn"}
# With layers that keep a state, of kinds whose states are known here.
_GATED_DELTA_NETS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
_STATEFUL = {"granitemoehybrid", "nemotron_h", *_GATED_DELTA_NETS}
_STATE_LAYERS = {"mamba", "linear_attention"}
# What a layer of Nemotron-H is by the letter of its pattern; those of the last two kinds are an MLP and nothing else.
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_MLP_LAYERS = {"mlp", "moe"}
STATE_ALIGNMENT = 64
_ENCODERS = {"bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"}
_OTHER_ENCODERS = {"albert", "distilbert", "electra", "deberta", "deberta-v2"}


# What a number may be, by the keys that it may have. No model comes near the larger one: what is beyond it would
# otherwise show as a want of memory.
_BOUNDS = (
    (_LAYERS, 1, 1 << 12),
    (_HEADS, 1, 1 << 16),
    (_KV_HEADS, 1, 1 << 16),
    (_HIDDEN, 1, 1 << 20),
    (("head_dim", "kv_channels", "attention_head_dim"), 1, 1 << 16),
    (_MAX_LEN, 1, 1 << 30),
    (("vocab_size", "padded_vocab_size"), 1, 1 << 26),
    ((*_INTERMEDIATE, "moe_intermediate_size", *_SHARED_WIDTH), 0, 1 << 24),
    ((*_EXPERTS, *_ACTIVE_EXPERTS), 0, 1 << 16),
)
# For the others that are read here.
_MOST_COUNT = 1 << 31
_MOST_ROPE_FACTOR = 1 << 20


class UnsupportedModelError(ValueError):
    """The model cannot be served from the page pool; the message says why."""


@dataclass(frozen=True)
class StoredWeights:
    """What the files of a checkpoint hold: `elements` numbers of a floating-point type, which become the type that the
    model is served in, and `packed_bytes` of other tensors (quantised weights), which stay as they are."""

    elements: int
    packed_bytes: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1): of each token a layer keeps one vector, from
    which the keys and values of all heads follow: a latent of `rank` numbers and the rotated part of the key, `rope`.

    Per head a query and a key have `nope + rope` numbers and a value `value`; queries come from a latent of their own
    of `query_rank` (0: from the hidden state).
    """

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int

    @property
    def width(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.rank + self.rope


@dataclass(frozen=True)
class StateLayers:
    """The `count` layers that keep a state of a sequence instead of K and V of its tokens: Mamba-2 (arXiv:2405.21060)
    or gated delta nets (arXiv:2412.06464).

    Of each sequence a layer keeps `inputs` numbers, the last inputs of a convolution, in the type that is computed in,
    and a `state` of so many numbers in the type `kept_as` ("": the one that is computed in), which on GPUs is
    `kept_on_gpus`: as stock vLLM has it. Its linear layers have `weights` weights. A token takes `flops` operations on
    the state.

    Ranks that split tensors have whole `heads`, and whole `groups` of heads with the same keys. A single group, of
    `group_inputs` inputs, is on all of them; 0: it cannot be, and there are at least as many groups as ranks.
    """

    count: int
    inputs: int
    state: int
    weights: int
    flops: int
    kept_on_gpus: str = ""
    kept_as: str = "float32"
    heads: int = 1
    groups: int = 1
    group_inputs: int = 0

    def splits_over(self, tp: int) -> bool:
        """Whether `tp` ranks can share a layer, as in vLLM."""
        return self.heads % tp == 0 and (self.groups % tp == 0 or (self.groups == 1 and self.group_inputs > 0))

    def layer_bytes(self, dtype: str, tp: int = 1) -> int:
        """Bytes of one layer's state of one sequence on each of `tp` ranks when the model is computed in `dtype`."""
        inputs = self.inputs + self.group_inputs * max(0, tp - self.groups)
        one = (inputs * ITEM_BYTES[dtype] + self.state * ITEM_BYTES[self.kept_as or dtype]) // tp
        return -(-one // STATE_ALIGNMENT) * STATE_ALIGNMENT


@dataclass(frozen=True)
class ModelArchitecture:
    """A transformer with attention in every layer, or in those that are neither `states` nor an MLP alone.

    A `pooling` model answers with vectors (embeddings, scores, classes) instead of text. One that is not `causal` sees
    each prompt as a whole and keeps no KV.

    `max_len` is the longest sequence in tokens that the checkpoint allows; `default_max_len` what it is meant for when
    nobody asks for more (smaller for longrope models). `dtype` is the checkpoint's own. Of a mixture of experts each
    token takes `active_experts` of `experts` and the MLP of width `shared_intermediate` that all share (0: none).
    Each layer has an MLP, unless `mlp_layers` of them are an MLP and nothing else (Nemotron-H). An MLP has
    `mlp_matrices` matrices: 2 if nothing gates it.
    `quantisation` is how the checkpoint's weights are quantised: `quant_method`, and after a space `quant_algo` or, of
    compressed-tensors, the bits of weights and activations (`W4A16`). `weight_bits` are those of a quantised weight of
    the linear layers by config.json, scales included (0: not quantised). `stored` is what the checkpoint's files hold,
    where they could be read, `kv_cache` the type of the KV cache where it is another than the one computed in.
    Engines keep room for `adapter_slots` LoRA adapters of up to `adapter_rank`.
    `text_only`: it is the language model of a multi-modal checkpoint, of which nothing else is served. One that
    `sees_images` takes them as well; its layers are those of its language model, for which an image is so many tokens.
    In `windowed_layers` of the layers, those numbered `windowed`, a token sees the last `window` tokens only.
    `cpu_only` names what engines on GPUs cannot compute yet, `gpu_only` what vLLM's kernels on CPU cannot. With
    `latent` attention what a layer keeps of a token counts as K and V of one KV head, of half its size each.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    max_len: int
    default_max_len: int
    dtype: str
    experts: int = 1
    tied_embeddings: bool = False
    active_experts: int = 1
    shared_intermediate: int = 0
    mlp_layers: int = 0
    mlp_matrices: int = 3
    quantisation: str = ""
    weight_bits: float = 0.0
    stored: StoredWeights | None = None
    pooling: bool = False
    causal: bool = True
    window: int = 0
    windowed_layers: int = 0
    windowed: tuple[int, ...] = ()
    cpu_only: str = ""
    gpu_only: str = ""
    text_only: bool = False
    sees_images: bool = False
    adapter_slots: int = 0
    adapter_rank: int = 0
    kv_cache: str = ""
    latent: LatentAttention | None = None
    states: StateLayers | None = None

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.layers - (self.states.count if self.states else 0) - self.mlp_layers

    @property
    def mlps(self) -> int:
        """MLPs in all layers; of a mixture of experts, all experts are one."""
        return self.mlp_layers or self.layers

    @property
    def pages_per_block(self) -> int:
        """Pages behind one token block: one per layer and KV head whose KV is kept."""
        return self.attention_layers * self.kv_heads if self.causal else 0

    def on_gpus(self) -> ModelArchitecture:
        """As engines on GPUs compute it."""
        states = self.states
        return self if states is None else replace(self, states=replace(states, kept_as=states.kept_on_gpus))

    def state_bytes(self, dtype: str, tp: int = 1) -> int:
        """Bytes that a sequence takes whatever its length, on each of `tp` ranks, when the model is computed in
        `dtype`."""
        return self.states.count * self.states.layer_bytes(dtype, tp) if self.states else 0

    @property
    def parameters(self) -> int:
        """Estimated number of weights: attention, gated MLPs of all experts, embeddings."""
        return self._linear + self._embeddings

    @property
    def _linear(self) -> int:
        mlp = self.mlp_matrices * self.hidden * (self.intermediate * self.experts + self.shared_intermediate)
        return int(self.mixer_weights()) + self.mlps * mlp

    def mixer_weights(self, tp: int = 1) -> float:
        """Weights of what mixes tokens in all layers, attention or states, on each of `tp` devices."""
        states = self.states.count * self.states.weights / tp if self.states else 0.0
        return self.attention_layers * self.attention_weights(tp) + states

    def attention_weights(self, tp: int = 1) -> float:
        """Weights of one layer's attention on each of `tp` devices. KV heads beyond those that there are, and what
        makes a latent, are on all of them."""
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.heads / tp + 2 * max(1.0, self.kv_heads / tp))
        a = self.latent
        query = (a.query_rank or self.hidden) * (a.nope + a.rope)
        split = query + a.rank * (a.nope + a.value) + a.value * self.hidden
        return self.hidden * (a.query_rank + a.width) + self.heads / tp * split

    def attention_numbers(self, tp: int = 1) -> float:
        """Numbers of a token's queries, keys, values and results in one layer, on each of `tp` devices. K and V of a
        head that several devices have are counted on each."""
        if self.latent is None:
            return (2 * self.heads + 2 * max(self.kv_heads, tp)) * self.head_dim / tp
        return 2 * self.heads * (self.latent.nope + self.latent.rope + self.latent.value) / tp

    @property
    def pair_numbers(self) -> int:
        """Numbers of a key and a value that a query head is multiplied with for each token that it sees. Latent ones
        are taken as they are."""
        return 2 * self.head_dim if self.latent is None else self.latent.width + self.latent.rank

    @property
    def _embeddings(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights when the model is served in `dtype`: as the checkpoint's files have them, or estimated
        from the shape where they could not be read. Quantised weights keep their size in any `dtype`. With the room for
        adapters."""
        adapters = self.adapter_bytes(dtype)
        if self.stored is not None:
            return self.stored.elements * ITEM_BYTES[dtype] + self.stored.packed_bytes + adapters
        return int(self._linear * self.linear_bytes(dtype)) + self._embeddings * ITEM_BYTES[dtype] + adapters

    def adapter_bytes(self, dtype: str) -> int:
        """Bytes of the room for LoRA adapters in `dtype`: of each linear layer, as many rows and columns as the rank
        has. Both engines write into it, so each has its own, and keeps as many adapters beside it."""
        heads, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + heads) + 2 * (self.hidden + kv)
        mlp = 3 * (self.hidden + self.intermediate)
        in_engine = self.adapter_slots * self.adapter_rank * self.layers * (attention + mlp)
        return 2 * 2 * in_engine * ITEM_BYTES[dtype]

    def linear_bytes(self, dtype: str) -> float:
        """Bytes of one weight of a linear layer in `dtype`, with its share of the scales if it is quantised. Embeddings
        and LM head are not quantised."""
        return self.weight_bits / 8 if self.weight_bits else ITEM_BYTES[dtype]

    def kv_dtype(self, dtype: str) -> str:
        """The type of the KV cache when the model is computed in `dtype`."""
        return self.kv_cache or dtype

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token when the model is computed in `dtype`."""
        return 2 * self.pages_per_block * self.head_dim * KV_ITEM_BYTES[self.kv_dtype(dtype)]


def read_architecture(config: Mapping[str, object], pooling: bool = False) -> ModelArchitecture:
    """The architecture that a config.json describes; of a model that is to be asked for vectors if `pooling`, whatever
    it was made for.

    Architectures that are not known are taken at their word when their fields are plain; the engine compares with what
    vLLM makes of the model before it serves.

    Raises:
        UnsupportedModelError: the page pool cannot carry the model, or fields are missing.
    """
    inside = seeing(config)
    if inside is not None:
        if pooling:
            raise UnsupportedModelError(f"{_name(config)}: models that see images generate text only here")
        found = read_architecture(inside)
        return replace(found, sees_images=True, cpu_only="an encoder of images")
    name = _name(config)
    reason = _impossible(config)
    if reason:
        raise UnsupportedModelError(f"{name}: {reason}")
    encoder = config.get("model_type") in _ENCODERS and not config.get("is_decoder")
    pooling = pooling or encoder or (name.endswith(_POOLING) and not name.endswith(_GENERATING))
    reason = _unsupported(config, name)
    if reason:
        raise UnsupportedModelError(f"{name}: {reason}")
    layers, heads, hidden = (_count(config, keys) for keys in (_LAYERS, _HEADS, _HIDDEN))
    if config.get("model_type") == "nemotron_h":
        layers = len(_layer_types(config)) or layers
    missing = [keys[0] for keys, value in ((_LAYERS, layers), (_HEADS, heads), (_HIDDEN, hidden)) if value is None]
    if layers is None or heads is None or hidden is None:
        raise UnsupportedModelError(f"{name}: config.json lacks {', '.join(missing)}")
    latent = _latent(config)
    kv_heads = 1 if latent else _kv_heads(config, heads)
    if heads % kv_heads:
        raise UnsupportedModelError(f"{name}: {heads} query heads cannot share {kv_heads} KV heads evenly")
    head_dim = _count(config, ("head_dim", "kv_channels", "attention_head_dim"))
    if latent is not None:
        head_dim = latent.width // 2
    if head_dim is None:
        if hidden % heads:
            raise UnsupportedModelError(
                f"{name}: no head_dim, and hidden size {hidden} is no multiple of {heads} heads"
            )
        head_dim = hidden // heads
    max_len, default_max_len = _max_len(config)
    window, windowed = _windows(config, layers, max_len)
    experts = _count(config, _EXPERTS) or 1
    quantisation, weight_bits = _quantisation(config)
    intermediate = (
        (_count(config, ("moe_intermediate_size",)) if experts > 1 else None)
        # Of Granite 4 without experts the MLP is what the experts would share.
        or (_count(config, ("shared_intermediate_size",)) if experts == 1 else None)
        or _count(config, _INTERMEDIATE)
        or 4 * hidden
    )
    return ModelArchitecture(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        intermediate=intermediate,
        vocab=_count(config, ("vocab_size", "padded_vocab_size")) or 0,
        max_len=max_len,
        default_max_len=default_max_len,
        dtype=_dtype(config),
        experts=experts,
        tied_embeddings=config.get("tie_word_embeddings") is True,
        active_experts=min(experts, _count(config, _ACTIVE_EXPERTS) or 1),
        shared_intermediate=_shared_intermediate(config, intermediate) if experts > 1 else 0,
        mlp_layers=sum(kind in _MLP_LAYERS for kind in _layer_types(config)[:layers]),
        mlp_matrices=2 if config.get("model_type") == "nemotron_h" else 3,
        quantisation=quantisation,
        weight_bits=weight_bits,
        pooling=pooling,
        causal=not (pooling and (encoder or config.get("is_causal") is False)),
        window=window,
        windowed_layers=len(windowed),
        windowed=windowed,
        gpu_only=_gpu_only(config),
        latent=latent,
        states=_states(config, layers, hidden),
    )


def _impossible(config: Mapping[str, object]) -> str | None:
    """What a config.json says that no model can have."""
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        return f"config.json has model_type: {_short(kind)}; it must be a text"
    for keys, least, most in _BOUNDS:
        for key in keys:
            value = config.get(key)
            # Lists are of models whose layers differ.
            if value is None or isinstance(value, list | bool):
                continue
            if not isinstance(value, int) or not least <= value <= most:
                return f"config.json has {key}: {_short(value)}; it must be a whole number from {least} to {most:,}"
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    factor = rope.get("factor") if isinstance(rope, Mapping) else None
    if factor is None:
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= _MOST_ROPE_FACTOR:
        return f"config.json scales positions by factor: {_short(factor)}; it must be from 0 to {_MOST_ROPE_FACTOR:,}"
    return None


def _short(value: object) -> str:
    text = str(value) if not isinstance(value, int) or value < 1 << 64 else f"about 2^{value.bit_length()}"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _gpu_only(config: Mapping[str, object]) -> str:
    if _latent(config) is not None and _rope_type(config) not in _LATENT_ROPES:
        # It takes the stride between two heads for that between two tokens.
        return "latent attention with rotary embeddings that are not scaled as YaRN's are"
    if config.get("model_type") == "nemotron_h" and "moe" in _layer_types(config):
        return "experts without a gate"
    return "experts that are chosen by a sigmoid" if _chosen_by_sigmoid(config) else ""


def _states(config: Mapping[str, object], layers: int, hidden: int) -> StateLayers | None:
    if config.get("model_type") not in _STATEFUL:
        return None
    count = sum(kind in _STATE_LAYERS for kind in _layer_types(config)[:layers])

    def number(key: str, default: int) -> int:
        return _count(config, (key,)) or default

    if config.get("model_type") in _GATED_DELTA_NETS:
        keys = number("linear_num_key_heads", 16) * number("linear_key_head_dim", 128)
        heads, width = number("linear_num_value_heads", 32), number("linear_value_head_dim", 128)
        values, inputs = heads * width, 2 * keys + heads * width
        return StateLayers(
            count=count,
            inputs=inputs * (number("linear_conv_kernel_dim", 4) - 1),
            state=values * number("linear_key_head_dim", 128),
            weights=hidden * (inputs + values + 2 * heads) + values * hidden,
            # Decayed, read by the key, corrected by an outer product, read by the query.
            flops=7 * values * number("linear_key_head_dim", 128),
            # vLLM does not ask Qwen3-Next's for it.
            kept_on_gpus=_kept(config, "mamba_ssm_dtype", "") if config["model_type"] != "qwen3_next" else "",
            heads=heads,
            groups=number("linear_num_key_heads", 16),
        )
    if config.get("model_type") == "nemotron_h":
        heads = number("mamba_num_heads", 128)
        inner, size, groups = heads * number("mamba_head_dim", 64), number("ssm_state_size", 128), number("n_groups", 8)
        convolution, kept = number("conv_kernel", 4), _kept(config, "mamba_ssm_cache_dtype", "float32")
    else:
        kept = ""
        heads, groups, convolution = (
            number("mamba_n_heads", 128),
            number("mamba_n_groups", 1),
            number("mamba_d_conv", 4),
        )
        inner, size = number("mamba_expand", 2) * hidden, number("mamba_d_state", 256)
    inputs = inner + 2 * groups * size
    return StateLayers(
        count=count,
        inputs=inputs * (convolution - 1),
        state=inner * size,
        weights=hidden * (inner + inputs + heads) + inner * hidden,
        # Decayed, an outer product added, read.
        flops=5 * inner * size,
        kept_on_gpus=kept,
        heads=heads,
        groups=groups,
        group_inputs=2 * size * (convolution - 1),
    )


def _kept(config: Mapping[str, object], key: str, default: str) -> str:
    """The type of states that a configuration asks for; "" for the one that is computed in."""
    asked = str(config.get(key) or default).removeprefix("torch.")
    return asked if asked in ITEM_BYTES else ""


def _chosen_by_sigmoid(config: Mapping[str, object]) -> bool:
    """Among all experts at once; DeepSeek's and others' are in groups."""
    return config.get("scoring_func") == "sigmoid" and not config.get("n_group")


def _latent(config: Mapping[str, object]) -> LatentAttention | None:
    rank, rope, nope, value = (
        _count(config, (key,)) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    if rank is None or rope is None or nope is None or value is None:
        return None
    return LatentAttention(rank, rope, nope, value, _count(config, ("q_lora_rank",)) or 0)


def _shared_intermediate(config: Mapping[str, object], intermediate: int) -> int:
    """Width of the MLP beside the routed experts, together if there are several."""
    width = _count(config, _SHARED_WIDTH)
    if width is not None:
        return width
    return (_count(config, ("n_shared_experts", "num_shared_experts", "num_shared_expert")) or 0) * intermediate


def _name(config: Mapping[str, object]) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    return str(config.get("model_type") or "unnamed architecture")


def _unsupported(config: Mapping[str, object], name: str) -> str | None:
    kind = config.get("model_type")
    if name.endswith(_NEITHER) or (kind in _OTHER_ENCODERS and not config.get("is_decoder")):
        return "vLLM can neither generate text with it nor pool what it computes"
    if config.get("is_encoder_decoder") or config.get("add_cross_attention") or config.get("cross_attention_layers"):
        return "it has cross attention (an encoder-decoder model); only decoder-only models are supported"
    if isinstance(config.get("text_config"), Mapping) or isinstance(config.get("vision_config"), Mapping):
        texts = sorted(kind for kind in LANGUAGE_MODELS if not kind.endswith("_text"))
        return (
            "it is multi-modal (config.json has a text_config or vision_config); only text models are supported, "
            f"the text of {', '.join(texts)}, and with images {', '.join(sorted(SEEING))}"
        )
    if _quantisation(config)[0] == "gguf":
        return "its weights are in GGUF, which this vLLM cannot load; give the safetensors checkpoint it was made from"
    if config.get("index_topk"):
        return "it has sparse attention (index_topk), whose index is a cache of another kind"
    if config.get("kv_lora_rank") and (kind not in _LATENT or _latent(config) is None):
        known = ", ".join(sorted(_LATENT))
        return f"it uses multi-head latent attention (MLA), which is served of these model types only: {known}"
    # MiniMax: 1 is full attention, which MiniMax-M2 has in each of its layers.
    kinds = config.get("attn_type_list")
    linear = isinstance(kinds, list) and any(each != 1 for each in kinds)
    hybrid = kind in _HYBRID_TYPES or any(config.get(key) is not None for key in _HYBRID_KEYS)
    if linear or (hybrid and kind not in _STATEFUL):
        known = ", ".join(sorted(_STATEFUL))
        return (
            f"it has state-space, recurrent or linear-attention layers, which are served of these model types: {known}"
        )
    if config.get("attention_chunk_size"):
        return "it uses chunked attention; only full and sliding-window attention are supported"
    types = set(_layer_types(config))
    if kind in _STATEFUL and not (types & _STATE_LAYERS and types & {"attention", "full_attention"}):
        return "layer_types must name layers with attention and layers with states; it has others only"
    known_types = {"full_attention", "attention", "sliding_attention"}
    if kind in _STATEFUL:
        known_types |= _STATE_LAYERS
    if kind == "nemotron_h":
        known_types |= _MLP_LAYERS
    odd = sorted(types - known_types)
    if odd:
        return f"some of its layers are {', '.join(odd)}; only full and sliding-window attention are supported"
    if isinstance(config.get("block_configs"), list) or any(isinstance(config.get(key), list) for key in _KV_HEADS):
        return "its layers differ in KV heads; all layers must have the same"
    if config.get("num_kv_shared_layers"):
        return "some of its layers share the KV cache of others"
    value_dim, head_dim = config.get("v_head_dim"), config.get("head_dim")
    if value_dim is not None and head_dim is not None and value_dim != head_dim and not config.get("kv_lora_rank"):
        return f"its values have another head size ({value_dim}) than its keys ({head_dim})"
    return _quantised_cache(config)


def _layer_types(config: Mapping[str, object]) -> list[str]:
    types = config.get("layer_types")
    if config.get("model_type") == "nemotron_h":
        types = types or config.get("layers_block_type")
        pattern = config.get("hybrid_override_pattern")
        if not types and isinstance(pattern, str):
            types = [_PATTERN.get(letter, letter) for letter in pattern]
    if isinstance(types, list):
        return [str(kind) for kind in types]
    layers = _count(config, _LAYERS)
    if config.get("model_type") in _GATED_DELTA_NETS and layers is not None:
        every = _count(config, ("full_attention_interval",)) or 4
        return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    return []


def _windows(config: Mapping[str, object], layers: int, max_len: int) -> tuple[int, tuple[int, ...]]:
    """Size of the sliding window in tokens, and which layers have it; 0 and none if all see the whole sequence. The
    longest has `max_len` tokens."""
    window = _count(config, ("sliding_window", "window_size"))
    if window is None or window >= max_len or config.get("use_sliding_window") is False:
        return 0, ()
    types = _layer_types(config)
    # Configurations from before there was `layer_types`: every n-th layer sees everything, or those below a limit do.
    pattern = _count(config, ("sliding_window_pattern", "_sliding_window_pattern"))
    pattern = pattern or {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}.get(str(config.get("model_type")))
    first = config.get("max_window_layers")
    if types:
        found = tuple(layer for layer in range(layers) if types[layer : layer + 1] == ["sliding_attention"])
    elif pattern is not None:
        found = tuple(layer for layer in range(layers) if (layer + 1) % pattern)
    elif config.get("use_sliding_window") and isinstance(first, int):
        found = tuple(range(first, layers))
    else:
        found = tuple(range(layers))
    return (window, found) if found else (0, ())


def _quantisation(config: Mapping[str, object]) -> tuple[str, float]:
    """How weights are quantised, and the bits of one; empty and 0 if they are not."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(given, Mapping):
        return "", 0.0
    inner = given.get("quantization")
    algorithm = str(given.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None) or "")
    method = str(given.get("quant_method") or "compressed-tensors")
    bits = next((float(size) for kind, size in _KNOWN_BITS if kind in (algorithm or method).lower()), 0.0)
    group = _count(given, ("group_size", "q_group_size"))
    if stated := _count(given, ("bits", "w_bit")):
        bits = float(stated)
    groups = given.get("config_groups")
    scheme = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if isinstance(scheme, Mapping) and isinstance(weights, Mapping) and (stated := _count(weights, ("num_bits",))):
        inputs = scheme.get("input_activations")
        activations = _count(inputs, ("num_bits",)) if isinstance(inputs, Mapping) else None
        bits, group = float(stated), _count(weights, ("group_size",))
        algorithm = f"W{stated}A{activations or 16}"
    # Each group of weights has a scale of 16 bits.
    return f"{method} {algorithm}".strip(), bits + 16 / group if bits and group else bits


def _quantised_cache(config: Mapping[str, object]) -> str | None:
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if isinstance(quantisation, Mapping):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            if quantisation.get(key):
                return f"its checkpoint asks for a quantised KV cache ({key}); the pool holds unquantised pages"
    return None


def _kv_heads(config: Mapping[str, object], heads: int) -> int:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    return _count(config, _KV_HEADS) or heads


def _max_len(config: Mapping[str, object]) -> tuple[int, int]:
    limit = min((v for key in _MAX_LEN if (v := _count(config, (key,)))), default=2048)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return limit, limit
    kind = _rope_type(config)
    factor = rope.get("factor")
    # Gemma 3 states the scaled limit, whatever its rope type.
    scaled = kind in _SCALED_ROPES or "gemma3" in str(config.get("model_type"))
    if not scaled and isinstance(factor, (int, float)) and not isinstance(factor, bool):
        limit = max(1, int(limit * factor))
    original = _count(config, ("original_max_position_embeddings",))
    return limit, min(limit, original) if kind == "longrope" and original else limit


def _rope_type(config: Mapping[str, object]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return str(rope.get("rope_type", rope.get("type", "default"))) if isinstance(rope, Mapping) else "default"


def _dtype(config: Mapping[str, object]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    # Other types (fp8 and the like) are of quantised weights; what is computed in is then bfloat16.
    return name if name in ITEM_BYTES else "bfloat16"


def _count(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if value > _MOST_COUNT:
                raise UnsupportedModelError(f"config.json has {key}: {_short(value)}, which no model has")
            return value
    return None


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage of a pipeline, as vLLM splits them: equally many, and what is left over goes to the stages
    before the last, from behind; the last one has the LM head to compute, the first one begins.

    Raises:
        ValueError: there are more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be spread over {stages} stages")
    each, over = divmod(layers, stages)
    split = [each] * stages
    for place in range(over):
        split[-2 - place] += 1
    return tuple(split)
