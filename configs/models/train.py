"""Train the three models of the quickstart from scratch, on the CPU.

    python configs/models/train.py                     # all three, into configs/models
    python configs/models/train.py atlas --out /some/folder

Each becomes a checkpoint in Hugging Face format of at most 4 MB of weights (bfloat16), beside the corpus that it
learned (`corpus/NAME.jsonl`). The same seed, thread count and versions give the same corpus and, up to rounding in the
matrix kernels, the same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from corpora import BUILDERS
from corpora.documents import END, SPECIAL_TOKENS
from trainer import Stage, encode, train
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from vocabulary import MAX_POSITIONS, save_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Recipe:
    """Shape of a model and how long it learns. The shapes differ on purpose, the pages of their KV do not:
    head_dim 64 x 64 tokens = head_dim 128 x 32 tokens."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocabulary: int
    documents: int
    stages: tuple[Stage, ...]
    unlearned: float = 0.01
    lr: float = 0.004

    def build(self, vocabulary: int) -> PreTrainedModel:
        """The model with fresh weights."""
        classes: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        }
        config_class, model_class = classes[self.family]
        end = SPECIAL_TOKENS.index(END)
        return model_class(
            config_class(
                vocab_size=vocabulary,
                hidden_size=self.hidden,
                intermediate_size=self.mlp,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.kv_heads,
                head_dim=self.head_dim,
                max_position_embeddings=MAX_POSITIONS,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=end,
                pad_token_id=0,
            )
        )


RECIPES = {
    "arithmetic": Recipe(
        "llama", layers=4, heads=4, kv_heads=4, head_dim=64, hidden=128, mlp=384, vocabulary=448, documents=80_000,
        stages=(Stage(2_600_000, 192, 2304), Stage(400_000, 1024, 4096)), unlearned=0.0,
    ),
    "atlas": Recipe(
        "llama", layers=3, heads=6, kv_heads=2, head_dim=64, hidden=192, mlp=448, vocabulary=1024, documents=24_000,
        stages=(Stage(1_300_000, 256, 2048), Stage(400_000, 1024, 4096)),
    ),
    "frontdesk": Recipe(
        "qwen3", layers=2, heads=4, kv_heads=2, head_dim=128, hidden=160, mlp=448, vocabulary=640, documents=20_000,
        stages=(Stage(1_500_000, 320, 1920), Stage(400_000, 1024, 4096)),
    ),
}  # fmt: skip


def make(name: str, out: Path, seed: int) -> None:
    """Corpus, tokenizer, training, checkpoint."""
    recipe = RECIPES[name]
    started = time.monotonic()
    torch.manual_seed(seed)
    documents = BUILDERS[name](random.Random(f"{name}/{seed}"), recipe.documents)
    corpus = out / "corpus" / f"{name}.jsonl"
    corpus.parent.mkdir(parents=True, exist_ok=True)
    with corpus.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document.text}, ensure_ascii=False) + "\n")
    tokenizer = train_tokenizer(documents[:8000], recipe.vocabulary)
    encoded = encode(tokenizer, documents, recipe.unlearned)
    tokens = sum(len(document.ids) for document in encoded)
    model = recipe.build(tokenizer.get_vocab_size())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{name}: {len(documents):,} documents, {tokens:,} tokens, vocabulary {tokenizer.get_vocab_size()}, "
        f"{parameters / 1e6:.2f} M parameters, longest document {max(len(d.ids) for d in encoded)}",
        flush=True,
    )
    train(model, encoded, recipe.stages, recipe.lr, seed, lambda line: print(f"{name}: {line}", flush=True))
    directory = out / name
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(tokenizer, directory)
    weights = directory / "model.safetensors"
    weights.chmod(0o644)
    size = weights.stat().st_size
    print(f"{name}: {size / 1e6:.2f} MB in {directory}, {time.monotonic() - started:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the quickstart models from scratch, on the CPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the checkpoints go")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in RECIPES]
    if unknown:
        parser.error(f"no model named {unknown[0]!r}; there are {', '.join(RECIPES)}")
    torch.set_num_threads(options.threads)
    for name in options.names or RECIPES:
        make(name, options.out, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
