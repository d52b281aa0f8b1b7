"""Random checkpoints of any shape, small enough to be made on the fly, with a tokenizer that takes any text."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

# Two with full attention in every layer, and four with sliding windows; a causal classifier with three labels, an
# encoder, and one with one label, as rerankers are.
Kind = Literal["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3-classifier", "bert", "bert-reranker"]
# Of those with sliding windows, in tokens: more than a block, and no multiple of one.
WINDOW = 100

CACHE = Path(__file__).resolve().parents[2] / "build" / "tiny-checkpoints"
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VERSION = 5


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
        _write_model(scratch, kind, layers, heads, kv_heads, head_dim, seed, max_len)
        os.rename(scratch, path)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not path.is_dir():  # another process may have been first
            raise
    return path


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


def _write_tokenizer(path: Path, kind: Kind, max_len: int) -> None:
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
    )
    fast.chat_template = CHAT_TEMPLATE
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
        "qwen3-classifier": ("Qwen3", "ForSequenceClassification"),
        "bert": ("Bert", "Model"),
        "bert-reranker": ("Bert", "ForSequenceClassification"),
    }[kind]
    config_class = getattr(transformers, {"gemma3": "Gemma3Text"}.get(kind, name) + "Config")
    model_class = getattr(transformers, name + architecture)
    labels = {"qwen3-classifier": 3, "bert-reranker": 1}.get(kind)
    more: dict[str, Any] = {} if labels is None else {"num_labels": labels}
    if not kind.startswith("bert"):
        more |= {"num_key_value_heads": kv_heads, "head_dim": head_dim}
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
        tie_word_embeddings=kind != "gpt_oss",
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
    if kind in ("gemma2", "gemma3"):
        # Gemma makes its embeddings larger by the root of their size: it would only repeat the last token.
        model.get_input_embeddings().weight.data.mul_(0.05)
    model.save_pretrained(path)
    if architecture != "ForCausalLM":
        return
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos], "bos_token_id": 1}) + "\n")


def _attention_fields(kind: Kind, layers: int, head_dim: int, max_len: int) -> dict[str, Any]:
    """What is special about the attention of that architecture, as fields of its configuration."""
    if kind == "mistral":
        return {"sliding_window": WINDOW}
    if kind == "gemma2":
        return {"sliding_window": WINDOW, "query_pre_attn_scalar": head_dim, "attn_logit_softcapping": 5.0}
    if kind == "gemma3":
        types = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(layers)]
        return {"sliding_window": WINDOW, "query_pre_attn_scalar": head_dim, "layer_types": types}
    if kind == "gpt_oss":
        rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
        rope |= {"original_max_position_embeddings": max_len // 4, "beta_fast": 32.0, "beta_slow": 1.0}
        return {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": rope,
        }
    return {}
