"""Random LoRA adapters in PEFT's format, for any checkpoint of the Llama kind."""

from __future__ import annotations

import json
from pathlib import Path

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(path: Path, model: Path, rank: int = 8, seed: int = 0, scale: float = 0.05) -> Path:
    """Write an adapter of all linear layers of `model` into the new directory `path`; returns it. `scale` is the
    standard deviation of its weights: large enough to change most answers."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = dict(
        zip(
            MODULES,
            [(hidden, heads), (hidden, kv), (hidden, kv), (heads, hidden), *[(hidden, inner)] * 2, (inner, hidden)],
            strict=True,
        )
    )
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (width, out) in shapes.items():
            part = "self_attn" if module in MODULES[:4] else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            tensors[f"{name}.lora_A.weight"] = scale * torch.randn(rank, width, generator=random)
            tensors[f"{name}.lora_B.weight"] = scale * torch.randn(out, rank, generator=random)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(MODULES),
    }
    (path / "adapter_config.json").write_text(json.dumps(described))
    return path
