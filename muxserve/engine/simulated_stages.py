"""A pipeline of stages that compute nothing: a thread for each, through which micro-batches follow each other.

vLLM's queue of micro-batches, the scheduler and the budgets of tokens are those of any pipeline
(`muxserve.engine.pipeline`). Real stages are processes; these only sleep, and one process has them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from muxserve.costs import Load
from muxserve.costs.step_costs import StepCosts, StepWork
from muxserve.engine.stage_clock import StageClock


class StageDevice(Protocol):
    """What a stage computes on."""

    def run(self, seconds: float, load: Load) -> None:
        """Run a job that takes so long alone."""


class StageLink(NamedTuple):
    """What lies behind a stage: seconds that anything takes to the next one, and seconds more for each token."""

    latency: float
    per_token: float


class SimulatedStage(NamedTuple):
    """One stage: what its steps cost, on what it runs, and what counts the seconds in which it does."""

    costs: StepCosts
    device: StageDevice
    link: StageLink
    clock: StageClock | None = None


class _MicroBatch(NamedTuple):
    """Arrives at a stage at `at`, of the monotonic clock."""

    work: StepWork
    at: float
    through: Future[None]


class StageThreads:
    """Runs micro-batches through the stages, each in the order in which they were begun. To be made in the process that
    uses it: threads do not survive a fork."""

    def __init__(self, stages: Sequence[SimulatedStage]) -> None:
        self._queues = [SimpleQueue[_MicroBatch]() for _ in stages]
        for number, stage in enumerate(stages):
            # The process may end whatever is under way.
            Thread(target=self._run, args=(number, stage), daemon=True, name=f"stage-{number}").start()

    def begin(self, work: StepWork) -> Future[None]:
        """Put a micro-batch in; what comes back is done when it is through the last stage."""
        through: Future[None] = Future()
        self._queues[0].put(_MicroBatch(work, time.monotonic(), through))
        return through

    def _run(self, number: int, stage: SimulatedStage) -> None:
        while True:
            batch = self._queues[number].get()
            time.sleep(max(0.0, batch.at - time.monotonic()))
            try:
                self._compute(stage, batch.work)
            except Exception as error:
                batch.through.set_exception(error)
                continue
            if number + 1 == len(self._queues):
                batch.through.set_result(None)
            else:
                arrives = time.monotonic() + stage.link.latency + batch.work.tokens * stage.link.per_token
                self._queues[number + 1].put(batch._replace(at=arrives))

    def _compute(self, stage: SimulatedStage, work: StepWork) -> None:
        if stage.clock is not None:
            stage.clock.start()
        try:
            stage.device.run(stage.costs.seconds(work), stage.costs.load(work))
        finally:
            if stage.clock is not None:
                stage.clock.stop()


class StagedOutput(AsyncModelRunnerOutput):
    """The tokens of a micro-batch, made when it is through."""

    def __init__(self, through: Future[None], sample: Callable[[], ModelRunnerOutput]) -> None:
        self._through = through
        self._sample = sample

    def get_output(self) -> ModelRunnerOutput:
        """Waits."""
        self._through.result()
        return self._sample()
