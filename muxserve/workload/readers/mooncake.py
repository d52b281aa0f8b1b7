"""Mooncake: JSON Lines of `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`.

A hash stands for 512 tokens of the prompt and all before them, the last one for what is left: requests share prefixes.
Models are not named. Others write the same fields with times in seconds, or hashes of other sizes: a file is taken for
one of Mooncake's only if it has their fields and whole milliseconds, and its hashes are of 512 tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from muxserve.workload.readers.format import Assumption, Format, RawRequest, ReadOptions, Row
from muxserve.workload.trace import Content, cut_content, numbered_lines, open_maybe_gzip

_BLOCK_TOKENS = 512
_FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


_decoder = msgspec.json.Decoder(_Line)


def _read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    seconds, block = options.seconds("ms"), options.block_tokens or _BLOCK_TOKENS
    with open_maybe_gzip(path, "rb") as file:
        for number, text in numbered_lines(path, file):
            try:
                line = _decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield Row(number, None, f"not a request with timestamp, input_length and output_length: {error}")
                continue
            problem = _problem(line, block, options.time_unit is None)
            if problem:
                yield Row(number, None, problem)
                continue
            prompt, content = line.input_length, _content(line, block)
            yield Row(number, RawRequest(line.timestamp * seconds, None, prompt, line.output_length, content))


def _problem(line: _Line, block: int, whole: bool) -> str:
    """What is wrong with a line whose hashes stand for `block` tokens, and whose times are `whole` numbers."""
    if line.input_length < 0 or line.output_length < 0:
        return "lengths must not be negative"
    if whole and not line.timestamp.is_integer():
        return f"the timestamp {line.timestamp} is no whole number of milliseconds; write time_unit=... in the workload"
    if not _holds(line, block):
        return (
            f"{len(line.hash_ids)} hashes of {block} tokens each do not stand for a prompt of {line.input_length:,}; "
            "write block_tokens=... in the workload"
        )
    return ""


def _holds(line: _Line, block: int) -> bool:
    """Its hashes are those of its prompt, if it has any."""
    return not line.hash_ids or len(line.hash_ids) == -(-line.input_length // block)


def _content(line: _Line, block: int) -> Content:
    return cut_content(tuple((str(each), block) for each in line.hash_ids), line.input_length)


def _matches(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0]
    return first.startswith(b"{") and b'"input_length"' in first and b'"output_length"' in first


def _first(head: bytes) -> tuple[_Line, set[str]] | None:
    """The first line with its fields; None if it is malformed, which reading will say."""
    try:
        text = head.split(b"\n", 1)[0]
        return _decoder.decode(text), set(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _time_unit(head: bytes) -> Assumption:
    first, doubt = _first(head), ""
    if first is not None:
        line, fields = first
        if fields != _FIELDS:
            other = sorted(_FIELDS - fields) or sorted(fields - _FIELDS)
            have = "lack" if _FIELDS - fields else "also have"
            doubt = f"its lines {have} {', '.join(other)}"
        elif not line.timestamp.is_integer():
            doubt = f"{line.timestamp} is no whole number of them"
        elif not _holds(line, _BLOCK_TOKENS):
            doubt = "its hashes are not like theirs"
    return Assumption("ms", f"Mooncake's own traces count milliseconds, but {doubt}" if doubt else "")


def _block_tokens(head: bytes) -> Assumption | None:
    first = _first(head)
    if first is None or not first[0].hash_ids:
        return None
    line, _ = first
    doubt = (
        f"in Mooncake's own traces it is {_BLOCK_TOKENS}, but here {len(line.hash_ids)} hashes stand for a prompt of "
        f"{line.input_length:,} tokens"
    )
    return Assumption(str(_BLOCK_TOKENS), "" if _holds(line, _BLOCK_TOKENS) else doubt)


FORMAT = Format(
    "mooncake",
    "JSON Lines with timestamp, input_length, output_length",
    _matches,
    _read,
    time_unit=_time_unit,
    block_tokens=_block_tokens,
)
