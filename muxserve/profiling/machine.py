"""What this machine's CPU reaches itself: a large copy, a large matrix product."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from muxserve.costs.profile import MeasuredMachine

_COPY_BYTES = 128 << 20  # more than a core's share of any cache
_PRODUCT = 1024
_TRIES = 12


def cpu_name() -> str:
    """As the kernel calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measure_machine(cores: int) -> MeasuredMachine:
    """Takes a second or two. The best of some tries counts: whatever else runs makes it only slower."""
    import numpy as np

    sources = [np.ones(_COPY_BYTES // 4 // cores, np.float32) for _ in range(cores)]
    targets = [np.empty_like(source) for source in sources]
    factors = [np.ones((_PRODUCT, _PRODUCT), np.float32) for _ in range(2)]
    result = np.empty_like(factors[0])
    with ThreadPoolExecutor(cores) as pool:

        def copy() -> None:
            list(pool.map(np.copyto, targets, sources))

        seconds = _best(copy)
    product = _best(lambda: np.matmul(factors[0], factors[1], out=result))
    moved = 2 * sum(source.nbytes for source in sources)
    return MeasuredMachine(
        name=f"{cpu_name()}, {cores} of {os.cpu_count()} cores",
        bandwidth=moved / seconds,
        flops={"float32": 2.0 * _PRODUCT**3 / product},
        cores=cores,
    )


def _best(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
