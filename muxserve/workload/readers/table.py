"""CSV files, row by row."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence

from muxserve.workload.readers.format import RawRequest, Row, bad_header
from muxserve.workload.trace import numbered_lines, open_maybe_gzip


def read_table(
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
