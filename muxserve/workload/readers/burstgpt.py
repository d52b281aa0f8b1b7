"""BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`.

Timestamps are seconds; a table with other columns may count something else. Requests that failed there have no
response tokens; `open_workload` leaves them out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import partial

from muxserve.workload.readers.format import Assumption, Format, RawRequest, ReadOptions, Row, token_count
from muxserve.workload.readers.table import read_table

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
_OWN = (*COLUMNS, "Total tokens", "Log Type")


def _parse(fields: Sequence[str], seconds: float) -> RawRequest:
    try:
        time = float(fields[0])
    except ValueError:
        time = math.nan
    if not math.isfinite(time):
        raise ValueError(f"Timestamp must be a number, not {fields[0]!r}")
    time *= seconds
    return RawRequest(time, fields[1] or None, token_count(fields[2], COLUMNS[2]), token_count(fields[3], COLUMNS[3]))


def _read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    return read_table(path, COLUMNS, partial(_parse, seconds=options.seconds("s")))


def _columns(head: bytes) -> list[str]:
    return [column.strip() for column in head.split(b"\n", 1)[0].decode(errors="replace").split(",")]


def _matches(head: bytes) -> bool:
    return all(column in _columns(head) for column in COLUMNS)


def _time_unit(head: bytes) -> Assumption:
    # Without its columns it cannot be read, whatever it counts.
    missing = [column for column in _OWN if column not in _columns(head)] if _matches(head) else []
    doubt = f"BurstGPT's own tables count seconds, but this one lacks their columns {', '.join(missing)}"
    return Assumption("s", doubt if missing else "")


FORMAT = Format(
    "burstgpt", "CSV with Timestamp,Model,Request tokens,Response tokens", _matches, _read, time_unit=_time_unit
)
