"""LMSYS-Chat-1M and ChatLMSYS: a JSON array (or JSON Lines) of `{"model": ..., "conversation": [{"role": ...,
"content": ...}, ...]}`.

ChatLMSYS has times, `tstamp` in seconds since 1970; LMSYS-Chat-1M has none. Messages may count their
tokens (`num_tokens`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from muxserve.workload.readers.conversations import Turn, pairs
from muxserve.workload.readers.format import Assumption, Format, RawRequest, ReadOptions, Row
from muxserve.workload.readers.records import records

# Seconds since 1970 of this century; other numbers count something else.
_THIS_CENTURY = (946_684_800.0, 4_102_444_800.0)
_TIME = re.compile(rb'"tstamp"\s*:\s*(-?[0-9][0-9.eE+-]*)')


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
    seconds = options.seconds("s")
    for number, record in records(path):
        try:
            if not isinstance(record, dict):
                raise ValueError(f"not JSON: {record}" if isinstance(record, Exception) else "not an object")
            time, model = record.get("tstamp"), record.get("model")
            if time is not None and not isinstance(time, int | float):
                raise ValueError(f"`tstamp` must be a number, not {time!r}")
            if model is not None and not isinstance(model, str):
                raise ValueError(f"`model` must be a name, not {model!r}")
            turns = _turns(record.get("conversation"))
        except ValueError as error:
            yield Row(number, None, str(error))
            continue
        arrival = None if time is None else float(time) * seconds
        for prompt, output in pairs(turns, options):
            yield Row(number, RawRequest(arrival, model or None, prompt, output))


def _matches(head: bytes) -> bool:
    return head[:1] in (b"[", b"{") and b'"conversation"' in head


def _time_unit(head: bytes) -> Assumption | None:
    times = [float(found) for found in _TIME.findall(head)]
    if not times:
        return None
    first, last = _THIS_CENTURY
    strange = next((time for time in times if not first <= time < last), None)
    doubt = f"ChatLMSYS counts seconds since 1970, which {strange or 0:.15g} is not"
    return Assumption("s", "" if strange is None else doubt)


FORMAT = Format(
    "lmsys",
    "JSON with model and conversation of messages role/content",
    _matches,
    _read,
    "record",
    time_unit=_time_unit,
    texts=True,
)
