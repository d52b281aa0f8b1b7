"""Random checkpoints whose caches the shared pool cannot hold."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.tiny_checkpoint import CACHE, SPECIAL_TOKENS, VERSION, WINDOW, _write_tokenizer

_SMALL: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_OF_ITSELF = ("architectures", "transformers_version", "_name_or_path", "model_type")
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class TinyKind:
    """Names of the configuration and the model in Transformers, and what is special about its shape. `reason` is part
    of why the pool cannot hold what it keeps."""

    config: str
    model: str
    reason: str
    fields: Mapping[str, object] = field(default_factory=dict)


PRIVATE = {
    "mamba2": TinyKind(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        "state-space",
        {"hidden_size": 256, "num_hidden_layers": 2, "state_size": 64, "num_heads": 8, "head_dim": 64, "n_groups": 1}
        | {"expand": 2, "chunk_size": 64},
    ),
    "falcon_h1": TinyKind(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        "state-space",
        {**_SMALL, "num_hidden_layers": 2, "head_dim": 64, "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64}
        | {"mamba_n_groups": 1, "mamba_d_state": 64, "mamba_chunk_size": 64},
    ),
    "zamba2": TinyKind(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        "state-space",
        {**_SMALL, "num_key_value_heads": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
        | {"n_mamba_heads": 8, "mamba_d_state": 64, "mamba_headdim": 64, "mamba_ngroups": 1, "chunk_size": 64}
        | {"num_mem_blocks": 1},
    ),
    "lfm2": TinyKind(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        "state-space",
        {**_SMALL, "layer_types": ["conv", "full_attention"] * 2, "conv_dim": 256, "block_dim": 256}
        | {"block_auto_adjust_ff_dim": False, "block_ff_dim": 512},
    ),
    "llama4": TinyKind(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        "chunked attention",
        {**_SMALL, "head_dim": 64, "intermediate_size_mlp": 512, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": 128},
    ),
    "gemma3n": TinyKind(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        "share the KV cache",
        {**_SMALL, "head_dim": 64, "sliding_window": WINDOW, "layer_types": _ALTERNATING, "num_kv_shared_layers": 2}
        | {"vocab_size_per_layer_input": 261, "hidden_size_per_layer_input": 32, "altup_num_inputs": 2}
        | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "tie_word_embeddings": True},
    ),
    "gemma4": TinyKind(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        "differ in KV heads or head size",
        {**_SMALL, "head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 1, "sliding_window": WINDOW}
        | {"layer_types": _ALTERNATING, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
        | {"tie_word_embeddings": True},
    ),
    "minicpm3": TinyKind(
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        "the keys and values of all heads",
        {**_SMALL, "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64}
        | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64},
    ),
}


# A checkpoint that sees images, whose language model is that kind.
WHOLE, TEXT = "llama4-mm", "llama4"


def tiny_private(kind: str, max_len: int = 2048) -> Path:
    """A directory in Hugging Face format with a checkpoint of that kind; made once, and kept under `build/`. Its
    tokenizer is that of `tiny_checkpoint`."""
    path = CACHE / f"private-{kind}-{max_len}-v{VERSION}"
    if path.is_dir():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=CACHE, prefix=f".{path.name}-"))
    try:
        _write_tokenizer(scratch, "llama", max_len)
        if kind == WHOLE:
            _write_whole(scratch, tiny_private(TEXT, max_len))
        else:
            _write(scratch, PRIVATE[kind], max_len)
        os.rename(scratch, path)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not path.is_dir():  # another process may have been first
            raise
    return path


def _write(path: Path, kind: TinyKind, max_len: int) -> None:
    import torch
    import transformers

    eos = SPECIAL_TOKENS.index("<|im_end|>")
    config = getattr(transformers, kind.config)(
        **{
            "vocab_size": len(SPECIAL_TOKENS) + 256,
            "bos_token_id": SPECIAL_TOKENS.index("<s>"),
            "eos_token_id": eos,
            "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
            "max_position_embeddings": max_len,
            "tie_word_embeddings": False,
            # Wide enough that greedy choices have clear margins.
            "initializer_range": 0.08,
            **kind.fields,
        }
    )
    torch.manual_seed(0)
    getattr(transformers, kind.model)(config).to(torch.float32).eval().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos], "bos_token_id": 1}) + "\n")


def _write_whole(path: Path, language_model: Path) -> None:
    import torch
    import transformers

    text = transformers.AutoModelForCausalLM.from_pretrained(language_model)
    fields = {key: value for key, value in text.config.to_dict().items() if key not in _OF_ITSELF}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 32}
    small |= {"projector_input_dim": 32, "projector_output_dim": 32}
    config = transformers.Llama4Config(text_config=fields, vision_config=small, image_token_index=3)
    torch.manual_seed(0)
    model = transformers.Llama4ForConditionalGeneration(config).to(torch.float32).eval()
    model.language_model.load_state_dict(text.state_dict())
    model.save_pretrained(path)
    shutil.copy(language_model / "generation_config.json", path)
