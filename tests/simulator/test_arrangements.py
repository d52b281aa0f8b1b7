"""Rolling and pipelined models in the simulation of a fleet."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper.one_phase import OnePhase
from muxserve.costs.architecture import split_layers
from muxserve.costs.profile import Overheads
from muxserve.costs.roofline import Roofline
from muxserve.planning.demand.known_models import planned_architecture
from muxserve.rolling.member import LatencyTargets
from muxserve.rolling.scheduler import RollingScheduler
from muxserve.scheduling.types import EngineSetup, KvLayout, ModelProfile, PoolProfile
from muxserve.simulator import (
    AloneSimulation,
    Link,
    Options,
    Pipeline,
    RingRules,
    Rules,
    SimModel,
    SimulationError,
    SimUnit,
    UnitResult,
    simulate,
    write_timeline,
)
from muxserve.workload import ModelLoad, generate
from muxserve.workload.lengths import FixedLength
from muxserve.workload.trace import TraceRequest

COSTS = Roofline()
LLAMA_7B = planned_architecture("llama-7b", Path())
DEVICE = "A100-80GB"


def replicas(name: str, policy: str, first: int, stages: int = 1) -> list[SimUnit]:
    """Two of them."""
    layers = split_layers(LLAMA_7B.layers, stages)
    pages = 4000 * max(layers) * LLAMA_7B.kv_heads
    profile = ModelProfile(
        name,
        rate=4.0,
        kv=KvLayout("pool0", max(layers), LLAMA_7B.kv_heads, block_tokens=16),
        engines=EngineSetup(1.0, 1.0, 256, 2048, both=True, depth=stages, waiting_tokens=16384),
        quota_pages=pages,
        floor_pages=pages,
    )
    pipeline = Pipeline(layers, (Link(),) * (stages - 1)) if policy == "free" else None
    return [
        SimUnit(
            f"unit{first + n}",
            DEVICE,
            tuple(range(first + n * stages, first + (n + 1) * stages)),
            (SimModel(profile, LLAMA_7B, "float16", max_len=4096),),
            (PoolProfile("pool0", pages),),
            policy,
            pipeline=pipeline,
        )
        for n in range(2)
    ]


RING, PIPES = replicas("ring", "rolling", 0), replicas("pipe", "free", 2, 2)
RULES: Rules = {"ring": RingRules(LatencyTargets(2.0, 0.1))}
BOTH = [RING, PIPES]


def load(units: list[SimUnit], rate: float = 4.0, seconds: float = 20.0) -> list[TraceRequest]:
    model = ModelLoad(rate, FixedLength(300), FixedLength(40))
    return list(generate({units[0].models[0].name: model}, seconds, seed=3))


def played(units: list[SimUnit], requests: list[TraceRequest], options: Options | None = None) -> list[UnitResult]:
    return simulate(units, requests, COSTS, options, RULES).units


def test_replicas_that_roll_can_be_pipelines() -> None:
    """Micro-batches hold prompts or sequences, never both; the ring knows how many tokens sequences have got."""
    units = [
        replace(unit, pipeline=replace(unit.pipeline, budget=OnePhase))
        for unit in replicas("ring", "free", 0, 2)
        if unit.pipeline is not None
    ]
    requests = load(units)
    result = simulate(units, requests, COSTS, rules=RULES)
    assert len(units) == 2
    assert all(record.ok for record in result.records)
    for unit in result.units:
        made = unit.micro_batches
        assert made is not None
        assert unit.records
        assert all(not (step.prefill and step.decode) for step in made.steps)
        assert sum(step.prefill for step in made.steps) == 300 * len(unit.records)
        # The first of 40 tokens comes with the prompt.
        assert sum(step.decode for step in made.steps) == 39 * len(unit.records)


def test_a_ring_has_one_window_open_after_the_other() -> None:
    requests = load(RING)
    result = simulate(RING, requests, COSTS, rules=RULES)
    assert all(record.ok for record in result.records)
    assert [unit.unit for unit in result.units] == ["unit0", "unit1"]
    assert [unit.rolling for unit in result.units] == [True, True]
    assert result.devices == 2
    assert sum(len(unit.records) for unit in result.units) == len(requests)
    assert min(len(unit.records) for unit in result.units) > 0
    # Every token of a prompt, and every later one of an answer, went through an engine once.
    assert sum(engine.tokens for unit in result.units for engine in unit.engines) == len(requests) * (300 + 39)
    waits = [wait for unit in result.units for wait in unit.waits]
    assert len(waits) == len(requests)
    assert 0.0 <= min(waits) < max(waits) < 2.0


def test_stages_of_a_pipeline() -> None:
    requests = load(PIPES)
    (unit,) = played(PIPES[:1], requests)
    assert unit.engines[0].tokens == len(requests) * (300 + 39)
    assert unit.devices == 2
    assert (unit.shapes, unit.rolling) == (("one",), False)
    assert unit.busy_seconds == pytest.approx(sum(unit.stages) / 2)
    assert unit.active > max(unit.stages) > 0.5 * unit.active


def test_replicas_of_a_pipeline_share_the_load() -> None:
    requests = load(PIPES, rate=10.0)
    result = simulate(PIPES, requests, COSTS)
    assert [record.arrival for record in result.records] == [request.arrival for request in requests]
    counts = [len(unit.records) for unit in result.units]
    assert sum(counts) == len(requests)
    assert min(counts) > 0.3 * len(requests)
    assert all(record.ok for record in result.records)


def test_records_stay_in_the_order_of_the_workload() -> None:
    requests = sorted([*load(RING), *load(PIPES), TraceRequest(1.0, "stranger", 5, 5)], key=lambda r: r.arrival)
    told: list[tuple[int, int]] = []
    result = simulate(RING + PIPES, requests, COSTS, rules=RULES, progress=lambda *at: told.append(at))
    assert [(r.model, r.arrival) for r in result.records] == [(r.model, r.arrival) for r in requests]
    assert [record.error for record in result.records if record.error] == ["no unit serves stranger"]
    assert len(result.units) == 4
    assert told[-1] == (len(requests), len(requests))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("units", BOTH)
def test_delays_around_the_engines(units: list[SimUnit]) -> None:
    requests = load(units, rate=0.4)
    plain = simulate(units, requests, COSTS, rules=RULES).records
    overheads = Overheads(request=0.5, token=0.25)
    later = simulate(units, requests, COSTS, Options(overheads), RULES).records
    assert [r.arrival for r in later] == [r.arrival for r in plain]
    for one, other in zip(plain, later, strict=True):
        assert one.ttft is not None
        assert other.ttft == pytest.approx(one.ttft + 0.75)
    slower = simulate(units, requests, COSTS, Options(Overheads(between=0.01)), RULES).records
    assert slower[0].tpot is not None
    assert plain[0].tpot is not None
    assert slower[0].tpot > plain[0].tpot + 0.009


@pytest.mark.parametrize("units", BOTH)
def test_long_requests_are_refused(units: list[SimUnit]) -> None:
    name = units[0].models[0].name
    requests = [TraceRequest(0.0, name, 4000, 97), TraceRequest(1.0, name, 4000, 96)]
    first, second = simulate(units, requests, COSTS, rules=RULES).records
    assert first.error == f"longer than the 4096 tokens of {name}"
    assert first.finish is None
    assert second.ok
    assert second.arrival == 1.0


@pytest.mark.parametrize("units", BOTH)
def test_pages_over_time(units: list[SimUnit]) -> None:
    found = played(units, load(units), Options(sample_seconds=0.5))
    for unit in found:
        times = [at for at, _ in unit.pages]
        assert times == [0.5 * n for n in range(len(times))]
        assert times[-1] > unit.seconds - 2.0
        (peak,) = unit.peak_pages
        assert 0 < max(held for _, (held,) in unit.pages) <= peak < unit.pool_pages["pool0"]
    layers = LLAMA_7B.layers // (1 if units is RING else 2)
    # A block has a page of each KV head in each layer that the device has.
    assert all(unit.peak_pages[0] % (layers * LLAMA_7B.kv_heads) == 0 for unit in found)


@pytest.mark.parametrize(("units", "lanes"), [(RING, 2), (PIPES, 4)])
def test_every_job_in_the_timeline(units: list[SimUnit], lanes: int, tmp_path: Path) -> None:
    result = simulate(units, load(units), COSTS, Options(timeline=True), RULES)
    assert len(result.timelines) == lanes
    write_timeline(tmp_path / "jobs.json", result.timelines)
    events = json.loads((tmp_path / "jobs.json").read_text())["traceEvents"]
    jobs = [event for event in events if event["ph"] == "X"]
    assert {job["pid"] for job in jobs} == {device for unit in units for device in unit.devices}
    # A micro-batch is a job on each stage.
    assert len(jobs) == result.jobs * (lanes // 2)
    for device in {job["pid"] for job in jobs}:
        spans = sorted((job["ts"], job["ts"] + job["dur"]) for job in jobs if job["pid"] == device)
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in itertools.pairwise(spans))


def test_stages_on_one_device_have_lanes_of_their_own() -> None:
    one = [replace(PIPES[0], devices=(0,))]
    (unit,) = played(one, load(PIPES), Options(timeline=True))
    (timeline,) = unit.timelines
    assert {job.model for job in timeline.jobs} == {"pipe, stage 1,", "pipe, stage 2,"}


def test_what_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RollingScheduler, "arrive", lambda self, demand, now: [])
    with pytest.raises(SimulationError, match="unit0, unit1: 2 requests wait"):
        simulate(RING, [TraceRequest(0.0, "ring", 100, 10)] * 2, COSTS, rules=RULES)


def test_the_yardstick_of_other_arrangements() -> None:
    model = replace(RING[0].models[0], cost_share=0.25)
    reference = AloneSimulation([replace(RING[0], models=(model,)), *PIPES], COSTS)
    # With all of the compute of its devices; stages one after the other are the whole model.
    assert reference.of("ring", 300, 40) == reference.of("pipe", 300, 40)
    record = simulate(RING, [TraceRequest(0.0, "ring", 300, 40)], COSTS, rules=RULES).records[0]
    assert record.latency == pytest.approx(reference(record).latency, rel=1e-6)


def test_tight_memory_preempts_and_everything_is_answered() -> None:
    for units in BOTH:
        profile = units[0].models[0].profile
        pages = 110 * profile.kv.pages_per_block
        tight = [
            replace(
                unit,
                models=(replace(unit.models[0], profile=replace(profile, quota_pages=pages, floor_pages=pages)),),
                pools=(PoolProfile("pool0", pages),),
            )
            for unit in units
        ]
        requests = [TraceRequest(0.01 * n, units[0].models[0].name, 100, 600) for n in range(20)]
        result = simulate(tight, requests, COSTS, rules=RULES)
        assert all(record.ok for record in result.records)
        assert all(record.output_tokens == 600 for record in result.records)
        assert sum(record.preemptions for record in result.records) > 0
        assert all(unit.peak_pages[0] <= pages for unit in result.units)
