"""The directory of one fleet: its sockets, its logs, what it consists of, and a directory of that kind for each unit.

It is short, because the kernel allows 107 bytes for the path of a Unix socket, and readable by its owner only. A lock
tells directories in use from those that a killed controller left behind; the latter are removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

LOCK = "lock"
_SOCKET_LIMIT = 107
_LONGEST_SOCKET = "u100/weights-10-7.sock"


class RunDirError(Exception):
    """There is no safe place for the run directory; the message says why."""


class RunDir:
    """A fresh run directory, ours until `remove` or the end of the process."""

    def __init__(self, base: Path | None = None) -> None:
        """Create it under `base` (by default $XDG_RUNTIME_DIR/muxserve, or muxserve-<uid> among the temporary files).

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
        self.logs = self.path / "logs"
        self.logs.mkdir(mode=0o700)
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Keep the files (logs of a failure), but let the next start delete them."""
        with contextlib.suppress(OSError):
            os.close(self._lock)


def default_base() -> Path:
    """Where run directories are made."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        return Path(runtime) / "muxserve"
    return Path(tempfile.gettempdir()) / f"muxserve-{os.getuid()}"


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
