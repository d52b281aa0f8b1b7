"""config.json files as they are found on the hub, cut to the fields that matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muxserve.costs import EngineShape
from muxserve.costs.architecture import ModelArchitecture, UnsupportedModelError, read_architecture
from muxserve.costs.profile import ProfiledModel
from muxserve.costs.roofline import Roofline
from muxserve.costs.work import layer_work

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
# DeepSeek-V3 as it was published.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 24,
    "torch_dtype": "bfloat16",
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "n_ctx": 1024,
    "vocab_size": 50257,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (32, 32, 8, 128, 131072, "bfloat16")),
        (QWEN3, (28, 16, 8, 128, 40960, "bfloat16")),
        (QWEN2, (24, 14, 2, 64, 32768, "bfloat16")),
        (MISTRAL, (32, 32, 8, 128, 32768, "bfloat16")),
        (GPT2, (12, 12, 12, 64, 1024, "float32")),
        ({**GPT2, "architectures": ["NobodyKnowsForCausalLM"], "model_type": "new"}, (12, 12, 12, 64, 1024, "float32")),
        ({**QWEN2, "layer_types": ["full_attention"] * 24}, (24, 14, 2, 64, 32768, "bfloat16")),
        ({**QWEN2, "use_sliding_window": True}, (24, 14, 2, 64, 32768, "bfloat16")),
        ({**LLAMA, "torch_dtype": "torch.float16"}, (32, 32, 8, 128, 131072, "float16")),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}}, (32, 32, 8, 128, 524288, "bfloat16")),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, (32, 32, 8, 128, 131072, "bfloat16")),
        ({**GPT2, "multi_query": True}, (12, 12, 1, 64, 1024, "float32")),
        ({**LLAMA, "model_type": "minimax_m2", "attn_type_list": [1] * 32}, (32, 32, 8, 128, 131072, "bfloat16")),
    ],
)
def test_shapes(config: dict[str, Any], expected: tuple[object, ...]) -> None:
    a = read_architecture(config)
    assert (a.layers, a.heads, a.kv_heads, a.head_dim, a.max_len, a.dtype) == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**LLAMA, "architectures": ["BertForMaskedLM"], "model_type": "bert"}, "nor pool what it computes"),
        ({**LLAMA, "architectures": ["DebertaModel"], "model_type": "deberta"}, "nor pool what it computes"),
        ({**LLAMA, "quantization_config": {"quant_method": "gguf"}}, "GGUF, which this vLLM cannot load"),
        ({**LLAMA, "num_key_value_heads": 7}, "cannot share 7 KV heads evenly"),
        ({**LLAMA, "num_attention_heads": 30, "num_key_value_heads": 30}, "no multiple of 30 heads"),
        ({**LLAMA, "num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"architectures": ["XForCausalLM"]}, "lacks num_hidden_layers, num_attention_heads, hidden_size"),
        ({}, "lacks num_hidden_layers"),
        ({**LLAMA, "num_hidden_layers": 0}, "has num_hidden_layers: 0; it must be a whole number from 1 to 4,096"),
        ({**LLAMA, "hidden_size": 10**9}, "has hidden_size: 1000000000; it must be a whole number from 1 to 1,048,576"),
        ({**LLAMA, "num_key_value_heads": 0}, "has num_key_value_heads: 0; it must be a whole number from 1 to"),
        ({**LLAMA, "num_key_value_heads": -2}, "has num_key_value_heads: -2; it must be a whole number from 1 to"),
        ({**LLAMA, "vocab_size": -1}, "has vocab_size: -1; it must be a whole number from 1 to"),
        ({**LLAMA, "max_position_embeddings": 0}, "has max_position_embeddings: 0; it must be a whole number"),
        ({**LLAMA, "max_position_embeddings": 10**400}, r"has max_position_embeddings: about 2\^1329; it must be"),
        ({**LLAMA, "sliding_window": 10**12}, "has sliding_window: 1000000000000, which no model has"),
        ({**LLAMA, "quantization_config": {"quant_method": "x", "bits": 10**400}}, r"has bits: about 2\^1329, which"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": float("inf")}}, "scales positions by factor: inf; it"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": float("nan")}}, "scales positions by factor: nan; it"),
        ({**LLAMA, "num_hidden_layers": -1}, "has num_hidden_layers: -1; it must be a whole number from 1 to 4,096"),
        ({**LLAMA, "num_hidden_layers": "32"}, "has num_hidden_layers: 32; it must be a whole number"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason.replace("(", r"\(")):
        read_architecture(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL, (0, 0)),
        ({**MISTRAL, "sliding_window": 4096}, (4096, 32)),
        ({**MISTRAL, "sliding_window": 32768}, (0, 0)),
        (QWEN2, (0, 0)),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 4096}, (0, 0)),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}, (4096, 4)),
        ({**QWEN2, "sliding_window": 99, "layer_types": ["full_attention", "sliding_attention"] * 12}, (0, 0)),
        ({**MISTRAL, "sliding_window": 99, "layer_types": ["full_attention", "sliding_attention"] * 16}, (99, 16)),
        # Configurations from before there was `layer_types`.
        ({**MISTRAL, "model_type": "gemma2", "sliding_window": 4096}, (4096, 16)),
        ({**MISTRAL, "model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512}, (512, 22)),
        ({**MISTRAL, "model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2}, (512, 16)),
        ({**MISTRAL, "model_type": "gpt_oss", "num_hidden_layers": 24, "sliding_window": 128}, (128, 12)),
    ],
)
def test_windows(config: dict[str, Any], expected: tuple[int, int]) -> None:
    a = read_architecture(config)
    assert (a.window, a.windowed_layers) == expected
    assert len(a.windowed) == a.windowed_layers


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        ({**MISTRAL, "sliding_window": 99, "layer_types": ["full_attention", "sliding_attention"] * 2}, (1, 3)),
        ({**MISTRAL, "model_type": "gemma2", "sliding_window": 99}, (0, 2)),
        ({**MISTRAL, "model_type": "gemma3_text", "sliding_window": 99, "sliding_window_pattern": 3}, (0, 1, 3)),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 99, "max_window_layers": 3}, (3,)),
    ],
)
def test_which_layers_have_a_window(config: dict[str, Any], windowed: tuple[int, ...]) -> None:
    assert read_architecture({**config, "num_hidden_layers": 4}).windowed == windowed


def test_sizes() -> None:
    llama = read_architecture(LLAMA)
    assert llama.pages_per_block == 256
    assert llama.kv_bytes_per_token("bfloat16") == 2 * 32 * 8 * 128 * 2
    assert llama.parameters == pytest.approx(8.03e9, rel=0.01)  # Llama 3.1 8B
    assert llama.weight_bytes("bfloat16") == 2 * llama.parameters
    assert read_architecture(QWEN3).parameters == pytest.approx(0.6e9, rel=0.05)  # tied embeddings


W4A16 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}, "input_activations": None}},
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}},
}


@pytest.mark.parametrize(
    ("quantisation", "words", "bits"),
    [
        (W4A16, "compressed-tensors W4A16", 4.125),
        (W8A8, "compressed-tensors W8A8", 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 4.125),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", 8),
        ({"quant_method": "fp8"}, "fp8", 8),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "modelopt NVFP4", 4.5),
        ({"quant_method": "something"}, "something", 0),
        (None, "", 0),
    ],
)
def test_quantised_weights_are_planned_in_their_own_size(
    quantisation: dict[str, Any] | None, words: str, bits: float
) -> None:
    plain = read_architecture(LLAMA)
    found = read_architecture({**LLAMA, "quantization_config": quantisation})
    assert (found.quantisation, found.weight_bits) == (words, bits)
    embeddings = 2 * plain.vocab * plain.hidden
    linear = plain.parameters - embeddings
    expected = linear * (bits or 16) // 8 + embeddings * 2
    assert found.weight_bytes("bfloat16") == pytest.approx(expected, abs=1)
    # Served in float32, only what is not quantised grows.
    assert found.weight_bytes("float32") == pytest.approx(linear * (bits or 32) // 8 + embeddings * 4, abs=1)
    work, before = layer_work(found, 1, "bfloat16"), layer_work(plain, 1, "bfloat16")
    assert work.dense_bytes == pytest.approx(before.dense_bytes * (bits or 16) / 16)
    assert work.head_bytes == before.head_bytes
    assert (ProfiledModel.of(found) == ProfiledModel.of(plain)) == (not words)


def test_mixture_of_experts_counts_all_experts() -> None:
    mixtral = read_architecture({**MISTRAL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8})
    assert isinstance(mixtral, ModelArchitecture)
    assert mixtral.parameters == pytest.approx(46.7e9, rel=0.02)


def test_longrope_is_meant_for_its_original_length() -> None:
    phi = read_architecture(
        {
            **LLAMA,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
        }
    )
    assert (phi.max_len, phi.default_max_len) == (131072, 4096)


@pytest.mark.parametrize(
    ("keys", "active", "shared"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 2, 0),
        ({"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632}, 4, 5632),
        (
            {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408},
            6,
            2816,
        ),
        ({}, 1, 0),
    ],
)
def test_experts_that_a_token_takes(keys: dict[str, Any], active: int, shared: int) -> None:
    found = read_architecture({**MISTRAL, **keys})
    assert (found.active_experts, found.shared_intermediate) == (active, shared)


def test_room_for_adapters_counts_as_weights() -> None:
    a = read_architecture(LLAMA)
    with_room = replace(a, adapter_slots=2, adapter_rank=16)
    # Per layer and rank: inputs and outputs of q, o, k, v, gate, up and down.
    per_rank = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    # Two engines, each with the slots and as many adapters beside them.
    assert with_room.adapter_bytes("bfloat16") == 2 * 2 * 2 * 16 * 32 * per_rank * 2
    assert with_room.weight_bytes("bfloat16") - a.weight_bytes("bfloat16") == with_room.adapter_bytes("bfloat16")
    assert a.adapter_bytes("bfloat16") == 0


@pytest.mark.parametrize(
    ("config", "asked", "pooling", "pages"),
    [
        (LLAMA, False, False, 32 * 8),
        (LLAMA, True, True, 32 * 8),
        ({**LLAMA, "architectures": ["LlamaModel"]}, False, True, 32 * 8),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, False, True, 32 * 8),
        # What sees the whole prompt keeps no KV.
        ({**LLAMA, "architectures": ["LlamaBidirectionalModel"], "is_causal": False}, False, True, 0),
        ({**LLAMA, "architectures": ["BertModel"], "model_type": "bert"}, False, True, 0),
        ({**LLAMA, "architectures": ["BertForTokenClassification"], "model_type": "bert"}, False, True, 0),
        (GPT2, False, False, 12 * 12),
        ({**LLAMA, "architectures": ["ChatGLMModel"]}, False, False, 32 * 8),
    ],
)
def test_models_that_answer_with_vectors(config: dict[str, Any], asked: bool, pooling: bool, pages: int) -> None:
    found = read_architecture(config, asked)
    assert found.pooling is pooling
    assert found.pages_per_block == pages
    assert (found.kv_bytes_per_token("bfloat16") > 0) is (pages > 0)


class TestLatentAttention:
    def test_a_token_takes_one_vector_of_each_layer(self) -> None:
        a = read_architecture(DEEPSEEK)
        assert (a.kv_heads, a.pages_per_block) == (1, 61)
        assert not a.cpu_only
        assert not a.gpu_only
        assert a.kv_bytes_per_token("bfloat16") == 61 * (512 + 64) * 2

    def test_rotary_embeddings_that_cpus_compute_wrongly_are_for_gpus(self) -> None:
        a = read_architecture({**DEEPSEEK, "rope_scaling": None})
        assert "not scaled as YaRN's" in a.gpu_only
        assert not a.cpu_only

    def test_weights_are_those_of_its_projections(self) -> None:
        a = read_architecture(DEEPSEEK)
        shared = 7168 * (1536 + 576)
        heads = 128 * (1536 * 192 + 512 * 256 + 128 * 7168)
        assert a.attention_weights() == shared + heads
        assert a.attention_weights(tp=8) == shared + heads / 8
        plain = read_architecture({**DEEPSEEK, "q_lora_rank": None})
        assert plain.attention_weights() == 7168 * 576 + 128 * (7168 * 192 + 512 * 256 + 128 * 7168)

    def test_decoding_reads_the_latent_alone(self) -> None:
        a = read_architecture(DEEPSEEK)
        work = layer_work(a, 1, "bfloat16")
        assert work.kv_bytes_per_token == a.kv_bytes_per_token("bfloat16")
        assert layer_work(a, 8, "bfloat16").kv_bytes_per_token == work.kv_bytes_per_token
        # A query head is multiplied with latent and rotated part, and then with the latent again.
        assert work.flops_per_pair == 2 * 61 * 128 * (576 + 512)


GRANITE_4_H = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}

# Nemotron-H-8B, whose config.json has the pattern of its layers as a text.
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}

STATEFUL = {"granite": GRANITE_4_H, "qwen3_next": QWEN3_NEXT, "nemotron_h": NEMOTRON_H}


class TestStates:
    def test_a_sequence_takes_a_state_of_some_layers_and_kv_of_the_others(self) -> None:
        a = read_architecture(GRANITE_4_H)
        assert (a.attention_layers, a.pages_per_block, a.cpu_only) == (4, 16, "")
        assert a.kv_bytes_per_token("bfloat16") == 2 * 4 * 4 * 128 * 2
        # The last three inputs of the convolution, and a matrix of 64 x 128 for each head in float32.
        assert a.state_bytes("bfloat16") == 36 * (3 * (3072 + 2 * 128) * 2 + 48 * 64 * 128 * 4)
        assert a.parameters == pytest.approx(6.9e9, rel=0.02)
        assert read_architecture(LLAMA).state_bytes("bfloat16") == 0

    def test_every_fourth_layer_has_attention_unless_it_is_said(self) -> None:
        a = read_architecture(QWEN3_NEXT)
        assert (a.attention_layers, a.pages_per_block) == (12, 24)
        assert a.state_bytes("bfloat16") == 36 * (3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4)
        assert a.parameters == pytest.approx(80e9, rel=0.02)
        said = {**QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention"] * 24}
        assert read_architecture(said).attention_layers == 24

    def test_layers_that_are_an_mlp_alone_keep_nothing(self) -> None:
        a = read_architecture(NEMOTRON_H)
        assert (a.layers, a.attention_layers, a.mlp_layers, a.pages_per_block) == (52, 4, 24, 32)
        # A convolution over what goes into all heads and both matrices of each of the 8 groups.
        assert a.state_bytes("bfloat16") == 24 * (3 * (8192 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4)
        assert a.parameters == pytest.approx(8.1e9, rel=0.01)
        work = layer_work(a, 1, "bfloat16")
        assert work.dense_bytes + 2 * work.head_bytes == pytest.approx(2 * a.parameters)
        named = {"M": "mamba", "-": "mlp", "*": "attention"}
        listed = [named[letter] for letter in str(NEMOTRON_H["hybrid_override_pattern"])]
        for types in (listed, [{"mamba": "linear_attention", "attention": "full_attention"}.get(t, t) for t in listed]):
            plain = {key: value for key, value in NEMOTRON_H.items() if "pattern" not in key and "layers" not in key}
            assert read_architecture({**plain, "layers_block_type": types}) == a

    def test_states_are_kept_on_gpus_as_stock_vllm_keeps_them(self) -> None:
        def kept(**config: object) -> str:
            states = read_architecture(config).on_gpus().states
            assert states is not None
            return states.kept_as

        assert [kept(**config) for config in (GRANITE_4_H, QWEN3_NEXT, NEMOTRON_H)] == ["", "", "float32"]
        assert kept(**NEMOTRON_H, mamba_ssm_cache_dtype="float16") == "float16"
        assert kept(**{**QWEN3_NEXT, "model_type": "qwen3_5_text"}, mamba_ssm_dtype="float32") == "float32"
        a = read_architecture(GRANITE_4_H)
        assert a.on_gpus().state_bytes("bfloat16") < 0.6 * a.state_bytes("bfloat16")

    def test_ranks_have_whole_heads_and_whole_groups_or_a_copy_of_the_only_one(self) -> None:
        states = {name: read_architecture(config).states for name, config in STATEFUL.items()}
        ways = {
            name: [tp for tp in (1, 2, 3, 4, 8, 16, 32) if each.heads.split_over(tp)]
            for name, each in states.items()
            if each
        }
        # 48 heads in one group, 32 heads in 16 groups, and 128 heads in 8 groups.
        assert ways == {
            "granite": [1, 2, 3, 4, 8, 16],
            "qwen3_next": [1, 2, 4, 8, 16],
            "nemotron_h": [1, 2, 4, 8],
        }
        granite, nemotron_h = read_architecture(GRANITE_4_H), read_architecture(NEMOTRON_H)
        assert granite.state_bytes("bfloat16", 2) == 36 * (3 * (1536 + 2 * 128) * 2 + 24 * 64 * 128 * 4)
        assert nemotron_h.state_bytes("bfloat16", 4) == nemotron_h.state_bytes("bfloat16") / 4

    def test_experts_without_a_gate_are_for_gpus(self) -> None:
        """Nemotron 3 Nano has 31.6 billion weights."""
        experts = {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1}
        widths = {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}
        sizes = {"hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64}
        pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
        a = read_architecture({**NEMOTRON_H, **experts, **widths, **sizes, "hybrid_override_pattern": pattern})
        assert (a.gpu_only, a.mlp_layers, a.shared_intermediate) == ("experts without a gate", 23, 3712)
        assert a.parameters == pytest.approx(31.6e9, rel=0.02)
        assert not read_architecture(NEMOTRON_H).gpu_only

    def test_a_step_reads_and_writes_the_state_of_each_sequence(self) -> None:
        a = read_architecture(GRANITE_4_H)
        work = layer_work(a, 1, "bfloat16")
        assert work.state_bytes == 2 * a.state_bytes("bfloat16")
        assert work.kv_bytes_per_token == a.kv_bytes_per_token("bfloat16")
        costs = Roofline().engine(a, EngineShape("A100-80GB", 1, 1.0, "bfloat16"))
        one, two = (costs.decode(batch, 1000).seconds(1000) for batch in (64, 128))
        assert two - one > 64 * work.state_bytes / 2.1e12  # no A100 reads faster

    @pytest.mark.parametrize("types", [["mamba"] * 40, ["attention"] * 40, ["moe"] * 40])
    def test_layers_of_one_kind_only_are_refused(self, types: list[str]) -> None:
        with pytest.raises(UnsupportedModelError, match="layers with attention and layers with states"):
            read_architecture({**GRANITE_4_H, "layer_types": types})
