"""Mooncake: JSON Lines of `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`.

A hash stands for 512 tokens of the prompt and all before them: requests share prefixes. Models are not named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from muxserve.workload.readers.format import Format, RawRequest, ReadOptions, Row
from muxserve.workload.trace import Content, cut_content, numbered_lines, open_maybe_gzip

_BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


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
            prompt, content = line.input_length, _content(line)
            yield Row(number, RawRequest(line.timestamp / 1000, None, prompt, line.output_length, content))


def _content(line: _Line) -> Content:
    """Where the hashes cover the prompt."""
    if len(line.hash_ids) * _BLOCK_TOKENS < line.input_length:
        return ()
    return cut_content(tuple((str(each), _BLOCK_TOKENS) for each in line.hash_ids), line.input_length)


def _matches(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0]
    return first.startswith(b"{") and b'"input_length"' in first and b'"output_length"' in first


FORMAT = Format("mooncake", "JSON Lines with timestamp, input_length, output_length", _matches, _read)
