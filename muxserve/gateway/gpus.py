"""The unit's GPUs in `/fleet` and `/metrics`: memory, utilisation, faults, by NVML."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from muxserve.deployment import Deployment
from muxserve.gpu import nvml
from muxserve.gpu.nvml import Gpu, Machine

# The driver averages utilisation over up to a second; asking more often tells nothing new.
MAX_AGE_SECONDS = 1.0
_LABELS = ["gpu", "uuid"]


class GpuStatus(Collector):
    """What NVML last said of the GPUs of the deployment; nothing at all without GPUs.

    Args:
        ask: asks NVML; in a thread, because a lost GPU may take its time.
    """

    def __init__(
        self,
        deployment: Deployment,
        ask: Callable[[], Machine] = nvml.machine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uuids = deployment.gpu.uuids if deployment.gpu else []
        self._pool_bytes = sum(pool.page_bytes * pool.num_pages for pool in deployment.pools)
        self._ask = ask
        self._clock = clock
        self._asked_at = -1e9
        self._asking = asyncio.Lock()
        self._machine = Machine()

    async def refresh(self) -> None:
        """Ask again if what is known is too old."""
        if not self._uuids:
            return
        async with self._asking:
            if self._clock() - self._asked_at > MAX_AGE_SECONDS:
                self._machine = await asyncio.to_thread(self._ask)
                self._asked_at = self._clock()

    def _gpus(self) -> Iterator[tuple[str, Gpu | None]]:
        for uuid in self._uuids:
            yield uuid, self._machine.by_uuid(uuid)

    def report(self) -> list[dict[str, object]]:
        """The GPUs for `/fleet`, by rank."""
        return [
            {
                "rank": rank,
                "uuid": uuid,
                "index": gpu.index if gpu else None,
                "name": gpu.name if gpu else None,
                "memory_bytes": gpu.memory_bytes if gpu else None,
                "used_bytes": gpu.used_bytes if gpu else None,
                "pool_bytes": self._pool_bytes,
                "utilization": gpu.utilisation if gpu else None,
                "fault": gpu.fault if gpu else self._machine.why_none or "it is no longer there",
            }
            for rank, (uuid, gpu) in enumerate(self._gpus())
        ]

    def collect(self) -> Iterator[Metric]:
        if not self._uuids:
            return
        up = GaugeMetricFamily("muxserve_gpu_up", "1 while the GPU answers and has no fault.", labels=_LABELS)
        total = GaugeMetricFamily("muxserve_gpu_memory_bytes", "Memory of the GPU.", labels=_LABELS)
        used = GaugeMetricFamily("muxserve_gpu_memory_used_bytes", "Memory of the GPU in use.", labels=_LABELS)
        busy = GaugeMetricFamily(
            "muxserve_gpu_utilization_ratio", "Part of the last second in which a kernel ran.", labels=_LABELS
        )
        pool = GaugeMetricFamily("muxserve_gpu_pool_bytes", "Memory of the GPU that KV pages have.", labels=_LABELS)
        for rank, (uuid, gpu) in enumerate(self._gpus()):
            labels = [str(gpu.index if gpu else f"rank{rank}"), uuid]
            up.add_metric(labels, float(gpu is not None and not gpu.fault))
            pool.add_metric(labels, self._pool_bytes)
            if gpu is None or not gpu.memory_bytes:
                continue
            total.add_metric(labels, gpu.memory_bytes)
            used.add_metric(labels, gpu.used_bytes)
            if gpu.utilisation is not None:
                busy.add_metric(labels, gpu.utilisation)
        yield from (up, total, used, busy, pool)
