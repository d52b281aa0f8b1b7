"""Logs of all processes of a fleet: their format, their files, and how these are bounded.

Each process writes to its stderr, which is a file that its parent has opened to append to. So a file can be copied and
emptied while it is written to. One that was renamed, as logrotate does, is opened anew by each process that writes to
it (`own_log`).
"""

from __future__ import annotations

import asyncio
import contextlib
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
from typing import Any, BinaryIO, TextIO

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

# The id of the HTTP request that a task works for; empty elsewhere.
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
    own_log.write_to(_file_of(2))
    logging.setLogRecordFactory(_following_record)
    if in_json():
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())


class OwnLog:
    """The file behind this process's stderr: it is opened anew when another one, or none, has its name."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def write_to(self, path: Path | None) -> None:
        """Stderr is the file at `path`, or none that has a name."""
        self._path = path

    def follow(self) -> None:
        """To be called now and then, and before what is worth reading is written. It costs two system calls."""
        if self._path is None:
            return
        try:
            ours = os.fstat(2)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self._path), ours):
                    return
            both = os.path.samestat(os.fstat(1), ours)
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:  # its directory is gone, or the disk is full: the file that is open will do
            return
        for number in (1, 2) if both else (2,):
            os.dup2(fd, number)
        os.close(fd)


own_log = OwnLog()


def _file_of(fd: int) -> Path | None:
    """The file that is open there, if it is one that has a name."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return path if path.is_file() and path.samefile(f"/proc/self/fd/{fd}") else None
    except OSError:
        return None


def _following_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """Every line of every library passes here before it is written."""
    own_log.follow()
    return logging.LogRecord(*args, **kwargs)


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


def tail(path: Path, lines: int, most_bytes: int = 1 << 20) -> list[str]:
    """The last `lines` lines of a log within its last `most_bytes`.

    Raises:
        OSError: the file cannot be read.
    """
    reader = LogReader(path)
    try:
        return reader.last(lines, most_bytes)
    finally:
        reader.close()


class LogReader:
    """The last lines of a log, and then those that are appended, also when the file is emptied or renamed meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._begun = ""

    def last(self, lines: int, most_bytes: int = 1 << 20) -> list[str]:
        """The last `lines` lines within its last `most_bytes`. To be called once, before `new`, if at all.

        Raises:
            OSError: the file cannot be read.
        """
        log = self._file = self._path.open("rb")
        end = log.seek(0, os.SEEK_END)
        start = log.seek(max(0, end - most_bytes))
        found = log.read(end - start).decode(errors="replace").splitlines()
        return (found[1:] if start and len(found) > 1 else found)[-lines:] if lines else []

    def new(self) -> Iterator[str]:
        """Whole lines that were written since the last call."""
        yield from self._read()
        try:
            following = self._path.open("rb")
        except OSError:
            return
        if self._file is not None:
            ours, its = os.fstat(self._file.fileno()), os.fstat(following.fileno())
            # Whoever writes goes on with the old file until there is something in the new one.
            if os.path.samestat(ours, its) or not its.st_size:
                following.close()
                return
            yield from self._read()
            self._file.close()
        self._file = following
        yield from self._read()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> Iterator[str]:
        if self._file is None:
            return
        if self._file.tell() > os.fstat(self._file.fileno()).st_size:  # it was emptied, and begins anew
            self._file.seek(0)
            self._begun = ""
        *lines, self._begun = (self._begun + self._file.read().decode(errors="replace")).split("\n")
        yield from lines


class Follower:
    """What a fleet's logs say, and what is appended to them, also to those that come later."""

    def __init__(self, run_dir: Path, wanted: str) -> None:
        self._run_dir = run_dir
        self._wanted = wanted
        self._readers: dict[str, LogReader] = {}

    def parts(self) -> dict[str, Path]:
        """Those that are followed now; a log that was renamed stays one of them."""
        files = log_files(self._run_dir)
        return matching(files, self._wanted) if self._wanted else files

    def last(self, lines: int) -> Iterator[tuple[str, str]]:
        """Part and line of the last `lines` of each. To be called once, before `new`, if at all."""
        for part, path in self.parts().items():
            reader = self._readers[part] = LogReader(path)
            try:
                found = reader.last(lines)
            except OSError:  # its part has left
                continue
            for line in found:
                yield part, line

    def new(self) -> Iterator[tuple[str, str]]:
        """Part and line of all whole lines since the last call."""
        for part, path in self.parts().items():
            self._readers.setdefault(part, LogReader(path))
        for part, reader in self._readers.items():
            for line in reader.new():
                yield part, line

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            reader.close()


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
