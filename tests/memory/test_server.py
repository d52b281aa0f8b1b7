"""Starting the manager: its command line, its configuration, its messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from muxserve.memory import server
from muxserve.memory._native import Config, PoolConfig
from muxserve.memory.client import MemoryClient
from muxserve.spec import GpuSpec, PoolSpec, UnitSpec, save
from tests.memory.support import model, unit_spec
from tests.support.patience import eventually

Start = Callable[[UnitSpec], subprocess.Popen[bytes]]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(server.binary()), *arguments], capture_output=True, text=True, timeout=60)


def test_help() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "--socket PATH" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--socket and --config are needed"),
        (["--socket"], "--socket needs a value"),
        (["--color"], 'unknown argument "--color"'),
        (["--settle-ms", "soon"], "whole number from 0 to 3600000"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "usage:" in result.stderr


def encoded(prefix: str = "x", pools: Sequence[PoolConfig] = (PoolConfig("p", 1, 9),)) -> bytes:
    return Config(prefix, ranks=1, device="posix", devices=[], ipc="auto", pools=pools, models=[]).encode()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "too short"),
        (b'{"prefix": "x", "pools": [], "models": []}', "no configuration of a memory manager"),
        (encoded()[:-4], "bytes behind its header"),
        (encoded(pools=()), "at least one pool"),
        (encoded(pools=[PoolConfig("p", 1, 1)]), 'pool "p": num_pages: 1 is not between 2'),
        (encoded("../x"), "prefix"),
    ],
)
def test_a_wrong_configuration_is_explained(tmp_path: Path, contents: bytes, message: str) -> None:
    config = tmp_path / "memory.config"
    config.write_bytes(contents)
    result = run("--socket", str(tmp_path / "s"), "--config", str(config))
    assert result.returncode == 2
    assert message in result.stderr
    assert str(config) in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    result = run("--socket", str(tmp_path / "s"), "--config", str(tmp_path / "nothing.config"))
    assert result.returncode == 2
    assert "nothing.config" in result.stderr
    assert "No such file" in result.stderr


def test_quotas_over_the_pool_are_refused(tmp_path: Path) -> None:
    of = unit_spec(tmp_path, 100, [model("a", 2, 3, 20, 60), model("b", 1, 2, 40, 41)])
    with pytest.raises(RuntimeError, match=r"status 2: .*sum to 101 pages, more than the pool's 100"):
        server.start(of)


def test_a_pool_larger_than_shared_memory_is_refused(tmp_path: Path) -> None:
    huge = msgspec.structs.replace(unit_spec(tmp_path, models=[]), pools=[PoolSpec("p", 1 << 30, 1 << 16)])
    with pytest.raises(RuntimeError, match=r"status 3: .*make the pools smaller"):
        server.start(huge)
    assert not list(Path("/dev/shm").glob(f"{server.prefix(huge)}.pool.*"))
    server.remove_segments(huge)


def test_blocks_of_the_dead_are_kept_on_gpus_only(tmp_path: Path) -> None:
    """What an engine had launched there may write into them after its end; on a CPU nothing outlives a process."""
    of = unit_spec(tmp_path)
    assert "--linger-ms" not in server.command(of)
    line = server.command(msgspec.structs.replace(of, gpu=GpuSpec(["GPU-a"])))
    assert line[line.index("--linger-ms") + 1] == "500"


def test_models_of_several_pools(start: Start, tmp_path: Path) -> None:
    of = msgspec.structs.replace(
        unit_spec(tmp_path),
        pools=[PoolSpec("p", 64, 50), PoolSpec("q", 4096, 30)],
        models=[model("in p", 2, 3, 20, 49, "p"), model("in q", 1, 2, 40, 29, "q")],
    )
    start(of)
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        p, q = client.map("in p"), client.map("in q")
        assert (p.pool.shape, q.pool.shape) == ((50, 64), (30, 4096))
        assert len(client.step(p, reserve=99, partial=True).reserved) == 8
        assert len(client.step(q, reserve=99, partial=True).reserved) == 14
        assert (p.counters.free_pages, q.counters.free_pages) == (1, 1)


def test_names_of_any_language(start: Start, tmp_path: Path) -> None:
    of = unit_spec(tmp_path, models=[model('org/modèle "β" 模型', 1, 1, 4, 4)])
    start(of)
    with MemoryClient(of.memory_socket, "kunde ✓", timeout_s=60) as client:
        assert len(client.step('org/modèle "β" 模型', reserve=1).reserved) == 1
        assert client.stats()["clients"][0]["name"] == "kunde ✓"


def test_only_one_manager_at_a_socket_and_a_prefix(start: Start, small: UnitSpec, tmp_path: Path) -> None:
    start(small)
    with pytest.raises(RuntimeError, match=r"status 3: .*another memory manager is running"):
        server.start(small)
    config = server.manager_config(small)
    config.prefix += "-other"
    path = tmp_path / "other.config"
    path.write_bytes(config.encode())
    result = run("--socket", small.memory_socket, "--config", str(path))
    assert result.returncode == 3
    assert "something is listening" in result.stderr
    for segment in Path("/dev/shm").glob(f"{config.prefix}.*"):
        segment.unlink()
    with MemoryClient(small.memory_socket, "c", timeout_s=60) as client:  # the first one is unharmed
        assert len(client.step("a", reserve=1).reserved) == 1


def test_a_stale_socket_is_replaced(start: Start, small: UnitSpec) -> None:
    process = start(small)
    process.kill()
    process.wait()
    assert os.path.exists(small.memory_socket)
    start(small)
    MemoryClient(small.memory_socket, "c", timeout_s=60).close()


def test_only_this_user_may_connect(start: Start, small: UnitSpec) -> None:
    start(small)
    assert os.stat(small.memory_socket).st_mode & 0o777 == 0o600
    for segment in Path("/dev/shm").glob(f"{server.prefix(small)}.*"):
        assert segment.stat().st_mode & 0o777 == 0o600


def test_a_log_that_was_renamed_is_opened_anew(small: UnitSpec, tmp_path: Path) -> None:
    path = tmp_path / "memory.log"
    with path.open("ab") as log:
        process = server.start(small, stderr=log)
    path.rename(tmp_path / "memory.log.1")
    eventually(path.exists, "a new log")
    assert path.stat().st_mode & 0o777 == 0o600
    process.terminate()
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


def test_it_dies_with_its_parent(small: UnitSpec, tmp_path: Path) -> None:
    plan = tmp_path / "unit.json"
    save(small, plan)
    code = (
        "import os, signal, sys\n"
        "from muxserve.spec import load\n"
        "from muxserve.memory import server\n"
        "print(server.start(load(sys.argv[1])).pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run([sys.executable, "-c", code, str(plan)], capture_output=True, text=True, timeout=120)
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)

    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(gone, "the manager has ended")
    assert not list(Path("/dev/shm").glob(f"{server.prefix(small)}.*"))  # stopped, not killed


def test_the_pool_takes_memory_only_where_it_is_written(start: Start, tmp_path: Path) -> None:
    of = unit_spec(tmp_path, 1_000_000)  # 64 MB
    start(of)
    segment = Path(f"/dev/shm/{server.prefix(of)}.pool.0")
    assert segment.stat().st_size == 64_000_000
    assert segment.stat().st_blocks == 0
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        view = client.map("a")
        view.pool[view.page_table[client.step(view, reserve=10).reserved].reshape(-1)] = 1
    assert segment.stat().st_blocks * 512 <= 8192


def test_every_rank_has_memory_of_its_own_and_one_page_table(start: Start, tmp_path: Path) -> None:
    of = msgspec.structs.replace(unit_spec(tmp_path), ranks=2)
    start(of)
    name = of.models[0].name
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        first, second = client.map(name), client.map(name, rank=1)
        block = client.step(first, reserve=1).reserved
        page = int(first.page_table[block[0]].reshape(-1)[0])
        assert (first.page_table[block[0]] == second.page_table[block[0]]).all()
        first.pool[page] = 1
        second.pool[page] = 2
        assert (client.map(name).pool[page] == 1).all()
        with pytest.raises(ValueError, match="on 2 ranks; there is no rank 2"):
            client.map(name, rank=2)
