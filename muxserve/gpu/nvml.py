"""What GPUs a machine has and what they are doing, by NVML (package nvidia-ml-py).

Every failure has its words, and a GPU that cannot be asked does not hide the others.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from muxserve.costs.devices import device
from muxserve.costs.latency import CostError


class Nvml(Protocol):
    """What is used of the module `pynvml`; it has the names of NVML's C functions."""

    NVMLError: type[Exception]
    # Raised where the driver is older than the module and lacks a form of a function.
    NVMLLibraryMismatchError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802
    def __getattr__(self, name: str) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU. `used_bytes` is None where the driver does not tell."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """What runs on a GPU. `utilisation` is the part of the last second in which a kernel ran, None where it is not
    known."""

    utilisation: float | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuModes:
    """How a GPU is set: whether it is divided (MIG), and which processes may compute on it."""

    mig: bool = False
    compute: str = "default"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU now.

    `fault` says in words why it cannot be used (lost, uncorrectable memory errors); what is not known is 0 or empty.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int = 0
    used_bytes: int = 0
    activity: GpuActivity = GpuActivity()
    modes: GpuModes = GpuModes()
    fault: str = ""

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has."""
        return max(0, self.memory_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """The GPUs of a machine, or of several; `why_none` says in words why there are none, `where` whose they are."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    why_none: str = ""
    where: str = "this machine"

    def by_uuid(self, uuid: str) -> Gpu | None:
        """The GPU of that UUID."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


# By NVML's error numbers (nvml.h, nvmlReturn_t).
_WORDS = {
    4: "this user may not ask the driver (permission denied)",
    9: "the NVIDIA driver is not loaded (nvidia-smi says more)",
    12: "libnvidia-ml.so.1 is missing: the NVIDIA driver is not installed, or not visible in this container",
    15: "the GPU is lost: it has fallen off the bus (see `dmesg | grep Xid`); reset it or restart the machine",
    16: "the GPU needs a reset (nvidia-smi --gpu-reset), or the machine a restart",
    18: "the driver's library and kernel module do not fit each other; restart the machine after a driver update",
    999: "unknown error of the driver; `dmesg | grep -i nvrm` says more",
}
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}


def words_of(error: Exception) -> str:
    """An error of NVML in words."""
    number = getattr(error, "value", None)
    return _WORDS.get(number, f"NVML: {error}") if isinstance(number, int) else f"NVML: {error}"


def load() -> Nvml | None:
    """The module `pynvml`; None if it is not installed."""
    try:
        return cast(Nvml, importlib.import_module("pynvml"))
    except ImportError:
        return None


def machine(nvml: Nvml | None = None) -> GpuMachine:
    """Ask for all GPUs.

    Args:
        nvml: the library to ask; by default the one that is installed.
    """
    nvml = nvml or load()
    if nvml is None:
        return GpuMachine(why_none="nvidia-ml-py is not installed (pip install nvidia-ml-py; the `gpu` extra has it)")
    try:
        with _session(nvml):
            gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
            versions = _versions(nvml)
    except nvml.NVMLError as error:
        return GpuMachine(why_none=words_of(error))
    return GpuMachine(gpus, *versions, why_none="" if gpus else "the driver shows no GPU")


@contextmanager
def _session(nvml: Nvml) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _versions(nvml: Nvml) -> tuple[str, str]:
    driver = _ask(nvml, "", lambda: _text(nvml.nvmlSystemGetDriverVersion()))
    cuda = _ask(nvml, 0, nvml.nvmlSystemGetCudaDriverVersion)
    return driver, f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""


def _gpu(nvml: Nvml, index: int) -> Gpu:
    name, uuid = f"GPU {index}", ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return Gpu(index, uuid, name, fault=words_of(error))
    utilisation = _ask(nvml, None, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
    return Gpu(
        index=index,
        uuid=uuid,
        name=name,
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        activity=GpuActivity(utilisation, _processes(nvml, handle)),
        modes=GpuModes(
            bool(_ask(nvml, (0, 0), lambda: nvml.nvmlDeviceGetMigMode(handle))[0]),
            _COMPUTE_MODES.get(_ask(nvml, 0, lambda: nvml.nvmlDeviceGetComputeMode(handle)), "unknown"),
        ),
        fault=_memory_fault(nvml, handle),
    )


def _processes(nvml: Nvml, handle: Any) -> tuple[GpuProcess, ...]:
    listed = _ask(nvml, [], lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return tuple(GpuProcess(int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in listed)


def _memory_fault(nvml: Nvml, handle: Any) -> str:
    """Uncorrectable memory errors since the driver was loaded (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile), and rows
    that wait for a reset to be replaced."""
    errors = _ask(nvml, 0, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0))
    rows = _ask(nvml, (0, 0, 0, 0), lambda: tuple(nvml.nvmlDeviceGetRemappedRows(handle)))
    if len(rows) > 3 and rows[3]:
        return "its memory has failed and no spare rows are left; it must be replaced"
    if errors:
        return f"its memory had {errors} uncorrectable errors since the driver was loaded; reset the GPU"
    return ""


def _ask(nvml: Nvml, otherwise: Any, question: Callable[[], Any]) -> Any:
    """An answer that a GPU or driver need not have. A lost GPU answers nothing from here on, and says so elsewhere."""
    try:
        return question()
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError, AttributeError):
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def device_name(gpu: Gpu) -> str | None:
    """The type of a GPU as `muxserve.costs.devices` calls it; None if that does not know it.

    NVML's names say `NVIDIA A100-SXM4-80GB`, `NVIDIA H200`, `NVIDIA L40S`; where a type comes with different memories
    the one nearest in size is meant.
    """
    words = re.sub(r"^(NVIDIA|Tesla|GRID)\s+", "", gpu.name).replace("-", " ").split()
    if not words:
        return None
    gib = round(gpu.memory_bytes / (1 << 30) / 10) * 10
    for guess in (f"{words[0]}-{gib}GB", words[0]):
        with contextlib.suppress(CostError):
            known = device(guess)
            # Another memory than the type's own is another product (H100 NVL, A100 40 GB).
            if not gpu.memory_bytes or abs(known.memory_bytes - gpu.memory_bytes) < 0.1 * known.memory_bytes:
                return known.name
    return None


def same_type(one: Gpu, other: Gpu) -> bool:
    """Whether what is planned for the one is right for the other."""
    kind = device_name(one)
    return one.name == other.name or (kind is not None and kind == device_name(other))


def visible(found: GpuMachine, environ: Mapping[str, str]) -> GpuMachine:
    """Only the GPUs that CUDA_VISIBLE_DEVICES leaves to this process: numbers, UUIDs or beginnings of UUIDs."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or not found.gpus:
        return found
    names = [name.strip() for name in text.split(",")]
    left = tuple(g for g in found.gpus if any(n and (n == str(g.index) or g.uuid.startswith(n)) for n in names))
    return replace(found, gpus=left, why_none=found.why_none if left else f"CUDA_VISIBLE_DEVICES is {text!r}")


class GpuChoiceError(ValueError):
    """The GPUs that are wanted cannot be had; the message says why. `key` is the key of `cluster` to look at."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


def choose(found: GpuMachine, count: int, ids: Sequence[int | str] = ()) -> tuple[Gpu, ...]:
    """`count` GPUs for a unit: those named by `ids` (numbers or UUIDs), else equal ones with the most free memory.

    Raises:
        GpuChoiceError: there are not enough, one is not there, is named twice, is faulty, divided (MIG) or closed.
    """
    if not found.gpus:
        raise GpuChoiceError(f"{found.where} has no usable GPU: {found.why_none}", "gpus")
    if ids:
        return _named(found, ids)
    usable = [gpu for gpu in found.gpus if not _unusable(gpu)]
    kinds: dict[str, list[Gpu]] = {}
    for gpu in usable:
        kinds.setdefault(gpu.name, []).append(gpu)
    enough = [each for each in kinds.values() if len(each) >= count]
    if not enough:
        have = ", ".join(f"{len(each)} {name}" for name, each in kinds.items()) or "none"
        out = "".join(f"; GPU {gpu.index} is out: {_unusable(gpu)}" for gpu in found.gpus if _unusable(gpu))
        raise GpuChoiceError(f"{count} GPUs of one type are wanted, {found.where} has {have}{out}", "gpus")
    best = [sorted(each, key=lambda gpu: (-gpu.free_bytes, gpu.index))[:count] for each in enough]
    chosen = max(best, key=lambda each: sum(gpu.free_bytes for gpu in each))
    return tuple(sorted(chosen, key=lambda gpu: gpu.index))


def _named(found: GpuMachine, ids: Sequence[int | str]) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    for wanted in ids:
        gpu = next((gpu for gpu in found.gpus if wanted in (gpu.index, gpu.uuid)), None)
        if gpu is None:
            have = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in found.gpus)
            raise GpuChoiceError(f"there is no GPU {wanted}; {found.where} has {have}", "gpu_ids")
        if gpu in chosen:
            raise GpuChoiceError(f"GPU {wanted} is named twice", "gpu_ids")
        if _unusable(gpu):
            raise GpuChoiceError(f"GPU {wanted} cannot be used: {_unusable(gpu)}", "gpu_ids")
        chosen.append(gpu)
    if len({gpu.name for gpu in chosen}) > 1:
        have = ", ".join(f"{gpu.index} is a {gpu.name}" for gpu in chosen)
        raise GpuChoiceError(f"the GPUs of a unit must be of one type, but {have}", "gpu_ids")
    return tuple(chosen)


def _unusable(gpu: Gpu) -> str:
    if gpu.fault:
        return gpu.fault
    if gpu.modes.mig:
        return "it is divided by MIG; switch that off (nvidia-smi -mig 0)"
    if gpu.modes.compute == "prohibited":
        return "its compute mode forbids computing (nvidia-smi -c 0 allows it)"
    return ""
