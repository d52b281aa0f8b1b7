"""How many tokens a text has: counted by a tokenizer, or estimated from its words."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from muxserve.workload.errors import WorkloadError

TokenCounter = Callable[[str], int]
# Scripts that write words without spaces between them: kana, Chinese characters, hangul, Thai.
_DENSE = re.compile("[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_PER_WORD = 4 / 3


def estimated_tokens(text: str) -> int:
    """4/3 tokens for each word, the rule of thumb for English, and one for each character of scripts without spaces."""
    dense = len(_DENSE.findall(text))
    words = len((_DENSE.sub(" ", text) if dense else text).split())
    return math.ceil(words * _PER_WORD) + dense


def tokenizer_counter(path: str | os.PathLike[str]) -> TokenCounter:
    """Counts with a `tokenizer.json`, given itself or by the checkpoint directory that has it, without special tokens.

    Raises:
        WorkloadError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise WorkloadError(f"no tokenizer at {file}; give a tokenizer.json or a directory that has one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise WorkloadError(f"{file} is not a tokenizer: {error}") from None

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count
