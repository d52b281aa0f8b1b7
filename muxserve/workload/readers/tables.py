"""CSV traces: those of Azure and BurstGPT.

Azure's LLM inference traces of 2023 and 2024 have `TIMESTAMP,ContextTokens,GeneratedTokens`. Timestamps are dates with
times; those of 2023 have seven decimals, those of 2024 a time zone. Models are not named.

BurstGPT has `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`. Timestamps are seconds; a table
with other columns may count something else. Requests that failed have no response tokens; `open_workload` leaves them
out.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial

from muxserve.workload.readers.format import Assumption, Format, RawRequest, ReadOptions, Row, bad_header, token_count
from muxserve.workload.trace import numbered_lines, open_maybe_gzip

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST = ("Timestamp", "Model", "Request tokens", "Response tokens")
_BURST_OWN = (*_BURST, "Total tokens", "Log Type")


def _read_table(
    path: str | os.PathLike[str], columns: Sequence[str], parse: Callable[[Sequence[str]], RawRequest]
) -> Iterator[Row]:
    """The rows of a CSV file with a header that has `columns`, among others. `parse` gets their values in that order
    and raises ValueError for what makes no sense.

    Raises:
        TraceError: the header lacks a column, or the compressed file is damaged.
    """
    with open_maybe_gzip(path, "rb") as file:
        lines = numbered_lines(path, file)
        _, first = next(lines, (1, b""))
        header = _fields(first.removeprefix(b"\xef\xbb\xbf").decode(errors="replace"))
        try:
            places = [header.index(column) for column in columns]
        except ValueError:
            raise bad_header(path, ", ".join(columns), ",".join(header)) from None
        for number, raw in lines:
            try:
                fields = _fields(raw.decode())
                if len(fields) != len(header):
                    raise ValueError(f"{len(fields)} fields instead of {len(header)}")
                yield Row(number, parse([fields[place] for place in places]))
            except (ValueError, csv.Error) as error:  # UnicodeDecodeError is a ValueError
                yield Row(number, None, str(error))


def _fields(line: str) -> list[str]:
    line = line.strip("\r\n")
    # None of the formats quotes anything that contains a comma or a line end, so most lines need no CSV machinery.
    if '"' not in line:
        return [field.strip() for field in line.split(",")]
    return [field.strip() for field in next(csv.reader(io.StringIO(line)), [])]


def _azure_parse(fields: Sequence[str]) -> RawRequest:
    try:
        time = datetime.fromisoformat(fields[0])
    except ValueError:
        raise ValueError(f"TIMESTAMP must be a date and time, not {fields[0]!r}") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return RawRequest(time.timestamp(), None, token_count(fields[1], _AZURE[1]), token_count(fields[2], _AZURE[2]))


def _azure_read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    return _read_table(path, _AZURE, _azure_parse)


def _azure_matches(head: bytes) -> bool:
    return head.split(b"\n", 1)[0].replace(b" ", b"").startswith(b"TIMESTAMP,ContextTokens,GeneratedTokens")


AZURE = Format("azure", "CSV with TIMESTAMP,ContextTokens,GeneratedTokens", _azure_matches, _azure_read)


def _burst_parse(fields: Sequence[str], seconds: float) -> RawRequest:
    try:
        time = float(fields[0])
    except ValueError:
        time = math.nan
    if not math.isfinite(time):
        raise ValueError(f"Timestamp must be a number, not {fields[0]!r}")
    time *= seconds
    return RawRequest(time, fields[1] or None, token_count(fields[2], _BURST[2]), token_count(fields[3], _BURST[3]))


def _burst_read(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[Row]:
    return _read_table(path, _BURST, partial(_burst_parse, seconds=options.seconds("s")))


def _burst_columns(head: bytes) -> list[str]:
    return [column.strip() for column in head.split(b"\n", 1)[0].decode(errors="replace").split(",")]


def _burst_matches(head: bytes) -> bool:
    return all(column in _burst_columns(head) for column in _BURST)


def _burst_time_unit(head: bytes) -> Assumption:
    # Without its columns it cannot be read, whatever it counts.
    missing = [column for column in _BURST_OWN if column not in _burst_columns(head)] if _burst_matches(head) else []
    doubt = f"BurstGPT's own tables count seconds, but this one lacks their columns {', '.join(missing)}"
    return Assumption("s", doubt if missing else "")


BURSTGPT = Format(
    "burstgpt",
    "CSV with Timestamp,Model,Request tokens,Response tokens",
    _burst_matches,
    _burst_read,
    time_unit=_burst_time_unit,
)
