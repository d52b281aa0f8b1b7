"""The controller's pieces on their own."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.cluster import machine
from muxserve.cluster.events import PartId
from muxserve.cluster.processes import Process, exit_words, spawn
from muxserve.cluster.restarts import RestartPolicy
from muxserve.cluster.steps import ChangeLock
from muxserve.cluster.supervision import GaveUp, Part, PartFailed, Supervisor
from muxserve.cluster.watch import Watch
from muxserve.gpu import nvml
from muxserve.spec.run_dir import LOG_DIRS_KEPT, RunDir, RunDirError, default_base, make_log_dir
from tests.cluster.effects import FakeUnitEffects
from tests.support.patience import PATIENCE


class IdleStarter:
    """A `Starter` that has nothing to start."""

    async def before_start(self, part: Part) -> None:
        pass

    async def start(self, part: Part) -> None:
        raise NotImplementedError

    async def release(self, pid: int) -> None:
        raise NotImplementedError


def test_the_first_restart_is_quick_and_the_last_death_is_final() -> None:
    policy = RestartPolicy(max_deaths=5, window=60, delays=(0.05, 0.5, 1.0, 2.0))
    assert [policy.died(float(now)) for now in range(5)] == [0.05, 0.5, 1.0, 2.0, None]


def test_old_deaths_are_forgotten() -> None:
    policy = RestartPolicy(max_deaths=3, window=60, delays=(0.1, 0.2))
    assert [policy.died(now) for now in (0.0, 10.0, 65.0, 66.0)] == [0.1, 0.2, 0.2, None]
    policy = RestartPolicy(max_deaths=3, window=60, delays=(0.1, 0.2))
    assert [policy.died(now) for now in (0.0, 60.0, 120.0, 180.0)] == [0.1] * 4


def test_what_does_not_even_come_up_is_tried_ever_more_rarely() -> None:
    policy = RestartPolicy(max_deaths=None)
    assert policy.died(0.0) == 0.05
    assert [policy.died(100.0 * k, came_up=False) for k in range(1, 8)] == [0.05, 1.0, 5.0, 15.0, 60.0, 60.0, 60.0]
    assert policy.failed_starts == 7
    assert policy.died(1000.0) == 0.05
    assert policy.failed_starts == 0


def test_starts_that_are_killed_from_outside_count_half() -> None:
    policy = RestartPolicy(max_deaths=None)
    policy.died(0.0, killed=True)
    assert [policy.died(100.0 * k, came_up=False, killed=True) for k in range(1, 7)] == [
        0.05,
        0.05,
        0.05,
        1.0,
        1.0,
        5.0,
    ]
    assert policy.failed_starts == 3


def test_one_that_is_killed_over_and_over_is_never_long_away() -> None:
    policy = RestartPolicy(max_deaths=None)
    assert max(policy.died(2.0 * k) or 0.0 for k in range(100)) == 2.0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.integers(2, 6))
def test_given_up_exactly_when_there_were_too_many(gaps: list[float], most: int) -> None:
    policy = RestartPolicy(max_deaths=most, window=60, delays=(0.1,))
    deaths: list[float] = []
    for gap in gaps:
        now = (deaths[-1] if deaths else 0.0) + gap
        deaths.append(now)
        given_up = policy.died(now) is None
        assert given_up == (sum(now - 60 < death for death in deaths) >= most)
        if given_up:
            return


async def test_a_process_and_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = spawn([sys.executable, "-c", "print('words'); raise SystemExit(3)"], log)
    await process.wait()
    assert (process.returncode, process.running) == (3, False)
    assert log.read_text() == "words\n"
    assert log.stat().st_mode & 0o777 == 0o600
    process.send(signal.SIGKILL)  # nothing happens


async def test_a_signal_that_comes_too_early_waits(tmp_path: Path) -> None:
    program = """
import os, select, signal
os.kill(os.getpid(), signal.SIGHUP)  # before anything else
from muxserve.net.process import Signals
signals = Signals((signal.SIGTERM, signal.SIGHUP))
select.select([signals], [], [], 30)
print(signals.take() == {signal.SIGHUP})
"""
    process = spawn([sys.executable, "-c", program], tmp_path / "log", held=[signal.SIGHUP])
    await process.wait()
    assert process.returncode == 0
    assert (tmp_path / "log").read_text() == "True\n"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "ours is as before"


async def test_stop_asks_first_and_insists_later(tmp_path: Path) -> None:
    polite = spawn([sys.executable, "-c", "import time; time.sleep(100)"], tmp_path / "log")
    await polite.stop(60)
    assert polite.returncode == -signal.SIGTERM
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
    )
    stubborn = spawn([sys.executable, "-c", code], tmp_path / "log", pipe_stdout=True)
    assert stubborn.stdout is not None
    assert await asyncio.to_thread(stubborn.stdout.readline) == b"up\n"
    await stubborn.stop(0.05)
    assert stubborn.returncode == -signal.SIGKILL


async def test_a_client_of_a_gpu_is_released_before_it_is_killed(tmp_path: Path) -> None:
    """NVIDIA supports the kill of an MPS client only then."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(100)"
    released: list[bool] = []

    class Releases(IdleStarter):
        async def release(self, pid: int) -> None:
            assert part.process is not None
            assert part.process.pid == pid
            released.append(part.process.running)

    part = Part(PartId("engine", "one", "decode"), Releases(), 1.0, releases=True)
    kills: list[Callable[[], Awaitable[None] | None]] = [part.kill, lambda: part.kill_hung(9), lambda: part.stop(0.05)]
    for kill in kills:
        part.process = spawn([sys.executable, "-c", code], tmp_path / "log", pipe_stdout=True)
        assert part.process.stdout is not None
        await asyncio.to_thread(part.process.stdout.readline)
        if (stopping := kill()) is not None:
            await stopping
        await part.process.wait()
        assert part.process.returncode == -signal.SIGKILL
    assert released == [True, True, True]


async def test_what_waits_for_others_has_no_time_limit() -> None:
    class Waits(IdleStarter):
        async def start(self, part: Part) -> None:
            part.pause()
            await asyncio.sleep(0.1)
            part.resume()
            raise PartFailed("it came that far")

    part = Part(PartId("weights", "one"), Waits(), 0.05)
    supervisor = Supervisor(FakeUnitEffects(), Watch(None, ""))
    with pytest.raises(GaveUp, match="it came that far"):
        await supervisor.keep(part)


async def test_ctrl_c_does_not_reach_what_was_spawned(tmp_path: Path) -> None:
    process = spawn([sys.executable, "-c", "import time; time.sleep(100)"], tmp_path / "log")
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert os.getsid(process.pid) == os.getsid(0)
    await process.stop(5)


async def test_a_pid_that_has_gone() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    with pytest.raises(ProcessLookupError):
        Process(pid)


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exited with status 0"), (3, "status 3"), (-15, "killed by SIGTERM"), (-9, "SIGKILL")]
)
def test_ends_in_words(code: int | None, words: str) -> None:
    assert words in exit_words(code)


def test_a_run_directory_is_ours_alone_and_short(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "base")
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert run_dir.base.stat().st_mode & 0o777 == 0o700
    run_dir.remove()
    assert not run_dir.path.exists()


def test_what_a_dead_controller_left_is_swept_and_what_is_in_use_stays(tmp_path: Path) -> None:
    in_use, dead = RunDir(tmp_path), RunDir(tmp_path)
    dead.release()
    assert dead.path.exists()
    RunDir(tmp_path)
    assert in_use.path.exists()
    assert not dead.path.exists()


def test_logs_that_are_kept_outlive_the_run_and_the_last_runs_stay(tmp_path: Path) -> None:
    kept = tmp_path / "logs"
    for number in range(LOG_DIRS_KEPT + 2):
        run_dir = RunDir(tmp_path / "base", kept)
        unit = run_dir.path / "u0"
        unit.mkdir()
        assert make_log_dir(unit) == make_log_dir(unit) == unit / "logs"
        (run_dir.logs / "vllm.log").write_text(f"run {number}")
        (unit / "logs/memory.log").write_text("of the unit")
        run_dir.remove()
    assert not unit.exists()
    assert len(list(kept.iterdir())) == LOG_DIRS_KEPT
    last = next(kept.glob(f"*-{run_dir.path.name}"))
    assert (last / "vllm.log").read_text() == f"run {number}"
    assert (last / "u0/memory.log").read_text() == "of the unit"
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"cannot write logs to .*file"):
        RunDir(tmp_path / "base", tmp_path / "file")


def test_a_base_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RunDirError, match="not a directory of yours"):
        RunDir(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError):
        RunDir(tmp_path / "file")


def test_a_base_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="XDG_RUNTIME_DIR"):
        RunDir(tmp_path / ("x" * 100))


def test_where_run_directories_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_base() == tmp_path / "muxserve"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert default_base() == Path(tempfile.gettempdir()) / f"muxserve-{os.getuid()}"


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = machine.this_machine()
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    assert here.memory_bytes > 1 << 28
    assert here.page_bytes == mmap.PAGESIZE
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("150000 100000")
    (tmp_path / "memory.max").write_text(str(1 << 30))
    assert machine.usable_cores() == 1
    assert machine.usable_memory() == 1 << 30
    (tmp_path / "cpu.max").write_text("max 100000")
    (tmp_path / "memory.max").write_text("max")
    assert machine.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cpuinfo", "avx512", "amx"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f avx512bw\n", True, False),
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2 amx_tile\n", True, True),
        ("processor\t: 0\nflags\t\t: fpu sse2 avx2\n", False, False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False, False),
        ("", True, True),
    ],
)
def test_what_cores_can_compute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpuinfo: str, avx512: bool, amx: bool
) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    found = machine.this_machine()
    assert (found.avx512, found.amx) == (avx512, amx)


@pytest.mark.parametrize(
    ("driver", "torch", "refused"),
    [
        ("12.2", "13.0", True), ("12.9", "13.0", True), ("13.0", "13.0", False), ("13.1", "13.0", False),
        ("13.0", "13.1", False), ("13.0", "", False), ("", "13.0", False),
    ],
)  # fmt: skip
def test_a_driver_older_than_torch_s_cuda_is_refused_in_words(driver: str, torch: str, refused: bool) -> None:
    found = nvml.GpuMachine((nvml.Gpu(0, "GPU-a", "NVIDIA H200"),), "535.183.01", driver)
    words = machine.driver_too_old(found, torch)
    assert bool(words) is refused
    if refused:
        assert f"535.183.01 knows CUDA {driver}, but the installed torch" in words
        assert "is built for CUDA 13.0: install a newer driver (580 or later)" in words


def test_gpus_that_torch_cannot_use_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = nvml.GpuMachine((nvml.Gpu(0, "GPU-a", "NVIDIA H200"),), "535.183.01", "12.2")
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    assert machine.fit_for_torch(found).gpus == ()
    with pytest.raises(nvml.GpuChoiceError, match=r"no usable GPU: the NVIDIA driver 535\.183\.01 knows CUDA 12\.2"):
        nvml.choose(machine.fit_for_torch(found), 1)
    monkeypatch.setattr(machine, "torch_cuda", lambda: "12.8")
    assert machine.fit_for_torch(found) == found


@pytest.mark.parametrize(("line", "expected"), [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = None", "")])
def test_torch_says_in_a_file_what_cuda_it_is_for(
    line: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    assert machine.torch_cuda() == expected


async def test_models_are_woken_beside_each_other_and_beside_no_other_change() -> None:
    lock, happened, ends = ChangeLock(), [], {name: asyncio.Event() for name in ("a", "b", "a again", "change", "c")}

    async def hold(name: str, how: AbstractAsyncContextManager[None]) -> None:
        async with how:
            happened.append(name)
            await ends[name].wait()

    async def until_quiet() -> list[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        return happened

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold("a", lock.shared("a")))
        tasks.create_task(hold("b", lock.shared("b")))
        tasks.create_task(hold("a again", lock.shared("a")))
        assert await until_quiet() == ["a", "b"]
        ends["a"].set()
        assert await until_quiet() == ["a", "b", "a again"]
        tasks.create_task(hold("change", lock.alone()))
        await until_quiet()
        tasks.create_task(hold("c", lock.shared("c")))
        ends["b"].set()
        assert await until_quiet() == ["a", "b", "a again"]
        ends["a again"].set()
        assert await until_quiet() == ["a", "b", "a again", "change"]
        ends["change"].set()
        assert await until_quiet() == ["a", "b", "a again", "change", "c"]
        ends["c"].set()


async def test_a_wake_that_is_cancelled_lets_others_go_on() -> None:
    lock = ChangeLock()

    async def hold() -> None:
        async with lock.shared("a"):
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    task.cancel()
    async with lock.alone(), asyncio.timeout(PATIENCE):
        assert task.cancelled()
