"""Models and devices for comparisons of arrangements, small enough to be simulated in a moment."""

from dataclasses import replace

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.planning.arrangements.base import Wanted
from muxserve.planning.device_pool import CpuPool, GpuPool
from placement import Machine
from placement.demand import Demand
from placement.memory import MemoryRules

COSTS = Roofline()
L20 = device("L20-48GB")
# Few layers, so that a device holds it easily; wide ones, so that its steps take long and few are simulated.
WIDE = ModelArchitecture("Wide", 14, 64, 8, 128, 8192, 28672, 32000, 4096, 4096, "bfloat16")
# For a CPU, whose steps take about a tenth of a second with it.
TINY = ModelArchitecture("Tiny", 4, 32, 32, 64, 2048, 8192, 8000, 2048, 2048, "float32")


def wanted(rate: float = 8.0, ttft: float | None = 2.0, tpot: float | None = 0.1, **more: object) -> Wanted:
    demand = Demand("wide", WIDE, rate, 200, 40, "bfloat16", ttft, tpot, 64, 2048)
    return Wanted(demand, **more)  # type: ignore[arg-type]


def tiny(rate: float = 0.5, **more: object) -> Wanted:
    return Wanted(Demand("tiny", TINY, rate, 100, 20, "float32", 8.0, 0.5, 32, 2048), **more)  # type: ignore[arg-type]


def gpus(*nodes: int, kind: str = "L20-48GB", network: float = 1.25e9, memory: float | None = None) -> GpuPool:
    size = device(kind).memory_bytes if memory is None else int(memory)
    return GpuPool(kind, nodes, size, MemoryRules.served(0.92), network)


def cores(count: int = 2, pool: int | None = 1 << 30, memory: int = 16 << 30) -> CpuPool:
    return CpuPool(Machine(count, memory), count, pool)


def with_demand(wanted: Wanted, **changes: object) -> Wanted:
    return replace(wanted, demand=replace(wanted.demand, **changes))  # type: ignore[arg-type]
