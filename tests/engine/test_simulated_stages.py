"""Stages that compute nothing: micro-batches follow each other through them, each stage with one at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from muxserve.costs import EngineShape, Load
from muxserve.costs.architecture import split_layers
from muxserve.costs.roofline import Roofline
from muxserve.costs.stages import costs_of_stages
from muxserve.costs.step_costs import StepCosts, StepWork
from muxserve.engine.simulated_stages import SimulatedStage, StagedOutput, StageLink, StageThreads
from muxserve.engine.stage_clock import StageClocks
from tests.costs.models import SEVEN_B
from tests.support.patience import PATIENCE

STAGES = 3


@dataclass
class Device:
    """Computes when it is told to, and keeps what it was asked for."""

    asked: list[float] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may_end: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def run(self, seconds: float, load: Load) -> None:
        self.asked.append(seconds)
        self.begun.release()
        assert self.may_end.acquire(timeout=PATIENCE)


def costs() -> list[StepCosts]:
    shape = EngineShape("A100-80GB", 1, 1.0, "float16")
    return [StepCosts(each) for each in costs_of_stages(split_layers(32, STAGES), Roofline(), SEVEN_B, shape)]


def test_each_stage_has_one_micro_batch_and_another_one_follows() -> None:
    of_stage, devices, clocks = costs(), [Device() for _ in range(STAGES)], StageClocks(STAGES)
    stages = StageThreads(
        [
            SimulatedStage(cost, device, StageLink(0.0, 0.0), clocks.clock(number))
            for number, (cost, device) in enumerate(zip(of_stage, devices, strict=True))
        ]
    )
    first, second = StepWork(prefill=100, prompts=1, pairs=5050), StepWork(decode=1, context=10)
    one, other = stages.begin(first), stages.begin(second)
    for number, device in enumerate(devices):
        assert device.begun.acquire(timeout=PATIENCE)
        # The second one waits before the stage in which the first one is.
        assert device.asked == [of_stage[number].seconds(first)]
        assert not one.done()
        device.may_end.release()
    one.result(PATIENCE)
    for number, device in enumerate(devices):
        assert device.begun.acquire(timeout=PATIENCE)
        assert device.asked[1:] == [of_stage[number].seconds(second)]
        assert not other.done()
        device.may_end.release()
    other.result(PATIENCE)
    assert all(seconds > 0 for seconds in clocks.take().computed)


def test_tokens_come_when_a_micro_batch_is_through_and_an_error_ends_only_its_own() -> None:
    class Breaks:
        def run(self, seconds: float, load: Load) -> None:
            if not seconds:
                raise RuntimeError("broken")

    class Costs:
        def seconds(self, work: StepWork) -> float:
            return float(work.tokens)

        def load(self, work: StepWork) -> Load:
            return Load(0.0, 0.0)

    cost: Any = Costs()
    stages = StageThreads([SimulatedStage(cost, Breaks(), StageLink(0.0, 0.0)) for _ in range(2)])
    poisoned, sound = stages.begin(StepWork()), stages.begin(StepWork(decode=1, context=1))
    with pytest.raises(RuntimeError, match="broken"):
        StagedOutput(poisoned, lambda: EMPTY_MODEL_RUNNER_OUTPUT).get_output()
    assert StagedOutput(sound, lambda: EMPTY_MODEL_RUNNER_OUTPUT).get_output() is EMPTY_MODEL_RUNNER_OUTPUT
