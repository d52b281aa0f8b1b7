"""Weights from their holder to an engine: description, wire, server, loader. Shared memory stands in for CUDA's IPC."""

from __future__ import annotations

import ctypes
import mmap
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from muxserve.engine.cuda import cuda_ipc, weight_loader, weight_tensors, weights
from muxserve.engine.cuda import weight_wire as wire
from muxserve.engine.cuda.weight_server import WeightServer
from muxserve.engine.cuda.weight_tensors import describe, mapped
from muxserve.vllm.args import loader_args
from tests.support.patience import PATIENCE

FINGERPRINT = {"checkpoint": "abc", "tp_rank": "0"}
CPU = torch.device("cpu")


class SharedAllocations:
    """Memory that several mappings see: what cudaMalloc and CUDA IPC are on a GPU."""

    def __init__(self, tmp_path: Path) -> None:
        self._path = tmp_path
        self._known: dict[int, tuple[int, Path]] = {}

    def allocate(self, size: int) -> torch.Tensor:
        file = self._path / f"allocation-{len(self._known)}"
        file.write_bytes(bytes(size))
        tensor = self._map(file)
        self._known[tensor.data_ptr()] = (size, file)
        return tensor

    def export(self, address: int) -> tuple[int, int, bytes]:
        for base, (size, file) in self._known.items():
            if base <= address < base + size:
                return base, size, str(file).encode()
        raise cuda_ipc.CudaIpcError("not of an allocation")

    def open(self, allocation: wire.Allocation) -> torch.Tensor:
        assert allocation.kind == "cuda"
        tensor = self._map(Path(allocation.handle.decode()))
        assert tensor.numel() == allocation.size
        return tensor

    @staticmethod
    def _map(file: Path) -> torch.Tensor:
        with open(file, "r+b") as opened:
            return torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)


def model(shared: SharedAllocations) -> torch.nn.Module:
    """Tensors as they come in a model: one allocation for several, tied, transposed, scalar, empty, half precision."""
    memory = shared.allocate(4096)
    other = shared.allocate(512)

    def place(start: int, values: torch.Tensor) -> torch.Tensor:
        flat = memory[start : start + values.numel() * values.element_size()].view(values.dtype)
        flat.copy_(values.reshape(-1))
        return flat.view(values.shape)

    root = torch.nn.Module()
    root.embed, root.head, root.rotary = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
    weight = torch.nn.Parameter(place(0, torch.arange(24, dtype=torch.bfloat16).view(6, 4)), requires_grad=False)
    root.embed.register_parameter("weight", weight)
    root.head.register_parameter("weight", weight)
    transposed = place(1024, torch.arange(12.0).view(4, 3)).t()
    root.head.register_parameter("packed", torch.nn.Parameter(transposed, requires_grad=False))
    root.rotary.register_buffer("scale", place(2048, torch.tensor(2.5)), persistent=False)
    root.rotary.register_buffer("nothing", torch.empty((0, 3), dtype=torch.float16))
    other.view(torch.int64)[:4] = torch.arange(4)
    root.register_buffer("ids", other.view(torch.int64)[1:4])
    return root


@pytest.fixture
def shared(tmp_path: Path) -> SharedAllocations:
    return SharedAllocations(tmp_path)


def test_tensors_come_out_as_they_went_in_and_share_their_memory(shared: SharedAllocations) -> None:
    held = model(shared)
    told = describe(held, "GPU-1", shared.export, shared_device="cpu")
    assert len(told.allocations) == 2
    assert told.aliases == {"head.weight": "embed.weight"}
    told = wire._decoder.decode(wire.msgspec.msgpack.encode(told))
    found = mapped(told, CPU, shared.open)
    expected = {**dict(held.named_parameters()), **dict(held.named_buffers())}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        ours = found[name].rebuild(0)
        assert torch.equal(ours, tensor), name
        assert (ours.dtype, ours.shape, ours.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
    assert {name for name, each in found.items() if each.kind == "buffer"} == {"ids", "rotary.scale", "rotary.nothing"}
    # The same memory, not a copy: seen by every engine that maps it.
    again = mapped(told, CPU, shared.open)
    held.head.packed[1, 2] = 77.0
    assert found["head.packed"].tensor[1, 2] == again["head.packed"].tensor[1, 2] == 77.0


def test_what_one_engine_writes_into_a_buffer_no_other_sees(
    shared: SharedAllocations, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = describe(model(shared), "GPU-1", shared.export, shared_device="cpu")
    first, second = (mapped(told, CPU, shared.open) for _ in range(2))
    first["ids"].tensor.fill_(-1)
    assert second["ids"].tensor.tolist() == [1, 2, 3]
    # Large tables stay one for all.
    monkeypatch.setattr(weight_tensors, "OWN_BUFFER_BYTES", 8)
    again = mapped(told, CPU, shared.open)["ids"].tensor
    again[0] = 55
    assert mapped(told, CPU, shared.open)["ids"].tensor[0] == 55


def test_tensors_that_are_not_on_the_gpu_are_sent_by_value() -> None:
    root = torch.nn.Module()
    root.register_buffer("table", torch.arange(6, dtype=torch.bfloat16).view(2, 3).t())
    root.register_buffer("one", torch.tensor(3))
    told = describe(root, "GPU-1")
    assert {each.kind for each in told.allocations} == {"bytes"}
    found = mapped(told, CPU)
    assert torch.equal(found["table"].tensor, root.table)
    assert found["one"].tensor.item() == 3


def held_at(path: Path, shared: SharedAllocations) -> WeightServer:
    told = describe(model(shared), "GPU-1", shared.export, shared_device="cpu")
    return WeightServer(str(path), FINGERPRINT, told)


def test_engines_ask_again_and_again(tmp_path: Path, shared: SharedAllocations) -> None:
    path = tmp_path / "weights.sock"
    server = held_at(path, shared)
    assert path.stat().st_mode & 0o077 == 0
    first = weight_loader.fetch(str(path), FINGERPRINT, 5)
    second = weight_loader.fetch(str(path), FINGERPRINT, 5)
    assert first == second
    assert first.gpu == "GPU-1"
    # One that says nothing, one that says nonsense, one that goes away in the middle: others are served all the same.
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(path))
    silent.sendall(struct.pack("<Q", 100) + b"x")
    silent.close()
    with socket.socket(socket.AF_UNIX) as odd:
        odd.connect(str(path))
        odd.sendall(struct.pack("<Q", 3) + b"abc")
    assert weight_loader.fetch(str(path), FINGERPRINT, 5) == first
    server.close()


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, shared: SharedAllocations) -> None:
    path = tmp_path / "weights.sock"
    server = held_at(path, shared)
    with pytest.raises(RuntimeError, match=r"checkpoint: held 'abc', wanted 'xyz'.*restart the fleet"):
        weight_loader.fetch(str(path), {**FINGERPRINT, "checkpoint": "xyz"}, 5)
    server.close()


def test_an_engine_waits_for_a_holder_that_is_started_again(tmp_path: Path, shared: SharedAllocations) -> None:
    path = tmp_path / "weights.sock"
    held_at(path, shared).close()  # a socket that nobody listens on is left behind, as after a kill
    with pytest.raises(TimeoutError, match="holds the weights"):
        weight_loader.fetch(str(path), FINGERPRINT, 0.0)
    found: list[wire.Weights] = []
    engine = threading.Thread(target=lambda: found.append(weight_loader.fetch(str(path), FINGERPRINT, 30)))
    engine.start()
    server = held_at(path, shared)
    engine.join(PATIENCE)
    assert [each.gpu for each in found] == ["GPU-1"]
    server.close()


def test_the_loader_is_vllm_s_and_never_goes_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    weights.register_loader()
    weights.register_loader()
    unit_spec: Any = SimpleNamespace(ranks=2, weights_socket=lambda model, rank: f"/run/{model}-{rank}.sock")
    args = loader_args(unit_spec, "m")
    loader = get_model_loader(LoadConfig(**args))
    assert isinstance(loader, weight_loader.HeldWeightsLoader)
    assert loader._sockets == ["/run/m-0.sock", "/run/m-1.sock"]
    assert loader.fallback is False
    assert loader.get_external_weight_memory(None) == 0  # type: ignore[arg-type]


def test_stages_of_a_pipeline_ask_their_own_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, two stages of two: rank 2 is the first of the second stage."""
    import vllm.distributed as distributed
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheKey

    def group(rank: int, size: int) -> Any:
        return lambda: SimpleNamespace(rank_in_group=rank, world_size=size)

    asked: list[tuple[str, dict[str, str]]] = []

    def fetch(path: str, fingerprint: dict[str, str], seconds: float) -> wire.Weights:
        asked.append((path, fingerprint))
        return wire.Weights("GPU-1", [], [], {})

    def key(config: Any, **ranks: int) -> WeightCacheKey:
        return WeightCacheKey("c", "Llama", dtype="bfloat16", quantization=None, quant_config_hash="", revision=None,
                              vllm_version="0", **ranks)  # fmt: skip

    monkeypatch.setattr(WeightCacheKey, "from_model_config", key)
    monkeypatch.setattr(weight_loader, "fetch", fetch)
    unit_spec: Any = SimpleNamespace(ranks=4, weights_socket=lambda model, rank: f"/run/{rank}.sock")
    loader = weight_loader.HeldWeightsLoader(LoadConfig(**loader_args(unit_spec, "m")))
    monkeypatch.setattr(loader, "_device", lambda: CPU)
    for rank in range(4):
        monkeypatch.setattr(weight_loader, "get_world_group", group(rank, 4))
        monkeypatch.setattr(distributed, "get_tp_group", group(rank % 2, 2))
        monkeypatch.setattr(distributed, "get_pp_group", group(rank // 2, 2))
        loader._fetch_entries(SimpleNamespace())  # type: ignore[arg-type]
    assert [path for path, _ in asked] == [f"/run/{rank}.sock" for rank in range(4)]
    assert [(of["tp_rank"], of["pp_rank"], of["pp_size"]) for _, of in asked] == [
        ("0", "0", "2"), ("1", "0", "2"), ("0", "1", "2"), ("1", "1", "2"),
    ]  # fmt: skip


# ------------------------------------------------------------ the driver's calls, by a stand-in of its library


class FakeDriver:
    """The calls of libcuda that are used, over one range of addresses."""

    BASE, SIZE = 0x7000_0000, 4096

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.opened: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.failing:
                return 201
            return int(getattr(self, f"_{name}")(*arguments) or 0)

        return call

    def _cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> None:  # noqa: N802
        assert self.BASE <= address.value < self.BASE + self.SIZE
        base._obj.value, size._obj.value = self.BASE, self.SIZE

    def _cuIpcGetMemHandle(self, handle: Any, base: Any) -> None:  # noqa: N802
        assert base.value == self.BASE
        ctypes.memmove(ctypes.addressof(handle._obj), bytes(range(64)), 64)

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:  # noqa: N802
        self.opened.append(ctypes.string_at(ctypes.addressof(handle), 64))
        assert flags.value == 1
        address._obj.value = 0x9000_0000

    def _cuGetErrorString(self, status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = b"invalid device context"


def test_handles_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    base, size, handle = cuda_ipc.export(FakeDriver.BASE + 512)
    assert (base, size, handle) == (FakeDriver.BASE, FakeDriver.SIZE, bytes(range(64)))  # zero bytes are kept
    assert cuda_ipc.open_handle(handle) == 0x9000_0000
    assert driver.opened == [handle]
    with pytest.raises(cuda_ipc.CudaIpcError, match="64 bytes"):
        cuda_ipc.open_handle(b"short")


@pytest.mark.parametrize("call", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle"])
def test_an_error_of_the_driver_says_what_failed_and_what_it_needs(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: FakeDriver(failing=call))
    with pytest.raises(cuda_ipc.CudaIpcError, match=f"{call} failed with 201: invalid device context.*cudaMalloc"):
        cuda_ipc.export(FakeDriver.BASE)
