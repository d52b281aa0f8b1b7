"""`cpu_stand_in` with the CUDA engine's runner over vLLM's second one."""

from __future__ import annotations

import vllm.v1.worker.cpu.model_runner as cpu_runner
import vllm.v1.worker.cpu_worker as cpu_worker

import tests.engine_cuda.cpu_stand_in  # noqa: F401
from muxserve.engine.cuda.second_runner import SecondPooledRunner


class SecondStandInRunner(SecondPooledRunner, cpu_runner.CPUModelRunner):
    """Our runner over vLLM's second one for CPU, which is that for GPUs with other streams."""


class SecondWorker(cpu_worker.CPUWorker):
    def init_device(self) -> None:
        cpu_runner.CPUModelRunner = SecondStandInRunner
        super().init_device()

    def schedule_ahead(self) -> None:
        """It always can."""

    def rebind_pool(self) -> None:
        self.model_runner.rebind_pool()
