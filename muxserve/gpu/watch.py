"""The state of a unit's GPUs as others are told: one entry for each rank, from what NVML says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from muxserve.gpu import nvml
from muxserve.gpu.nvml import GpuMachine
from muxserve.spec import UnitSpec

# The driver averages utilisation over up to a second; asking more often tells nothing new.
MAX_AGE_SECONDS = 1.0


def states(unit_spec: UnitSpec, machine: GpuMachine) -> list[dict[str, object]]:
    """The unit's GPUs by rank, ready for JSON: bytes of memory, in use by anyone, of it KV pages; the part of the last
    second in which a kernel ran; in words what is wrong. `host` is the machine, if it is another one."""
    pool_bytes = sum(pool.page_bytes * pool.num_pages for pool in unit_spec.pools)
    host = unit_spec.listen.host if unit_spec.listen is not None else None
    told: list[dict[str, object]] = []
    for rank, uuid in enumerate(unit_spec.gpu.uuids if unit_spec.gpu else []):
        gpu = machine.by_uuid(uuid)
        told.append(
            {
                "rank": rank,
                "uuid": uuid,
                "host": host,
                "index": gpu.index if gpu else None,
                "name": gpu.name if gpu else None,
                "memory_bytes": gpu.memory_bytes if gpu else None,
                "used_bytes": gpu.used_bytes if gpu else None,
                "pool_bytes": pool_bytes,
                "utilization": gpu.activity.utilisation if gpu else None,
                "fault": gpu.fault if gpu else machine.why_none or "it is no longer there",
            }
        )
    return told


class GpuWatch:
    """What NVML last said of a unit's GPUs, for a process that must not wait: a thread asks while somebody wants to
    know, at most once a second, and a lost GPU may keep it busy.

    Args:
        ask: asks NVML.
        clock: in seconds.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        ask: Callable[[], GpuMachine] = nvml.machine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unit_spec = unit_spec
        self._ask = ask
        self._clock = clock
        self._machine: GpuMachine | None = None
        self._asked_at = -1e9
        self._asking: threading.Thread | None = None

    def states(self) -> list[dict[str, object]]:
        """What is known now; nothing before the first answer. If that is old, the next call will know better."""
        if self._clock() - self._asked_at > MAX_AGE_SECONDS and (self._asking is None or not self._asking.is_alive()):
            self._asked_at = self._clock()
            self._asking = threading.Thread(target=self._refresh, name="nvml", daemon=True)
            self._asking.start()
        return [] if self._machine is None else states(self._unit_spec, self._machine)

    def _refresh(self) -> None:
        self._machine = self._ask()
