"""Layers that keep a state of a sequence instead of K and V of its tokens, from a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_ALIGNMENT = 64

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
_WITHOUT_ATTENTION = {"mamba", "mamba2", "falcon_mamba"}
GATED_DELTA_NETS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
# Whose states the pool can hold.
POOLED = {"granitemoehybrid", "nemotron_h", *GATED_DELTA_NETS}
STATE_LAYERS = {"mamba", "linear_attention", "conv", "recurrent", "kda"}
MLP_LAYERS = {"mlp", "moe"}
_ATTENTION = {"attention", "full_attention"}
# What a layer of Nemotron-H is by the letter of its pattern; those of the last two kinds are an MLP and nothing else.
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


class StateHeads(NamedTuple):
    """What ranks that split tensors have whole of a layer: `heads`, and `groups` of heads with the same keys. A single
    group, of `group_inputs` inputs, is on all ranks; 0: it cannot be, and there are at least as many groups as ranks.
    """

    heads: int = 1
    groups: int = 1
    group_inputs: int = 0

    def split_over(self, tp: int) -> bool:
        """Whether `tp` ranks can share a layer, as in vLLM."""
        return self.heads % tp == 0 and (self.groups % tp == 0 or (self.groups == 1 and self.group_inputs > 0))


_ONE_HEAD = StateHeads()


@dataclass(frozen=True)
class StateLayers:
    """The `count` layers that keep a state of a sequence instead of K and V of its tokens: Mamba-2 (arXiv:2405.21060)
    or gated delta nets (arXiv:2412.06464).

    A layer keeps `inputs` numbers of each sequence, the last inputs of a convolution, in the type that is computed in,
    and a `state` of so many numbers in the type `kept_as` ("": the one that is computed in), which on GPUs is
    `kept_on_gpus`: as stock vLLM has it. Its linear layers have `weights` weights. A token takes `flops` operations on
    the state.
    """

    count: int
    inputs: int
    state: int
    weights: int
    flops: int
    kept_on_gpus: str = ""
    kept_as: str = "float32"
    heads: StateHeads = _ONE_HEAD

    def layer_bytes(self, dtype: str, tp: int = 1) -> int:
        """Bytes of one layer's state of one sequence on each of `tp` ranks when the model is computed in `dtype`."""
        inputs = self.inputs + self.heads.group_inputs * max(0, tp - self.heads.groups)
        one = (inputs * ITEM_BYTES[dtype] + self.state * ITEM_BYTES[self.kept_as or dtype]) // tp
        return -(-one // STATE_ALIGNMENT) * STATE_ALIGNMENT


class Mixers(NamedTuple):
    """What mixes tokens in a model's layers. `attention` of them have attention, also those of `states` that have both.
    `private` says why the pool cannot hold the states (empty: it can). `estimated`: their kind is not known, and the
    sizes of a state are those of Mamba-2."""

    attention: int
    states: StateLayers | None = None
    private: str = ""
    estimated: bool = False


def layer_types(config: Mapping[str, object]) -> list[str]:
    """The kind of each layer, where a config.json names them or vLLM knows them; else empty."""
    types = config.get("layer_types") or config.get("layers_block_type")
    if config.get("model_type") == "nemotron_h":
        pattern = config.get("hybrid_override_pattern")
        if not types and isinstance(pattern, str):
            types = [_PATTERN.get(letter, letter) for letter in pattern]
    if isinstance(types, list):
        return [str(kind) for kind in types]
    layers = _number(config, "num_hidden_layers")
    every = _number(config, "full_attention_interval", 4 if config.get("model_type") in GATED_DELTA_NETS else 0)
    if every:
        return ["full_attention" if not (layer + 1) % every else "linear_attention" for layer in range(layers)]
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(at := config.get(key), list):
            return ["full_attention" if layer in at else "mamba" for layer in range(layers)]
    if period := _number(config, "attn_layer_period"):
        offset = _number(config, "attn_layer_offset")
        return ["full_attention" if layer % period == offset else "mamba" for layer in range(layers)]
    kinds = config.get("attn_type_list")  # MiniMax: 1 is full attention, which MiniMax-M2 has in each of its layers
    if isinstance(kinds, list) and any(each != 1 for each in kinds):
        return ["full_attention" if each == 1 else "linear_attention" for each in kinds]
    if group := _number(config, "layer_group_size"):  # Bailing: the last of each group
        return ["full_attention" if not (layer + 1) % group else "linear_attention" for layer in range(layers)]
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(at := linear.get("kda_layers"), list):
        return ["kda" if layer + 1 in at else "full_attention" for layer in range(layers)]
    return []


def mixers(config: Mapping[str, object], layers: int, hidden: int) -> Mixers:
    """Which of a model's `layers` have attention, and which keep a state."""
    kind, types = str(config.get("model_type")), layer_types(config)[:layers]
    hybrid = kind in _HYBRID_TYPES or any(config.get(key) is not None for key in _HYBRID_KEYS)
    count = sum(each in STATE_LAYERS or each == "hybrid" for each in types)
    attention = layers - count - sum(each in MLP_LAYERS for each in types)
    if not hybrid and not count:
        return Mixers(attention)
    if kind in _WITHOUT_ATTENTION:
        count, attention = layers, 0
    elif kind == "falcon_h1":
        count, attention = layers, layers
    elif "hybrid" in types:  # Zamba2: all have a state, and some attention as well
        attention = types.count("hybrid")
    states, known = _states(kind, config, count, hidden)
    if kind in POOLED and set(types) & STATE_LAYERS and set(types) & _ATTENTION:
        return Mixers(attention, states)
    words = "it has state-space, recurrent or linear-attention layers of a kind whose states the pool does not hold"
    if not count:
        # It says that it has some, and not which.
        count = max(1, layers * 3 // 4)
        states, known = _states(kind, config, count, hidden)[0], False
        attention = layers - count
    return Mixers(attention, states, words, not known)


def _states(kind: str, config: Mapping[str, object], count: int, hidden: int) -> tuple[StateLayers, bool]:
    """The layers with a state, and whether their kind is known."""
    if isinstance(config.get("linear_attn_config"), Mapping):
        return _delta_attention(config, count, hidden), True
    if config.get("linear_num_value_heads") or kind in GATED_DELTA_NETS:
        return _delta_net(kind, config, count, hidden), True
    if kind in ("lfm2", "lfm2_moe"):
        inputs = hidden * (_number(config, "conv_L_cache", 3) - 1)
        return StateLayers(count, inputs, 0, 4 * hidden * hidden, 0, kept_as="", heads=StateHeads(hidden)), True
    if kind in ("mamba", "falcon_mamba", "jamba"):
        return _selective(config, count, hidden), True
    if config.get("attn_type_list") or config.get("layer_group_size"):
        heads = _number(config, "num_attention_heads", 1)
        width = _number(config, "head_dim", hidden // heads)
        return (
            StateLayers(
                count,
                0,
                heads * width * width,
                4 * hidden * heads * width,
                4 * heads * width * width,
                heads=StateHeads(heads),
            ),
            True,
        )
    known = kind in ("granitemoehybrid", "nemotron_h", "bamba", "falcon_h1", "zamba2", "mamba2")
    return _mamba2(kind, config, count, hidden), known


def _delta_net(kind: str, config: Mapping[str, object], count: int, hidden: int) -> StateLayers:
    keys = _number(config, "linear_num_key_heads", 16) * _number(config, "linear_key_head_dim", 128)
    heads, width = _number(config, "linear_num_value_heads", 32), _number(config, "linear_value_head_dim", 128)
    values, inputs = heads * width, 2 * keys + heads * width
    return StateLayers(
        count=count,
        inputs=inputs * (_number(config, "linear_conv_kernel_dim", 4) - 1),
        state=values * _number(config, "linear_key_head_dim", 128),
        weights=hidden * (inputs + values + 2 * heads) + values * hidden,
        # Decayed, read by the key, corrected by an outer product, read by the query.
        flops=7 * values * _number(config, "linear_key_head_dim", 128),
        # vLLM does not ask Qwen3-Next's for it.
        kept_on_gpus=_kept(config, "mamba_ssm_dtype", "") if kind != "qwen3_next" else "",
        kept_as="float32" if kind in POOLED else _kept(config, "mamba_ssm_dtype", ""),
        heads=StateHeads(heads, _number(config, "linear_num_key_heads", 16)),
    )


def _delta_attention(config: Mapping[str, object], count: int, hidden: int) -> StateLayers:
    """Kimi Delta Attention (arXiv:2510.26692)."""
    linear = config.get("linear_attn_config")
    assert isinstance(linear, Mapping)
    heads, width = _number(linear, "num_heads", 1), _number(linear, "head_dim", 128)
    inner = heads * width
    return StateLayers(
        count=count,
        inputs=3 * inner * (_number(linear, "short_conv_kernel_size", 4) - 1),
        state=inner * width,
        weights=4 * hidden * inner + 2 * (hidden * width + width * inner) + hidden * heads,
        flops=7 * inner * width,
        kept_on_gpus="float32",
        heads=StateHeads(heads, heads),
    )


def _selective(config: Mapping[str, object], count: int, hidden: int) -> StateLayers:
    """Mamba (arXiv:2312.00752)."""
    inner = _number(config, "mamba_expand") * hidden or _number(config, "intermediate_size", 2 * hidden)
    size = _number(config, "mamba_d_state", _number(config, "state_size", 16))
    convolution = _number(config, "mamba_d_conv", _number(config, "conv_kernel", 4))
    rank = _number(config, "mamba_dt_rank", _number(config, "time_step_rank", -(-hidden // 16)))
    return StateLayers(
        count=count,
        inputs=inner * (convolution - 1),
        state=inner * size,
        weights=hidden * 2 * inner + inner * (rank + 2 * size) + rank * inner + inner * hidden,
        flops=5 * inner * size,
        kept_as="",
        heads=StateHeads(inner, inner),
    )


def _mamba2(kind: str, config: Mapping[str, object], count: int, hidden: int) -> StateLayers:
    def first(default: int, *keys: str) -> int:
        return next((found for key in keys if (found := _number(config, key))), default)

    heads = first(128, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    size = first(256 if kind == "granitemoehybrid" else 128, "mamba_d_state", "ssm_state_size", "state_size")
    groups = first(8 if kind in ("nemotron_h", "mamba2") else 1, "mamba_n_groups", "n_groups", "mamba_ngroups")
    convolution = first(4, "mamba_d_conv", "conv_kernel")
    expanded = first(2, "mamba_expand", "expand") * hidden
    inner = expanded
    if kind == "nemotron_h":
        inner = heads * first(64, "mamba_head_dim")
    elif kind == "falcon_h1":
        inner = first(expanded, "mamba_d_ssm")
    inputs = inner + 2 * groups * size
    pooled = kind in POOLED
    return StateLayers(
        count=count,
        inputs=inputs * (convolution - 1),
        state=inner * size,
        weights=hidden * (inner + inputs + heads) + inner * hidden,
        # Decayed, an outer product added, read.
        flops=5 * inner * size,
        kept_on_gpus=_kept(config, "mamba_ssm_cache_dtype", "float32") if kind == "nemotron_h" else "",
        kept_as="float32" if pooled else "",
        heads=StateHeads(heads, groups, 2 * size * (convolution - 1)),
    )


def _kept(config: Mapping[str, object], key: str, default: str) -> str:
    """The type of states that a configuration asks for; "" for the one that is computed in."""
    asked = str(config.get(key) or default).removeprefix("torch.")
    return asked if asked in ITEM_BYTES else ""


def _number(config: Mapping[str, object], key: str, default: int = 0) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def kinds_of(types: Sequence[str]) -> set[str]:
    """The kinds of layers that are neither attention, nor states, nor an MLP alone."""
    return set(types) - STATE_LAYERS - MLP_LAYERS - _ATTENTION - {"sliding_attention", "chunked_attention", "hybrid"}
