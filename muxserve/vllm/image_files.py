"""What a front end has made of a request's images, in files beside the request.

Pixels are large: an image of 1,456 x 1,456 pixels becomes 29 MB for Idefics 3. So they go from the gateway to the
prefill engine in files and never through the unit scheduler, and a decode engine does not read them. The request itself
brings, for each image, its place in the prompt, its hash, by which caches know it, and the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

# Largest tensor that is encoded with its request; larger ones would go into frames of their own.
LARGEST = 1 << 40


def without_pixels(
    features: Sequence[MultiModalFeatureSpec], files: Iterable[Path | str]
) -> list[MultiModalFeatureSpec]:
    """`features` as a request brings them to engines. vLLM's name of an item in the cache of its processor, which
    engines here have none of, is that of its file."""
    return [replace(each, data=None, mm_hash=str(file)) for each, file in zip(features, files, strict=True)]


def size(item: MultiModalKwargsItem) -> int:
    """Bytes of the tensors of `item`."""
    return sum(_size(element.data) for element in item.values())


def _size(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


def write(file: Path, item: MultiModalKwargsItem) -> None:
    """Keep `item` in a new file.

    Raises:
        OSError: the file cannot be written.
    """
    (frame,) = MsgpackEncoder(size_threshold=LARGEST).encode(item)
    file.write_bytes(frame)


def with_pixels(features: Sequence[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
    """What `without_pixels` has left out, read from the files.

    Raises:
        OSError: a file is gone: the request has ended, or its gateway.
    """
    decoder = MsgpackDecoder(MultiModalKwargsItem)
    return [replace(each, data=decoder.decode(Path(each.mm_hash or "").read_bytes())) for each in features]
