"""Records of a JSON array or of JSON Lines, one at a time: files of many gigabytes take constant memory."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator

import msgspec

from muxserve.workload.errors import TraceError
from muxserve.workload.trace import numbered_lines, open_maybe_gzip


def records(path: str | os.PathLike[str]) -> Iterator[tuple[int, object]]:
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
