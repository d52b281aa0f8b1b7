"""Simulated engines: what a step is about, how long it takes beside others, and which tokens come of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput

from muxserve.costs import Load
from muxserve.costs.latency import EngineShape
from muxserve.costs.roofline import Roofline
from muxserve.costs.step_costs import StepCosts, StepWork
from muxserve.engine import simulated
from muxserve.engine.runner import RESUMED_OUTPUT
from muxserve.engine.simulated import ANSWER_TOKENS, SharedDevice, SimulatedWorker
from muxserve.simulator.stages import Stage
from tests.costs.models import SEVEN_B

END = 3


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Latency:
    """Each job beside another one makes it as much slower as it uses of the device."""

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        assert device == "CPU"
        return [1.0 + sum(load.compute for load in loads) - mine.compute for mine in loads]


def device(path: Path) -> SharedDevice:
    return SharedDevice(path, "CPU", Latency())  # type: ignore[arg-type]


def test_jobs_slow_each_other_down_while_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(simulated, "time", clock)
    one, other = device(tmp_path / "device"), device(tmp_path / "device")
    one.run(0.1, Load(0.0, 0.5))
    assert clock.now == pytest.approx(100.1)
    # The other one's job ends half-way.
    other._rows[other._mine, 1:] = (100.25, *Load(0.0, 1.0))
    one.run(0.1, Load(0.0, 0.5))
    assert clock.now == pytest.approx(100.275, abs=0.003)
    # What an engine does between two steps counts like the steps.
    other.run(0.1, Load(0.0, 1.0), after=0.05)
    one.run(0.1, Load(0.0, 0.5))
    assert clock.now == pytest.approx(100.5, abs=0.003)
    other._rows[other._mine, 1] = 0.0
    # The last job of an engine that died counts for a moment only, and its row is another's.
    other._rows[other._mine] = (2**22 + 1, clock.now + 0.008, *Load(0.0, 1.0))
    began = clock.now
    one.run(0.1, Load(0.0, 0.5))
    assert clock.now - began == pytest.approx(0.104, abs=0.003)
    assert device(tmp_path / "device")._mine == other._mine


def worker() -> SimulatedWorker:
    made = SimulatedWorker.__new__(SimulatedWorker)
    made._sequences, made._step, made._ends, made._plain = {}, ([], []), [END], 10
    made._unit_spec = SimpleNamespace(stages=1)  # type: ignore[assignment]
    made._vectors = None
    return made


def new(
    request: str, prompt: int, computed: int = 0, resumed: int = 0, endless: bool = False, pooling: Any = None
) -> Any:
    made = SimpleNamespace(
        req_id=request,
        prompt_token_ids=[0] * prompt,
        num_computed_tokens=computed,
        sampling_params=None if pooling else SimpleNamespace(ignore_eos=endless),
        pooling_params=pooling,
    )
    if resumed:
        setattr(made, RESUMED_OUTPUT, [0] * resumed)
    return made


def scheduled(counts: dict[str, int], first: list[Any], cached: dict[str, int] | None = None) -> Any:
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=first,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[*cached], num_computed_tokens=[*cached.values()]),
        num_scheduled_tokens=counts,
    )


def test_a_prompt_in_chunks_and_sequences_that_decode() -> None:
    engine = worker()
    first = engine._schedule(scheduled({"a": 4, "b": 2}, [new("a", 10), new("b", 5, computed=3)]))
    assert first == StepWork(prefill=6, prompts=2, pairs=10 + 2 * 3 + 3)
    # Only the second prompt is through.
    output = engine.sample_tokens(None)
    assert (output.req_ids, [len(each) for each in output.sampled_token_ids]) == (["a", "b"], [0, 1])
    then = engine._schedule(scheduled({"a": 6, "b": 1}, [], {"a": 4, "b": 5}))
    assert then == StepWork(prefill=6, prompts=1, pairs=6 * 4 + 21, decode=1, context=6)
    assert [len(each) for each in engine.sample_tokens(None).sampled_token_ids] == [1, 1]
    # One that comes with tokens of another engine goes on.
    moved = engine._schedule(scheduled({"c": 1}, [new("c", 8, computed=9, resumed=2)]))
    assert moved == StepWork(decode=1, context=10)


def test_a_prompt_is_answered_with_vectors_when_all_of_it_is_computed() -> None:
    engine, made = worker(), torch.ones(3)
    asked: list[tuple[Any, int]] = []
    engine._vectors = SimpleNamespace(answer=lambda params, prompt: asked.append((params, len(prompt))) or made)  # type: ignore[assignment]
    first = engine._schedule(scheduled({"a": 4, "b": 2}, [new("a", 10, pooling="mean"), new("b", 2, pooling="last")]))
    assert first == StepWork(prefill=6, prompts=2, pairs=10 + 3)
    output = engine.sample_tokens(None)
    assert isinstance(output, ModelRunnerOutput)
    assert output.pooler_output == [None, made]
    then = engine._schedule(scheduled({"a": 6}, [], {"a": 4}))
    assert then == StepWork(prefill=6, prompts=1, pairs=6 * 4 + 21)
    output = engine.sample_tokens(None)
    assert isinstance(output, ModelRunnerOutput)
    assert output.pooler_output == [made]
    assert asked == [("last", 2), ("mean", 10)]


def test_a_mixed_step_takes_what_the_simulator_says() -> None:
    costs = Roofline().engine(SEVEN_B, EngineShape("A100-80GB", 1, 0.5, "float16"))
    engine, ran = worker(), []
    engine._costs, engine._ended, engine._between = StepCosts(costs), 0.0, 0.0
    engine._device = SimpleNamespace(run=lambda seconds, load, after: ran.append((seconds, load)))  # type: ignore[assignment]
    first = scheduled({"a": 9}, [new("a", 9)])
    first.finished_req_ids, first.total_num_scheduled_tokens = set(), 9
    engine.execute_model(first)
    engine.sample_tokens(None)
    mixed = scheduled({"a": 1, "b": 500}, [new("b", 500)], {"a": 9})
    mixed.finished_req_ids, mixed.total_num_scheduled_tokens = set(), 501
    engine.execute_model(mixed)
    stage, work = Stage(costs), StepWork(500, 1, 500 * 501 // 2, 1, 10)
    assert ran[1] == (stage.seconds(work), stage.load(work))


def test_an_answer_ends_unless_it_must_not() -> None:
    engine = worker()
    engine._schedule(scheduled({"a": 1, "b": 1}, [new("a", 1), new("b", 1, endless=True)]))
    said: dict[str, list[int]] = {"a": [], "b": []}
    for step in range(ANSWER_TOKENS + 5):
        if step:
            engine._schedule(scheduled({"a": 1, "b": 1}, [], {"a": step, "b": step}))
        output = engine.sample_tokens(None)
        for request, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            said[request] += tokens
    assert said["a"].index(END) == ANSWER_TOKENS
    assert END not in said["b"]


def test_grammars_are_kept_to() -> None:
    engine = worker()
    engine._schedule(scheduled({"a": 1, "b": 1}, [new("a", 1), new("b", 1)]))
    bitmask = np.zeros((1, 2), dtype=np.int32)
    bitmask[0, 1] = 1 << 5  # token 37
    grammar: Any = SimpleNamespace(structured_output_request_ids=["b"], grammar_bitmask=bitmask)
    plain, kept = engine.sample_tokens(grammar).sampled_token_ids
    assert (plain, kept) == ([11], [37])
