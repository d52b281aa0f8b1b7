"""Readers of the public trace formats, all streaming, found by what a file begins with."""

from __future__ import annotations

import os
import zlib

from muxserve.workload.errors import WorkloadError
from muxserve.workload.readers import mooncake
from muxserve.workload.readers.chats import LMSYS, SHAREGPT
from muxserve.workload.readers.format import TIME_UNITS, Assumption, Format, ReadOptions, Row
from muxserve.workload.readers.format import RawRequest as RawRequest
from muxserve.workload.readers.tables import AZURE, BURSTGPT
from muxserve.workload.trace import open_maybe_gzip

__all__ = [
    "FORMATS",
    "NATIVE",
    "TIME_UNITS",
    "Assumption",
    "Format",
    "RawRequest",
    "ReadOptions",
    "Row",
    "detect",
    "head_of",
]

NATIVE = "muxserve"
FORMATS = {format.name: format for format in (AZURE, BURSTGPT, mooncake.FORMAT, LMSYS, SHAREGPT)}
_HEAD = 1 << 16


def head_of(path: str | os.PathLike[str]) -> bytes:
    """The first 64 KiB of a file, decompressed, without white space at their start.

    Raises:
        WorkloadError: a compressed file is damaged.
        OSError: the file cannot be opened.
    """
    try:
        with open_maybe_gzip(path, "rb") as file:
            return file.read(_HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
    except (EOFError, zlib.error) as error:
        raise WorkloadError(f"{os.fspath(path)}: the compressed file is damaged or cut off: {error}") from None


def detect(path: str | os.PathLike[str]) -> str:
    """The name of the file's format, of `FORMATS` or `NATIVE`.

    Raises:
        WorkloadError: none of them.
        OSError: the file cannot be opened.
    """
    head = head_of(path)
    if not head:
        raise WorkloadError(f"{os.fspath(path)} is empty; a trace was expected")
    if b'"muxserve_trace"' in head.split(b"\n", 1)[0]:
        return NATIVE
    for name, format in FORMATS.items():
        if format.matches(head):
            return name
    known = "; ".join(f"{name} ({format.about})" for name, format in FORMATS.items())
    raise WorkloadError(
        f"{os.fspath(path)} is in no format that is known: {known}; {NATIVE} (docs/workload.md). "
        f"If it is one of these, name it: {os.fspath(path)}:format=..."
    )
