"""The unit's GPUs in `/fleet` and `/metrics`: memory, utilisation, faults. Of this machine by NVML, of others by what
their units say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from muxserve.gpu import nvml
from muxserve.gpu.nvml import GpuMachine
from muxserve.gpu.watch import MAX_AGE_SECONDS, states
from muxserve.spec import UnitSpec

_LABELS = ["gpu", "uuid"]


class GpuStatus(Collector):
    """What NVML last said of the GPUs of the unit; nothing at all without GPUs.

    Args:
        ask: asks NVML; in a thread, because a lost GPU may take its time.
        told: what the unit of another machine says of its GPUs (`muxserve.gpu.watch.states`), instead of `ask`; nothing
            while it has not said anything.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        ask: Callable[[], GpuMachine] = nvml.machine,
        clock: Callable[[], float] = time.monotonic,
        told: Callable[[], object] | None = None,
    ) -> None:
        self._unit_spec = unit_spec
        self._ask = ask
        self._clock = clock
        self._told = told
        self._asked_at = -1e9
        self._asking = asyncio.Lock()
        self._machine = GpuMachine()

    async def refresh(self) -> None:
        """Ask again if what is known is too old."""
        if self._unit_spec.gpu is None or self._told is not None:
            return
        async with self._asking:
            if self._clock() - self._asked_at > MAX_AGE_SECONDS:
                self._machine = await asyncio.to_thread(self._ask)
                self._asked_at = self._clock()

    def report(self) -> list[dict[str, object]]:
        """The GPUs for `/fleet`, by rank."""
        told = None if self._told is None else self._told()
        if isinstance(told, list) and told:
            return told
        return states(
            self._unit_spec,
            self._machine if self._told is None else GpuMachine(why_none="its unit has not told of it yet"),
        )

    def collect(self) -> Iterator[Metric]:
        if self._unit_spec.gpu is None:
            return
        up = GaugeMetricFamily("muxserve_gpu_up", "1 while the GPU answers and has no fault.", labels=_LABELS)
        total = GaugeMetricFamily("muxserve_gpu_memory_bytes", "Memory of the GPU.", labels=_LABELS)
        used = GaugeMetricFamily("muxserve_gpu_memory_used_bytes", "Memory of the GPU in use.", labels=_LABELS)
        busy = GaugeMetricFamily(
            "muxserve_gpu_utilization_ratio", "Part of the last second in which a kernel ran.", labels=_LABELS
        )
        pool = GaugeMetricFamily("muxserve_gpu_pool_bytes", "Memory of the GPU that KV pages have.", labels=_LABELS)
        for gpu in self.report():
            index = gpu["index"]
            labels = [str(f"rank{gpu['rank']}" if index is None else index), str(gpu["uuid"])]
            up.add_metric(labels, float(index is not None and not gpu["fault"]))
            known = ((pool, "pool_bytes"), (total, "memory_bytes"), (used, "used_bytes"), (busy, "utilization"))
            for family, key in known:
                value = gpu[key]
                # What a GPU holds it holds although the driver does not answer; of the rest nothing is known then.
                if isinstance(value, int | float) and (family is pool or gpu["memory_bytes"]):
                    family.add_metric(labels, value)
        yield from (up, total, used, busy, pool)
