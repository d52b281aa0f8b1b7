"""Architectures that tests of costs share."""

from __future__ import annotations

from muxserve.costs.architecture import ModelArchitecture


def llama(
    layers: int = 32, hidden: int = 4096, heads: int = 32, kv_heads: int = 32, **changes: object
) -> ModelArchitecture:
    """LLaMA 7B unless changed; its longest sequence is its default, too."""
    values: dict[str, object] = {
        "name": "LlamaForCausalLM",
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 128,
        "hidden": hidden,
        "intermediate": 11008,
        "vocab": 32000,
        "max_len": 4096,
        "dtype": "float16",
        **changes,
    }
    return ModelArchitecture(**{"default_max_len": values["max_len"], **values})  # type: ignore[arg-type]


SEVEN_B = llama()
MIXTRAL = llama(kv_heads=8, intermediate=14336, experts=8, active_experts=2)
