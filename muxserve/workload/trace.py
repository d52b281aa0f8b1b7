"""The trace format: JSON Lines, one header object, then one array per request.

    {"muxserve_trace":1,"models":["atlas","frontdesk"],"duration":60.0,"about":"..."}
    [0.125,"atlas",31,120]
    [0.3,"frontdesk",40,64]

An array is arrival in seconds from the start, model, prompt tokens, output tokens, and, where prompts share beginnings,
what the prompt is made of (`Content`). Arrivals never fall. A path that
ends in `.gz` is compressed. Reading and writing stream: a trace of any length takes constant memory.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import msgspec

from muxserve.workload.errors import TraceError

VERSION = 1


# What a prompt is made of: the name of each piece and how many of its first tokens it has, all of the prompt together.
# Two prompts that begin with the same pieces begin with the same tokens. The answer goes on with the last piece, so
# that the next turn of a conversation holds it.
Content = tuple[tuple[str, int], ...]


class TraceRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One request. `arrival` is in seconds from the start of the trace; lengths are in tokens, at least 1. Without
    `content` no other request has a beginning in common with it."""

    arrival: float
    model: str
    prompt_tokens: int
    output_tokens: int
    content: Content = ()


def cut_content(content: Content, tokens: int) -> Content:
    """The content of the first `tokens` tokens."""
    kept: list[tuple[str, int]] = []
    for name, length in content:
        if tokens <= 0:
            break
        kept.append((name, min(length, tokens)))
        tokens -= length
    return tuple(kept)


class TraceHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """First line. `models` are the names that requests may use; `duration` is in seconds (0: unknown); `about` says in
    words where the trace comes from; `seed` and `parameters` let a generated one be made again."""

    muxserve_trace: int
    models: list[str]
    duration: float = 0.0
    about: str = ""
    seed: int | None = None
    parameters: dict[str, object] = {}


@dataclass(frozen=True)
class Trace:
    """A trace in memory."""

    header: TraceHeader
    requests: list[TraceRequest]


_header_decoder = msgspec.json.Decoder(TraceHeader)
_request_decoder = msgspec.json.Decoder(TraceRequest)
_encoder = msgspec.json.Encoder()


def _header_problem(header: TraceHeader) -> str | None:
    if header.muxserve_trace != VERSION:
        return f"trace version {header.muxserve_trace} is not known, this reader knows version {VERSION}"
    if not header.models or len(set(header.models)) != len(header.models):
        return "`models` must list at least one model, and none twice"
    if not (header.duration >= 0 and math.isfinite(header.duration)):
        return f"`duration` must be zero or positive, not {header.duration}"
    return None


def _request_problem(request: TraceRequest, models: frozenset[str], before: float) -> str | None:
    if not (request.arrival >= 0 and math.isfinite(request.arrival)):
        return f"the arrival must be zero or positive seconds, not {request.arrival}"
    if request.arrival < before:
        return f"the arrival {request.arrival} lies before the one above it, {before}"
    if request.model not in models:
        return f"model {request.model!r} is not among the header's models ({', '.join(sorted(models))})"
    if request.prompt_tokens < 1 or request.output_tokens < 1:
        return f"prompt and output need at least 1 token, not {request.prompt_tokens} and {request.output_tokens}"
    if request.content and (
        min(tokens for _, tokens in request.content) < 1
        or sum(tokens for _, tokens in request.content) != request.prompt_tokens
    ):
        return f"the pieces of the prompt need at least 1 token each, and {request.prompt_tokens} together"
    return None


@contextlib.contextmanager
def open_trace(
    path: str | os.PathLike[str], skipped: Callable[[TraceError], None] | None = None
) -> Iterator[tuple[TraceHeader, Iterator[TraceRequest]]]:
    """The header and a stream of the requests, valid inside the `with` block. Blank lines are skipped; so are malformed
    requests where `skipped` is given, which is told of each.

    Raises:
        TraceError: the header is malformed; while iterating, the first malformed request.
        OSError: the file cannot be opened.
    """
    with open_maybe_gzip(path, "rb") as file:
        lines = numbered_lines(path, file)
        first = next(lines, None)
        if first is None:
            raise TraceError(path, 1, "the file is empty; a trace begins with a header line")
        number, text = first
        try:
            header = _header_decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(path, number, f"not the header of a trace: {error}") from None
        problem = _header_problem(header)
        if problem:
            raise TraceError(path, number, problem)
        yield header, _requests(path, lines, header, skipped or _refuse)


def open_maybe_gzip(path: str | os.PathLike[str], mode: str) -> IO[bytes]:
    """The file, decompressed where its name ends in `.gz`."""
    if os.fspath(path).endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, mode))
    return cast(IO[bytes], open(path, mode))


def numbered_lines(path: str | os.PathLike[str], file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Its lines that are not blank, numbered from 1.

    Raises:
        TraceError: the compressed file is damaged.
    """
    number = 0
    try:
        for number, text in enumerate(file, start=1):
            if text.strip():
                yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, number + 1, f"the compressed file is damaged or cut off: {error}") from None


def _refuse(error: TraceError) -> None:
    raise error from None


def _requests(
    path: str | os.PathLike[str],
    lines: Iterator[tuple[int, bytes]],
    header: TraceHeader,
    skipped: Callable[[TraceError], None],
) -> Iterator[TraceRequest]:
    models = frozenset(header.models)
    before = 0.0
    for number, text in lines:
        try:
            request = _request_decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wanted = "[arrival, model, prompt tokens, output tokens], or with pieces of the prompt behind"
            skipped(TraceError(path, number, f"not a request {wanted}: {error}"))
            continue
        problem = _request_problem(request, models, before)
        if problem:
            skipped(TraceError(path, number, problem))
            continue
        before = request.arrival
        yield request


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The whole trace in memory.

    Raises:
        TraceError: the header or a line is malformed.
        OSError: the file cannot be opened.
    """
    with open_trace(path) as (header, requests):
        return Trace(header, list(requests))


def write_trace(
    path: str | os.PathLike[str],
    models: Sequence[str],
    requests: Iterable[TraceRequest],
    *,
    duration: float = 0.0,
    about: str = "",
    seed: int | None = None,
    parameters: dict[str, object] | None = None,
) -> int:
    """Write a trace that `open_trace` reads; returns the number of its requests.

    Raises:
        TraceError: the header or a request would not be readable, such as one that arrives before the last one.
        OSError: the file cannot be written.
    """
    header = TraceHeader(VERSION, list(models), duration, about, seed, parameters or {})
    if problem := _header_problem(header):
        raise TraceError(path, 1, problem)
    known, before, line = frozenset(models), 0.0, 1
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(Path(path).open("wb"))
        if os.fspath(path).endswith(".gz"):
            # The time and the name inside a gzip file would make equal traces differ.
            file = cast(IO[bytes], stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)))
        file.write(_encoder.encode(header) + b"\n")
        for line, request in enumerate(requests, start=2):
            if problem := _request_problem(request, known, before):
                raise TraceError(path, line, problem)
            fields = (request.arrival, request.model, request.prompt_tokens, request.output_tokens)
            file.write(_encoder.encode((*fields, request.content) if request.content else fields) + b"\n")
            before = request.arrival
    return line - 1
