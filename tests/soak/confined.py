"""Namespaces for the soak: shared memory, run directory, network and process ids of its own.

What fills a disk or floods a port in there is seen by nobody outside; and when the first process in there ends, however
it does, the kernel ends all others, and the file systems are gone with them.

`run` is called outside. `python -m tests.soak.confined BASE MiB COMMAND...` is the first process inside: it mounts,
starts the command, collects what nobody else does, and ends with the command.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
_VARIABLE = "MUXSERVE_SOAK_BASE"
_MIB = 1 << 20
# The run directory, and the temporary files: small enough to be filled at once.
_RUN_MIB = 32
_TMP_MIB = 128


class ConfinedError(Exception):
    """The namespaces cannot be made; the message says why."""


@dataclass(frozen=True)
class Confined:
    """Where things are inside."""

    base: Path

    @property
    def run(self) -> Path:
        """The file system of run directories."""
        return self.base / "run"

    @property
    def temporary(self) -> Path:
        """The file system of temporary files."""
        return self.base / "tmp"

    def strangers(self) -> list[psutil.Process]:
        """Processes that are neither ours, nor above us, nor zombies."""
        own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid not in own and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def inside() -> Confined | None:
    """Where things are, if this process runs inside."""
    base = os.environ.get(_VARIABLE)
    return Confined(Path(base)) if base else None


def run(command: Sequence[str], shared_memory_mib: int) -> int:
    """Run the command inside and return its exit status; signals that end programs are passed on to it.

    Raises:
        ConfinedError: the namespaces cannot be made.
    """
    # Whoever is not root is root in a namespace of users.
    unshare = ["unshare", *([] if os.getuid() == 0 else ["--map-root-user"]), "--mount", "--net", "--pid"]
    unshare += ["--propagation", "private", "--fork", "--kill-child", "--mount-proc"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, text=True)
    except OSError as error:
        raise ConfinedError(f"cannot run unshare of util-linux: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise ConfinedError(f"cannot make namespaces ({error.stderr.strip()}); run as root") from None
    # Short, because paths of Unix sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="mux-soak-") as base:
        first = [sys.executable, "-m", "tests.soak.confined", base, str(shared_memory_mib), *command]
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *unshare, *first], start_new_session=True)

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        try:
            return process.wait()
        finally:
            process.kill()


def _mount(path: Path, mib: int) -> None:
    path.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"soak", os.fsencode(path), b"tmpfs", 0, f"size={mib}m,mode=0700".encode()):
        raise SystemExit(f"cannot mount a tmpfs on {path}: {os.strerror(ctypes.get_errno())}")


def main() -> int:
    """The first process inside."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("mib", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    place = Confined(given.base)
    for path, mib in ((SHARED_MEMORY, given.mib), (place.run, _RUN_MIB), (place.temporary, _TMP_MIB)):
        _mount(path, mib)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # They are for the command, which gets them, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    environment = {_VARIABLE: str(given.base), "XDG_RUNTIME_DIR": str(place.run), "TMPDIR": str(place.temporary)}
    child = os.posix_spawnp(
        given.command[0],
        given.command,
        {**os.environ, **environment},
        setsigdef=[signal.SIGINT, signal.SIGTERM],
    )
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
