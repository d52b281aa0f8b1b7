"""Models whose cache the pool cannot hold: why, and what they keep, as vLLM's KV cache specs have it."""

from __future__ import annotations

from typing import Any

import pytest

from muxserve.costs.architecture import read_architecture
from tests.costs.test_architecture import DEEPSEEK, LLAMA, QWEN3

# Each layer of LLAMA: K and V of 8 heads with 128 numbers of 16 bits.
LAYER = 2 * 8 * 128 * 2
SPARSE = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0],
    "index_head_dim": 128,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}
JAMBA = {
    **LLAMA,
    "model_type": "jamba",
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
FALCON_H1 = {
    **LLAMA,
    "model_type": "falcon_h1",
    "mamba_d_ssm": 1024,
    "mamba_d_state": 256,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
KIMI_LINEAR = {
    **DEEPSEEK,
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
NAS = {
    **LLAMA,
    "num_hidden_layers": 3,
    "num_key_value_heads": None,
    "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 2.0}},
        {"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"no_op": True}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 4.0}},
    ],
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "vocab_size": 51865,
    "torch_dtype": "float16",
}
GEMMA4 = {
    **LLAMA,
    "num_hidden_layers": 6,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}


@pytest.mark.parametrize(
    ("config", "reason", "token_bytes", "state_bytes"),
    [
        ({**DEEPSEEK, "model_type": "deepseek_v32", **SPARSE}, "sparse attention", 61 * (576 * 2 + 132), 0),
        (
            {**DEEPSEEK, "model_type": "glm_moe_dsa", **SPARSE, "indexer_types": ["full", "shared"] * 31},
            "sparse attention",
            61 * 576 * 2 + 31 * 132,
            0,
        ),
        (V4, "one entry for several tokens", 2 * 584 // 4 + 2 * 132 // 4 + -(-584 // 128), 4 * 584 * 128),
        ({**LLAMA, "attention_chunk_size": 8192}, "chunked attention", 32 * LAYER, 0),
        (GEMMA4, "differ in KV heads or head size", 5 * 2 * LAYER + 2 * 2 * 512 * 2, 0),
        ({**LLAMA, "num_kv_shared_layers": 10}, "share the KV cache", 22 * LAYER, 0),
        (NAS, "differ in KV heads", (4 + 8) * 2 * 128 * 2, 0),
        ({**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": [4, 8]}, "differ in KV heads", 12 * 512, 0),
        (
            {**LLAMA, "hybrid_layer_pattern": [0, 1] * 16, "head_dim": 192, "v_head_dim": 128}
            | {"swa_num_key_value_heads": 16, "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window": 128},
            "differ in KV heads",
            16 * (8 + 16) * 320 * 2,
            0,
        ),
        ({**LLAMA, "head_dim": 128, "v_head_dim": 64}, "another head size", 32 * 8 * 192 * 2, 0),
        ({**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "scales", 32 * LAYER // 2, 0),
        # Inputs of the convolution, and the state, in the type that is computed in, as stock vLLM has them.
        (JAMBA, "state-space", 4 * LAYER, 28 * (8192 * 3 + 8192 * 16) * 2),
        ({**LLAMA, "model_type": "mamba", "state_size": 16, "expand": 2}, "state-space", 0, 32 * (14336 * 19) * 2),
        (FALCON_H1, "state-space", 32 * LAYER, 32 * ((1024 + 512) * 3 + 1024 * 256) * 2),
        (KIMI_LINEAR, "state-space", 576 * 2, 3 * (3 * 4096 * 3 * 2 + 4096 * 128 * 4)),
        ({**LLAMA, "model_type": "lfm2", "full_attn_idxs": [1, 3], "conv_L_cache": 3}, "state", 2 * LAYER, 30 * 16384),
        # Four layers of a decoder, and what they keep of an encoder's 1,500 positions.
        (WHISPER, "cross attention", 4 * 2 * 384 * 2, 4 * 2 * 384 * 2 * 1500),
        ({"architectures": ["XForConditionalGeneration"], "text_config": LLAMA}, "multi-modal", 32 * LAYER, 0),
        ({**LLAMA, "vision_config": {"depth": 2}}, "multi-modal", 32 * LAYER, 0),
        ({**LLAMA, "kv_lora_rank": 512}, "latent attention is held by the pool for these", 32 * LAYER, 0),
        ({**QWEN3, "layer_types": ["odd", "full_attention"] * 14}, "some of its layers are odd", 28 * LAYER, 0),
    ],
)
def test_what_is_kept(config: dict[str, Any], reason: str, token_bytes: int, state_bytes: int) -> None:
    a = read_architecture(config)
    dtype = "bfloat16" if a.dtype == "float32" else a.dtype
    assert reason in a.private
    assert (a.kv_bytes_per_token(dtype), a.state_bytes(dtype)) == (token_bytes, state_bytes)
    assert a.multi_modal == (reason == "multi-modal")
    assert a.encoder_decoder == (config is WHISPER)


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "hybrid_override_pattern": "M-M*"},
        {**QWEN3, "full_attention_interval": 4},
        {**LLAMA, "model_type": "new", "block_types": ["recurrent", "attention"]},
    ],
)
def test_states_of_an_unknown_kind_are_estimated(config: dict[str, Any]) -> None:
    a = read_architecture(config)
    assert a.states is not None
    assert "estimated as those of Mamba-2" in a.estimated


@pytest.mark.parametrize(
    ("changes", "experts", "dense"),
    [
        ({}, 32, 0),
        ({"first_k_dense_replace": 3}, 29, 3),
        ({"interleave_moe_layer_step": 2}, 16, 16),
        ({"moe_layer_freq": [0, 1] * 16}, 16, 16),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 31}, 31, 1),
        ({"mlp_only_layers": [0, 1]}, 30, 2),
    ],
)
def test_layers_without_experts_have_one_mlp(changes: dict[str, Any], experts: int, dense: int) -> None:
    config = {**LLAMA, "num_experts": 8, "moe_intermediate_size": 100, **changes}
    without = read_architecture({**LLAMA, "intermediate_size": 1}).parameters - 32 * 3 * 4096
    found = read_architecture(config)
    assert found.parameters == without + 3 * 4096 * (experts * 8 * 100 + dense * 14336)


def test_experts_may_compute_in_a_smaller_space() -> None:
    whole = {**LLAMA, "num_experts": 8, "moe_intermediate_size": 100}
    smaller = read_architecture({**whole, "moe_latent_size": 1024}).parameters
    change = 32 * (8 * 3 * 100 * (1024 - 4096) + 2 * 4096 * 1024)
    assert smaller - read_architecture(whole).parameters == change


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, 0),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                    "layers.0.mlp.experts": {"quant_algo": "NVFP4"},
                },
            },
            4.5,
        ),
    ],
)
def test_weights_of_mixed_precision_are_mostly_those_of_experts(quantisation: dict[str, Any], bits: float) -> None:
    assert read_architecture({**LLAMA, "quantization_config": quantisation}).weight_bits == bits
