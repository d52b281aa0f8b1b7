"""Stands in for the module `pynvml`: GPUs by description, errors by number."""
# ruff: noqa: N802

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
# In place of an error number: the driver has no such form of the function.
OLDER = -1


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class NVMLLibraryMismatchError(Exception):
    pass


@dataclass
class FakeGpu:
    name: str = "NVIDIA H200"
    uuid: str = "GPU-00000000-0000-0000-0000-000000000000"
    total: int = 143771 << 20
    used: int = 1 * GIB
    busy: int = 40
    mig: int = 0
    mode: int = 0
    ecc: int = 0
    pids: list[int] = field(default_factory=list)
    # Function name -> error number.
    errors: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError

    def __init__(self, *gpus: FakeGpu, init_error: int = 0) -> None:
        self.gpus, self.init_error = gpus, init_error
        self.sessions = 0

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NVMLError(self.init_error)
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._of(self.gpus[index], "nvmlDeviceGetHandleByIndex", self.gpus[index])

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid.encode(),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=gpu.total, used=gpu.used),
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.busy),
            "nvmlDeviceGetMigMode": lambda gpu: [gpu.mig, gpu.mig],
            "nvmlDeviceGetComputeMode": lambda gpu: gpu.mode,
            "nvmlDeviceGetTotalEccErrors": lambda gpu: gpu.ecc,
            "nvmlDeviceGetRemappedRows": lambda gpu: (0, 0, 0, 0),
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=None if pid < 0 else pid) for pid in gpu.pids
            ],
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda gpu, *_: self._of(gpu, name, answers[name](gpu))

    def _of(self, gpu: FakeGpu, name: str, answer: Any) -> Any:
        assert self.sessions == 1
        if gpu.errors.get(name) == OLDER:
            raise NVMLLibraryMismatchError(name)
        if name in gpu.errors:
            raise NVMLError(gpu.errors[name])
        return answer
