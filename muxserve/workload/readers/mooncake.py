"""Mooncake: JSON Lines of `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`.

The hashes tell which prefixes requests share; they are not used. Models are not named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from muxserve.workload.readers.format import Format, RawRequest, ReadOptions, Row
from muxserve.workload.trace import numbered_lines, open_maybe_gzip


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int


_decoder = msgspec.json.Decoder(_Line)


def _read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    with open_maybe_gzip(path, "rb") as file:
        for number, text in numbered_lines(path, file):
            try:
                line = _decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield Row(number, None, f"not a request with timestamp, input_length and output_length: {error}")
                continue
            if line.input_length < 0 or line.output_length < 0:
                yield Row(number, None, "lengths must not be negative")
                continue
            yield Row(number, RawRequest(line.timestamp / 1000, None, line.input_length, line.output_length))


def _matches(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0]
    return first.startswith(b"{") and b'"input_length"' in first and b'"output_length"' in first


FORMAT = Format("mooncake", "JSON Lines with timestamp, input_length, output_length", _matches, _read)
