"""What files are, as far as their metadata tells: part of the hashes of every block whose KV depends on them.

Files that are overwritten in place keep their path. Blocks that were computed with the earlier content must not be
found by requests that are computed with the later one.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

# vLLM begins all block hashes of an engine with this variable. Python wants a number of 32 bits there.
SEED = "PYTHONHASHSEED"
ADAPTER_FILES = "adapter_*"


def identity(path: str, pattern: str = "*") -> bytes:
    """A digest of name, size, inode and time of change of the files in the directory `path`, or of the file `path`.
    It is the same in every process of a machine.

    Raises:
        OSError: one cannot be looked at, or there is none.
    """
    place = Path(path)
    files = sorted(each for each in place.glob(pattern) if each.is_file()) if place.is_dir() else [place]
    if not files:
        raise FileNotFoundError(f"{path} has no {pattern}")
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}\n".encode())
    return digest.digest()


def adapter_number(name: str, path: str) -> int:
    """The number by which engines know the LoRA adapter `name`, whose files are in the directory `path`, as they are
    now; above 0.

    Raises:
        OSError: the files cannot be looked at, or there is none.
    """
    digest = hashlib.sha256(f"{name}\n{path}\n".encode() + identity(path, ADAPTER_FILES)).digest()
    return 1 + int.from_bytes(digest[:6], "big")


def salt_block_hashes(path: str) -> None:
    """Have the engines of this process, and of those that it forks, hash blocks by what the checkpoint at `path` is
    now. To be called before its weights are read: what is overwritten meanwhile counts as the earlier files, which
    nobody will have again.

    Raises:
        OSError: as of `identity`.
    """
    seed = os.environ.get(SEED, "")
    digest = hashlib.sha256(seed.encode() + identity(path)).digest()
    os.environ[SEED] = str(int.from_bytes(digest[:4], "big"))
