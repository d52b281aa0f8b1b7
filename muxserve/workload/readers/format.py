"""What every reader of a format has in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from muxserve.workload.errors import TraceError
from muxserve.workload.text import TokenCounter, estimated_tokens
from muxserve.workload.trace import Content


class RawRequest(NamedTuple):
    """A request as a file tells of it. `arrival` is in seconds of the file's own clock, None where it has none; `model`
    is the file's name for it, None where it names none. Lengths are in tokens; `content` is as of `TraceRequest`."""

    arrival: float | None
    model: str | None
    prompt_tokens: int
    output_tokens: int
    content: Content = ()


class Row(NamedTuple):
    """One line or record: its request, or the `problem` that makes it malformed."""

    place: int
    request: RawRequest | None
    problem: str = ""


# Seconds of each unit in which a file may count time.
TIME_UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class ReadOptions:
    """How a file is read. `count` gives the tokens of a text; `all_turns` makes every answer of a conversation a
    request, with all before it as its prompt, instead of the first alone. `time_unit` (of TIME_UNITS) is what times
    count and `block_tokens` the tokens that a hash stands for, where somebody says so; None: as the format's own files
    have it."""

    count: TokenCounter = estimated_tokens
    all_turns: bool = False
    time_unit: str | None = None
    block_tokens: int | None = None

    def seconds(self, usual: str) -> float:
        """Seconds of one unit of time, which is `usual` in the format's own files."""
        return TIME_UNITS[self.time_unit or usual]


class Assumption(NamedTuple):
    """What a number in a file is taken to mean, in the format's own files. `doubt` says why it may be another thing in
    this one; empty where that is certain."""

    value: str
    doubt: str = ""


def nothing(head: bytes) -> Assumption | None:
    """There is nothing to assume."""
    return None


@dataclass(frozen=True)
class Format:
    """A file format. `read` yields its rows and raises TraceError where the file cannot be read any further; `unit` is
    what its places count (line, record). `matches`, `time_unit` and `block_tokens` judge the first 64 KiB, white space
    stripped from their start: whether a file is of this format, in which unit its times are, and how many tokens a hash
    stands for (None: it has no times that are numbers, or no hashes). `texts`: their tokens are counted."""

    name: str
    about: str
    matches: Callable[[bytes], bool]
    read: Callable[[str | os.PathLike[str], ReadOptions], Iterator[Row]]
    unit: str = "line"
    time_unit: Callable[[bytes], Assumption | None] = nothing
    block_tokens: Callable[[bytes], Assumption | None] = nothing
    texts: bool = False


def bad_header(path: str | os.PathLike[str], wanted: str, got: str) -> TraceError:
    """The error for a table that lacks a column."""
    return TraceError(path, 1, f"not the header of this format: expected the columns {wanted}, found {got[:200]!r}")


def token_count(text: str, name: str) -> int:
    """A whole number of at least zero.

    Raises:
        ValueError: anything else; the message names the field.
    """
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {text!r}") from None
    if value < 0:
        raise ValueError(f"{name} must not be negative, not {value}")
    return value
