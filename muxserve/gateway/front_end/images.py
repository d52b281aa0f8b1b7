"""Keeps what a model's processor has made of images for as long as a request needs it.

A prompt may be computed several times: when pages are short, and when an engine dies. So its images stay until the
request has ended, in files that prefill engines read (`muxserve.vllm.image_files`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import weakref
from collections.abc import Sequence
from http import HTTPStatus
from itertools import count
from pathlib import Path

from vllm.exceptions import GracefulHTTPError
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem

from muxserve.vllm import image_files

log = logging.getLogger(__name__)

# What the images of all requests of one gateway may take.
MOST_BYTES = 1 << 30


class ImageFile:
    """One image's file of so many `bytes`, which is removed when nobody refers to it any more."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.bytes = size
        self.written: asyncio.Future[None] | None = None


class RequestImages:
    """The files of one gateway: each image once, however many requests bring it.

    Args:
        directory: where they are.
        index: which gateway of the fleet this is. What one before it has left is removed.
        most_bytes: how much they may take together.
    """

    def __init__(self, directory: Path, index: int, most_bytes: int = MOST_BYTES) -> None:
        self._directory = directory / f"gateway-{index}"
        self._most_bytes = most_bytes
        self._files: weakref.WeakValueDictionary[tuple[str, str], ImageFile] = weakref.WeakValueDictionary()
        self._numbers = count()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def bytes(self) -> int:
        """What the files take at the moment."""
        return sum(file.bytes for file in self._files.values())

    async def keep(
        self, model: str, features: Sequence[MultiModalFeatureSpec]
    ) -> tuple[list[MultiModalFeatureSpec], list[ImageFile]]:
        """`features` as engines are to have them, and their files; the caller refers to these until the request ends.

        Raises:
            GracefulHTTPError: there is no room for them.
        """
        files = [self._file(model, feature) for feature in features]
        try:
            # Whoever waits may give up; others wait for the same file.
            await asyncio.gather(*(asyncio.shield(file.written) for file in files if file.written is not None))
        except OSError as error:
            log.warning("images cannot be kept in %s: %s", self._directory, error)
            raise self._full() from None
        return image_files.without_pixels(features, [file.path for file in files]), files

    def _file(self, model: str, feature: MultiModalFeatureSpec) -> ImageFile:
        # What a processor makes of an image depends on the model; the hash is of the image.
        key = model, feature.identifier
        file = self._files.get(key)
        failed = file is not None and file.written is not None and file.written.done() and file.written.exception()
        if file is None or failed:
            assert feature.data is not None, "a front end keeps what it has made of images"
            size = image_files.size(feature.data)
            if self.bytes + size > self._most_bytes:
                raise self._full()
            self._files[key] = file = ImageFile(self._directory / str(next(self._numbers)), size)
            weakref.finalize(file, _remove, file.path)
            file.written = asyncio.ensure_future(self._write(file, feature.data))
        return file

    async def _write(self, file: ImageFile, item: MultiModalKwargsItem) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(image_files.write, file.path, item)

    def _full(self) -> GracefulHTTPError:
        return GracefulHTTPError(
            "this server has no room for the images of more requests at the moment; try again in a moment",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
