"""Pools in GPU memory, over a driver without a GPU: a real manager, real clients, real kills."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from muxserve.memory import _native, server
from muxserve.memory.client import MemoryClient
from muxserve.memory.errors import DeviceMemoryError, MemoryManagerGone
from muxserve.memory.fd_store import FdStore
from muxserve.memory.view import ModelView
from muxserve.spec import GpuSpec, PoolSpec, UnitSpec
from tests.memory.support import unit_spec
from tests.support.patience import eventually

ROOT = Path(__file__).resolve().parents[2]
GPUS = [f"GPU-00010203-0405-0607-0809-0a0b0c0d0e{i:02x}" for i in range(2)]


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver that the C++ tests use, compiled."""
    library = tmp_path_factory.mktemp("driver") / "libfake_cuda.so"
    source = ROOT / "memory_manager/tests/fake_cuda/fake_cuda.cpp"
    subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", "-O0", "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, fake_driver: Path) -> None:
    monkeypatch.setenv("MUXSERVE_CUDA_DRIVER", str(fake_driver))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")


@pytest.fixture
def of(tmp_path: Path) -> UnitSpec:
    return msgspec.structs.replace(unit_spec(tmp_path), gpu=GpuSpec(GPUS[:1]))


@pytest.fixture
def managers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def memory_of(view: ModelView) -> memoryview:
    """The pool as this process has it mapped; device memory of the fake driver can be read."""
    assert view.device_pool is not None
    return memoryview((ctypes.c_char * view.device_pool.bytes).from_address(view.device_pool.address)).cast("B")


def map_in_another_process(of: UnitSpec, code: str) -> str:
    """Run `code` in a new process in which `memory` is the mapped pool of the first model."""
    program = (
        "import sys, ctypes\n"
        "from muxserve.memory.client import MemoryClient\n"
        "client = MemoryClient(sys.argv[1], 'other')\n"
        "view = client.map(sys.argv[2])\n"
        "memory = (ctypes.c_char * view.device_pool.bytes).from_address(view.device_pool.address)\n"
    )
    command = [sys.executable, "-c", program + code, of.memory_socket, of.models[0].name]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("ipc", ["vmm", "legacy"])
def test_processes_share_a_pool(of: UnitSpec, managers: list[subprocess.Popen[bytes]], ipc: str) -> None:
    assert of.gpu is not None
    of = msgspec.structs.replace(of, gpu=msgspec.structs.replace(of.gpu, ipc=ipc))
    managers.append(server.start(of))
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        view = client.map(of.models[0].name)
        assert view.device_pool is not None
        pool = of.pools[0]
        assert view.device_pool.shape == (pool.num_pages, pool.page_bytes)
        assert view.device_pool.device_uuid == GPUS[0]
        assert view.pool.size == 0
        interface = view.device_pool.__cuda_array_interface__
        assert interface["data"] == (view.device_pool.address, False)
        assert interface["shape"] == view.device_pool.shape
        memory_of(view)[:5] = b"pages"
        assert map_in_another_process(of, "print(memory[:5].decode())\nmemory[:5] = b'read!'") == "pages\n"
        assert memory_of(view)[:5] == b"read!"
        # Page tables and books are what they are on CPU.
        assert len(client.step(view, reserve=2).reserved) == 2


def test_each_rank_has_its_gpu(tmp_path: Path, managers: list[subprocess.Popen[bytes]]) -> None:
    of = msgspec.structs.replace(unit_spec(tmp_path), ranks=2, gpu=GpuSpec(GPUS))
    managers.append(server.start(of))
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        first, second = (client.map(of.models[0].name, rank) for rank in range(2))
        assert first.device_pool is not None
        assert second.device_pool is not None
        assert [first.device_pool.device_uuid, second.device_pool.device_uuid] == GPUS
        memory_of(first)[:1], memory_of(second)[:1] = b"a", b"b"
        assert memory_of(first)[:1] == b"a"
        other = client.map(of.models[1].name)
        if of.models[1].pool == of.models[0].pool:
            assert other.device_pool is first.device_pool


MAP = """
import ctypes, sys
from muxserve.memory import _native
mapping = _native.CudaMapping(sys.argv[1], int(sys.argv[2]), read_only=True)
memory = (ctypes.c_char * 7).from_address(mapping.address)
print(memory.raw.decode(), mapping.read_only, flush=True)
memory[0] = b"x"
print("written")
"""


@pytest.mark.parametrize("read_only", [True, False], ids=["read-only", "where the driver cannot"])
def test_exported_memory_is_read_by_others_when_its_maker_is_gone(
    read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As weights are: made by one process, kept as a descriptor, mapped by engines."""
    if not read_only:
        monkeypatch.setenv("FAKE_CUDA_NO_READ_ONLY", "1")
    exported = _native.ExportedMemory(GPUS[1], 3 << 20)
    made = _native.CudaMapping(exported.handle, os.dup(exported.descriptor))
    assert (made.bytes, made.device_uuid, made.read_only) == (4 << 20, GPUS[1], False)  # whole granules
    ctypes.memmove(made.address, b"weights", 7)
    handle, kept = exported.handle, os.dup(exported.descriptor)
    del made, exported
    command = [sys.executable, "-c", MAP, handle, str(kept)]
    done = subprocess.run(command, pass_fds=[kept], capture_output=True, text=True, timeout=60)
    os.close(kept)
    said = done.stdout.split()
    assert said == (["weights", "True"] if read_only else ["weights", "False", "written"])
    assert (done.returncode == 0) is not read_only  # a write into what others compute with ends the writer


def test_whether_a_gpu_can_export_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _native.exports_memory(GPUS[0])
    monkeypatch.setenv("FAKE_CUDA_NO_VMM", "1")
    assert not _native.exports_memory(GPUS[0])
    with pytest.raises(DeviceMemoryError, match="cuMemExportToShareableHandle"):
        _native.ExportedMemory(GPUS[0], 2 << 20)


def test_a_mapping_outlives_the_manager(of: UnitSpec, managers: list[subprocess.Popen[bytes]]) -> None:
    managers.append(server.start(of))
    client = MemoryClient(of.memory_socket, "c", timeout_s=60)
    view = client.map(of.models[0].name)
    memory_of(view)[:4] = b"step"
    managers[0].kill()
    managers[0].wait()
    # An engine in the middle of a step goes on writing, and nothing happens to it.
    assert memory_of(view)[:4] == b"step"
    memory_of(view)[:4] = b"goes"
    client.close()


def test_a_restarted_manager_serves_the_same_memory(of: UnitSpec, managers: list[subprocess.Popen[bytes]]) -> None:
    def start(store: FdStore) -> None:
        fd = store.open_child()
        command = [*server.command(of, die_with_parent=False), "--fd-store", str(fd)]
        managers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(fd,)))

    async def scenario() -> None:
        store = FdStore()
        start(store)
        await asyncio.to_thread(server.wait_ready, managers[0], 40.0)
        client = MemoryClient(of.memory_socket, "c", timeout_s=60)
        view = client.map(of.models[0].name)
        assert view.device_pool is not None
        memory_of(view)[:4] = b"kept"
        managers[0].kill()
        managers[0].wait()
        client.close()
        start(store)
        await asyncio.to_thread(server.wait_ready, managers[1], 40.0)
        assert len(store.names) == len(of.pools)
        again = await asyncio.to_thread(MemoryClient, of.memory_socket, "c", 60)
        mapped = again.map(of.models[0].name)
        # The same object: captured graphs with its address stay good.
        assert mapped.device_pool is view.device_pool
        assert await asyncio.to_thread(map_in_another_process, of, "print(memory[:4].decode())") == "kept\n"
        again.close()
        # Stopped in order, it gives the memory back.
        managers[1].terminate()
        await asyncio.to_thread(managers[1].wait)
        store.open_child()
        assert store.names == ()
        store.close()

    asyncio.run(scenario())


def test_without_a_keeper_the_next_manager_allocates_anew(
    of: UnitSpec, managers: list[subprocess.Popen[bytes]]
) -> None:
    managers.append(server.start(of))
    client = MemoryClient(of.memory_socket, "c", timeout_s=60)
    before = client.map(of.models[0].name).device_pool
    assert before is not None
    managers[0].kill()
    managers[0].wait()
    client.close()
    managers.append(server.start(of))
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as again:
        after = again.map(of.models[0].name).device_pool
        assert after is not None
        assert after.handle != before.handle


def test_a_killed_client_leaves_nothing_behind(of: UnitSpec, managers: list[subprocess.Popen[bytes]]) -> None:
    managers.append(server.start(of))
    with pytest.raises(subprocess.CalledProcessError):
        map_in_another_process(of, "client.step(view, reserve=3)\nimport os\nos.kill(os.getpid(), 9)")
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        view = client.map(of.models[0].name)
        # What it had launched on the GPU may still write there for a while.
        eventually(lambda: view.counters.used_pages == 0, "the blocks of the killed client are free again")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FAKE_CUDA_DEVICES", "0", "no GPU is visible"),
        ("MUXSERVE_CUDA_DRIVER", "/nonexistent/libcuda.so.1", "install the NVIDIA driver, or serve on CPU"),
        ("FAKE_CUDA_MEMORY", "1000", "too little free memory"),
    ],
)
def test_a_manager_that_cannot_start_says_why(
    of: UnitSpec, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(RuntimeError, match=words):
        server.start(of)


def test_a_client_that_cannot_map_says_why(
    of: UnitSpec, managers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    managers.append(server.start(of))
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        monkeypatch.setenv("FAKE_CUDA_FAIL", "cuMemMap=801")
        with pytest.raises(DeviceMemoryError, match=r"mapping the pool .* cuMemMap .* does not allow it"):
            _ = client.map(of.models[0].name).device_pool
        monkeypatch.delenv("FAKE_CUDA_FAIL")
        os.unlink(f"{of.memory_socket}.pools")
        with pytest.raises(MemoryManagerGone, match="cannot reach"):
            _ = client.map(of.models[0].name).device_pool


def test_chunks_come_and_go_under_a_client(of: UnitSpec, managers: list[subprocess.Popen[bytes]]) -> None:
    pool = PoolSpec("p", 1 << 20, 101, chunk_bytes=4 << 20, start_pages=8)
    of = msgspec.structs.replace(of, pools=[pool])
    managers.append(server.start(of))
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        view = client.map("a")
        memory = view.device_pool
        assert memory is not None
        assert view.counters.backed_pages == 8
        assert len(client.step("a", reserve=10, partial=True).reserved) == 1
        client.set_room("p", 101)
        blocks = client.step("a", reserve=9).reserved
        memory.sync()
        pages = view.page_table[blocks].reshape(-1)
        address, mapped = memory.address, memory_of(view)
        for page in pages:
            mapped[int(page) << 20] = 5
        client.set_room("p", 8)
        # Pages in use stay, and what is free has gone.
        assert all(mapped[int(page) << 20] == 5 for page in pages)
        client.step("a", release=blocks)
        eventually(lambda: view.counters.backed_pages <= 16, "free chunks are given back")
        client.set_room("p", 101)
        again = client.step("a", reserve=9).reserved
        memory.sync()
        assert memory.address == address
        assert sum(mapped[int(page) << 20] for page in view.page_table[again].reshape(-1)) < 5 * len(pages)


def test_a_manager_that_dies_has_few_chunks_again(of: UnitSpec, managers: list[subprocess.Popen[bytes]]) -> None:
    pool = PoolSpec("p", 1 << 20, 101, chunk_bytes=4 << 20, start_pages=8)
    of = msgspec.structs.replace(of, pools=[pool])
    managers.append(server.start(of))
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        view = client.map("a")
        client.set_room("p", 101)
        memory = view.device_pool
        assert memory is not None
        memory.sync()
        mapped = memory_of(view)
        mapped[50 << 20] = 1
        managers[0].kill()
        managers[0].wait()
    managers.append(server.start(of))
    with MemoryClient(of.memory_socket, "c", timeout_s=60) as client:
        again = client.map("a")
        assert again.counters.backed_pages == 8
        assert again.device_pool is memory, "the addresses stay"
        client.set_room("p", 101)
        memory.sync()
        mapped[50 << 20] = 2
        assert mapped[50 << 20] == 2
