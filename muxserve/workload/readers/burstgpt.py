"""BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`.

Timestamps are seconds. Requests that failed there have no response tokens; `open_workload` leaves them out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

from muxserve.workload.readers.format import Format, RawRequest, ReadOptions, Row, token_count
from muxserve.workload.readers.table import read_table

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


def _parse(fields: Sequence[str]) -> RawRequest:
    try:
        time = float(fields[0])
    except ValueError:
        time = math.nan
    if not math.isfinite(time):
        raise ValueError(f"Timestamp must be a number of seconds, not {fields[0]!r}")
    return RawRequest(time, fields[1] or None, token_count(fields[2], COLUMNS[2]), token_count(fields[3], COLUMNS[3]))


def _read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    return read_table(path, COLUMNS, _parse)


def _matches(head: bytes) -> bool:
    columns = [column.strip() for column in head.split(b"\n", 1)[0].split(b",")]
    return all(column.encode() in columns for column in COLUMNS)


FORMAT = Format("burstgpt", "CSV with Timestamp,Model,Request tokens,Response tokens", _matches, _read)
