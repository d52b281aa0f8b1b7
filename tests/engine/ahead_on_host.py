"""What asynchronous scheduling needs on CPU, where no fleet has it: a thread that computes, and a step's result without
streams of CUDA. So what schedules for engines on GPUs is tried with real kernels.

A GPU computes what was launched while the host goes on. On CPU vLLM's executor of one process computes in the thread
that asks for it, so that nothing could be scheduled meanwhile; here the worker gets a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import vllm.v1.worker.gpu_model_runner as gpu_model_runner
from vllm.config import VllmConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput

from muxserve.spec import EnginePhase, ModelSpec, UnitSpec
from muxserve.vllm import args

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Base
else:
    Base = object


class ThreadedExecutor(UniProcExecutor):
    """vLLM's executor of one process, whose worker can be given a thread. Calls keep their order."""

    _thread: ThreadPoolExecutor | None = None

    def begin_thread(self, initialize: Callable[[], None]) -> None:
        """From now on the worker runs in a thread of its own, which first calls `initialize`. Not before the process
        has forked for the last time: its children would not have the thread."""
        self._thread = ThreadPoolExecutor(1, "worker", initialize)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        call = super().collective_rpc
        if self._thread is None:
            return call(method, timeout, args, kwargs, non_block, single_value)
        # Blocks in that thread, so that what comes of it is whole.
        future: Future[Any] = self._thread.submit(call, method, timeout, args, kwargs, False, single_value)
        return future if non_block else future.result()


class _Done:
    """In the place of an event of CUDA: what it stands for has happened."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostOutput(AsyncModelRunnerOutput):
    """vLLM's `AsyncGPUModelRunnerOutput` of tokens that are in the host's memory already; same arguments.

    Args:
        sampled_token_ids: [requests, 1].
        invalid_req_indices: requests whose sampled token does not count, since their prompt goes on.
    """

    def __init__(
        self,
        model_runner_output: ModelRunnerOutput,
        sampled_token_ids: torch.Tensor,
        logprobs_tensors: LogprobsTensors | None,
        invalid_req_indices: list[int],
        **_: Any,
    ) -> None:
        self.sampled_token_ids_cpu = sampled_token_ids
        self.async_copy_ready_event = _Done()
        self._output = model_runner_output
        self._logprobs = logprobs_tensors
        self._invalid = invalid_req_indices

    def get_output(self) -> ModelRunnerOutput:
        """The tokens as lists, as the scheduler wants them."""
        tokens = self.sampled_token_ids_cpu.tolist()
        for index in self._invalid:
            tokens[index].clear()
        self._output.sampled_token_ids = tokens
        self._output.logprobs = None if self._logprobs is None else self._logprobs.tolists()
        return self._output


class AheadOnHost(Base):
    """Mixed in before vLLM's runner for CPU. That can feed a step's tokens to the next one, as the runner for GPUs, and
    lacks only what is of CUDA."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        scheduling = vllm_config.scheduler_config
        # vLLM would make streams and events of CUDA at once.
        ahead, scheduling.async_scheduling = scheduling.async_scheduling, False
        super().__init__(vllm_config, device)
        scheduling.async_scheduling = ahead

    def schedule_ahead(self) -> None:
        """From now on a step's tokens come back when the next one has been scheduled, which begins with them."""
        gpu_model_runner.AsyncGPUModelRunnerOutput = HostOutput
        self.use_async_scheduling = True

    def _get_or_create_async_output_copy_stream(self) -> Any:
        return None  # there is nothing to copy


def allow() -> None:
    """Have engines on a CPU schedule asynchronously if their model asks for it."""

    def ahead(unit_spec: UnitSpec, model: ModelSpec, phase: EnginePhase) -> bool:
        return bool(model.engine_args.get("async_scheduling")) and phase != "prefill"

    config_of = args.config_of

    def config_as_asked(options: dict[str, Any]) -> VllmConfig:
        config = config_of(options)
        # vLLM's platform for CPUs has switched it off.
        config.scheduler_config.async_scheduling = options["async_scheduling"]
        return config

    vars(args).update(_ahead=ahead, config_of=config_as_asked)
