"""Models and devices for comparisons of arrangements, small enough to be simulated in a moment."""

from dataclasses import replace

from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.planning.candidates.device_pool import CpuPool, GpuPool
from muxserve.planning.candidates.layouts import LayoutRequest
from placement import Machine
from placement.demand import Demand
from placement.memory import MemoryRules
from tests.costs.models import llama

COSTS = Roofline()
L20 = device("L20-48GB")
# Few layers, so that a device holds it easily; wide ones, so that its steps take long and few are simulated.
WIDE = llama(name="Wide", layers=14, heads=64, kv_heads=8, hidden=8192, intermediate=28672, dtype="bfloat16")
# For a CPU, whose steps take about a tenth of a second with it.
TINY = llama(
    name="Tiny", layers=4, head_dim=64, hidden=2048, intermediate=8192, vocab=8000, max_len=2048, dtype="float32"
)


def wanted(rate: float = 8.0, ttft: float | None = 2.0, tpot: float | None = 0.1, **more: object) -> LayoutRequest:
    demand = Demand(
        "wide",
        architecture=WIDE,
        rate=rate,
        prompt_tokens=200,
        output_tokens=40,
        dtype="bfloat16",
        slo_ttft=ttft,
        slo_tpot=tpot,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
    )
    return LayoutRequest(demand, **more)  # type: ignore[arg-type]


def tiny(rate: float = 0.5, **more: object) -> LayoutRequest:
    return LayoutRequest(
        Demand(
            "tiny",
            architecture=TINY,
            rate=rate,
            prompt_tokens=100,
            output_tokens=20,
            dtype="float32",
            slo_ttft=8.0,
            slo_tpot=0.5,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
        ),
        **more,
    )  # type: ignore[arg-type]


def gpus(*nodes: int, kind: str = "L20-48GB", memory: float | None = None) -> GpuPool:
    size = device(kind).memory_bytes if memory is None else int(memory)
    return GpuPool(kind, nodes, size, MemoryRules.served(0.92))


def cores(count: int = 2, pool: int | None = 1 << 30, memory: int = 16 << 30) -> CpuPool:
    return CpuPool(Machine(count, memory), count, pool)


def with_demand(wanted: LayoutRequest, **changes: object) -> LayoutRequest:
    return replace(wanted, demand=replace(wanted.demand, **changes))  # type: ignore[arg-type]
