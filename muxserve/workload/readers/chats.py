"""Dumps of conversations: LMSYS-Chat-1M, ChatLMSYS and ShareGPT, as a JSON array or JSON Lines.

LMSYS's records are `{"model": ..., "conversation": [{"role": ..., "content": ...}, ...]}`. ChatLMSYS has times,
`tstamp` in seconds since 1970; LMSYS-Chat-1M has none. Messages may count their tokens (`num_tokens`).

ShareGPT's are `{"id": ..., "conversations": [{"from": "human", "value": ...}, ...]}`, with neither times nor token
counts.

Records are read one at a time: files of many gigabytes take constant memory.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from muxserve.workload.errors import TraceError
from muxserve.workload.readers.format import Assumption, Format, RawRequest, ReadOptions, Row
from muxserve.workload.trace import numbered_lines, open_maybe_gzip

# Seconds since 1970 of this century; other numbers count something else.
_THIS_CENTURY = (946_684_800.0, 4_102_444_800.0)
_TIME = re.compile(rb'"tstamp"\s*:\s*(-?[0-9][0-9.eE+-]*)')
_ANSWERS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


class _Message(NamedTuple):
    """A message. `tokens` is None where the file does not count them."""

    answer: bool
    text: str
    tokens: int | None = None


def _pairs(turns: Sequence[_Message], options: ReadOptions) -> Iterator[tuple[int, int]]:
    """Tokens of prompt and answer of each request in a conversation.

    The first answer that has a prompt, or with `all_turns` every one: its prompt is then all that was said before it,
    as a chat server sees it (what a chat template adds is not counted).
    """
    before = 0
    for turn in turns:
        tokens = options.count(turn.text) if turn.tokens is None else turn.tokens
        if turn.answer and before:
            yield before, tokens
            if not options.all_turns:
                return
        before += tokens


def _records(path: str | os.PathLike[str]) -> Iterator[tuple[int, object]]:
    """Number and value of each record: those of a JSON array from 1, those of JSON Lines by their line. A line that is
    no JSON comes as the error; an array cannot be read beyond such a place.

    Raises:
        TraceError: the array is not JSON at some place, or a compressed file is damaged.
    """
    with open_maybe_gzip(path, "rb") as file:
        start = file.read(1)
        while start and start in b" \t\r\n\xef\xbb\xbf":
            start = file.read(1)
    if start == b"[":
        yield from _array(path)
    else:
        yield from _lines(path)


def _array(path: str | os.PathLike[str]) -> Iterator[tuple[int, object]]:
    import ijson

    number = 0
    with open_maybe_gzip(path, "rb") as file:
        try:
            for number, value in enumerate(ijson.items(file, "item", use_float=True), start=1):
                yield number, value
        except (ijson.JSONError, UnicodeDecodeError) as error:
            words = " ".join(str(error).split())
            raise TraceError(path, number + 1, f"not JSON: {words}", "record") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(
                path, number + 1, f"the compressed file is damaged or cut off: {error}", "record"
            ) from None


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, object]]:
    with open_maybe_gzip(path, "rb") as file:
        for number, text in numbered_lines(path, file):
            try:
                yield number, msgspec.json.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield number, error


def _lmsys_turns(conversation: object) -> list[_Message]:
    if not isinstance(conversation, list):
        raise ValueError("no list `conversation`")
    turns = []
    for message in conversation:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("a message without a text `content`")
        tokens = message.get("num_tokens")
        counted = tokens if isinstance(tokens, int) and tokens >= 0 else None
        turns.append(_Message(message.get("role") == "assistant", message["content"], counted))
    return turns


def _lmsys_read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    seconds = options.seconds("s")
    for number, record in _records(path):
        try:
            if not isinstance(record, dict):
                raise ValueError(f"not JSON: {record}" if isinstance(record, Exception) else "not an object")
            time, model = record.get("tstamp"), record.get("model")
            if time is not None and not isinstance(time, int | float):
                raise ValueError(f"`tstamp` must be a number, not {time!r}")
            if model is not None and not isinstance(model, str):
                raise ValueError(f"`model` must be a name, not {model!r}")
            turns = _lmsys_turns(record.get("conversation"))
        except ValueError as error:
            yield Row(number, None, str(error))
            continue
        arrival = None if time is None else float(time) * seconds
        for prompt, output in _pairs(turns, options):
            yield Row(number, RawRequest(arrival, model or None, prompt, output))


def _lmsys_matches(head: bytes) -> bool:
    return head[:1] in (b"[", b"{") and b'"conversation"' in head


def _lmsys_time_unit(head: bytes) -> Assumption | None:
    times = [float(found) for found in _TIME.findall(head)]
    if not times:
        return None
    first, last = _THIS_CENTURY
    strange = next((time for time in times if not first <= time < last), None)
    doubt = f"ChatLMSYS counts seconds since 1970, which {strange or 0:.15g} is not"
    return Assumption("s", "" if strange is None else doubt)


LMSYS = Format(
    "lmsys",
    "JSON with model and conversation of messages role/content",
    _lmsys_matches,
    _lmsys_read,
    "record",
    time_unit=_lmsys_time_unit,
    texts=True,
)


def _sharegpt_turns(record: object) -> list[_Message]:
    if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
        raise ValueError("no list `conversations`")
    turns = []
    for message in record["conversations"]:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise ValueError("a message without a text `value`")
        turns.append(_Message(str(message.get("from", "")).lower() in _ANSWERS, message["value"]))
    return turns


def _sharegpt_read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    for number, record in _records(path):
        try:
            if isinstance(record, Exception):
                raise ValueError(f"not JSON: {record}")
            turns = _sharegpt_turns(record)
        except ValueError as error:
            yield Row(number, None, str(error))
            continue
        for prompt, output in _pairs(turns, options):
            yield Row(number, RawRequest(None, None, prompt, output))


def _sharegpt_matches(head: bytes) -> bool:
    return head[:1] in (b"[", b"{") and b'"conversations"' in head


SHAREGPT = Format(
    "sharegpt",
    "JSON with conversations of messages from/value",
    _sharegpt_matches,
    _sharegpt_read,
    "record",
    texts=True,
)
