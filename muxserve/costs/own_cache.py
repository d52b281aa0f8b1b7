"""What a model keeps of its tokens where the pages of a shared pool cannot hold it, from its config.json.

A pool has K and V of equally large heads in every layer, a latent in every layer, or either beside states of a few
kinds. Here are the others, for engines with vLLM's own cache: how much they keep, as vLLM's KV cache specs have it, and
why the pool cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Bytes that vLLM keeps of an entry of DeepSeek V4: 448 numbers and 8 scales of 8 bits, and 64 numbers of 16 bits.
_V4_ENTRY = 584
# A scale of 4 bytes for 128 numbers of 8 bits: the keys by which sparse attention chooses.
_SCALED = 128
_SWITCHED_OFF = ("no_op", "replace_with_linear")


@dataclass(frozen=True)
class KeptLayers:
    """`layers` that keep alike: an entry for every `tokens` tokens, of `heads` heads with `numbers` each, K and V
    together. A number has `item_bytes` (0: those of the KV cache's type). With a `window` a token sees that many
    before it; `fixed` entries are kept of each sequence whatever its length."""

    layers: int
    heads: int
    numbers: int
    window: int = 0
    tokens: int = 1
    item_bytes: int = 0
    fixed: int = 0

    def entry_bytes(self, item_bytes: int) -> int:
        """Bytes of one entry in all layers, where the KV cache's type has `item_bytes`."""
        return self.layers * self.heads * self.numbers * (self.item_bytes or item_bytes)


@dataclass(frozen=True)
class OwnCache:
    """Why the pool cannot hold it, and what is kept (empty: what the sizes of the layers say). `weights` are those of
    one layer's attention, where its sizes do not say it (0: they do)."""

    reason: str
    kept: tuple[KeptLayers, ...] = ()
    weights: int = 0


@dataclass(frozen=True)
class AttentionSizes:
    """Layers with attention: how many there are, and per layer query heads, KV heads, and the size of a key."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


def own_cache(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """What the model of that config.json keeps, if that is nothing for the pool; None: the pool can hold it.

    `layer_types` are those of the layers, where they are named.
    """
    for kind in (
        _compressed,
        _sparse_latent,
        _sparse_heads,
        _chosen_by_search,
        _differing,
        _two_windows,
        _by_type,
        _chunked,
        _large_latent,
        _wide_values,
        _scaled,
    ):
        found = kind(config, sizes, layer_types)
        if found is not None:
            return found
    return None


def _number(config: Mapping[str, object], key: str, default: int = 0) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _list(config: Mapping[str, object], key: str) -> list[object]:
    value = config.get(key)
    return value if isinstance(value, list) else []


def _scaled_bytes(numbers: int) -> int:
    return numbers + numbers // _SCALED * 4


def _compressed(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """DeepSeek V4: every layer keeps a window of entries, most also one entry for several tokens together."""
    ratios = [each for each in _list(config, "compress_ratios")[: sizes.layers] if isinstance(each, int)]
    if not ratios:
        return None
    kept = [KeptLayers(sizes.layers, 1, _V4_ENTRY, item_bytes=1, fixed=_number(config, "sliding_window", 128))]
    index = _scaled_bytes(_number(config, "index_head_dim", 128))
    for ratio in sorted({each for each in ratios if each > 1}):
        layers = ratios.count(ratio)
        kept.append(KeptLayers(layers, 1, _V4_ENTRY, tokens=ratio, item_bytes=1))
        if ratio == min(each for each in ratios if each > 1):  # by which the others are chosen
            kept.append(KeptLayers(layers, 1, index, tokens=ratio, item_bytes=1))
    width = sizes.heads * sizes.head_dim
    query = _number(config, "q_lora_rank", sizes.hidden)
    output = _number(config, "o_lora_rank", sizes.hidden)
    weights = (
        sizes.hidden * (query + sizes.head_dim)
        + query * width
        + width * output
        + _number(config, "o_groups", 1) * output * sizes.hidden
        # Weights of the layers that compress, and choose.
        + 2 * sizes.hidden * sizes.head_dim
        + query * _number(config, "index_n_heads") * _number(config, "index_head_dim") // 2
    )
    return OwnCache("its layers keep one entry for several tokens (compress_ratios)", tuple(kept), weights)


def _sparse_latent(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """DeepSeek V3.2, GLM-5: a latent, and keys by which a token chooses the tokens that it sees."""
    rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    if not config.get("index_topk") or not rank:
        return None
    kinds = _list(config, "indexer_types")[: sizes.layers]
    choosing = sum(kind != "shared" for kind in kinds) if kinds else sizes.layers
    index, heads = _number(config, "index_head_dim", 128), _number(config, "index_n_heads", 64)
    query = _number(config, "q_lora_rank", sizes.hidden)
    nope, value = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
    weights = (
        sizes.hidden * (query + rank + rope)
        + sizes.heads * (query * (nope + rope) + rank * (nope + value) + value * sizes.hidden)
        + (query * heads * index + sizes.hidden * (index + heads)) * choosing // sizes.layers
    )
    kept = (
        KeptLayers(sizes.layers, 1, rank + rope),
        KeptLayers(choosing, 1, _scaled_bytes(index), item_bytes=1),
    )
    return OwnCache("it has sparse attention (index_topk), whose index is a cache of another kind", kept, weights)


def _sparse_heads(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """MiniMax M3: K and V by head, and keys by which blocks are chosen."""
    sparse = config.get("sparse_attention_config")
    if not isinstance(sparse, Mapping) or not sparse.get("use_sparse_attention", True):
        return None
    choosing = sum(bool(each) for each in _list(sparse, "sparse_attention_freq")) or sizes.layers
    kept = (
        KeptLayers(sizes.layers, sizes.kv_heads, 2 * sizes.head_dim),
        KeptLayers(choosing, 1, _number(sparse, "sparse_index_dim", 128)),
    )
    return OwnCache("it has sparse attention (sparse_attention_config), whose index is a cache of another kind", kept)


def _chosen_by_search(
    config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]
) -> OwnCache | None:
    if not config.get("index_topk"):
        return None
    index = _scaled_bytes(_number(config, "index_head_dim", 128))
    kept = (KeptLayers(sizes.layers, sizes.kv_heads, 2 * sizes.head_dim), KeptLayers(sizes.layers, 1, index, 0, 1, 1))
    return OwnCache("it has sparse attention (index_topk), whose index is a cache of another kind", kept)


def _differing(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """Nemotron NAS, OpenELM: each layer has KV heads of its own, or none."""
    counts: list[int] = []
    for block in _list(config, "block_configs"):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping) or any(attention.get(key) for key in _SWITCHED_OFF):
            continue
        counts.append(sizes.heads // _number(attention, "n_heads_in_group", 1))
    for key in ("num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer"):
        counts = counts or [each for each in _list(config, key) if isinstance(each, int)]
    if not counts:
        return None
    kept = tuple(KeptLayers(counts.count(each), each, 2 * sizes.head_dim) for each in sorted(set(counts)))
    weights = sum(2 * sizes.hidden * sizes.head_dim * (sizes.heads + each) for each in counts)
    return OwnCache("its layers differ in KV heads", kept, weights // sizes.layers)


def _two_windows(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """MiMo V2: layers with a window have more KV heads than the others, and values are smaller than keys."""
    pattern = _list(config, "hybrid_layer_pattern")[: sizes.layers]
    if not pattern:
        return None
    windowed = sum(bool(each) for each in pattern)
    own = (_number(config, "swa_num_key_value_heads", sizes.kv_heads), _number(config, "swa_head_dim", sizes.head_dim))
    value = _number(config, "v_head_dim", sizes.head_dim)
    kept = (
        KeptLayers(len(pattern) - windowed, sizes.kv_heads, sizes.head_dim + value),
        KeptLayers(
            windowed,
            own[0],
            own[1] + _number(config, "swa_v_head_dim", value),
            _number(config, "sliding_window", _number(config, "sliding_window_size")),
        ),
    )
    return OwnCache("its layers differ in KV heads", kept)


def _by_type(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """Gemma 3n and 4: the last layers use the KV of others, layers that see everything may have other heads."""
    shared = _number(config, "num_kv_shared_layers")
    heads = _number(config, "num_global_key_value_heads", sizes.kv_heads)
    head_dim = _number(config, "global_head_dim", sizes.head_dim)
    alike = (heads, head_dim) == (sizes.kv_heads, sizes.head_dim)
    if not shared and alike:
        return None
    keeping = layer_types[: sizes.layers - shared] or ["full_attention"] * (sizes.layers - shared)
    windowed = sum(kind == "sliding_attention" for kind in keeping)
    kept = (
        KeptLayers(len(keeping) - windowed, heads, 2 * head_dim),
        KeptLayers(windowed, sizes.kv_heads, 2 * sizes.head_dim, _number(config, "sliding_window")),
    )
    full = sum(kind != "sliding_attention" for kind in layer_types) or sizes.layers
    weights = full * head_dim * (sizes.heads + heads)
    weights += (sizes.layers - full) * sizes.head_dim * (sizes.heads + sizes.kv_heads)
    reason = "some of its layers share the KV cache of others"
    if not alike:
        reason = "its layers differ in KV heads or head size"
    return OwnCache(reason, kept, 2 * sizes.hidden * weights // sizes.layers)


def _chunked(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """Llama 4: layers with positions see their chunk of the sequence, every fourth sees everything."""
    chunk = _number(config, "attention_chunk_size")
    if not chunk:
        return None
    positions = _list(config, "no_rope_layers")[: sizes.layers]
    if layer_types:
        chunked = sum(kind == "chunked_attention" for kind in layer_types[: sizes.layers])
    elif positions:
        chunked = sum(bool(each) for each in positions)
    else:
        chunked = sum(bool((layer + 1) % 4) for layer in range(sizes.layers))
    kept = (
        KeptLayers(sizes.layers - chunked, sizes.kv_heads, 2 * sizes.head_dim),
        KeptLayers(chunked, sizes.kv_heads, 2 * sizes.head_dim, chunk),
    )
    return OwnCache("it uses chunked attention (attention_chunk_size)", kept)


def _large_latent(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    """MiniCPM3 has latents, of which vLLM keeps the keys and values of all heads."""
    if config.get("model_type") != "minicpm3":
        return None
    key = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    return OwnCache(
        "of its latents vLLM keeps the keys and values of all heads", (KeptLayers(sizes.layers, sizes.heads, 2 * key),)
    )


def _wide_values(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    value = _number(config, "v_head_dim")
    if not value or not _number(config, "head_dim") or config.get("kv_lora_rank") or value == sizes.head_dim:
        return None
    reason = f"its values have another head size ({value}) than its keys ({sizes.head_dim})"
    return OwnCache(reason, (KeptLayers(sizes.layers, sizes.kv_heads, sizes.head_dim + value),))


def _scaled(config: Mapping[str, object], sizes: AttentionSizes, layer_types: Sequence[str]) -> OwnCache | None:
    given = config.get("quantization_config") or config.get("compression_config")
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if isinstance(given, Mapping) and given.get(key):
            return OwnCache(f"its checkpoint has scales for a quantised KV cache ({key})")
    return None
