"""ShareGPT: a JSON array (or JSON Lines) of `{"id": ..., "conversations": [{"from": "human", "value": ...}, ...]}`.

It has neither times nor token counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from muxserve.workload.readers.conversations import Turn, pairs
from muxserve.workload.readers.format import Format, RawRequest, ReadOptions, Row
from muxserve.workload.readers.records import records

_ANSWERS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


def _turns(record: object) -> list[Turn]:
    if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
        raise ValueError("no list `conversations`")
    turns = []
    for message in record["conversations"]:
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise ValueError("a message without a text `value`")
        turns.append(Turn(str(message.get("from", "")).lower() in _ANSWERS, message["value"]))
    return turns


def _read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    for number, record in records(path):
        try:
            if isinstance(record, Exception):
                raise ValueError(f"not JSON: {record}")
            turns = _turns(record)
        except ValueError as error:
            yield Row(number, None, str(error))
            continue
        for prompt, output in pairs(turns, options):
            yield Row(number, RawRequest(None, None, prompt, output))


def _matches(head: bytes) -> bool:
    return head[:1] in (b"[", b"{") and b'"conversations"' in head


FORMAT = Format("sharegpt", "JSON with conversations of messages from/value", _matches, _read, "record", texts=True)
