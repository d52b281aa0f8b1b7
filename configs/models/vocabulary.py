"""The tokenizer of a quickstart model: byte-level BPE trained on its corpus, digits one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from corpora.documents import END, SPECIAL_TOKENS, Document
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# Words take the space before them, digits and line ends stand alone: "47 + 38" is 4 7 _+ _ 3 8.
_PIECES = Regex(r"\p{N}|[ ]?\p{L}+|[ ]?[^\s\p{L}\p{N}]+|\n|\s")
MAX_POSITIONS = 2048


def train_tokenizer(documents: Iterable[Document], size: int) -> Tokenizer:
    """BPE over the bytes of the corpus; every text round-trips because all 256 bytes are in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for document in documents for text, _ in document.segments)
    specials = sorted(SPECIAL_TOKENS, key=len, reverse=True)

    def without_specials() -> Iterable[str]:
        for text in texts:
            for special in specials:
                text = text.replace(special, "\n")
            yield text

    tokenizer.train_from_iterator(without_specials(), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, the chat template within the latter."""
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8").strip()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "eos_token": END,
        "pad_token": SPECIAL_TOKENS[0],
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
