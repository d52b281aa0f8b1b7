"""Keys of a prompt's beginnings, by which the global scheduler knows prompts that begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np

from muxserve.replicas.prefixes import KEY_BYTES, KEY_TOKENS, MOST_KEYS


def prefix_keys(prompt: Sequence[int], salt: str = "", images: Iterable[tuple[int, str]] = ()) -> bytes:
    """One of `KEY_BYTES` for each whole `KEY_TOKENS` tokens of the prompt, and all before them; at most `MOST_KEYS`.

    Args:
        salt: what else the KV of a prompt depends on.
        images: the first token of each image in the prompt, by number, and the image's hash.
    """
    tokens = np.array(prompt[: KEY_TOKENS * MOST_KEYS], dtype=np.uint32)
    for first, name in images:
        if first < len(tokens):
            tokens[first] = crc32(name.encode())
    key, found = blake2b(salt.encode(), digest_size=KEY_BYTES).digest(), []
    for begin in range(0, len(tokens) - KEY_TOKENS + 1, KEY_TOKENS):
        key = blake2b(tokens[begin : begin + KEY_TOKENS].tobytes(), key=key, digest_size=KEY_BYTES).digest()
        found.append(key)
    return b"".join(found)
