"""The number by which engines know a LoRA adapter: of its name and of what its files are."""

from __future__ import annotations

import hashlib

from muxserve.vllm.file_identity import identity

FILES = "adapter_*"


def adapter_number(name: str, path: str) -> int:
    """The number of the adapter `name` whose files are in the directory `path`, as they are now; above 0.

    Raises:
        OSError: the files cannot be looked at, or there is none.
    """
    digest = hashlib.sha256(f"{name}\n{path}\n".encode() + identity(path, FILES)).digest()
    return 1 + int.from_bytes(digest[:6], "big")
