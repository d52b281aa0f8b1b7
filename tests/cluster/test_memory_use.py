"""What a fleet's processes take, from a made-up /proc and from the real one."""

from __future__ import annotations

import os
from pathlib import Path

from muxserve.cluster.memory_use import below, measure, process_tree
from muxserve.net.process_memory import memory_of

KIB = 1024


def process(proc: Path, pid: int, parent: int, pss: int, private: int, shared_memory: int = 0) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) S {parent} 1 1 0")
    (proc / str(pid) / "smaps_rollup").write_text(
        "55d0-7ffc ---p 00000000 00:00 0    [rollup]\n"
        f"Pss:  {pss} kB\nPss_Shmem: {shared_memory} kB\nPrivate_Clean: 0 kB\nPrivate_Dirty: {private} kB\n"
    )


def test_what_comes_free_with_a_model_is_told_from_what_all_share(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, 999, 999)  # not of the fleet
    process(tmp_path, 10, 1, 50, 40)
    process(tmp_path, 11, 10, 70, 10)  # warm parent: 60 of it are its part of what all of them share
    process(tmp_path, 20, 11, 200, 30)  # a model parent and its engines
    process(tmp_path, 21, 20, 150, 20, shared_memory=15)
    process(tmp_path, 22, 20, 150, 20, shared_memory=15)
    process(tmp_path, 30, 11, 80, 40)  # one that is only being forked
    report = measure("u0", 10, {"a": 20, "b": 30}, [11], proc=tmp_path)
    assert report.total == (50 + 70 + 200 + 150 + 150 + 80) * KIB
    assert report.models == {"a": (500 - 30 - 3 * 60) * KIB, "b": 40 * KIB}
    assert report.pools == 30 * KIB


def test_a_wake_took_at_most_what_its_process_had_before_it_forked_engines(tmp_path: Path) -> None:
    process(tmp_path, 11, 0, 70, 10)
    process(tmp_path, 20, 11, 300, 30)
    process(tmp_path, 21, 20, 200, 25)
    (tmp_path / "20" / "status").write_text("Name:\tpython\nVmHWM:\t  950 kB\nVmRSS:\t  900 kB\nThreads:\t1\n")
    report = measure("u0", 11, {"a": 20}, [11], proc=tmp_path)
    assert report.models == {"a": (300 + 200 - 2 * 60) * KIB}
    assert report.wake_peaks == {"a": (380 - 25 + 50) * KIB}


def test_processes_that_have_ended_take_nothing(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 50, 40)
    assert memory_of(11, tmp_path).pss == 0
    assert measure("u0", 10, {"a": 99}, [98], proc=tmp_path).models == {"a": 0}


def test_this_process_is_found_and_takes_something() -> None:
    tree = process_tree()
    assert os.getpid() in tree[os.getppid()]
    assert os.getpid() in below(tree, os.getppid())
    assert memory_of(os.getpid()).pss >= memory_of(os.getpid()).private > 0
