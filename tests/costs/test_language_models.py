"""Configurations of multi-modal checkpoints as they are found on the hub, cut to the fields that matter."""

from __future__ import annotations

from typing import Any

import pytest

from muxserve.costs.architecture import UnsupportedModelError, read_architecture
from muxserve.costs.language_models import is_of_language_model, language_model

GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    # No more than this: the rest is what Transformers takes by itself.
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
MISTRAL3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "num_hidden_layers": 24},
}
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "vocab_size": 151936,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152},
}
QWEN3_5_MOE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"},
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 27, "hidden_size": 1152},
}
# Without a text_config.
QWEN2_5_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "vision_start_token_id": 151652,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        (GEMMA3, "Gemma3ForCausalLM", (34, 8, 4, 256, 2560, 131072, 1024, 29)),
        (MISTRAL3, "MistralForCausalLM", (40, 32, 8, 128, 5120, 131072, 0, 0)),
        (QWEN3_VL, "Qwen3ForCausalLM", (36, 32, 8, 128, 4096, 262144, 0, 0)),
        (QWEN3_5_MOE, "Qwen3_5MoeForCausalLM", (40, 16, 2, 256, 2048, 262144, 0, 0)),
        (QWEN2_5_VL, "Qwen2ForCausalLM", (28, 28, 4, 128, 3584, 128000, 0, 0)),
    ],
)
def test_of_multi_modal_checkpoints_the_language_model_is_read(
    config: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    text = language_model(config)
    assert text is not None
    found = read_architecture(text)
    assert (found.name, found.dtype) == (name, "bfloat16")
    assert shape == (
        found.layers, found.heads, found.kv_heads, found.head_dim, found.hidden, found.max_len,
        found.window, found.windowed_layers,
    )  # fmt: skip
    rope = text.get("rope_scaling")
    assert rope is None or not {"mrope_section", "mrope_interleaved"} & set(rope)
    assert rope is None or "mrope" not in rope.values()


def test_qwen3_5_keeps_states_with_images_and_without() -> None:
    text = language_model(QWEN3_5_MOE)
    assert text is not None
    found = read_architecture(text)
    assert (found.attention_layers, found.states and found.states.count) == (10, 30)
    assert found.parameters == pytest.approx(35e9, rel=0.02)
    # A checkpoint without images is what is in one with them.
    alone = {**QWEN3_5_MOE["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"]}
    assert language_model(alone) is not None
    assert read_architecture(language_model(alone) or {}) == found
    assert not is_of_language_model("mtp.layers.0.mlp.gate.weight")


# SmolVLM-256M-Instruct.
IDEFICS3: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "idefics3",
    "scale_factor": 4,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 768, "image_size": 512, "model_type": "idefics3_vision"},
}


def test_a_checkpoint_that_is_served_with_images_has_the_pages_of_its_language_model() -> None:
    assert language_model(IDEFICS3) is None
    found = read_architecture(IDEFICS3)
    assert (found.name, found.sees_images, found.text_only) == ("Idefics3ForConditionalGeneration", True, False)
    assert (found.layers, found.heads, found.kv_heads, found.head_dim, found.max_len) == (30, 9, 3, 64, 8192)
    assert (found.dtype, found.tied_embeddings) == ("bfloat16", False)
    assert found.cpu_only
    with pytest.raises(UnsupportedModelError, match="models that see images generate text only here"):
        read_architecture(IDEFICS3, pooling=True)


def test_fields_that_its_text_config_leaves_out_are_those_of_llama() -> None:
    found = read_architecture({**IDEFICS3, "text_config": {"vocab_size": 128259, "num_key_value_heads": 8}})
    assert (found.layers, found.hidden, found.kv_heads, found.vocab) == (32, 4096, 8, 128259)


def test_what_the_whole_says_of_its_weights_holds_for_the_language_model() -> None:
    text = language_model({**MISTRAL3, "quantization_config": {"quant_method": "fp8"}})
    assert text is not None
    assert read_architecture(text).quantisation == "fp8"


def test_other_checkpoints_have_none() -> None:
    assert language_model(MISTRAL3["text_config"]) is None
    assert language_model({"model_type": "llava", "text_config": {}, "vision_config": {}}) is None


def test_whose_tensors_are_whose() -> None:
    tensors = {
        "model.language_model.layers.0.mlp.up_proj.weight": True,
        "language_model.model.embed_tokens.weight": True,
        "language_model.lm_head.weight": True,
        "lm_head.weight": True,
        "model.layers.0.mlp.up_proj.weight": True,
        "model.visual.blocks.0.attn.qkv.weight": False,
        "visual.merger.mlp.0.weight": False,
        "vision_tower.ln_pre.weight": False,
        "model.multi_modal_projector.linear_1.weight": False,
    }
    assert {name: is_of_language_model(name) for name in tensors} == tensors
