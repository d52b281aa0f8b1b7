"""Azure LLM inference traces of 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`.

Timestamps are dates with times; those of 2023 have seven decimals, those of 2024 a time zone. Models are not named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from muxserve.workload.readers.format import Format, RawRequest, ReadOptions, Row, token_count
from muxserve.workload.readers.table import read_table

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _parse(fields: Sequence[str]) -> RawRequest:
    try:
        time = datetime.fromisoformat(fields[0])
    except ValueError:
        raise ValueError(f"TIMESTAMP must be a date and time, not {fields[0]!r}") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return RawRequest(time.timestamp(), None, token_count(fields[1], COLUMNS[1]), token_count(fields[2], COLUMNS[2]))


def _read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    return read_table(path, COLUMNS, _parse)


def _matches(head: bytes) -> bool:
    return head.split(b"\n", 1)[0].replace(b" ", b"").startswith(b"TIMESTAMP,ContextTokens,GeneratedTokens")


FORMAT = Format("azure", "CSV with TIMESTAMP,ContextTokens,GeneratedTokens", _matches, _read)
