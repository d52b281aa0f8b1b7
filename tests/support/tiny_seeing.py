"""Random checkpoints that see images, which vLLM serves with a cache of its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.tiny_checkpoint import CACHE, SPECIAL_TOKENS, VERSION, _write_tokenizer

IMAGE_TOKEN = "<image>"
# Qwen's processor knows its tokens by these names.
_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
# What stands for an image in a prompt, by kind; with nothing there is one image, before the prompt.
PLACES = {"aria": IMAGE_TOKEN, "blip2": "", "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
_IMAGE_TOKEN_ID = len(SPECIAL_TOKENS) + 256
_TOKENS = {
    "bos_token_id": SPECIAL_TOKENS.index("<s>"),
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
    "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
}
# Wide enough that greedy choices have clear margins.
_WIDE = {"initializer_range": 0.08}
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **_WIDE}
_PLAIN = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def tiny_seeing(kind: str, max_len: int = 2048) -> Path:
    """A directory in Hugging Face format with a checkpoint of that kind; made once, and kept under `build/`. Its
    tokenizer is that of `tiny_checkpoint`, with a token for images."""
    path = CACHE / f"seeing-{kind}-{max_len}-v{VERSION}"
    if path.is_dir():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=CACHE, prefix=f".{path.name}-"))
    try:
        token = "" if kind == "qwen2_5_vl" else IMAGE_TOKEN
        _write_tokenizer(scratch, "llama", max_len, token, in_chats=bool(PLACES[kind]))
        _KINDS[kind](scratch, max_len)
        (scratch / "generation_config.json").write_text(json.dumps({"eos_token_id": [_TOKENS["eos_token_id"]]}) + "\n")
        os.rename(scratch, path)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not path.is_dir():  # another process may have been first
            raise
    return path


def _write(path: Path, name: str, fields: dict[str, Any], images: dict[str, Any], processor: dict[str, Any]) -> None:
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**fields)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(torch.float32).eval()
    model.save_pretrained(path)
    images = {"image_processor_type": f"{name.removesuffix('2')}ImageProcessor", **_PLAIN, **images}
    (path / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
    processor = {"processor_class": f"{name}Processor", **processor}
    (path / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def _write_blip2(path: Path, max_len: int) -> None:
    """OPT behind 16 queries into a vision tower."""
    text = {
        "model_type": "opt",
        "vocab_size": _IMAGE_TOKEN_ID + 1,
        "hidden_size": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": max_len,
        "word_embed_proj_dim": 128,
        "init_std": 0.08,
        **_TOKENS,
    }
    fields = {
        "vision_config": {**_SMALL, "image_size": 56, "patch_size": 14},
        "qformer_config": {**_SMALL, "vocab_size": _IMAGE_TOKEN_ID + 1, "encoder_hidden_size": 32},
        "text_config": text,
        "num_query_tokens": 16,
        "image_token_index": _IMAGE_TOKEN_ID,
    }
    _write(path, "Blip2", fields, {"size": {"height": 56, "width": 56}}, {"num_query_tokens": 16})


def _write_aria(path: Path, max_len: int) -> None:
    """A mixture of experts, for which an image is 16 tokens."""
    text = {
        "model_type": "aria_text",
        "vocab_size": _IMAGE_TOKEN_ID + 1,
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": max_len,
        "moe_num_experts": 4,
        "moe_topk": 2,
        "moe_num_shared_experts": 1,
        **_WIDE,
        **_TOKENS,
    }
    fields = {
        "vision_config": {**_SMALL, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 70},
        "text_config": text,
        "image_token_index": _IMAGE_TOKEN_ID,
        "projector_patch_to_query_dict": {49: 16, 196: 32},
    }
    images = {"max_image_size": 490, "min_image_size": 336, "split_image": False}
    _write(path, "Aria", fields, images, {"size_conversion": {"490": 16, "980": 32}})


def _write_qwen(path: Path, max_len: int) -> None:
    """Qwen2.5-VL: positions of three parts, and images of any size. vLLM needs torchvision for it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</s>", "<|im_start|>", *_QWEN_TOKENS]})
    tokenizer.chat_template = tokenizer.chat_template.replace(IMAGE_TOKEN, PLACES["qwen2_5_vl"])
    tokenizer.save_pretrained(path)
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, _QWEN_TOKENS)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_len,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [8, 12, 12]},
        **_WIDE,
        **_TOKENS,
    }
    fields = {
        "text_config": text,
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 256,
            "fullatt_block_indexes": [1], **_WIDE,
        },
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": False,
    }  # fmt: skip
    images = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56, "max_pixels": 112 * 112}
    _write(path, "Qwen2_5_VL", fields, images, {})
    (path / "video_preprocessor_config.json").write_text('{"video_processor_type": "Qwen2VLVideoProcessor"}\n')


_KINDS: dict[str, Callable[[Path, int], None]] = {"blip2": _write_blip2, "aria": _write_aria, "qwen2_5_vl": _write_qwen}
