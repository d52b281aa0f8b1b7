"""Memory that moves behind a file, in processes of their own: of this one nothing shall move."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMON = """
import ctypes, gc, mmap, os, re, resource, sys, tempfile, threading
import numpy as np
from muxserve.memory import Hibernation

BYTES = 32 << 20
file = tempfile.TemporaryFile(dir=sys.argv[1], buffering=0)
random = np.random.default_rng(1)
weights = random.integers(0, 256, BYTES, dtype=np.uint8)
expected = weights[::4097].copy()
small = [random.integers(0, 256, 5000, dtype=np.uint8) for _ in range(2000)]
sums = [int(each.sum()) for each in small]

def private():
    text = open("/proc/self/smaps_rollup").read()
    return int(re.search(r"Private_Dirty: +([0-9]+)", text)[1]) << 10

def same():
    return np.array_equal(weights[::4097], expected) and [int(each.sum()) for each in small] == sums

def everything(hibernation, seconds=60.0):
    moved = 0
    while True:
        now, done = hibernation.move(seconds)
        moved += now
        if done:
            return moved
"""


def run(program: str, directory: Path) -> str:
    """What `program` prints."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ran = subprocess.run(
        [sys.executable, "-c", COMMON + program, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_memory_moves_and_is_the_same(tmp_path: Path) -> None:
    run(
        """
before = private()
hibernation = Hibernation(file.fileno(), 1 << 14)
assert everything(hibernation) > BYTES
assert before - private() > BYTES - (4 << 20), (before, private())
assert same()
assert hibernation.file_bytes >= BYTES
""",
        tmp_path,
    )


def test_a_child_has_it_and_what_it_writes_is_its_own(tmp_path: Path) -> None:
    run(
        """
hibernation = Hibernation(file.fileno(), 1 << 14)
everything(hibernation)
pid = os.fork()
if not pid:
    right = same()
    weights[:] = 7
    right = right and weights.max() == 7
    os._exit(0 if right else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert same()
""",
        tmp_path,
    )


def test_what_was_written_since_goes_to_its_old_place(tmp_path: Path) -> None:
    run(
        """
hibernation = Hibernation(file.fileno(), 1 << 14)
everything(hibernation)
first = hibernation.file_bytes
weights[4097 * 100] = expected[100] = expected[100] ^ 0xFF
for _ in range(5):
    weights[5] += 1
    assert 0 < everything(hibernation) < BYTES // 4
assert same()
assert hibernation.file_bytes - first < BYTES // 4, (first, hibernation.file_bytes)
""",
        tmp_path,
    )


def test_it_goes_on_where_the_time_was_over(tmp_path: Path) -> None:
    run(
        """
hibernation = Hibernation(file.fileno(), 1 << 14)
moved, done = hibernation.move(0.0)
assert (moved, done) == (0, False)
calls = 0
while not hibernation.move(0.001)[1]:
    calls += 1
    assert same()
assert calls > 1
""",
        tmp_path,
    )


def test_memory_of_pages_that_a_parent_shares_stays(tmp_path: Path) -> None:
    run(
        """
pid = os.fork()
if not pid:
    hibernation = Hibernation(file.fileno(), 1 << 14)
    moved = everything(hibernation)
    os._exit(0 if moved < BYTES // 2 and same() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert same()
""",
        tmp_path,
    )


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """As far as the file may grow."""
    run(
        """
hibernation = Hibernation(file.fileno(), 1 << 14)
assert not hibernation.move(0.0)[1]  # the file reaches far beyond what is in use
resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES // 2, BYTES // 2))
try:
    everything(hibernation)
except RuntimeError as error:
    print(error)
else:
    raise AssertionError("it fits")
assert same()
weights[5] = 1
assert same()
""",
        tmp_path,
    )


def test_a_limit_on_files_is_told_at_once(tmp_path: Path) -> None:
    said = run(
        """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    Hibernation(file.fileno(), 1 << 14).move(1.0)
except RuntimeError as error:
    print(error)
assert same()
""",
        tmp_path,
    )
    assert said == "cannot make the file large enough: File too large\n"


def test_not_with_other_threads(tmp_path: Path) -> None:
    said = run(
        """
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
try:
    Hibernation(file.fileno(), 1 << 14).move(1.0)
except RuntimeError as error:
    print(error)
over.set()
thread.join()
""",
        tmp_path,
    )
    assert said == "the process has other threads\n"


def test_memory_can_grow_shrink_and_be_freed_afterwards(tmp_path: Path) -> None:
    """The C library enlarges a mapping in place, cuts it, and has what was freed again."""
    run(
        """
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
blocks = [libc.malloc(size) for size in (1 << 20, 40 << 20, 70 << 20)]
for block in blocks:
    ctypes.memset(block, 0x5A, 1 << 20)
ctypes.memset(blocks[1], 0x5A, 40 << 20)
hibernation = Hibernation(file.fileno(), 1 << 14)
everything(hibernation)
for size in (200 << 20, 300 << 20, 2 << 20):
    blocks = [libc.realloc(block, size) for block in blocks]
    for block in blocks:
        assert ctypes.string_at(block, 1 << 20) == bytes([0x5A]) * (1 << 20)
        ctypes.memset(block + (1 << 20), 1, size - (1 << 20))
    everything(hibernation)
for block in blocks:
    libc.free(block)
del weights, small
gc.collect()
again = np.zeros(BYTES, dtype=np.uint8)
assert not again.any()
lots = [np.zeros(3000, dtype=np.uint8) for _ in range(20000)]
assert not any(each.any() for each in lots)
""",
        tmp_path,
    )


def test_new_memory_of_a_thread_is_zero(tmp_path: Path) -> None:
    """A heap of a thread grows again where it has shrunk, and the C library takes that for zero."""
    run(
        """
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.calloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.calloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.malloc_trim.argtypes = [ctypes.c_size_t]

def fill():
    blocks = [libc.malloc(100_000) for _ in range(300)]
    for block in blocks:
        ctypes.memset(block, 0xEE, 100_000)
    return blocks

def in_thread(work, result):
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    while len(os.listdir("/proc/self/task")) > 1:  # the kernel still ends it
        pass

result = []
in_thread(fill, result)
everything(Hibernation(file.fileno(), 1 << 14))

def empty():
    for block in result[0]:
        libc.free(block)
    libc.malloc_trim(0)
    return all(
        ctypes.string_at(libc.calloc(1, 100_000), 100_000) == bytes(100_000) for _ in range(300)
    )

in_thread(empty, result)
assert result[1]
""",
        tmp_path,
    )


def test_locked_memory_stays(tmp_path: Path) -> None:
    run(
        """
area = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area[:] = bytes([3]) * (1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
assert ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(1 << 16)) == 0
everything(Hibernation(file.fileno(), 1 << 14))
maps = [line for line in open("/proc/self/maps") if int(line.split("-")[0], 16) == address]
assert maps and maps[0].split()[4] == "0", maps
assert area[:] == bytes([3]) * (1 << 20)
""",
        tmp_path,
    )


SLEEPING = """
from muxserve.forks import hibernation
from muxserve.forks.hibernation import HibernationError, SleepingMemory

def failure(memory):
    beats = []
    try:
        memory.move(lambda: beats.append(1))
    except HibernationError as error:
        print(error)
    assert same()
    return len(beats)
"""


def test_a_sleeping_model_s_memory_moves_with_signs_of_life(tmp_path: Path) -> None:
    run(
        SLEEPING
        + """
hibernation._SLICE_SECONDS = 0.001
beats = []
memory = SleepingMemory(sys.argv[1], 60.0)
assert memory.move(lambda: beats.append(1)) > BYTES
assert len(beats) > 2
memory.write_out()
memory.read_ahead()
assert same()
assert memory.move(lambda: None) < BYTES // 4
assert os.listdir(sys.argv[1]) == []
""",
        tmp_path,
    )


def test_a_full_disk_and_a_slow_one_are_told_before_and_while_memory_moves(tmp_path: Path) -> None:
    said = run(
        SLEEPING
        + """
hibernation.KEPT_FREE_BYTES = 1 << 60
assert failure(SleepingMemory(sys.argv[1], 60.0)) == 0
hibernation.KEPT_FREE_BYTES = 0
behind, hibernation._is_behind = hibernation._is_behind, lambda more: True
assert failure(SleepingMemory(sys.argv[1], 60.0)) == 0
hibernation._is_behind = behind
hibernation._SLICE_SECONDS = 0.001
assert failure(SleepingMemory(sys.argv[1], 0.0)) == 1
assert failure(SleepingMemory(sys.argv[1] + "/none", 60.0)) == 0
""",
        tmp_path,
    ).splitlines()
    assert len(said) == 4
    assert "has only" in said[0]
    assert "MiB free" in said[0]
    assert said[1] == "the disks have not written yet what they were given"
    assert "MiB in 0.0 s" in said[2]
    assert "No such file or directory" in said[3]
