"""Leaping over steps changes no result, whatever the load, the pool, the policy and the delays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from muxserve.costs import LatencyModel
from muxserve.costs.measured import TURN_SECONDS
from muxserve.costs.profile import Overheads
from muxserve.scheduling.types import ModelProfile
from muxserve.simulator.setup import Options, SimUnit
from muxserve.simulator.unit import SimulatedUnit
from muxserve.workload.trace import Content, TraceRequest
from tests.scheduling.machine import profile
from tests.simulator.support import Analytic, Linear, run, stepping, unit
from tests.support.thoroughness import examples

SEARCH = settings(
    max_examples=examples(100), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def outcome(world: SimulatedUnit, load: list[TraceRequest]) -> tuple[object, ...]:
    result = run(world, load)
    for pool in world.machine.pages.pools.values():
        assert pool.held == pool.committed == 0
        assert all(pages.held == pages.committed == 0 for pages in pool.models)
    assert len(result.records) == len(load)
    assert all(record.ok or record.error for record in result.records)
    return (
        [tuple(getattr(r, f) for f in r.__struct_fields__) for r in result.records],
        [(e.model, e.phase, e.jobs, e.tokens, e.busy_seconds) for e in result.engines],
        result.pages,
        result.busy_seconds,
        result.waits,
        world.scheduler.turns,
    )


def models(draw: st.DrawFn, count: int) -> tuple[list[ModelProfile], int]:
    profiles = []
    for index in range(count):
        layers, size = draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 32]))
        # Up to 210 tokens are asked for, so that some requests are too long.
        floor = layers * 2 * -(-draw(st.sampled_from([120, 212])) // size)
        quota = draw(st.integers(floor, floor + 60))
        profiles.append(
            profile(
                f"m{index}",
                layers=layers,
                block_tokens=size,
                quota_pages=quota,
                floor_pages=floor,
                rate=draw(st.sampled_from([0.5, 1.0, 3.0])),
                prefill_share=draw(st.sampled_from([0.3, 0.5, 1.0])),
                decode_share=draw(st.sampled_from([0.2, 0.35, 0.5])),
                max_num_seqs=draw(st.integers(1, 8)),
                max_num_batched_tokens=draw(st.sampled_from([16, 64, 256])),
                window=draw(st.sampled_from([20, 50])),
                windowed_layers=draw(st.integers(0, layers)),
            )
        )
    return profiles, sum(p.quota_pages for p in profiles) + draw(st.integers(0, 40))


def workload(draw: st.DrawFn, count: int) -> list[TraceRequest]:
    chance = random.Random(draw(st.integers(0, 10_000)))
    rate = draw(st.sampled_from([3.0, 30.0, 300.0]))
    now, load = 0.0, []
    for _ in range(draw(st.integers(1, 40))):
        now += chance.expovariate(rate)
        load.append(TraceRequest(now, f"m{chance.randrange(count)}", chance.randint(1, 90), chance.randint(1, 120)))
    return [structs.replace(each, content=content(each, chance)) for each in load] if draw(st.booleans()) else load


def content(request: TraceRequest, chance: random.Random) -> Content:
    """A few conversations behind two system prompts, some of whose turns are served at the same time."""
    talk = f"conversation {chance.randrange(4)}"
    if request.prompt_tokens <= 24 or chance.random() < 0.2:
        return ((talk, request.prompt_tokens),)
    return ((f"system {chance.randrange(2)}", 24), (talk, request.prompt_tokens - 24))


@st.composite
def scenes(draw: st.DrawFn) -> tuple[SimUnit, LatencyModel, Options, list[TraceRequest]]:
    count = draw(st.integers(1, 3))
    profiles, pages = models(draw, count)
    policy = draw(st.sampled_from(["adbs", "slack", "fcfs", "free"]))
    costs = Linear(
        # Steps that are slow beside the quanta of leases make seconds end them.
        decode_fixed=draw(st.sampled_from([0.004, 0.03, 0.15])),
        bend=draw(st.sampled_from([100.0, 400.0, float("inf")])),
        bandwidth=draw(st.sampled_from([0.0, 0.4, 0.9])),
    )
    delay = draw(st.sampled_from([0.0, 0.0003, 0.001]))
    options = Options(Overheads(request=delay, turn=2 * delay, between=delay, token=delay), 0.05)
    simulated = unit(profiles, pages, policy, adapt_quotas=draw(st.booleans()))
    # Without skew, steps of different engines end at the very same moments.
    latency = Analytic(costs, draw(st.sampled_from([0.0, 0.0137])))
    return simulated, latency, options, workload(draw, count)


@SEARCH
@given(scenes())
def test_a_leap_is_many_steps(scene: tuple[SimUnit, LatencyModel, Options, list[TraceRequest]]) -> None:
    simulated, latency, options, load = scene
    leaping = outcome(SimulatedUnit(simulated, latency, options), load)
    assert leaping == outcome(stepping(simulated, latency, options), load)


@st.composite
def rolling_scenes(draw: st.DrawFn) -> tuple[SimUnit, LatencyModel, Options, list[TraceRequest]]:
    simulated, latency, options, _ = draw(scenes())
    first = simulated.models[0]
    one = replace(first, profile=first.profile.with_engines(both=True, decode_share=1.0))
    return replace(simulated, models=(one,), policy="rolling"), latency, options, workload(draw, 1)


@SEARCH
@given(rolling_scenes())
def test_a_leap_of_an_engine_of_both_phases_is_many_steps(
    scene: tuple[SimUnit, LatencyModel, Options, list[TraceRequest]],
) -> None:
    simulated, latency, options, load = scene
    leaping = outcome(SimulatedUnit(simulated, latency, options), load)
    assert leaping == outcome(stepping(simulated, latency, options), load)


@st.composite
def mixed_scenes(draw: st.DrawFn) -> tuple[SimUnit, LatencyModel, Options, list[TraceRequest]]:
    """Some models with an engine for each phase, others with one of both."""
    simulated, latency, options, load = draw(scenes())
    models = [
        replace(model, profile=model.profile.with_engines(both=draw(st.booleans()), elastic=draw(st.booleans())))
        for model in simulated.models
    ]
    policy = draw(st.sampled_from(["adbs", "slack", "fcfs", "free"]))
    return replace(simulated, models=tuple(models), policy=policy), latency, options, load


@SEARCH
@given(mixed_scenes())
def test_a_leap_is_many_steps_whatever_the_shapes(
    scene: tuple[SimUnit, LatencyModel, Options, list[TraceRequest]],
) -> None:
    simulated, latency, options, load = scene
    leaping = outcome(SimulatedUnit(simulated, latency, options), load)
    assert leaping == outcome(stepping(simulated, latency, options), load)


@pytest.mark.parametrize("overheads", [Overheads(), Overheads(turn=TURN_SECONDS)], ids=["at once", "live delays"])
@pytest.mark.parametrize("policy", ["adbs", "fcfs", "rolling", "free"])
def test_leaping_looks_less_often(policy: str, overheads: Overheads) -> None:
    names = ["m0"] if policy == "rolling" else ["m0", "m1"]
    simulated = unit([profile(name, both=policy in ("rolling", "free")) for name in names], 800, policy)
    load = [TraceRequest(0.3 * i, names[i % len(names)], 40, 100) for i in range(10)]
    options = Options(overheads)
    few = run(SimulatedUnit(simulated, Analytic(), options), load)
    many = run(stepping(simulated, Analytic(), options), load)
    assert few.looks < many.looks * 0.7
    assert few.turns == many.turns, "the scheduler is asked as often"
