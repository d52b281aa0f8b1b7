"""Images come with their requests, as data URLs. What a model's processor makes of one is kept for as long as a request
needs it.

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
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from muxserve.vllm import image_files

log = logging.getLogger(__name__)

# What the images of all requests of one gateway may take.
MOST_BYTES = 1 << 30
_FETCHES_NOTHING = "this server fetches nothing: an image must come with the request, as a data URL"


class DataUrls(MediaConnector):
    """Takes data URLs only. Stock vLLM's asks any host unless its options name some."""

    def load_from_url(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """See `MediaConnector.load_from_url`.

        Raises:
            VLLMValidationError: it is another URL, or no image that can be read.
        """
        _check(url)
        try:
            return super().load_from_url(url, *args, **kwargs)
        except Exception as error:
            raise _unreadable(error) from error

    async def load_from_url_async(self, url: str, *args: Any, **kwargs: Any) -> Any:
        """See `load_from_url`."""
        _check(url)
        try:
            return await super().load_from_url_async(url, *args, **kwargs)
        except Exception as error:
            raise _unreadable(error) from error


def _check(url: str) -> None:
    if not url.lower().startswith("data:"):
        raise VLLMValidationError(_FETCHES_NOTHING)


def _unreadable(error: Exception) -> VLLMValidationError:
    # Pillow's decoders fail in many ways on what is no image, or one that is too large to be decoded.
    return VLLMValidationError(f"an image cannot be read: {str(error).splitlines()[0] if str(error) else repr(error)}")


def fetch_nothing() -> None:
    """Have vLLM take images from data URLs only in this process."""
    MEDIA_CONNECTOR_REGISTRY.register("http")(DataUrls)


class ImageFile:
    """One image's file of `bytes` bytes, which is removed when nobody refers to it any more."""

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
            assert feature.data is not None, "a front end keeps its preprocessed images"
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
