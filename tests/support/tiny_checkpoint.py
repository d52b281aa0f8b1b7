"""Random checkpoints of any shape, small enough to be made on the fly, with a tokenizer that takes any text."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from PIL.Image import Image

# With full attention in every layer; with sliding windows; of the latter with experts in MXFP4; with latent attention;
# with states in every other layer; multi-modal ones, of which the last is served with images; a causal classifier with
# three labels, an encoder, and one with one label, as rerankers are.
Kind = Literal[
    "llama", "qwen2", "qwen3", "qwen3_moe", "granite", "phi3", "nemotron",
    "glm4_moe",
    "mistral", "gemma2", "gemma3", "olmo3", "gpt_oss",
    "gpt_oss-mxfp4",
    "deepseek_v2", "deepseek_v3",
    "granite_hybrid", "nemotron_h", "nemotron_h-moe", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "gemma3-mm", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5-mm",
    "idefics3",
    "qwen3-classifier", "bert", "bert-reranker",
]  # fmt: skip
# Size of sliding windows in tokens: more than a block, and no multiple of one.
WINDOW = 100

# A multi-modal kind: the kind of its language model, and what computes its images.
LANGUAGE_MODEL_OF: dict[str, Kind] = {
    "gemma3-mm": "gemma3",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_5-mm": "qwen3_5",
}

# Kinds whose configuration has another name than their model.
TEXT_CONFIGS = {"gemma3": "Gemma3Text", "qwen3_5": "Qwen3_5Text", "qwen3_5_moe": "Qwen3_5MoeText"}
CACHE = Path(__file__).resolve().parents[2] / "build" / "tiny-checkpoints"
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
# How DeepSeek V3 chooses its experts.
NO_AUXILIARY_LOSS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VERSION = 6
# A model that sees images. Each piece of 56 x 56 pixels becomes 16 tokens; a larger image is divided into up to
# 2 x 2 pieces, beside the whole in small.
PIECE, PATCH, SCALE, LONGEST_EDGE = 56, 7, 2, 112
IMAGE_TOKENS = [
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]  # fmt: skip
IMAGE_CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{%- endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_checkpoint(
    kind: Kind = "llama",
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    seed: int = 0,
    max_len: int = 2048,
) -> Path:
    """A directory in Hugging Face format; made once per shape and kept under `build/`.

    The tokenizer has one token per byte, so a text of n bytes is n tokens. Token ids below 5 are special; byte b is
    token `byte_token(b)`.
    """
    name = f"{kind}-{layers}l-{heads}h-{kv_heads}kv-{head_dim}d-{max_len}-s{seed}-v{VERSION}"
    path = CACHE / name
    if path.is_dir():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=CACHE, prefix=f".{name}-"))
    try:
        _write_tokenizer(scratch, kind, max_len)
        if kind in LANGUAGE_MODEL_OF:
            of = tiny_checkpoint(LANGUAGE_MODEL_OF[kind], layers, heads, kv_heads, head_dim, seed, max_len)
            _write_multi_modal(scratch, kind, of)
        elif kind == "idefics3":
            _write_idefics3(scratch, layers, heads, kv_heads, head_dim, seed, max_len)
        else:
            _write_model(scratch, kind, layers, heads, kv_heads, head_dim, seed, max_len)
        os.rename(scratch, path)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not path.is_dir():  # another process may have been first
            raise
    return path


def picture(width: int, height: int) -> Image:
    """An image whose content follows from its size: as good as noise, and the same wherever it is made."""
    import numpy as np
    from PIL import Image

    values = np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def data_url(width: int, height: int) -> str:
    """That image as clients send it."""
    with io.BytesIO() as file:
        picture(width, height).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def byte_token(byte: int) -> int:
    """Token id of a byte."""
    return len(SPECIAL_TOKENS) + _alphabet().index(byte)


def token_byte(token: int) -> int:
    """The byte of a token id that is not special."""
    return _alphabet()[token - len(SPECIAL_TOKENS)]


@cache
def _alphabet() -> list[int]:
    """Bytes in the order of their token ids: byte-level BPE's letters in code point order."""
    return sorted(range(256), key=lambda byte: ord(_letter(byte)))


def _letter(byte: int) -> str:
    """The printable letter that byte-level BPE writes for a byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(1 for b in range(byte) if b not in printable))


def _write_tokenizer(path: Path, kind: Kind, max_len: int, image_token: str = "", in_chats: bool = False) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    for byte in _alphabet():
        vocabulary[_letter(byte)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.startswith("bert"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A </s> $B:1 </s>:1",
            special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("<s>", "</s>")],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["</s>", "<|im_start|>"],
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": {"image_token": image_token}} if image_token else {}),
    )
    if kind == "idefics3":
        fast.add_special_tokens({"additional_special_tokens": ["</s>", "<|im_start|>", *IMAGE_TOKENS]})
    fast.chat_template = IMAGE_CHAT_TEMPLATE if kind == "idefics3" or in_chats else CHAT_TEMPLATE
    fast.save_pretrained(path)


def _write_model(
    path: Path, kind: Kind, layers: int, heads: int, kv_heads: int, head_dim: int, seed: int, max_len: int
) -> None:
    import torch
    import transformers

    name, architecture = {
        "llama": ("Llama", "ForCausalLM"),
        "qwen3": ("Qwen3", "ForCausalLM"),
        "mistral": ("Mistral", "ForCausalLM"),
        "gemma2": ("Gemma2", "ForCausalLM"),
        "gemma3": ("Gemma3", "ForCausalLM"),
        "gpt_oss": ("GptOss", "ForCausalLM"),
        "gpt_oss-mxfp4": ("GptOss", "ForCausalLM"),
        "qwen2": ("Qwen2", "ForCausalLM"),
        "qwen3_moe": ("Qwen3Moe", "ForCausalLM"),
        "granite": ("Granite", "ForCausalLM"),
        "phi3": ("Phi3", "ForCausalLM"),
        "nemotron": ("Nemotron", "ForCausalLM"),
        "olmo3": ("Olmo3", "ForCausalLM"),
        "glm4_moe": ("Glm4Moe", "ForCausalLM"),
        "deepseek_v2": ("DeepseekV2", "ForCausalLM"),
        "deepseek_v3": ("DeepseekV3", "ForCausalLM"),
        "granite_hybrid": ("GraniteMoeHybrid", "ForCausalLM"),
        "nemotron_h": ("NemotronH", "ForCausalLM"),
        "nemotron_h-moe": ("NemotronH", "ForCausalLM"),
        "qwen3_next": ("Qwen3Next", "ForCausalLM"),
        "qwen3_5": ("Qwen3_5", "ForCausalLM"),
        "qwen3_5_moe": ("Qwen3_5Moe", "ForCausalLM"),
        "qwen3-classifier": ("Qwen3", "ForSequenceClassification"),
        "bert": ("Bert", "Model"),
        "bert-reranker": ("Bert", "ForSequenceClassification"),
    }[kind]
    config_class = getattr(transformers, TEXT_CONFIGS.get(kind, name) + "Config")
    model_class = getattr(transformers, name + architecture)
    labels = {"qwen3-classifier": 3, "bert-reranker": 1}.get(kind)
    more: dict[str, Any] = {} if labels is None else {"num_labels": labels}
    if not kind.startswith("bert"):
        more |= {"num_key_value_heads": heads if kind.startswith("deepseek") else kv_heads}
    if not kind.startswith(("bert", "deepseek")) and kind not in (
        "granite", "granite_hybrid", "olmo3", "phi3", "qwen2",
    ):  # fmt: skip
        more |= {"head_dim": head_dim}
    more |= _attention_fields(kind, layers, head_dim, max_len)
    hidden = heads * head_dim
    eos = SPECIAL_TOKENS.index("<|im_end|>")
    config = config_class(
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=max_len,
        tie_word_embeddings=not kind.startswith(("gpt_oss", "deepseek", "glm4", "qwen3_next", "qwen3_5", "nemotron_h")),
        bos_token_id=SPECIAL_TOKENS.index("<s>"),
        eos_token_id=eos,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        # Wide enough that greedy choices have clear margins.
        initializer_range=0.08,
        **more,
    )
    torch.manual_seed(seed)
    model = model_class(config).to(torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        # Each head's own, and as large as scores are: heads mixed up would give other tokens.
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 1.0, 2.0)
    for buffer_name, buffer in model.named_buffers():
        # Experts that are chosen without it are others.
        if buffer_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.5)
    if kind in ("gemma2", "gemma3"):
        # Gemma makes its embeddings larger by the root of their size: it would only repeat the last token.
        model.get_input_embeddings().weight.data.mul_(0.05)
    model.save_pretrained(path)
    if kind == "gpt_oss-mxfp4":
        _quantise_experts(path)
    if architecture != "ForCausalLM":
        return
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos], "bos_token_id": 1}) + "\n")


def _write_multi_modal(path: Path, kind: Kind, language_model: Path) -> None:
    """A checkpoint that sees images, whose language model is the one in the directory `language_model`."""
    import torch
    import transformers

    text = transformers.AutoModelForCausalLM.from_pretrained(language_model)
    fields = text.config.to_dict()
    width = text.config.hidden_size
    for name in ("architectures", "transformers_version", "_name_or_path", "model_type"):
        fields.pop(name, None)
    small = {"hidden_size": 32, "intermediate_size": 64}
    of_kind: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "gemma3-mm": (
            "Gemma3",
            {**small, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
            {"mm_tokens_per_image": 4, "image_token_index": 3, "boi_token_index": 1, "eoi_token_index": 2},
        ),
        "mistral3": (
            "Mistral3",
            {**small, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
            {"image_token_index": 3},
        ),
        "qwen2_5_vl": (
            "Qwen2_5_VL",
            {**small, "depth": 1, "num_heads": 2, "out_hidden_size": width, "fullatt_block_indexes": [0]},
            {"image_token_id": 3, "video_token_id": 2},
        ),
        "qwen3_vl": (
            "Qwen3VL",
            {**small, "depth": 1, "num_heads": 2, "out_hidden_size": width, "num_position_embeddings": 16}
            | {"deepstack_visual_indexes": [0]},
            {"image_token_id": 3, "video_token_id": 2},
        ),
        "qwen3_5-mm": (
            "Qwen3_5",
            {**small, "depth": 1, "num_heads": 2, "out_hidden_size": width, "num_position_embeddings": 16},
            {"image_token_id": 3, "video_token_id": 2},
        ),
    }
    name, vision, more = of_kind[kind]
    if kind.startswith("qwen"):
        rope = fields["rope_parameters"]
        rotated = int(width // text.config.num_attention_heads * rope.get("partial_rotary_factor", 1.0))
        sections = [rotated // 2 - 2 * (rotated // 6), rotated // 6, rotated // 6]
        fields["rope_parameters"] = {**rope, "mrope_section": sections}
        if kind.startswith("qwen3"):
            fields["rope_parameters"]["mrope_interleaved"] = True
    config_class = getattr(transformers, f"{name}Config")
    fields["model_type"] = config_class().text_config.model_type
    if kind == "gemma3-mm":
        vision["model_type"] = "siglip_vision_model"
    if kind == "mistral3":
        vision["model_type"] = "pixtral"
    tied = text.config.tie_word_embeddings
    config = config_class(text_config=fields, vision_config=vision, tie_word_embeddings=tied, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(torch.float32).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(path)
    shutil.copy(language_model / "generation_config.json", path)


def _write_idefics3(path: Path, layers: int, heads: int, kv_heads: int, head_dim: int, seed: int, max_len: int) -> None:
    """A Llama that sees images through a SigLIP tower, as SmolVLM does, with the settings of its image processor."""
    import torch
    import transformers

    hidden = heads * head_dim
    tokens = {
        "bos_token_id": SPECIAL_TOKENS.index("<s>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
    }
    text = transformers.LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + 256 + len(IMAGE_TOKENS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        initializer_range=0.08,
        **tokens,
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": PIECE,
        "patch_size": PATCH,
        "initializer_range": 0.08,
    }
    config = transformers.Idefics3Config(
        text_config=text.to_dict(),
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=len(SPECIAL_TOKENS) + 256 + IMAGE_TOKENS.index("<image>"),
        tie_word_embeddings=False,
        **tokens,
    )
    torch.manual_seed(seed)
    transformers.Idefics3ForConditionalGeneration(config).to(torch.float32).eval().save_pretrained(path)
    each = (PIECE // PATCH // SCALE) ** 2
    image_processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": LONGEST_EDGE},
        "max_image_size": {"longest_edge": PIECE},
        "do_image_splitting": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 1,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(image_processor, indent=2) + "\n")
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": each}
    (path / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    eos = {"eos_token_id": [tokens["eos_token_id"]], "bos_token_id": tokens["bos_token_id"]}
    (path / "generation_config.json").write_text(json.dumps(eos) + "\n")


def _quantise_experts(path: Path) -> None:
    """Round the experts' weights of a gpt-oss checkpoint to MXFP4, as its public ones have them: numbers of 4 bits, two
    in a byte, and an exponent for each 32 of a column."""
    import torch
    from safetensors.torch import load_file, save_file

    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        columns = tensors.pop(name).transpose(1, 2).float()  # [experts, out, in]
        groups = columns.unflatten(-1, (-1, 32))
        exponents = (groups.abs().amax(-1).clamp(min=1e-9).log2().floor() - 2).clamp(-127, 127)
        scaled = groups / torch.exp2(exponents)[..., None]
        digits = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
        low, high = digits[..., 0::2], digits[..., 1::2]
        tensors[f"{name}_blocks"] = (low | (high << 4)).to(torch.uint8).contiguous()
        tensors[f"{name}_scales"] = (exponents + 127).to(torch.uint8).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _attention_fields(kind: Kind, layers: int, head_dim: int, max_len: int) -> dict[str, Any]:
    """What is special about the attention of that architecture, as fields of its configuration."""
    if kind == "mistral":
        return {"sliding_window": WINDOW}
    if kind == "gemma2":
        return {"sliding_window": WINDOW, "query_pre_attn_scalar": head_dim, "attn_logit_softcapping": 5.0}
    if kind in ("gemma3", "olmo3"):
        types = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(layers)]
        scalar = {"query_pre_attn_scalar": head_dim} if kind == "gemma3" else {}
        return {"sliding_window": WINDOW, "layer_types": types, **scalar}
    if kind == "granite":
        return {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 1 / head_dim,
            "logits_scaling": 0.5,
        }
    if kind == "granite_hybrid":
        # Granite 4.0 H: Mamba-2, no positions, and no experts in the smallest.
        hidden = 4 * head_dim
        return {
            "layer_types": ["attention" if layer % 2 else "mamba" for layer in range(layers)],
            "position_embedding_type": "nope",
            "mamba_n_heads": 2 * hidden // head_dim,
            "mamba_d_head": head_dim,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 2 * hidden,
        }
    if kind.startswith("nemotron_h"):
        # Mamba-2 with several groups, no positions; a layer is one of three things.
        of_layer = ["linear_attention", "moe" if kind.endswith("moe") else "mlp", "full_attention"]
        return {
            "layers_block_type": [of_layer[layer % 3] for layer in range(layers)],
            "mamba_num_heads": 8,
            "mamba_head_dim": head_dim,
            "n_groups": 2,
            "ssm_state_size": 64,
            "chunk_size": 64,
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        }
    if kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": head_dim}
        experts |= {"shared_expert_intermediate_size": head_dim}
        return {
            "layer_types": ["full_attention" if layer % 2 else "linear_attention" for layer in range(layers)],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": head_dim,
            "linear_value_head_dim": head_dim,
            **({} if kind == "qwen3_5" else experts),
        }
    if kind == "phi3":  # Phi-4-mini: a rope for short and one for long sequences, and a window that no sequence leaves
        rotary = head_dim * 3 // 4
        factors = {
            "short_factor": [1 + i / rotary for i in range(rotary // 2)],
            "long_factor": [1 + i for i in range(rotary // 2)],
        }
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
        rope["original_max_position_embeddings"] = max_len // 2
        return {
            "rope_parameters": rope,
            "original_max_position_embeddings": max_len // 2,
            "partial_rotary_factor": 0.75,
            "sliding_window": max_len,
        }
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        return {**experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if kind == "glm4_moe":
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
        return {**experts, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}
    if kind.startswith("gpt_oss"):
        rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
        rope |= {"original_max_position_embeddings": max_len // 4, "beta_fast": 32.0, "beta_slow": 1.0}
        return {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": rope,
        }
    if kind.startswith("deepseek"):
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.707}
        rope |= {"original_max_position_embeddings": max_len // 4, "beta_fast": 32.0, "beta_slow": 1.0}
        # The kernel on CPUs has the latent of all published ones only. The first layer is dense, as in all of them.
        return {
            "q_lora_rank": None if kind == "deepseek_v2" else 2 * head_dim,
            "kv_lora_rank": 512,
            "rope_parameters": rope,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": head_dim,
            "v_head_dim": head_dim,
            "moe_intermediate_size": head_dim,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            **({"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" else NO_AUXILIARY_LOSS),
        }
    return {}
