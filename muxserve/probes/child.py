"""What runs in the child processes of probes: `python -m muxserve.probes.child ROLE ARGUMENTS`.

Each role prints one line of JSON, `{"error": ...}` if it fails.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from muxserve.gpu.green import ContextSet
    from muxserve.probes.beside import SameSteps
    from muxserve.probes.sms import SmMarks

_SIZE = 16 << 20
_PATTERN = 0x5A
# Cycles of a kernel that outlasts every probe.
_LONG = 1 << 42
_ROUNDS = 200


def compute() -> dict[str, Any]:
    """Multiply small matrices, and compare."""
    properties = torch.cuda.get_device_properties(0)
    a, b = (torch.arange(64 * 64, dtype=torch.float32).view(64, 64) % 7 for _ in range(2))
    if not torch.equal((a.cuda() @ b.cuda()).cpu(), a @ b):
        raise ValueError("a product of matrices is wrong")
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def export(socket: str, uuid: str) -> dict[str, Any]:
    """Write memory that outlives this process, as who loads weights does, and have it kept."""
    from muxserve.gpu import weight_wire as wire
    from muxserve.memory import _native
    from muxserve.memory.device import DeviceMemory

    torch.zeros(1, device="cuda")
    exported = _native.ExportedMemory(uuid, _SIZE)
    mapping = _native.CudaMapping(exported.handle, os.dup(exported.descriptor))
    torch.as_tensor(DeviceMemory(mapping, 1, _SIZE), device="cuda").fill_(_PATTERN)
    torch.cuda.synchronize()
    weights = wire.Weights(uuid, [wire.Allocation("vmm", exported.handle.encode(), _SIZE)], [], {})
    wire.say(socket, wire.Keep({}, weights), [exported.descriptor])
    return {}


def map_exported(socket: str) -> dict[str, Any]:
    """Map it for reading as an engine does, and read it with a kernel."""
    from muxserve.gpu import weight_wire as wire
    from muxserve.memory import _native
    from muxserve.memory.device import DeviceMemory

    torch.zeros(1, device="cuda")
    weights, (descriptor,) = wire.fetch(socket, {}, 0.0)
    mapping = _native.CudaMapping(weights.allocations[0].handle.decode(), descriptor, read_only=True)
    whole = torch.as_tensor(DeviceMemory(mapping, 1, _SIZE), device="cuda")
    return {"same": bool((whole == _PATTERN).all()), "read_only": mapping.read_only}


def keep() -> dict[str, Any]:
    """Hold memory of cudaMalloc as a weight holder that stays does, and tell its handle; stays."""
    from muxserve.engine.cuda import cuda_ipc

    global kept
    kept = torch.full((_SIZE,), _PATTERN, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    base, size, handle = cuda_ipc.export(kept.data_ptr())
    return {"handle": f"{kept.data_ptr() - base}:{size}:{handle.hex()}"}


kept: torch.Tensor | None = None


def map_memory(handle: str) -> dict[str, Any]:
    """Map it as an engine does, and read it with a kernel."""
    from muxserve.engine.cuda import cuda_ipc

    torch.zeros(1, device="cuda")
    offset, size, data = handle.split(":")
    address = cuda_ipc.open_handle(bytes.fromhex(data))
    whole = cuda_ipc.as_bytes(address, int(size), torch.device("cuda", 0))
    return {"same": bool((whole[int(offset) : int(offset) + _SIZE] == _PATTERN).all())}


def manage(directory: str, uuid: str, ipc: str, pages: str = "256") -> dict[str, Any]:
    """Start a memory manager with a small pool on the GPU; stays."""
    import msgspec

    from muxserve.memory import server
    from muxserve.spec import GpuSpec, ModelSpec, PoolSpec, UnitSpec

    Path(directory).mkdir(exist_ok=True)
    model = ModelSpec("m", "", "p", "bfloat16", 2, 2, 64, 16, 64, 128, 0, 512, 1.0, 8, 64, True, 1, 1.0, 1.0, 8, 8)
    unit_spec = UnitSpec(directory, "probe", "adbs", 1, [PoolSpec("p", 4096, int(pages))], [model])
    gpu = msgspec.convert({"uuids": [uuid], "ipc": ipc}, GpuSpec)
    server.start(msgspec.structs.replace(unit_spec, gpu=gpu))
    return {"socket": unit_spec.memory_socket}


def _pool(socket: str) -> torch.Tensor:
    from muxserve.memory.client import MemoryClient

    torch.zeros(1, device="cuda")
    client = MemoryClient(socket, f"probe-{os.getpid()}")
    return torch.as_tensor(client.map("m").device_pool, device="cuda")


def _page(socket: str) -> torch.Tensor:
    return _pool(socket)[3]


def write_page(socket: str) -> dict[str, Any]:
    """Write a page of that pool by a kernel."""
    page = _page(socket)
    page.copy_(torch.arange(page.numel(), device="cuda").to(torch.uint8))
    torch.cuda.synchronize()
    return {}


def read_page(socket: str) -> dict[str, Any]:
    """Read it in another process."""
    page = _page(socket)
    return {"same": bool((page == torch.arange(page.numel(), device="cuda").to(torch.uint8)).all())}


def attention(replayed: bool = False) -> dict[str, Any]:
    """Our kernels and FlashAttention on pages of one head, beside ordinary attention; shapes of common models."""
    from muxserve.probes.attention import AttentionBatch, FoldedAttention

    decode = AttentionBatch(contexts=(130, 1, 64, 700), new=(1, 1, 1, 1))
    mixed = AttentionBatch(contexts=(300, 0, 33, 128), new=(1, 200, 1, 60))
    cases = [(shape, block, batch) for shape in ((32, 8, 128), (16, 16, 64), (8, 1, 128)) for block in (32, 64)
             for batch in ((decode,) if replayed else (decode, mixed))]  # fmt: skip
    most, mean = 0.0, 0.0
    for (heads, kv_heads, dim), block, batch in cases:
        folded = FoldedAttention(heads, kv_heads, dim, block, layers=2, dtype=torch.bfloat16)
        output, expected = folded.run(batch, replayed)
        error = (output.float() - expected.float()).abs()
        # NaN must not be lost: no comparison is true for it.
        most = max(most, float(error.max())) if bool(error.isfinite().all()) else float("inf")
        mean = max(mean, float(error.mean()))
    return {"most": most, "mean": mean, "cases": len(cases)}


def graph() -> dict[str, Any]:
    """The same for decodes by a CUDA graph that was captured whole, replayed with another batch."""
    return attention(replayed=True)


def reduce(store: str, rank: str) -> dict[str, Any]:
    """One of two ranks of a communicator: sums over both GPUs, between other work, as engines do."""
    import torch.distributed as distributed

    torch.cuda.set_device(int(rank))
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=int(rank), world_size=2)
    own = torch.full((1 << 20,), float(int(rank) + 1), device="cuda")
    work = torch.randn(1024, 1024, device="cuda")
    same = True
    for _ in range(_ROUNDS):
        total = own.clone()
        distributed.all_reduce(total)
        work = torch.tanh(work @ work)
        same = same and bool((total == 3.0).all())
    return {"same": same}


def spin() -> dict[str, Any]:
    """Launch a kernel that does not end; stays."""
    torch.cuda._sleep(_LONG)
    return {}


def beside(socket: str, first_page: str, phase: str, seconds: str, part: str = "") -> dict[str, Any]:
    """Steps of an engine on the pool's pages from that one on: from a line of input on alone, and from another one on
    for so long beside others; how many came out otherwise. `part` of the SMs is its green context, from the front for
    prefill and from the end for decode."""
    import muxserve.engine.cuda.attention  # noqa: F401 -- takes seconds, and others wait from the first line on
    from muxserve.probes import beside as work

    torch.cuda.set_device(0)
    contexts = _green_part(phase, float(part)) if part else None
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    whole = _pool(socket).view(torch.bfloat16).view(-1, 1, work.BLOCK, 2 * work.DIM)
    steps = work.same_steps(phase, whole, int(first_page))
    if not steps.error <= work.TOLERANCE:  # not a number compares with nothing
        raise ValueError(f"a step is wrong by {steps.error:.2g} of the largest value before others begin")
    alone, different = _count(steps, float(seconds) / 2)
    if different:
        raise ValueError(f"steps come out otherwise before others begin, {different} times")
    print(json.dumps({"alone": alone}), flush=True)
    sys.stdin.readline()
    rate, different = _count(steps, float(seconds))
    if contexts is not None:
        contexts.check()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    sms = contexts.contexts[0].sms if contexts is not None else sms
    return {"sms": sms, "rate": rate, "alone": alone, "steps": int(rate * float(seconds)), "different": different}


def _count(steps: SameSteps, seconds: float) -> tuple[float, int]:
    """Steps a second, and how many came out otherwise than the first."""
    from muxserve.probes.beside import TOLERANCE

    count = different = 0
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        count += 1
        different += not steps.difference() <= TOLERANCE
    return count / (time.monotonic() - began), different


def shapes(described: str) -> dict[str, Any]:
    """Attention and products of models' shapes, with the SMs that this process sees."""
    import msgspec

    from muxserve.probes.shapes import AttentionShape, errors_of

    found = [errors_of(shape) for shape in msgspec.json.decode(described, type=list[AttentionShape])]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return {"sms": sms, "errors": [[each.attention, each.products] for each in found]}


def _green_part(phase: str, part: float) -> ContextSet:
    """A green context of a part of the SMs, current, as an engine of that phase has it."""
    from muxserve.gpu.green import ContextSet, device_of, divide, load, make_context
    from muxserve.gpu.sm import SmRange, parts_of

    driver = load()
    device = device_of(driver, 0)
    division = divide(driver, device)
    parts = len(division.parts)
    count = parts_of(part, parts)
    where = SmRange(0 if phase == "prefill" else parts - count, count)
    return ContextSet(driver, [make_context(driver, device, division, where)])


# Factor on the time of kernels that mark: milliseconds, beside which launching them is nothing.
_TIMED = 60
_SIDE_BY_SIDE = 1.5
_MEASURABLE = 2e-3


def _slowdown(contexts: ContextSet, marks: SmMarks) -> float:
    """How many times as long a kernel in one of two contexts takes beside one in the other, at most: about 1 where they
    have no SM in common, about 2 where they have those of the smaller one; 1 where it is over too soon to tell."""
    streams = []
    for index in (0, 1):
        contexts.use(index)
        streams.append(torch.cuda.ExternalStream(contexts.stream()))

    def seconds(*which: int) -> dict[int, float]:
        ended: dict[int, float] = {}
        began = time.perf_counter()
        for index in which:
            with torch.cuda.stream(streams[index]):
                marks.launch(_TIMED)
        while len(ended) < len(which):
            for index in which:
                if index not in ended and streams[index].query():
                    ended[index] = time.perf_counter() - began
        return ended

    seconds(0, 1)
    alone = seconds(0) | seconds(1)
    together = seconds(0, 1)
    if min(alone.values()) < _MEASURABLE:
        return 1.0
    return max(together[index] / alone[index] for index in alone)


def green() -> dict[str, Any]:
    """Have two green contexts as an engine has them, and see on which SMs kernels run, and graphs of one of them that
    are replayed in the other. Under MPS the SMs of each context are numbered from 0 on (seen with driver 580), so that
    whether two have SMs in common shows in the time that they take at once."""
    from muxserve.gpu.green import ContextSet, device_of, divide, load, make_context
    from muxserve.gpu.sm import SmRange
    from muxserve.probes.sms import SmMarks

    torch.cuda.set_device(0)
    compute()
    driver = load()
    device = device_of(driver, 0)
    division = divide(driver, device)
    parts = len(division.parts)
    few, many = max(1, parts // 4), max(1, parts // 2)
    ranges = (SmRange(parts - few, few), SmRange(0, many))
    contexts = ContextSet(driver, [make_context(driver, device, division, where) for where in ranges])
    marks = SmMarks()
    used, graphs = [set[int](), set[int]()], []
    for index, context in enumerate(contexts.contexts):
        contexts.use(index)
        compute()
        marks.launch()
        used[index] = marks.take()
        if not 0 < len(used[index]) <= context.sms:
            raise ValueError(f"kernels in a green context of {context.sms} SMs ran on {len(used[index])}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(contexts.stream())):
            marks.launch()
        graphs.append(graph)
        marks.take()
    slowdown = _slowdown(contexts, marks)
    if slowdown > _SIDE_BY_SIDE:
        raise ValueError(
            f"a kernel in a green context takes {slowdown:.2f} times as long beside another: they share SMs"
        )
    marks.take()
    for index, graph in enumerate(graphs):
        contexts.use(1 - index)
        marks.take()
        graph.replay()
        astray = marks.take() - used[index]
        if astray:
            raise ValueError(f"a graph that was captured in a green context ran on {len(astray)} SMs of others")
    began = time.monotonic()
    for turn in range(_ROUNDS):
        contexts.use(turn % 2)
    seconds = (time.monotonic() - began) / _ROUNDS
    contexts.check()
    return {
        "sms": contexts.contexts[1].sms,
        "total": division.total,
        "switch_us": seconds * 1e6,
        "slowdown": slowdown,
    }


ROLES: dict[str, Callable[..., dict[str, Any]]] = {
    "compute": compute,
    "export": export,
    "map-exported": map_exported,
    "keep": keep,
    "map": map_memory,
    "manage": manage,
    "write-page": write_page,
    "read-page": read_page,
    "attention": attention,
    "graph": graph,
    "reduce": reduce,
    "spin": spin,
    "beside": beside,
    "shapes": shapes,
    "green": green,
}
# These have something that others use, until they are killed or nobody listens any more.
STAYING = ("keep", "manage", "spin")


def main() -> None:
    role, *arguments = sys.argv[1:]
    try:
        said = ROLES[role](*arguments)
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said), flush=True)
    if role in STAYING and "error" not in said:
        sys.stdin.read()
    # Not to wait for what was launched.
    os._exit(0)


if __name__ == "__main__":
    main()
