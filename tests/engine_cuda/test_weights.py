"""Weights from their holder to an engine: description, wire, server, loader. Shared memory stands in for CUDA's IPC."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheState

from muxserve.engine.cuda import cuda_ipc, weight_loader, weight_tensors
from muxserve.engine.cuda.weight_loader import follow, rebuild
from muxserve.engine.cuda.weight_memory import ExportedWeights, Piece, in_file, restored
from muxserve.engine.cuda.weight_tensors import describe, mapped, processed
from muxserve.gpu import weight_wire as wire
from muxserve.gpu.driver import Driver
from muxserve.gpu.weight_server import WeightServer
from muxserve.gpu.weight_wire import fetch, fetch_copy, say
from muxserve.vllm import weight_seam
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

    def open(self, allocation: wire.Allocation, descriptor: int) -> torch.Tensor:
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
    found = mapped(told, CPU, (), shared.open)
    expected = {**dict(held.named_parameters()), **dict(held.named_buffers())}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        ours = found[name].rebuild(0)
        assert torch.equal(ours, tensor), name
        assert (ours.dtype, ours.shape, ours.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
    assert {name for name, each in found.items() if each.kind == "buffer"} == {"ids", "rotary.scale", "rotary.nothing"}
    # The same memory, not a copy: seen by every engine that maps it.
    again = mapped(told, CPU, (), shared.open)
    held.head.packed[1, 2] = 77.0
    assert found["head.packed"].tensor[1, 2] == again["head.packed"].tensor[1, 2] == 77.0


def test_what_one_engine_writes_into_a_buffer_no_other_sees(
    shared: SharedAllocations, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = describe(model(shared), "GPU-1", shared.export, shared_device="cpu")
    first, second = (mapped(told, CPU, (), shared.open) for _ in range(2))
    first["ids"].tensor.fill_(-1)
    assert second["ids"].tensor.tolist() == [1, 2, 3]
    # Large tables stay one for all.
    monkeypatch.setattr(weight_tensors, "OWN_BUFFER_BYTES", 8)
    again = mapped(told, CPU, (), shared.open)["ids"].tensor
    again[0] = 55
    assert mapped(told, CPU, (), shared.open)["ids"].tensor[0] == 55


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
    first = fetch(str(path), FINGERPRINT, 5)
    second = fetch(str(path), FINGERPRINT, 5)
    assert first == second
    assert (first[0].gpu, first[1]) == ("GPU-1", [])
    # One that says nothing, one that says nonsense, one that goes away in the middle: others are served all the same.
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(str(path))
    silent.sendall(struct.pack("<Q", 100) + b"x")
    silent.close()
    with socket.socket(socket.AF_UNIX) as odd:
        odd.connect(str(path))
        odd.sendall(struct.pack("<Q", 3) + b"abc")
    assert fetch(str(path), FINGERPRINT, 5) == first
    server.close()


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, shared: SharedAllocations) -> None:
    path = tmp_path / "weights.sock"
    server = held_at(path, shared)
    with pytest.raises(RuntimeError, match=r"checkpoint: held 'abc', wanted 'xyz'.*restart the fleet"):
        fetch(str(path), {**FINGERPRINT, "checkpoint": "xyz"}, 5)
    server.close()


def test_an_engine_waits_for_a_holder_that_is_started_again(tmp_path: Path, shared: SharedAllocations) -> None:
    path = tmp_path / "weights.sock"
    held_at(path, shared).close()  # a socket that nobody listens on is left behind, as after a kill
    with pytest.raises(TimeoutError, match="nobody handed weights out"):
        fetch(str(path), FINGERPRINT, 0.0)
    found: list[tuple[wire.Weights, list[int]]] = []
    engine = threading.Thread(target=lambda: found.append(fetch(str(path), FINGERPRINT, 30)))
    engine.start()
    server = held_at(path, shared)
    engine.join(PATIENCE)
    assert [each.gpu for each, _ in found] == ["GPU-1"]
    server.close()


# ------------------------------------------------------------ weights that outlive who has loaded them


def keeper(path: Path, lost: list[str]) -> WeightServer:
    return WeightServer(str(path), on_lost=lost.append)


def memory(content: bytes) -> int:
    fd = os.memfd_create("weights")
    os.write(fd, content)
    return fd


def content(fd: int) -> bytes:
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def exported(*contents: bytes) -> tuple[wire.Weights, list[int]]:
    allocations = [wire.Allocation("vmm", f"cuda-vmm:GPU-1:2:{index}".encode(), 2) for index in range(len(contents))]
    return wire.Weights("GPU-1", allocations, [], {}), [memory(each) for each in contents]


def test_what_is_kept_is_handed_out_when_its_maker_is_gone(tmp_path: Path) -> None:
    path, lost = tmp_path / "weights.sock", list[str]()
    server = keeper(path, lost)
    with pytest.raises(RuntimeError, match="no weights yet"):
        fetch(str(path), FINGERPRINT, 5)
    # More than one message of the kernel takes.
    contents = [f"piece {index}".encode() for index in range(300)]
    told, fds = exported(*contents)
    say(str(path), wire.Keep(FINGERPRINT, told), fds)
    for fd in fds:
        os.close(fd)
    for _ in range(2):
        found, descriptors = fetch(str(path), FINGERPRINT, 5)
        assert found == told
        assert [content(fd) for fd in descriptors] == contents
    with pytest.raises(RuntimeError, match="do not fit this engine"):
        fetch(str(path), {**FINGERPRINT, "checkpoint": "xyz"}, 5)
    assert lost == []
    server.close()


def test_weights_that_cannot_be_mapped_any_more_are_forgotten_once(tmp_path: Path) -> None:
    path, lost = tmp_path / "weights.sock", list[str]()
    server = keeper(path, lost)
    told, fds = exported(b"a")
    say(str(path), wire.Keep(FINGERPRINT, told), fds)
    for _ in range(2):  # both engines of the model say so
        say(str(path), wire.WeightsLost("the GPU was reset"))
    assert lost == ["the GPU was reset"]
    with pytest.raises(RuntimeError, match="no weights yet"):
        fetch(str(path), FINGERPRINT, 5)
    server.close()
    # Kept nowhere else, and not by who was closed: only our own descriptor is left.
    assert content(fds[0]) == b"a"


def test_a_copy_outlives_what_was_kept_on_the_gpu(tmp_path: Path) -> None:
    """It is handed to who copies the weights back, which are then kept like those that were loaded."""
    path, lost = tmp_path / "weights.sock", list[str]()
    first = keeper(path, lost)
    with pytest.raises(RuntimeError, match="there is no copy of the weights"):
        fetch_copy(str(path))
    contents = [f"piece {index}".encode() for index in range(300)]
    told, fds = exported(*contents)
    files = [memory(b"host " + each) for each in contents]
    say(str(path), wire.Keep(FINGERPRINT, told, copied=True), [*fds, *files])
    found, descriptors = fetch(str(path), FINGERPRINT, 5)
    assert found == told
    assert [content(fd) for fd in descriptors] == contents
    first.close()
    assert first.copy is not None
    assert first.copy.bytes == 2 * len(contents)
    second = WeightServer(str(path), on_lost=lost.append, copy=first.copy)
    with pytest.raises(RuntimeError, match="no weights yet"):
        fetch(str(path), FINGERPRINT, 5)
    copied, descriptors = fetch_copy(str(path))
    assert (copied.fingerprint, copied.weights) == (FINGERPRINT, told)
    assert [content(fd) for fd in descriptors] == [b"host " + each for each in contents]
    again, fds_again = exported(*contents)
    say(str(path), wire.Keep(FINGERPRINT, again), fds_again)
    assert fetch(str(path), FINGERPRINT, 5)[0] == again
    assert second.copy is first.copy, "it is there for the next time"
    second.close()
    second.copy.close()
    wire.close_all([*fds, *files, *fds_again])


def test_who_holds_weights_itself_keeps_no_others(tmp_path: Path, shared: SharedAllocations) -> None:
    path = tmp_path / "weights.sock"
    server = held_at(path, shared)
    with pytest.raises(RuntimeError, match="not kept"):
        say(str(path), wire.WeightsLost("x"))
    assert fetch(str(path), FINGERPRINT, 5)[0].gpu == "GPU-1"
    server.close()


def allocated(pieces: list[torch.Tensor], size: int) -> Piece:
    """The next piece."""
    pieces.append(torch.zeros(size, dtype=torch.uint8))
    return Piece(f"piece {len(pieces)}", len(pieces), pieces[-1])


def test_tensors_are_moved_with_what_sees_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muxserve.engine.cuda.weight_memory.PIECE_BYTES", 4096)
    root = torch.nn.Module()
    base = torch.arange(64, dtype=torch.float32)
    root.register_parameter("whole", torch.nn.Parameter(base.view(8, 8), requires_grad=False))
    root.register_buffer("view", base.view(8, 8).t()[2:4])
    root.register_parameter("large", torch.nn.Parameter(torch.arange(3000.0), requires_grad=False))
    root.register_parameter("short", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False))
    root.register_buffer("nothing", torch.empty(0))
    before = {name: tensor.clone() for name, tensor in {**root._parameters, **root._buffers}.items()}  # type: ignore[union-attr]
    pieces: list[torch.Tensor] = []
    allocate = partial(allocated, pieces)
    kept = ExportedWeights(allocate, device="cpu")
    kept.move(root)
    assert len(pieces) == 3
    assert kept.size == 3 * (2 << 20)
    for name, tensor in before.items():
        now = getattr(root, name)
        assert torch.equal(now, tensor), name
        assert now.numel() == 0 or any(now.untyped_storage().data_ptr() == each.data_ptr() for each in pieces), name
    root.whole[0, 2] = -1.0
    assert root.view[0, 0] == -1.0
    told = describe(root, "GPU-1", kept.export, shared_device="cpu", kind="vmm")
    assert {each.handle for each in told.allocations} == {*kept.descriptors} == {b"piece 1", b"piece 2", b"piece 3"}
    assert told.descriptors == 3
    with pytest.raises(LookupError, match="has not been moved"):
        kept.export(base.data_ptr())

    # From the host's memory they come back as they were, in other pieces.
    files = kept.copied()
    values = [each.clone() for each in pieces]
    in_order = [files[each.handle] for each in told.allocations]
    copies = [in_file(file, each.size) for file, each in zip(in_order, told.allocations, strict=True)]
    back, made = restored(told, copies, allocate)
    wire.close_all(in_order)
    assert [each.handle for each in back.allocations] == [b"piece 4", b"piece 5", b"piece 6"]
    assert msgspec.structs.replace(back, allocations=told.allocations) == told
    assert [piece.descriptor for piece in made] == [4, 5, 6]
    by_handle = {f"piece {number}".encode(): value for number, value in enumerate(values, 1)}
    for piece, each in zip(made, told.allocations, strict=True):
        assert torch.equal(piece.memory, by_handle[each.handle])


def test_what_a_model_has_made_anew_is_moved_as_well() -> None:
    """At its first step, of a table that was moved before; all else stays where it is."""
    root = torch.nn.Module()
    root.register_parameter("weight", torch.nn.Parameter(torch.arange(3000.0), requires_grad=False))
    root.register_buffer("table", torch.arange(5000.0))
    pieces: list[torch.Tensor] = []
    allocate = partial(allocated, pieces)
    kept = ExportedWeights(allocate, device="cpu")
    kept.move(root)
    places = [root.weight.data_ptr(), root.table.data_ptr()]
    kept.move(root)
    assert (len(pieces), [root.weight.data_ptr(), root.table.data_ptr()]) == (1, places)
    root.table = root.table.to(torch.bfloat16)
    with pytest.raises(LookupError, match=r"table: .* has not been moved"):
        describe(root, "GPU-1", kept.export, shared_device="cpu", kind="vmm")
    kept.move(root)
    assert (len(pieces), root.weight.data_ptr()) == (2, places[0])
    told = describe(root, "GPU-1", kept.export, shared_device="cpu", kind="vmm")
    assert {each.name: each.dtype for each in told.tensors} == {"weight": "float32", "table": "bfloat16"}


def test_who_was_told_of_a_parameter_keeps_the_one_that_is_mapped() -> None:
    with torch.device("meta"):
        root = torch.nn.Module()
        root.gate = torch.nn.Linear(2, 3)
        root.experts = torch.nn.Module()
    root.experts.router = vllm_object(bias=root.gate.bias, by_name={"weight": root.gate.weight}, own=torch.ones(2))
    before = {id(each): name for name, each in root.named_parameters()}
    for name in ("weight", "bias"):
        held = torch.nn.Parameter(torch.ones(getattr(root.gate, name).shape), requires_grad=False)
        root.gate.register_parameter(name, held)
    follow(root, before)
    router = vars(root.experts)["router"]
    assert router.bias is root.gate.bias
    assert router.by_name["weight"] is root.gate.weight
    assert torch.equal(router.own, torch.ones(2))


# ------------------------------------------------------------ what vLLM makes of weights when it has loaded them


class Packed(QuantizeMethodBase):
    """Keeps, as vLLM's methods do, what it computes with in more places than parameters."""

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra: Any) -> None:
        layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False))
        layer.range = torch.tensor(7.0)
        layer.register_parameter("scale", torch.nn.Parameter(torch.zeros(4), requires_grad=False))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed = torch.nn.Parameter(layer.weight.t().contiguous() * 2, requires_grad=False)
        layer.register_parameter("weight", packed)
        del layer.scale
        layer.largest = float(packed.max())
        layer.range = layer.range if layer.range.is_meta else layer.range * 3
        self.kernel = vllm_object(rows=(packed[0], packed[1]), locks=torch.zeros(3, dtype=torch.int32), of=packed)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.kernel.locks += 1
        return (x @ self.kernel.of + self.kernel.rows[1]) / layer.largest  # type: ignore[no-any-return]


def vllm_object(**attributes: Any) -> Any:
    kind = type("Kernel", (), {"__module__": "vllm.model_executor.kernels"})
    made = kind()
    vars(made).update(attributes)
    return made


def layer(device: str, method: type[Packed] = Packed) -> torch.nn.Module:
    root = torch.nn.Module()
    with torch.device(device):
        root.up = torch.nn.Module()
        root.up.quant_method = method()
        root.up.quant_method.create_weights(root.up)  # type: ignore[operator, union-attr]
    return root


def loaded(method: type[Packed] = Packed) -> torch.nn.Module:
    root = layer("cpu", method)
    root.up.weight.copy_(torch.arange(8.0).view(4, 2))  # type: ignore[operator, union-attr]
    root.up.quant_method.process_weights_after_loading(root.up)  # type: ignore[operator, union-attr]
    return root


def held_by_others(root: torch.nn.Module) -> tuple[WeightCacheState, dict[str, float]]:
    told = wire._decoder.decode(wire.msgspec.msgpack.encode(describe(root, "GPU-1")))
    assert isinstance(told, wire.Weights)
    entries: Any = mapped(told, CPU)
    return WeightCacheState(entries=entries, aliases=told.aliases, attrs={}), told.scalars


def test_a_module_is_made_of_zeros_and_then_of_what_is_held() -> None:
    theirs = loaded()
    state, scalars = held_by_others(theirs)
    assert {name for name, each in state.entries.items() if each.kind == "state"} == {
        "up:range", "up:quant_method.kernel.rows.0", "up:quant_method.kernel.rows.1", "up:quant_method.kernel.locks",
    }  # fmt: skip
    assert state.aliases == {"up:quant_method.kernel.of": "up.weight"}
    ours = layer("meta")
    taken = rebuild(ours, state, scalars, CPU)
    assert taken >= {"up.weight", "up:quant_method.kernel.of", "up:largest"}
    assert ours.up.range == 21.0  # type: ignore[union-attr]
    x = torch.arange(2.0)
    for _ in range(2):
        assert torch.equal(ours.up.quant_method.apply(ours.up, x), theirs.up.quant_method.apply(theirs.up, x))  # type: ignore[operator, union-attr]
    assert ours.up.quant_method.kernel.of is ours.up.weight  # type: ignore[union-attr]
    # Locks of kernels are an engine's own.
    assert state.entries["up:quant_method.kernel.locks"].tensor.tolist() == [2, 2, 2]  # type: ignore[attr-defined]
    again, _ = held_by_others(loaded())
    assert again.entries["up:quant_method.kernel.locks"].tensor.tolist() == [0, 0, 0]  # type: ignore[attr-defined]


class Wider(Packed):
    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra: Any) -> None:
        super().create_weights(layer)
        layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False))


class WithMore(Packed):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        layer.more = torch.zeros(1)


@pytest.mark.parametrize(
    ("held", "made", "words"),
    [
        (Packed, Wider, r"up\.weight is float32 \[3, 4\], and float32 \[2, 4\] is held"),
        (Packed, WithMore, r"up:more is not among the weights"),
        (WithMore, Packed, r"up:more is held, and the engine has not made it"),
    ],
)
def test_an_engine_that_makes_something_else_ends_in_words(held: type[Packed], made: type[Packed], words: str) -> None:
    state, scalars = held_by_others(loaded(held))
    with pytest.raises(RuntimeError, match=f"other parts than the one whose weights are held: {words}"):
        rebuild(layer("meta", made), state, scalars, CPU)


class Promising(Packed):
    supports_pre_processed_weights = True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing."""


class Breaking(Promising):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.largest = float(layer.weight.max())


def test_a_promise_is_of_the_class_that_gives_it() -> None:
    """Some of vLLM's methods inherit that they take processed weights, and then process them otherwise."""
    assert [processed(layer("cpu", method).up) for method in (Packed, Promising, Breaking)] == [True, False, True]  # type: ignore[arg-type]
    chosen = layer("cpu", Breaking)
    chosen.up.quant_method.supports_pre_processed_weights = True  # type: ignore[union-attr]
    assert not processed(chosen.up)  # type: ignore[arg-type]


def test_the_loader_is_vllm_s_and_never_goes_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    weight_loader.register_loader()
    weight_loader.register_loader()
    unit_spec: Any = SimpleNamespace(ranks=2, weights_socket=lambda model, rank: f"/run/{model}-{rank}.sock")
    args = loader_args(unit_spec, "m")
    loader = get_model_loader(LoadConfig(**args))
    assert isinstance(loader, weight_loader.HeldWeightsLoader)
    assert loader._sockets == ["/run/m-0.sock", "/run/m-1.sock"]
    assert loader.fallback is False
    assert loader.get_external_weight_memory(None) == 0  # type: ignore[arg-type]


def test_stages_of_a_pipeline_ask_their_own_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, two stages of two: rank 2 is the first of the second stage."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheKey

    def group(rank: int, size: int) -> Any:
        return lambda: SimpleNamespace(rank_in_group=rank, world_size=size)

    asked: list[tuple[str, dict[str, str]]] = []

    def fetch(path: str, fingerprint: dict[str, str], seconds: float) -> tuple[wire.Weights, list[int]]:
        asked.append((path, fingerprint))
        return wire.Weights("GPU-1", [], [], {}), []

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
        monkeypatch.setattr(weight_seam, "get_tp_group", group(rank % 2, 2))
        monkeypatch.setattr(weight_seam, "get_pp_group", group(rank // 2, 2))
        loader._fetch_entries(SimpleNamespace())  # type: ignore[arg-type]
    assert [path for path, _ in asked] == [f"/run/{rank}.sock" for rank in range(4)]
    assert [(of["tp_rank"], of["pp_rank"], of["pp_size"]) for _, of in asked] == [
        ("0", "0", "2"), ("1", "0", "2"), ("0", "1", "2"), ("1", "1", "2"),
    ]  # fmt: skip


# ------------------------------------------------------------ the driver's calls, by a stand-in of its library


class FakeHandle:
    """`CUipcMemHandle`: 64 bytes at an address."""

    def __init__(self, data: bytes = bytes(64)) -> None:
        self.data = ctypes.create_string_buffer(data, 64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self.data)


class FakeDriver:
    """The calls of `cuda.bindings.driver` that are used, over one range of addresses."""

    BASE, SIZE = 0x7000_0000, 4096
    CUipcMemHandle = FakeHandle

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.opened: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == self.failing:
                return 201, *[None] * (2 if name == "cuMemGetAddressRange" else 1)
            return 0, *getattr(self, f"_{name}")(*arguments)

        return call

    def _cuMemGetAddressRange(self, address: int) -> tuple[int, int]:  # noqa: N802
        assert self.BASE <= address < self.BASE + self.SIZE
        return self.BASE, self.SIZE

    def _cuIpcGetMemHandle(self, base: int) -> tuple[FakeHandle]:  # noqa: N802
        assert base == self.BASE
        return (FakeHandle(bytes(range(64))),)

    def _cuIpcOpenMemHandle(self, handle: FakeHandle, flags: int) -> tuple[int]:  # noqa: N802
        self.opened.append(handle.data.raw)
        assert flags == 1
        return (0x9000_0000,)

    def _cuGetErrorName(self, status: int) -> tuple[bytes]:  # noqa: N802
        return (b"CUDA_ERROR_INVALID_CONTEXT",)

    def _cuGetErrorString(self, status: int) -> tuple[bytes]:  # noqa: N802
        return (b"invalid device context",)


def test_handles_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: Driver(driver))
    base, size, handle = cuda_ipc.export(FakeDriver.BASE + 512)
    assert (base, size, handle) == (FakeDriver.BASE, FakeDriver.SIZE, bytes(range(64)))  # zero bytes are kept
    assert cuda_ipc.open_handle(handle) == 0x9000_0000
    assert driver.opened == [handle]
    with pytest.raises(cuda_ipc.CudaIpcError, match="64 bytes"):
        cuda_ipc.open_handle(b"short")


@pytest.mark.parametrize("call", ["cuMemGetAddressRange", "cuIpcGetMemHandle"])
def test_an_error_of_the_driver_says_what_failed_and_what_it_needs(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: Driver(FakeDriver(failing=call)))
    with pytest.raises(
        cuda_ipc.CudaIpcError,
        match=rf"{call} failed with CUDA_ERROR_INVALID_CONTEXT \(201\): invalid device context\. .*cudaMalloc",
    ):
        cuda_ipc.export(FakeDriver.BASE)
