"""The directory of one fleet: its sockets, its logs, what it consists of, and a directory of that kind for each unit.

It is short, because the kernel allows 107 bytes for the path of a Unix socket, and readable by its owner only. A lock
tells directories in use from those that a killed controller left behind; the latter are removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

LOCK = "lock"
LOGS = "logs"
LOG_DIRS_KEPT = 10
_KEPT = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_SOCKET_LIMIT = 107
_LONGEST_SOCKET = "u100/weights-10-7.sock"


class RunDirError(Exception):
    """There is no safe place for the run directory; the message says why."""


class LogDirError(RunDirError):
    """Logs cannot be kept where the user wants them."""


class RunDir:
    """A fresh run directory, ours until `remove` or the end of the process."""

    def __init__(self, base: Path | None = None, log_dir: Path | None = None) -> None:
        """Create it under `base` (by default `default_base()`). With `log_dir` logs are written to a directory below
        that, which stays; `LOG_DIRS_KEPT` of them are kept.

        Raises:
            RunDirError: the base cannot be made, belongs to someone else, or its path is too long.
        """
        self.base = base or default_base()
        claim(self.base)
        sweep(self.base)
        self.path = self.base / secrets.token_hex(4)
        if len(os.fsencode(self.path / _LONGEST_SOCKET)) > _SOCKET_LIMIT:
            raise RunDirError(f"{self.base} is too long a path for Unix sockets; set XDG_RUNTIME_DIR to a shorter one")
        self.path.mkdir(mode=0o700)
        self.logs = self.path / LOGS
        if log_dir is None:
            self.logs.mkdir(mode=0o700)
        else:
            self.logs.symlink_to(_kept_log_dir(log_dir, self.path.name))
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, str(os.getpid()).encode())

    def remove(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Keep the files (logs of a failure), but let the next start delete them."""
        with contextlib.suppress(OSError):
            os.close(self._lock)


def make_log_dir(directory: Path) -> Path:
    """Where the processes of a unit write their logs, whose directory is below a fleet's: in it, or where the fleet's
    logs are kept."""
    logs, of_fleet = directory / LOGS, directory.parent / LOGS
    if of_fleet.is_symlink() and not logs.exists():
        kept = of_fleet.resolve() / directory.name
        kept.mkdir(mode=0o700, exist_ok=True)
        logs.symlink_to(kept)
    logs.mkdir(mode=0o700, exist_ok=True)
    return logs


def _kept_log_dir(base: Path, run: str) -> Path:
    """A fresh directory below `base` for the logs of a run; the oldest of earlier runs are removed."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        made = base.resolve() / f"{time.strftime('%Y%m%d-%H%M%S')}-{run}"
        made.mkdir(mode=0o700)
        earlier = sorted(each for each in base.iterdir() if _KEPT.fullmatch(each.name) and each.name != made.name)
        for old in earlier[: 1 - LOG_DIRS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise LogDirError(f"cannot write logs to {base}: {error.strerror}") from None
    return made


def default_base() -> Path:
    """Where run directories are made: $XDG_RUNTIME_DIR/muxserve, or muxserve-<uid> among the temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and not why_not_runtime():
        return Path(runtime) / "muxserve"
    return Path(tempfile.gettempdir()) / f"muxserve-{os.getuid()}"


def why_not_runtime() -> str:
    """Why $XDG_RUNTIME_DIR, which is set, cannot hold run directories; empty if it can, or is not set."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if not runtime:
        return ""
    if not os.path.isdir(runtime):
        return "is no directory"
    return "" if os.access(runtime, os.W_OK) else "cannot be written to"


def sweep(base: Path) -> list[Path]:
    """Remove the run directories under `base` whose controller is gone; returns them."""
    removed = []
    for directory in base.iterdir():
        try:
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    return removed


def claim(base: Path) -> None:
    """Make `base` if it is not there, for its owner only.

    Raises:
        RunDirError: it cannot be made, or belongs to someone else.
    """
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(base)
    except OSError as error:
        raise RunDirError(f"cannot create {base}: {error.strerror}") from None
    # Among the temporary files anybody could have made it first, as a link or with open doors.
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise RunDirError(f"{base} is not a directory of yours; remove it or set XDG_RUNTIME_DIR")
    os.chmod(base, 0o700)
