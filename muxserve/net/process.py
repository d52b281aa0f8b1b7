"""What long-running processes of the fleet begin with: signals that a poller sees, and the parent's death."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import traceback
from collections.abc import Collection

# Who started a process: by the time it asks for its parent, that may have ended and another be its parent.
PARENT_VARIABLE = "MUXSERVE_PARENT"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# A process that has had nothing to do for so long gives freed memory back. That takes it some milliseconds, and what
# comes next takes a little longer, since the memory must be had anew.
TRIM_SECONDS = 5.0
_PASSED = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


class Signals:
    """Turns signals into something that a poller can wait for, also those that whoever started this has held back until
    now."""

    def __init__(self, numbers: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def fileno(self) -> int:
        """What becomes readable."""
        return self._reader.fileno()

    def take(self) -> set[int]:
        """The signals since the last call."""
        try:
            return set(self._reader.recv(256))
        except BlockingIOError:
            return set()


def die_with_parent() -> bool:
    """Be sent SIGTERM when the process that started this ends; false if it has ended already.

    A parent that ended before this is called is noticed if it has left its pid in `PARENT_VARIABLE`.
    """
    parent = int(os.environ.pop(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


def close_inherited(given: Collection[str] = ()) -> None:
    """Close every descriptor from 3 on that this process was started with: a shell, a test or an editor may have left
    its locks and pipes open, and a server that runs for weeks would hold them.

    What was passed on purpose stays: descriptors that `given` arguments name (`/dev/fd/63`, as of `<(command)`), and
    those of systemd's socket activation. To be called before anything is opened.
    """
    keep = {int(found[1]) for each in given if (found := _PASSED.fullmatch(each))}
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        keep |= set(range(3, 3 + int(os.environ.get("LISTEN_FDS", "0"))))
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in keep:
            with contextlib.suppress(OSError):  # that of the directory just read
                os.close(number)


def give_way(niceness: int) -> None:
    """Have all threads of this process, and those that they start, be by so much nicer than they were (nice(2)).
    Nothing makes them less nice again."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)


def trim() -> None:
    """Give the system back what the C library keeps of freed memory."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only
    if found is not None:
        found(0)


class IdleTrim:
    """Gives the system back what the C library keeps of freed memory, once after each time in which there was work.

    Freed memory stays with its process otherwise: one that an overload has made large would stay so.
    """

    def __init__(self) -> None:
        self._worked = False
        self._idle_since: float | None = None

    def busy(self) -> None:
        """There is work."""
        self._worked = True
        self._idle_since = None

    def idle(self, now: float) -> None:
        """There is none at `now` (monotonic seconds)."""
        if not self._worked:
            return
        if self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= TRIM_SECONDS:
            self._worked = False
            trim()


_TRACEBACK = "Traceback (most recent call last)"
_MOST_WORDS = 500


def words(error: BaseException) -> str:
    """An error in one line, for the controller: its type, and what was wrong rather than what was being done.

    An error without a text, as of `assert`, is told with the line of source that raised it.
    """
    return f"{type(error).__name__}: {_message(error)}"[:_MOST_WORDS]


def _message(error: BaseException) -> str:
    details = getattr(error, "errors", None)
    if callable(details):  # pydantic's own text begins with how many there are, and ends with a link
        with contextlib.suppress(Exception):
            found = [
                str(each["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ").strip()
                for each in details()
            ]
            if told := "; ".join(text.splitlines()[0] for text in found if text):
                return told
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return words(cause) if cause is not None and str(cause).strip() else _raised_at(error)
    if any(line.startswith(_TRACEBACK) for line in lines):
        return lines[-1]  # of another process
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]


def _raised_at(error: BaseException) -> str:
    """The line of source that raised `error`, and where it stands."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    if not frames:
        return "nothing more is known"
    (frame,) = frames
    file = frame.filename.rpartition("site-packages/")[2]
    return f"`{frame.line}` in {file}, line {frame.lineno}" if frame.line else f"in {file}, line {frame.lineno}"


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; `parent` guards against its having died already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent dies, so that their end can be seen and nothing is left behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_title(name: str) -> None:
    """Name the process for `ps`."""
    import setproctitle

    setproctitle.setproctitle(f"muxserve {name}")
