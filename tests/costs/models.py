"""Architectures that tests of costs share."""

from __future__ import annotations

from muxserve.costs.architecture import ModelArchitecture


def llama(
    layers: int = 32, hidden: int = 4096, heads: int = 32, kv_heads: int = 32, **changes: object
) -> ModelArchitecture:
    """LLaMA 7B unless changed."""
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
        "default_max_len": 4096,
        "dtype": "float16",
    }
    return ModelArchitecture(**{**values, **changes})  # type: ignore[arg-type]


SEVEN_B = llama()
MIXTRAL = llama(kv_heads=8, intermediate=14336, experts=8, active_experts=2)
