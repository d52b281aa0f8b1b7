"""Downloads from the Hugging Face hub: whether the disk has room for one, and how far it is."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from muxserve.config.checkpoint_files import CheckpointError
from placement.format import format_size

log = logging.getLogger(__name__)

# Called with the repository, the bytes that are there, and how many there are to be.
OnBytes = Callable[[str, int, int], None]
LOOK_SECONDS = 0.25
# Seconds between lines, where they stay.
LINE_SECONDS = 10.0
# Other programs need a disk, too.
SPARE_BYTES = 256 << 20


def in_lines(tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> OnBytes:
    """Downloads as lines: one every `LINE_SECONDS`, and one at the end of each."""
    told: dict[str, float] = {}

    def on_bytes(repo: str, done: int, size: int) -> None:
        now = clock()
        if done == size or now - told.setdefault(repo, now) >= LINE_SECONDS:
            told[repo] = now
            tell(f"{repo}: {format_size(done)} of {format_size(size)}")

    return on_bytes


def missing_bytes(repo: str, revision: str | None, left_out: list[str]) -> int:
    """Bytes of a repository that are not in the cache, without files that are `left_out`; 0 if the hub does not say:
    the download itself says why, or does with what is in the cache."""
    from huggingface_hub import snapshot_download

    try:
        listed = snapshot_download(repo, revision=revision, ignore_patterns=left_out, dry_run=True)
    except Exception as error:  # of whichever library it uses
        log.debug("what %s takes is not known: %s", repo, error)
        return 0
    return sum(file.file_size or 0 for file in listed if file.will_download)


def check_room(repo: str, size: int) -> None:
    """Whether the disk with the hub's cache takes `size` bytes more.

    Raises:
        CheckpointError: it does not.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    there = next(place for place in (cache, *cache.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if size and size + SPARE_BYTES > free:
        raise CheckpointError(
            f"{repo} takes {format_size(size)}, and {cache} has room for {format_size(max(0, free - SPARE_BYTES))}; "
            "make room there, or set HF_HOME to a directory on another disk"
        )


@contextlib.contextmanager
def following(repo: str, size: int, on_bytes: OnBytes | None) -> Iterator[None]:
    """While a repository of which `size` bytes are missing is downloaded, tell how many have come. The files are looked
    at, since the library's own bars are for a terminal alone."""
    if on_bytes is None or not size:
        yield
        return
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    before, ended = _bytes_in(blobs), threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            on_bytes(repo, min(size, _bytes_in(blobs) - before), size)

    looking = threading.Thread(target=look, name="download", daemon=True)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
    on_bytes(repo, size, size)


def _bytes_in(directory: Path) -> int:
    """What the files there take, those under way included."""
    total = 0
    with contextlib.suppress(OSError):
        for file in directory.iterdir():
            with contextlib.suppress(OSError):  # it was renamed meanwhile
                # Blocks and not the length: files are made whole and filled in by parts.
                total += min(file.stat().st_blocks * 512, file.stat().st_size)
    return total
