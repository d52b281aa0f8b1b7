"""Refuses models that the page pool cannot carry, with the reason, once vLLM has resolved their attention layers."""

from __future__ import annotations

from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec

from muxserve.spec import ModelSpec
from muxserve.vllm.tasks import tasks_of


def unsupported(specs: dict[str, KVCacheSpec], model: ModelSpec, stages: int = 1) -> str | None:
    """Why the model with these KV cache specs (by layer name) cannot be served; None if it can. One of several stages
    may have fewer layers than the largest."""
    if not model.kv_heads:
        return f"{', '.join(specs)} would keep KV, but its config.json promised none" if specs else None
    if not specs:
        return "it has no attention layers with a KV cache"
    shapes = set()
    for layer, spec in specs.items():
        if isinstance(spec, MLAAttentionSpec) and model.latent:
            shapes.add((1, spec.head_size / 2, spec.dtype))
            continue
        if type(spec) is not FullAttentionSpec:
            return f"{layer} needs a {type(spec).__name__}; only full and sliding-window attention are supported"
        if spec.sliding_window is not None or spec.attention_chunk_size is not None:
            return f"{layer} uses chunked attention"
        shapes.add((spec.num_kv_heads, spec.head_size, spec.dtype))
    if len(shapes) > 1:
        return f"its layers differ in KV heads, head size or type: {sorted(map(str, shapes))}"
    heads, head_size, _ = next(iter(shapes))
    layers_fit = len(specs) == model.layers or (stages > 1 and len(specs) < model.layers)
    if not layers_fit or (heads, head_size) != (model.kv_heads, model.head_dim):
        return (
            f"vLLM sees {len(specs)} layers, {heads} KV heads and head size {head_size}, but its config.json promised "
            f"{model.layers}, {model.kv_heads} and {model.head_dim}"
        )
    return None


def refuse_unsupported(executor: Executor, model: ModelSpec, stages: int = 1) -> None:
    """Go on only if the loaded model can be served, on each of its ranks.

    Raises:
        ValueError: says why not.
    """
    for specs in executor.get_kv_cache_specs() if not model.private else ():
        reason = unsupported(specs, model, stages)
        if reason:
            raise ValueError(f"model {model.name!r} cannot be served: {reason}")
    if not model.pooling:
        return
    promised, known = tasks_of(executor.model_config), executor.supported_tasks
    if not set(promised) <= set(known):
        raise ValueError(
            f"model {model.name!r} cannot be served: it is offered for {', '.join(promised)}, but vLLM uses it for "
            f"{', '.join(known) or 'nothing'}"
        )
