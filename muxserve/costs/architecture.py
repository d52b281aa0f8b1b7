"""What the planner must know of a model, from its Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from muxserve.costs.language_models import seeing, text_inside
from muxserve.costs.own_cache import AttentionSizes, KeptLayers, OwnCache, own_cache
from muxserve.costs.state_layers import (
    ITEM_BYTES as ITEM_BYTES,
)
from muxserve.costs.state_layers import (
    MLP_LAYERS,
    POOLED,
    STATE_LAYERS,
    Mixers,
    StateLayers,
    kinds_of,
    layer_types,
    mixers,
)

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
_EXPERT_HIDDEN = ("moe_latent_size", "routed_expert_hidden_size")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts")

# Rope types whose position limit in config.json is already the scaled one; vLLM multiplies for all others.
_SCALED_ROPES = {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"}

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
# With states of Mamba's first version.
_SELECTIVE = {"mamba", "falcon_mamba", "jamba"}
_WINDOWED = (["sliding_attention"], ["chunked_attention"])
_LATENT_ROPES = {"yarn", "deepseek_yarn"}
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
ENCODER_NOTE = "its encoder of images or sound is not counted"
# For the others that are read here.
_MOST_COUNT = 1 << 31
_MOST_ROPE_FACTOR = 1 << 20


class UnsupportedModelError(ValueError):
    """vLLM cannot serve the model, or what must be known of it is not there; the message says why."""


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
class ModelArchitecture:
    """A transformer with attention in every layer, or in those that are neither `states` nor an MLP alone.

    A `pooling` model answers with vectors (embeddings, scores, classes) instead of text. One that is not `causal` sees
    each prompt as a whole and keeps no KV.

    `max_len` is the longest sequence in tokens that the checkpoint allows; `default_max_len` what it is meant for when
    nobody asks for more (smaller for longrope models). `dtype` is the checkpoint's own. In a mixture of experts each
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
    Where the pool cannot hold what is kept, `own` says why, and what it is. `parallel` layers have both attention and a
    state. In a mixture of experts `dense_layers` have an MLP of width `dense_intermediate` instead. Experts that
    compute in a space of their own have `expert_hidden` inputs (0: `hidden`). `estimated` says in words what of it does
    not follow from config.json (empty: nothing). One that is `multi_modal` is served from the whole checkpoint, and for
    text, unless it `sees_images`. An `encoder_decoder` is read for plans. `config` is the config.json that it was read
    from, where that is at hand: kernel tables know models by it.
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
    own: OwnCache | None = None
    parallel: int = 0
    dense_layers: int = 0
    dense_intermediate: int = 0
    expert_hidden: int = 0
    estimated: str = ""
    multi_modal: bool = False
    encoder_decoder: bool = False
    config: str = field(default="", compare=False, repr=False)

    @property
    def private(self) -> str:
        """Why the pool cannot hold what it keeps; empty if it can."""
        return self.own.reason if self.own is not None else ""

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.layers - (self.states.count if self.states else 0) - self.mlp_layers + self.parallel

    @property
    def mlps(self) -> int:
        """MLPs in all layers but those of `dense_layers`; of a mixture of experts, all experts are one."""
        return (self.mlp_layers or self.layers) - self.dense_layers

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
        states = self.states.count * self.states.layer_bytes(dtype, tp) if self.states else 0
        item = KV_ITEM_BYTES[self.kv_dtype(dtype)]
        return states + sum(each.fixed * each.entry_bytes(item) for each in self._kept)

    @property
    def _kept(self) -> tuple[KeptLayers, ...]:
        return self.own.kept if self.own is not None else ()

    @property
    def parameters(self) -> int:
        """Estimated number of weights: attention, gated MLPs of all experts, embeddings."""
        return self._linear + self._embeddings

    @property
    def _linear(self) -> int:
        mlp = self.expert_weights * self.experts + self.mlp_matrices * self.hidden * self.shared_intermediate
        mlp += 2 * self.hidden * self.expert_hidden
        dense = self.mlp_matrices * self.hidden * self.dense_intermediate
        return int(self.mixer_weights()) + self.mlps * mlp + self.dense_layers * dense

    @property
    def expert_weights(self) -> int:
        """Weights of one expert, or of the MLP of a layer without experts."""
        return self.mlp_matrices * (self.expert_hidden or self.hidden) * self.intermediate

    def mixer_weights(self, tp: int = 1) -> float:
        """Weights of what mixes tokens in all layers, attention or states, on each of `tp` devices."""
        states = self.states.count * self.states.weights / tp if self.states else 0.0
        return self.attention_layers * self.attention_weights(tp) + states

    def attention_weights(self, tp: int = 1) -> float:
        """Weights of one layer's attention on each of `tp` devices. KV heads beyond those that there are, and what
        makes a latent, are on all of them."""
        if self.own is not None and self.own.weights:
            return self.own.weights / tp
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
        item = KV_ITEM_BYTES[self.kv_dtype(dtype)]
        if not self._kept:
            return 2 * self.pages_per_block * self.head_dim * item
        return sum(-(-each.entry_bytes(item) // each.tokens) for each in self._kept if not each.fixed)

    def page_head_dim(self, dtype: str) -> int:
        """Numbers of a key, or value, that pages of the layers' KV heads would have to hold of a token, on average."""
        if not self._kept or not self.pages_per_block:
            return self.head_dim
        return -(-self.kv_bytes_per_token(dtype) // (2 * self.pages_per_block * KV_ITEM_BYTES[self.kv_dtype(dtype)]))


def read_architecture(config: Mapping[str, object], pooling: bool = False) -> ModelArchitecture:
    """The architecture that a config.json describes; of a model that is to be asked for vectors if `pooling`, whatever
    it was made for.

    Architectures that are not known are taken at their word, and what they do not say is estimated from their sizes
    (`estimated`); the engine compares with what vLLM makes of the model before it serves.

    Raises:
        UnsupportedModelError: vLLM cannot serve the model, or fields are missing.
    """
    inside = seeing(config)
    if inside is not None:
        if pooling:
            raise UnsupportedModelError(f"{_name(config)}: models that see images generate text only here")
        found = read_architecture(inside)
        return replace(found, sees_images=True, cpu_only="an encoder of images")
    inside = text_inside(config)
    if inside is not None:
        found = read_architecture(inside, pooling)
        reason = found.private or "it is multi-modal, and not of a kind whose text, or images, are served from the pool"
        inner = replace(found.own or OwnCache(""), reason=reason)
        return replace(found, own=inner, estimated=found.estimated or ENCODER_NOTE, multi_modal=True)
    name = _name(config)
    config = _decoder(config)
    refusal = _impossible(config) or _unservable(config, name)
    if refusal:
        raise UnsupportedModelError(f"{name}: {refusal}")
    encoder = config.get("model_type") in _ENCODERS and not config.get("is_decoder")
    pooling = pooling or encoder or (name.endswith(_POOLING) and not name.endswith(_GENERATING))
    layers, heads, hidden = (_count(config, keys) for keys in (_LAYERS, _HEADS, _HIDDEN))
    if config.get("model_type") == "nemotron_h":
        layers = len(layer_types(config)) or layers
    mixed = mixers(config, layers, hidden) if layers is not None and hidden is not None else None
    if mixed is not None and not mixed.attention:
        heads = heads or 1
    missing = [keys[0] for keys, value in ((_LAYERS, layers), (_HEADS, heads), (_HIDDEN, hidden)) if value is None]
    if layers is None or heads is None or hidden is None or mixed is None:
        raise UnsupportedModelError(f"{name}: config.json lacks {', '.join(missing)}")
    latent = _latent(config)
    kv_heads = 1 if latent else _kv_heads(config, heads)
    if heads % kv_heads:
        raise UnsupportedModelError(f"{name}: {heads} query heads cannot share {kv_heads} KV heads evenly")
    head_dim = _head_dim(config, heads, hidden, latent, name) if mixed.attention else 1
    sizes = AttentionSizes(max(1, mixed.attention), heads, kv_heads, head_dim, hidden)
    own = _own(config, sizes, mixed, latent)
    max_len, default_max_len = _max_len(config)
    window, windowed = _windows(config, layers, max_len)
    experts = _count(config, _EXPERTS) or 1
    quantisation, weight_bits = _quantisation(config)
    intermediate = _intermediate(config, hidden, experts)
    dense = _dense_layers(config, layers) if experts > 1 else 0
    return ModelArchitecture(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        intermediate=intermediate if mixed.attention else 0,
        vocab=_count(config, ("vocab_size", "padded_vocab_size")) or 0,
        max_len=max_len,
        default_max_len=default_max_len,
        dtype=_dtype(config),
        experts=experts,
        tied_embeddings=config.get("tie_word_embeddings") is True,
        active_experts=min(experts, _count(config, _ACTIVE_EXPERTS) or 1),
        shared_intermediate=_shared_intermediate(config, intermediate) if experts > 1 else 0,
        mlp_layers=sum(kind in MLP_LAYERS for kind in layer_types(config)[:layers]),
        mlp_matrices=2 if config.get("model_type") == "nemotron_h" else 3,
        quantisation=quantisation,
        weight_bits=weight_bits,
        pooling=pooling,
        causal=not (pooling and (encoder or config.get("is_causal") is False)),
        window=window,
        windowed_layers=len(windowed),
        windowed=windowed,
        gpu_only=_gpu_only(config),
        kv_cache=_cache_type(config),
        latent=latent,
        states=mixed.states,
        own=own,
        parallel=mixed.attention + (mixed.states.count if mixed.states else 0) - layers
        if mixed.states and not any(kind in MLP_LAYERS for kind in layer_types(config))
        else 0,
        dense_layers=dense,
        dense_intermediate=_dense_intermediate(config) if dense else 0,
        expert_hidden=_count(config, _EXPERT_HIDDEN) or 0 if experts > 1 else 0,
        encoder_decoder=bool(config.get("is_encoder_decoder")),
        estimated="the sizes of its states are estimated as those of Mamba-2" if mixed.estimated else "",
    )


def _own(
    config: Mapping[str, object], sizes: AttentionSizes, mixed: Mixers, latent: LatentAttention | None
) -> OwnCache | None:
    """What the pool cannot hold of the model."""
    if config.get("is_encoder_decoder") or config.get("add_cross_attention") or config.get("cross_attention_layers"):
        return _with_cross_attention(config, sizes)
    own = own_cache(config, sizes, layer_types(config)) if mixed.attention else None
    if mixed.private:
        return OwnCache(mixed.private, own.kept if own else (), own.weights if own else 0)
    if own is not None:
        return own
    kind = config.get("model_type")
    if config.get("kv_lora_rank") and (kind not in _LATENT or latent is None):
        return OwnCache(
            f"latent attention is held by the pool for these model types only: {', '.join(sorted(_LATENT))}"
        )
    odd = sorted(kinds_of(layer_types(config)))
    return OwnCache(f"some of its layers are {', '.join(odd)}") if odd else None


def _with_cross_attention(config: Mapping[str, object], sizes: AttentionSizes) -> OwnCache:
    """An encoder-decoder: the layers of its decoder keep K and V of what the encoder makes as well."""
    encoded = _count(config, ("max_source_positions", "max_encoder_len", "max_position_embeddings", "n_positions"))
    numbers = 2 * sizes.head_dim
    kept = (
        KeptLayers(sizes.layers, sizes.kv_heads, numbers),
        KeptLayers(sizes.layers, sizes.kv_heads, numbers, fixed=encoded or 1024),
    )
    encoder = _count(config, ("encoder_layers", "num_encoder_layers", "num_layers")) or sizes.layers
    # The encoder's layers are counted with the decoder's: attention to itself, and an MLP of two matrices.
    attention = 4 * sizes.hidden * sizes.heads * sizes.head_dim
    weights = 2 * attention + (attention + 8 * sizes.hidden * sizes.hidden) * encoder // sizes.layers
    return OwnCache("it has cross attention (an encoder-decoder model)", kept, weights)


def _decoder(config: Mapping[str, object]) -> Mapping[str, object]:
    """The decoder of an encoder-decoder's config.json, under the keys of other models."""
    if not config.get("is_encoder_decoder"):
        return config
    names = {
        "num_hidden_layers": ("decoder_layers", "num_decoder_layers"),
        "num_attention_heads": ("decoder_attention_heads",),
        "intermediate_size": ("decoder_ffn_dim", "d_ff"),
        "max_position_embeddings": ("max_target_positions", "max_position_embeddings", "n_positions"),
    }
    found = {key: value for key, keys in names.items() if (value := _count(config, keys)) is not None}
    return {**config, **found}


def _head_dim(config: Mapping[str, object], heads: int, hidden: int, latent: LatentAttention | None, name: str) -> int:
    if latent is not None:
        return latent.width // 2
    # Heads of attention are others than those of states in Mamba-2 beside it.
    found = _count(config, ("attention_head_dim", "head_dim", "kv_channels", "d_kv"))
    if found is None and hidden % heads:
        raise UnsupportedModelError(f"{name}: no head_dim, and hidden size {hidden} is no multiple of {heads} heads")
    return found or hidden // heads


def _intermediate(config: Mapping[str, object], hidden: int, experts: int) -> int:
    """Width of a layer's MLP, or of one expert."""
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and blocks:
        return sum(_ffn_width(block, hidden) for block in blocks) // len(blocks)
    return (
        (_count(config, ("moe_intermediate_size",)) if experts > 1 else None)
        # In Granite 4 without experts the MLP is what the experts would share.
        or (_count(config, ("shared_intermediate_size",)) if experts == 1 else None)
        or _count(config, _INTERMEDIATE)
        or 4 * hidden
    )


def _ffn_width(block: object, hidden: int) -> int:
    """Width of the MLP of a layer of Nemotron NAS, rounded as its code does."""
    ffn = block.get("ffn") if isinstance(block, Mapping) else None
    if not isinstance(ffn, Mapping) or ffn.get("no_op"):
        return 0
    if ffn.get("replace_with_linear"):
        return hidden // 3
    multiple = ffn.get("ffn_mult")
    wide = int(2 * multiple * hidden / 3) if isinstance(multiple, int | float) else _count(ffn, ("intermediate_size",))
    return -(-(wide or 4 * hidden) // 256) * 256


def _dense_layers(config: Mapping[str, object], layers: int) -> int:
    """How many layers of a mixture of experts have one MLP instead."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return kinds[:layers].count("dense")
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return sum(not each for each in frequency[:layers])
    for key in ("interleave_moe_layer_step", "decoder_sparse_step", "expert_layer_period"):
        if (step := _count(config, (key,)) or 1) > 1:
            return layers - layers // step
    dense = config.get("mlp_only_layers")
    return len(dense) if isinstance(dense, list) else min(layers - 1, _count(config, ("first_k_dense_replace",)) or 0)


def _dense_intermediate(config: Mapping[str, object]) -> int:
    return _count(config, ("intermediate_size_mlp", "dense_intermediate_size", *_INTERMEDIATE)) or 0


def _cache_type(config: Mapping[str, object]) -> str:
    """The type of the KV cache that a checkpoint has scales for, as vLLM then keeps it; "" without."""
    given = config.get("quantization_config") or config.get("compression_config")
    scheme = given.get("kv_cache_scheme") or given.get("kv_cache_quant_algo") if isinstance(given, Mapping) else None
    return "fp8_e4m3" if scheme else ""


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
    if config.get("model_type") in _SELECTIVE:
        return "Mamba's selective scan"
    if config.get("model_type") == "nemotron_h" and "moe" in layer_types(config):
        return "experts without a gate"
    return "experts that are chosen by a sigmoid" if _chosen_by_sigmoid(config) else ""


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
    if str(config.get("model_type")).startswith("llama4"):
        return intermediate
    if config.get("enable_moe_block"):  # Gemma 4: an MLP beside the experts
        return _count(config, _INTERMEDIATE) or 0
    return (_count(config, ("n_shared_experts", "num_shared_experts", "num_shared_expert")) or 0) * intermediate


def _name(config: Mapping[str, object]) -> str:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    return str(config.get("model_type") or "unnamed architecture")


def _unservable(config: Mapping[str, object], name: str) -> str | None:
    """Why vLLM cannot serve the model."""
    kind = config.get("model_type")
    if name.endswith(_NEITHER) or (kind in _OTHER_ENCODERS and not config.get("is_decoder")):
        return "vLLM can neither generate text with it nor pool what it computes"
    if _quantisation(config)[0] == "gguf":
        return "its weights are in GGUF, which this vLLM cannot load; give the safetensors checkpoint it was made from"
    types = set(layer_types(config))
    if kind in POOLED and not (types & STATE_LAYERS and types & {"attention", "full_attention"}):
        return "layer_types must name layers with attention and layers with states; it has others only"
    return None


def _windows(config: Mapping[str, object], layers: int, max_len: int) -> tuple[int, tuple[int, ...]]:
    """Size of the sliding window in tokens, and which layers have it; 0 and none if all see the whole sequence. The
    longest has `max_len` tokens."""
    window = _count(config, ("sliding_window", "window_size", "attention_chunk_size"))
    if window is None or window >= max_len or config.get("use_sliding_window") is False:
        return 0, ()
    types = layer_types(config)
    # Configurations from before there was `layer_types`: every n-th layer sees everything, or those below a limit do.
    pattern = _count(config, ("sliding_window_pattern", "_sliding_window_pattern"))
    pattern = pattern or {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}.get(str(config.get("model_type")))
    first = config.get("max_window_layers")
    if (marks := config.get("hybrid_layer_pattern")) and isinstance(marks, list):
        found = tuple(layer for layer in range(layers) if any(marks[layer : layer + 1]))
    elif config.get("attention_chunk_size") and not types:
        found = tuple(layer for layer in range(layers) if (layer + 1) % 4)
    elif types:
        found = tuple(layer for layer in range(layers) if types[layer : layer + 1] in _WINDOWED)
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
    if algorithm == "MIXED_PRECISION":
        algorithm = f"{algorithm} {_most_of(given.get('quantized_layers'))}".strip()
    bits = next((float(size) for kind, size in _KNOWN_BITS if kind in (algorithm or method).lower()), 0.0)
    if config.get("expert_dtype") == "fp4":
        bits = 4.25  # of the experts, which are nearly all of the weights
    group = _count(given, ("group_size", "q_group_size"))
    if stated := _count(given, ("bits", "w_bit")):
        bits = float(stated)
    groups = given.get("config_groups")
    scheme = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    mixed = algorithm.startswith("MIXED_PRECISION")
    if (
        not mixed
        and isinstance(scheme, Mapping)
        and isinstance(weights, Mapping)
        and (stated := _count(weights, ("num_bits",)))
    ):
        inputs = scheme.get("input_activations")
        activations = _count(inputs, ("num_bits",)) if isinstance(inputs, Mapping) else None
        bits, group = float(stated), _count(weights, ("group_size",))
        algorithm = f"W{stated}A{activations or 16}"
    # Each group of weights has a scale of 16 bits.
    return f"{method} {algorithm}".strip(), bits + 16 / group if bits and group else bits


def _most_of(layers: object) -> str:
    """How most weights are quantised where each layer says its own: those of experts, or else of the MLPs."""
    named = {str(name): each for name, each in layers.items()} if isinstance(layers, Mapping) else {}
    of = [[each for name, each in named.items() if part in name] for part in ("expert", "mlp", "")]
    kinds = [str(each.get("quant_algo")) for each in next(filter(None, of), []) if isinstance(each, Mapping)]
    return max(sorted(set(kinds)), key=kinds.count, default="")


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
