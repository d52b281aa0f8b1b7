"""Rolling and pipelined models in the simulation of a fleet."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from muxserve.costs import EngineShape
from muxserve.costs.architecture import split_layers
from muxserve.costs.roofline import Roofline
from muxserve.planning.architectures import planned_architecture
from muxserve.rolling.member import Objectives
from muxserve.scheduling.token_throttling import TokenThrottling
from muxserve.simulator import (
    Alone,
    Apart,
    ApartResult,
    Options,
    Overheads,
    PipelinedModel,
    Replica,
    RollingModel,
    SimulationError,
    simulate,
    write_timeline,
)
from muxserve.simulator.apart import dealt
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.pipeline import Pipeline, PipelineSpec
from muxserve.simulator.rolling import Rolling, RollingOptions
from muxserve.workload import ModelLoad, generate
from muxserve.workload.lengths import FixedLength
from muxserve.workload.trace import TraceRequest

COSTS = Roofline()
LLAMA_7B = planned_architecture("llama-7b", Path())
SHAPE = EngineShape("A100-80GB")
INSTANCE = InstanceSpec(LLAMA_7B, SHAPE, 4000)
ROLLING = RollingModel(
    "ring", (Replica("unit0", (0,)), Replica("unit1", (1,))), INSTANCE, RollingOptions(2, Objectives(2.0, 0.1)), 4096
)
STAGES = PipelineSpec(LLAMA_7B, SHAPE, (4000, 4000))
PIPELINED = PipelinedModel(
    "pipe",
    (Replica("unit2", (2, 3)), Replica("unit3", (4, 5))),
    (STAGES, STAGES),
    TokenThrottling,
    4096,
)


def load(name: str, rate: float = 4.0, seconds: float = 20.0) -> list[TraceRequest]:
    model = ModelLoad(rate, FixedLength(300), FixedLength(40))
    return list(generate({name: model}, seconds, seed=3))


def units(apart: Apart, requests: list[TraceRequest], options: Options | None = None) -> list[ApartResult]:
    found = simulate([], requests, COSTS, options, apart=[apart]).units
    assert all(isinstance(unit, ApartResult) for unit in found)
    return [unit for unit in found if isinstance(unit, ApartResult)]


def test_a_ring_is_played_by_what_plays_rings() -> None:
    requests = load("ring")
    result = simulate([], requests, COSTS, apart=[ROLLING])
    alone = Rolling(INSTANCE, COSTS, ROLLING.options).run(requests)
    assert result.records == alone.records()
    assert [unit.unit for unit in result.units] == ["unit0", "unit1"]
    assert result.devices == 2
    assert result.busy_gpu_seconds == pytest.approx(sum(alone.busy.values()))
    found = units(ROLLING, requests)
    assert sum(len(unit.records) for unit in found) == len(requests)
    assert sorted(w for unit in found for w in unit.waits) == sorted(r.switch_wait for r in alone.requests)
    # Every token of a prompt, and every later one of an answer, went through an engine once.
    assert sum(engine.tokens for unit in found for engine in unit.engines) == len(requests) * (300 + 39)


def test_pipelines_are_played_by_what_plays_pipelines() -> None:
    requests = load("pipe")
    one = replace(PIPELINED, replicas=PIPELINED.replicas[:1], specs=(STAGES,))
    (unit,) = units(one, requests)
    alone = Pipeline(STAGES, COSTS, TokenThrottling()).run(requests)
    assert unit.records == alone.records()
    assert unit.stages == tuple(alone.busy())
    assert unit.busy_seconds == pytest.approx(sum(alone.busy()) / 2)
    assert unit.active == alone.active() > max(unit.stages)
    assert unit.engines[0].tokens == len(requests) * (300 + 39)
    assert unit.devices == 2


def test_replicas_of_a_pipeline_share_the_load() -> None:
    requests = load("pipe", rate=10.0)
    result = simulate([], requests, COSTS, apart=[PIPELINED])
    assert [record.arrival for record in result.records] == [request.arrival for request in requests]
    counts = [len(unit.records) for unit in result.units]
    assert sum(counts) == len(requests)
    assert min(counts) > 0.4 * len(requests)
    assert all(record.ok for record in result.records)


def test_requests_go_where_the_fewest_tokens_are() -> None:
    requests = [TraceRequest(0.1 * n, "m", 1000 if n == 0 else 10, 10) for n in range(10)]
    assert dealt(requests, 2, token_seconds=1.0) == [0] + [1] * 9
    # After ten seconds the long one is gone.
    late = [*requests, TraceRequest(30.0, "m", 10, 10)]
    assert dealt(late, 2, token_seconds=1.0)[-1] == 0


def test_records_stay_in_the_order_of_the_workload() -> None:
    requests = sorted([*load("ring"), *load("pipe"), TraceRequest(1.0, "stranger", 5, 5)], key=lambda r: r.arrival)
    told: list[tuple[int, int]] = []
    result = simulate([], requests, COSTS, progress=lambda *at: told.append(at), apart=[ROLLING, PIPELINED])
    assert [(r.model, r.arrival) for r in result.records] == [(r.model, r.arrival) for r in requests]
    assert [record.error for record in result.records if record.error] == ["no unit serves stranger"]
    assert len(result.units) == 4
    assert told[-1] == (len(requests), len(requests))
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("model", [ROLLING, PIPELINED])
def test_delays_around_the_engines(model: Apart) -> None:
    requests = load(model.name, rate=1.0)
    plain = simulate([], requests, COSTS, apart=[model]).records
    overheads = Overheads(request=0.5, token=0.25)
    later = simulate([], requests, COSTS, Options(overheads), apart=[model]).records
    assert [r.arrival for r in later] == [r.arrival for r in plain]
    for one, other in zip(plain, later, strict=True):
        assert one.ttft is not None
        assert other.ttft == pytest.approx(one.ttft + 0.75)
    slower = simulate([], requests, COSTS, Options(Overheads(decode_step=0.01)), apart=[model]).records
    assert slower[0].tpot is not None
    assert plain[0].tpot is not None
    assert slower[0].tpot > plain[0].tpot + 0.009


@pytest.mark.parametrize("model", [ROLLING, PIPELINED])
def test_long_requests_are_refused(model: Apart) -> None:
    requests = [TraceRequest(0.0, model.name, 4000, 97), TraceRequest(1.0, model.name, 4000, 96)]
    first, second = simulate([], requests, COSTS, apart=[model]).records
    assert first.error == f"longer than the 4096 tokens of {model.name}"
    assert first.finish is None
    assert second.ok
    assert second.arrival == 1.0


@pytest.mark.parametrize("model", [ROLLING, PIPELINED])
def test_pages_over_time(model: Apart) -> None:
    found = units(model, load(model.name), Options(sample_seconds=0.5))
    for unit in found:
        times = [at for at, _ in unit.pages]
        assert times == [0.5 * n for n in range(len(times))]
        assert times[-1] > unit.seconds - 0.5
        (peak,) = unit.peak_pages
        assert 0 < max(held for _, (held,) in unit.pages) <= peak < unit.pool_pages["pool0"]
    layers = LLAMA_7B.layers if model is ROLLING else max(split_layers(LLAMA_7B.layers, 2))
    # A block has a page of each KV head in each layer that the device has.
    assert all(unit.peak_pages[0] % (layers * LLAMA_7B.kv_heads) == 0 for unit in found)


@pytest.mark.parametrize(("model", "lanes"), [(ROLLING, 2), (PIPELINED, 4)])
def test_every_job_in_the_timeline(model: Apart, lanes: int, tmp_path: Path) -> None:
    result = simulate([], load(model.name), COSTS, Options(timeline=True), apart=[model])
    assert len(result.timelines) == lanes
    write_timeline(tmp_path / "jobs.json", result.timelines)
    events = json.loads((tmp_path / "jobs.json").read_text())["traceEvents"]
    jobs = [event for event in events if event["ph"] == "X"]
    assert {job["pid"] for job in jobs} == {device for unit in model.replicas for device in unit.devices}
    # A micro-batch is a job on each stage.
    assert len(jobs) == result.jobs * (lanes // 2)
    for device in {job["pid"] for job in jobs}:
        spans = sorted((job["ts"], job["ts"] + job["dur"]) for job in jobs if job["pid"] == device)
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in itertools.pairwise(spans))


def test_stages_on_one_device_have_lanes_of_their_own() -> None:
    replicas = (Replica("unit0", (0,)),)
    one = replace(PIPELINED, replicas=replicas, specs=(STAGES,))
    (unit,) = units(one, load("pipe"), Options(timeline=True))
    (timeline,) = unit.timelines
    assert {job.model for job in timeline.jobs} == {"pipe, stage 1,", "pipe, stage 2,"}


def test_what_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rolling, "place", lambda self, request, now: None)
    with pytest.raises(SimulationError, match="ring: 2 requests wait"):
        simulate([], [TraceRequest(0.0, "ring", 100, 10)] * 2, COSTS, apart=[ROLLING])


def test_the_yardstick_of_models_apart() -> None:
    ring = replace(ROLLING, spec=replace(INSTANCE, shape=replace(SHAPE, share=0.25)))
    reference = Alone([], COSTS, [ring, PIPELINED])
    # With all of the compute of its devices; stages one after the other are the whole model.
    assert reference.of("ring", 300, 40) == reference.of("pipe", 300, 40)
    record = simulate([], [TraceRequest(0.0, "ring", 300, 40)], COSTS, apart=[ROLLING]).records[0]
    assert record.latency == pytest.approx(reference(record).latency, rel=1e-6)
