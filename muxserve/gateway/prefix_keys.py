"""Keys of a prompt's beginnings, by which the global scheduler knows prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from muxserve.replicas.prefixes import KEY_BYTES, KEY_TOKENS, MOST_KEYS


def prefix_keys(prompt: Sequence[int], salt: str = "") -> bytes:
    """One of `KEY_BYTES` for each whole `KEY_TOKENS` tokens of the prompt, and all before them; at most `MOST_KEYS`.

    Args:
        salt: what else the KV of a prompt depends on.
    """
    tokens = np.asarray(prompt[: KEY_TOKENS * MOST_KEYS], dtype=np.uint32)
    key, found = blake2b(salt.encode(), digest_size=KEY_BYTES).digest(), []
    for begin in range(0, len(tokens) - KEY_TOKENS + 1, KEY_TOKENS):
        key = blake2b(tokens[begin : begin + KEY_TOKENS].tobytes(), key=key, digest_size=KEY_BYTES).digest()
        found.append(key)
    return b"".join(found)
