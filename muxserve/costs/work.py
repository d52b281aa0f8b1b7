"""How much there is to do: floating-point operations and bytes of a job, from the architecture alone."""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.costs.architecture import ITEM_BYTES, KV_ITEM_BYTES, ModelArchitecture
from muxserve.costs.latency import CostError


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What the layers of one model do on each of `tp` devices, per token or in all.

    `flops_per_token` counts two per weight and token of the linear layers, `flops_per_pair` those of a (query, key)
    pair of attention. `dense_bytes` are weights that every token reads (attention, shared experts), `expert_bytes`
    those of all routed experts. `kv_bytes_per_token` is K and V of a token; `head_flops` (per row) and `head_bytes` are
    the LM head's; `activation_bytes` is what the layers read and write per token besides weights and KV. In the part
    `windowed` of the layers (0 to 1) a token sees the last `window` tokens only. `state_bytes` are what a step reads
    and writes of the states of one sequence.
    """

    flops_per_token: float
    flops_per_pair: float
    dense_bytes: float
    expert_bytes: float
    kv_bytes_per_token: float
    head_flops: float
    head_bytes: float
    activation_bytes: float
    experts: int
    active_experts: int
    window: int
    windowed: float
    state_bytes: float

    def seen_pairs(self, pairs: int, tokens: int) -> float:
        """(query, key) pairs that a layer computes on average, of the `pairs` of a prefill step over `tokens` tokens
        that full attention has; at most, since a short prompt beside a long one has fewer than its window allows."""
        return pairs - self.windowed * max(0, pairs - tokens * self.window)

    def seen_context(self, batch: int, context: int) -> float:
        """Tokens that a layer reads on average in a decode step, of the `context` tokens that `batch` sequences have;
        at most, as above."""
        return context - self.windowed * max(0, context - batch * self.window)

    def weight_bytes(self, tokens: int) -> float:
        """Bytes of weights that a step over `tokens` tokens reads, LM head apart. It reads only the experts that some
        token is routed to: with even routing a fraction `1 - (1 - active/experts)^tokens` of them."""
        if self.experts <= 1:
            return self.dense_bytes + self.expert_bytes
        missed = (1.0 - self.active_experts / self.experts) ** tokens
        return self.dense_bytes + self.expert_bytes * (1.0 - missed)


def layer_work(architecture: ModelArchitecture, tp: int, dtype: str) -> LayerWork:
    """The work of `architecture` when it is split over `tp` devices and computed in `dtype`.

    Quantised weights are read in their own size, and computed at the speed of `dtype`: what integer or FP8 units gain
    is not modelled. KV heads are split too; when there are fewer of them than devices, each holds a copy of one.

    Raises:
        CostError: the dtype is unknown, or the heads cannot be split that way.
    """
    if dtype not in ITEM_BYTES:
        raise CostError(f"dtype {dtype!r} is unknown; known are {', '.join(ITEM_BYTES)}")
    if tp < 1:
        raise CostError(f"tensor parallelism must be at least 1, not {tp}")
    a = architecture
    if a.heads % tp:
        raise CostError(f"{a.name}: {a.heads} attention heads cannot be split over {tp} devices")
    item, weight = ITEM_BYTES[dtype], architecture.linear_bytes(dtype)
    local_kv = max(1.0, a.kv_heads / tp)
    # Weights of a layer on average, as everywhere here.
    mixer, mlps = a.mixer_weights(tp) / a.layers, a.mlps / a.layers
    expert = mlps * a.expert_weights / tp
    lone = a.dense_layers / a.layers * a.mlp_matrices * a.hidden * a.dense_intermediate / tp
    routed = expert * (a.experts if a.experts > 1 else 0)
    shared = mlps * a.mlp_matrices * a.hidden * a.shared_intermediate / tp
    dense = mixer + (0.0 if a.experts > 1 else expert) + shared + lone
    used = dense + (expert * a.active_experts if a.experts > 1 else 0.0)
    head = a.vocab * a.hidden / tp
    return LayerWork(
        flops_per_token=2.0 * a.layers * used + (a.states.count * a.states.flops / tp if a.states else 0.0),
        flops_per_pair=2.0 * a.attention_layers * a.heads / tp * a.pair_numbers,
        dense_bytes=a.layers * dense * weight,
        expert_bytes=a.layers * routed * weight,
        kv_bytes_per_token=2.0
        * a.attention_layers
        * local_kv
        * a.page_head_dim(dtype)
        * KV_ITEM_BYTES[a.kv_dtype(dtype)],
        head_flops=2.0 * head,
        head_bytes=head * item,
        # Per layer and token: residual stream read and written by both norms and both additions, and what lies between
        # the linear layers, written once and read once.
        activation_bytes=a.layers
        * item
        * (
            8.0 * a.hidden
            + 2.0 * a.attention_numbers() / tp
            + 2.0 * mlps * a.mlp_matrices * a.intermediate * a.active_experts / tp
        ),
        experts=a.experts,
        active_experts=a.active_experts,
        window=a.window,
        windowed=a.windowed_layers / a.layers,
        # Read and written.
        state_bytes=2.0 * a.state_bytes(dtype, tp),
    )
