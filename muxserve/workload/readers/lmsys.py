"""LMSYS-Chat-1M and ChatLMSYS: a JSON array (or JSON Lines) of `{"model": ..., "conversation": [{"role": ...,
"content": ...}, ...]}`.

ChatLMSYS has times, `tstamp` in seconds; LMSYS-Chat-1M has none. Messages may count their tokens (`num_tokens`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from muxserve.workload.readers.conversations import Turn, pairs
from muxserve.workload.readers.format import Format, RawRequest, ReadOptions, Row
from muxserve.workload.readers.records import records


def _turns(conversation: object) -> list[Turn]:
    if not isinstance(conversation, list):
        raise ValueError("no list `conversation`")
    turns = []
    for message in conversation:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("a message without a text `content`")
        tokens = message.get("num_tokens")
        counted = tokens if isinstance(tokens, int) and tokens >= 0 else None
        turns.append(Turn(message.get("role") == "assistant", message["content"], counted))
    return turns


def _read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    for number, record in records(path):
        try:
            if not isinstance(record, dict):
                raise ValueError(f"not JSON: {record}" if isinstance(record, Exception) else "not an object")
            time, model = record.get("tstamp"), record.get("model")
            if time is not None and not isinstance(time, int | float):
                raise ValueError(f"`tstamp` must be a number of seconds, not {time!r}")
            if model is not None and not isinstance(model, str):
                raise ValueError(f"`model` must be a name, not {model!r}")
            turns = _turns(record.get("conversation"))
        except ValueError as error:
            yield Row(number, None, str(error))
            continue
        for prompt, output in pairs(turns, options):
            yield Row(number, RawRequest(None if time is None else float(time), model or None, prompt, output))


def _matches(head: bytes) -> bool:
    return head[:1] in (b"[", b"{") and b'"conversation"' in head


FORMAT = Format("lmsys", "JSON with model and conversation of messages role/content", _matches, _read, "record")
