"""What processes of the fleet begin with: the parent's death is noticed, and what others had open is closed."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pydantic
import pytest

from muxserve.net.process import PARENT_VARIABLE, words

ASK = "import sys; from muxserve.net.process import die_with_parent; sys.exit(0 if die_with_parent() else 7)"


def asked(parent: int | None) -> int:
    environment = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    if parent is not None:
        environment[PARENT_VARIABLE] = str(parent)
    return subprocess.run([sys.executable, "-c", ASK], env=environment).returncode


def test_a_living_parent_is_known() -> None:
    assert asked(os.getpid()) == 0
    assert asked(None) == 0


def test_a_parent_that_has_ended_before_is_noticed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert asked(gone.pid) == 7


GIVE_WAY = """
import os, threading
from muxserve.net.process import give_way
ends = threading.Event()
before = threading.Thread(target=ends.wait)
before.start()
give_way(7)
after = threading.Thread(target=ends.wait)
after.start()
print(*(os.getpriority(os.PRIO_PROCESS, each.native_id) for each in (threading.main_thread(), before, after)))
ends.set()
"""


def test_all_threads_give_way() -> None:
    ran = subprocess.run([sys.executable, "-c", GIVE_WAY], capture_output=True, text=True, check=True)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert ran.stdout.split() == [str(min(own + 7, 19))] * 3


CLOSE = """
import os, sys
from muxserve.net.process import close_inherited
close_inherited(sys.argv)
print(*(fd for fd in range(3, 200) if os.path.exists(f"/proc/self/fd/{fd}")))
print("closed", flush=True)
sys.stdin.read()
"""


def test_locks_and_pipes_of_others_are_not_kept(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    reader, writer = os.pipe()
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = subprocess.Popen(
        [sys.executable, "-c", CLOSE], pass_fds=[lock, writer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n", "nothing is open"
    os.close(lock)
    os.close(writer)
    with open(tmp_path / "lock") as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.read(reader, 1) == b"", "the pipe has no writer left"
    os.close(reader)
    process.communicate("")


def test_what_was_passed_on_purpose_stays(tmp_path: Path) -> None:
    given = os.open(tmp_path / "given", os.O_RDWR | os.O_CREAT)
    named = [sys.executable, "-c", CLOSE, f"/dev/fd/{given}"]
    ended = subprocess.run(named, pass_fds=[given], input="", capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[0] == str(given)
    # As systemd does it.
    activated = ["bash", "-c", f'exec 3<&{given} {given}<&-; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@"', "sh", *named[:3]]
    ended = subprocess.run(activated, pass_fds=[given], input="", capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[0] == "3"
    os.close(given)


TRIM = """
import ctypes, os
from muxserve.net.process import TRIM_SECONDS, IdleTrim

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
trim = IdleTrim()
trim.busy()
pieces = [libc.malloc(64 << 10) for _ in range(1600)]
for piece in pieces:
    ctypes.memset(ctypes.c_void_p(piece), 1, 64 << 10)
# What lies at the end is in use, so that the C library gives nothing back by itself.
for piece in pieces[:-1]:
    libc.free(ctypes.c_void_p(piece))
kept = resident()
trim.idle(0.0)
trim.idle(TRIM_SECONDS / 2)
assert resident() > kept - (10 << 20), "given back while work may come at once"
trim.idle(TRIM_SECONDS)
print(kept - resident())
"""


def test_what_was_freed_is_given_back_when_there_is_no_work() -> None:
    given = subprocess.run([sys.executable, "-c", TRIM], capture_output=True, text=True)
    assert int(given.stdout) > 90 << 20, given.stderr


class Options(pydantic.BaseModel):
    kind: str

    @pydantic.field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        raise ValueError(f"model type {kind} is not known\n\nYou can update the library")


def fails_silently() -> None:
    assert os.sep == "no separator"


def fails_for_another_reason() -> None:
    try:
        raise OSError("the disk is full")
    except OSError as error:
        raise RuntimeError from error


def raised(error: Exception) -> Callable[[], None]:
    def fails() -> None:
        raise error

    return fails


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (raised(ValueError("no such thing\nand more of it")), "ValueError: no such thing"),
        (lambda: Options(kind="x"), "ValidationError: model type x is not known"),
        (raised(RuntimeError("Error(s) in loading:\n\tsize of a")), "RuntimeError: Error(s) in loading: size of a"),
        (
            raised(RuntimeError("Worker failed:\nTraceback (most recent call last):\n  File x\nKeyError: 'rope'\n")),
            "RuntimeError: KeyError: 'rope'",
        ),
        (fails_for_another_reason, "RuntimeError: OSError: the disk is full"),
        (raised(ValueError("x" * 1000)), "ValueError: " + "x" * 488),
    ],
)  # fmt: skip
def test_an_error_says_what_was_wrong(fails: Callable[[], object], expected: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fails()
    assert words(caught.value) == expected


def test_an_error_without_a_text_says_where_it_was_raised() -> None:
    with pytest.raises(AssertionError) as caught:
        fails_silently()
    error = AssertionError().with_traceback(caught.tb)
    assert words(error).startswith('AssertionError: `assert os.sep == "no separator"` in ')
    assert words(MemoryError()) == "MemoryError: nothing more is known"
