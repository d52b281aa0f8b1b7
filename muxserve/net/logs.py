"""Logs of all processes of a fleet: their format, their files, and how these are bounded.

Each process writes to its stderr, which is a file that its parent has opened to append to. So a file can be copied and
emptied while it is written to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from io import TextIOBase
from pathlib import Path
from typing import TextIO

# `text` or `json`, for a process and all that it starts.
FORMAT_VARIABLE = "MUXSERVE_LOG_FORMAT"
# How much they log: one of `LEVELS`.
LEVEL_VARIABLE = "MUXSERVE_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
TEXT, JSON = "text", "json"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SUFFIX = ".log"
# A file that has grown beyond this many bytes is put aside; so many of those are kept.
MOST_BYTES = 64 << 20
KEPT = 3
_LOOK_SECONDS = 10.0

# Of the HTTP request that a task works for; empty elsewhere.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def of_request(unit_id: str) -> dict[str, str]:
    """`extra` of a line about the request that units and engines call `unit_id`."""
    return {"unit_request": unit_id}


def choose(chosen: str, level: str = "info") -> None:
    """Have this process and all that it starts log as `text` or `json`, lines of that level and above."""
    os.environ[FORMAT_VARIABLE] = chosen
    os.environ[LEVEL_VARIABLE] = level
    if chosen == JSON:
        # vLLM's own handler writes text; without it, its lines go the way of ours.
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"


def in_json() -> bool:
    """Whether logs are JSON here."""
    return os.environ.get(FORMAT_VARIABLE) == JSON


def log_to_stderr(level: str = "") -> None:
    """Log as every process of the fleet does; at a level of its own, if one is given."""
    asked = level or os.environ.get(LEVEL_VARIABLE, "")
    wanted = logging.getLevelNamesMapping()[(asked if asked in LEVELS else "info").upper()]
    # What libraries have to say to their authors is not asked for.
    logging.basicConfig(stream=sys.stderr, level=max(wanted, logging.INFO), format=TEXT_FORMAT)
    logging.getLogger("muxserve").setLevel(wanted)
    if in_json():
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())


class JsonLines(logging.Formatter):
    """One JSON object per line: `time` (RFC 3339, UTC), `level`, `logger`, `pid`, `message`; where there are some,
    `request_id` (of an HTTP request), `unit_request` (what units call it) and `error` (a traceback)."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if http := request_id.get():
            fields["request_id"] = http
        if of_unit := getattr(record, "unit_request", ""):
            fields["unit_request"] = of_unit
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class JsonLineStream(TextIOBase):
    """A text stream whose lines become JSON objects on `target`, as if `logger` had logged them."""

    def __init__(self, target: TextIO, logger: str, level: str) -> None:
        self._target = target
        self._fixed = {"level": level, "logger": logger, "pid": os.getpid()}
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                fields = {"time": _rfc3339(time.time()), **self._fixed, "message": line.rstrip()}
                self._target.write(json.dumps(fields, ensure_ascii=False) + "\n")
        return len(text)

    def flush(self) -> None:
        self._target.flush()


def _rfc3339(seconds: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds * 1000) % 1000:03d}Z"


# ------------------------------------------------------------ files


def log_files(run_dir: Path) -> dict[str, Path]:
    """The logs of a fleet's processes on this machine, by part: `gateway-0`, `u0/unit`, `u0/engine-NAME-decode`."""
    found = {path.stem: path for path in sorted((run_dir / "logs").glob(f"*{SUFFIX}"))}
    for path in sorted(run_dir.glob(f"*/logs/*{SUFFIX}")):
        found[f"{path.parent.parent.name}/{path.stem}"] = path
    return found


def matching(files: Mapping[str, Path], wanted: str) -> dict[str, Path]:
    """Those whose part is `wanted`; else those that have it in their name."""
    if wanted in files:
        return {wanted: files[wanted]}
    return {part: path for part, path in files.items() if wanted in part}


def tail(path: Path, lines: int, most_bytes: int = 1 << 20) -> tuple[list[str], int]:
    """The last `lines` lines of a log within its last `most_bytes`, and where it ends."""
    with path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        start = log.seek(max(0, end - most_bytes))
        text = log.read(end - start).decode(errors="replace")
    found = text.splitlines()
    return (found[1:] if start and len(found) > 1 else found)[-lines:] if lines else [], end


class Follower:
    """What is appended to a fleet's logs, also to those that come later."""

    def __init__(self, run_dir: Path, wanted: str, ends: Mapping[str, int]) -> None:
        """`ends`: what has been read of each log."""
        self._run_dir = run_dir
        self._wanted = wanted
        self._read = dict(ends)
        self._begun: dict[str, str] = {}

    def new(self) -> Iterator[tuple[str, str]]:
        """Part and line of all whole lines since the last call."""
        files = log_files(self._run_dir)
        for part, path in (matching(files, self._wanted) if self._wanted else files).items():
            try:
                with path.open("rb") as log:
                    known = self._read.get(part, 0)
                    # A log that was put aside begins anew.
                    log.seek(known if known <= os.fstat(log.fileno()).st_size else 0)
                    text = self._begun.get(part, "") + log.read().decode(errors="replace")
                    self._read[part] = log.tell()
            except OSError:
                continue
            *lines, self._begun[part] = text.split("\n")
            for line in lines:
                yield part, line


def rotate(path: Path, most_bytes: int = MOST_BYTES, kept: int = KEPT) -> bool:
    """Put `path` aside as `NAME.log.1` if it is larger than `most_bytes`, older ones as `.2` and so on, and empty it;
    whether that was done. What is written between copying and emptying is lost."""
    try:
        if path.stat().st_size <= most_bytes:
            return False
        for number in range(kept - 1, 0, -1):
            older = path.with_name(f"{path.name}.{number}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number + 1}"))
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    except OSError as error:  # the disk may be full
        logging.getLogger(__name__).warning("%s cannot be put aside: %s", path, error)
        return False
    return True


async def keep_bounded(run_dir: Path) -> None:
    """Put aside those logs of a fleet's processes on this machine that become too large; ends when it is cancelled."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        for path in log_files(run_dir).values():
            await asyncio.to_thread(rotate, path)
