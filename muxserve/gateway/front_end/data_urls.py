"""Images come with their requests: a front end fetches none, and what it cannot read is the client's to mend."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

_FETCHES_NOTHING = "this server fetches nothing: an image must come with the request, as a data URL"


class DataUrls(MediaConnector):
    """Takes data URLs only. Stock vLLM's asks any host, if it is not told which."""

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


def install() -> None:
    """Have vLLM use it in this process, in place of its own."""
    MEDIA_CONNECTOR_REGISTRY.register("http")(DataUrls)
