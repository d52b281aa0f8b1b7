"""What a simulated unit does, against arithmetic and queueing theory."""

from __future__ import annotations

import random
from typing import Any

import pytest

from muxserve.costs.profile import Overheads
from muxserve.simulator import SimulationError, simulate
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.setup import Options, SimModel
from muxserve.simulator.unit import SimulatedUnit
from muxserve.workload.trace import TraceRequest
from tests.scheduling.machine import profile
from tests.simulator.support import Analytic, Linear, architecture, one_engine, requests, run, unit

FLAT = Linear(prefill_fixed=0.01, prefill_token=0.0, decode_fixed=0.005, decode_sequence=0.0, decode_token=0.0)


def worlds(
    pages: int = 400, costs: Linear = FLAT, options: Options | None = None, **changes: Any
) -> list[SimulatedUnit]:
    simulated = unit([profile("a", **{"prefill_share": 1.0, "decode_share": 1.0, **changes})], pages)
    return [SimulatedUnit(each, Analytic(costs), options) for each in (simulated, one_engine(simulated))]


def held(world: SimulatedUnit) -> list[ModelPages]:
    return world.machine.pages.models


@pytest.mark.parametrize("kind", [0, 1])
def test_a_lone_request_takes_its_steps(kind: int) -> None:
    (record,) = run(worlds()[kind], requests((1.0, "a", 40, 21))).records
    assert record.ttft == pytest.approx(0.01)
    assert record.tpot == pytest.approx(0.005)
    assert record.latency == pytest.approx(0.01 + 20 * 0.005)
    assert record.ok
    assert record.output_tokens == 21


@pytest.mark.parametrize("kind", [0, 1])
def test_a_long_prompt_is_computed_in_chunks(kind: int) -> None:
    (record,) = run(worlds(max_num_batched_tokens=64)[kind], requests((0.0, "a", 200, 1))).records
    assert record.ttft == pytest.approx(0.04)
    assert record.latency == record.ttft


def test_one_engine_computes_chunks_of_a_prompt_beside_the_tokens_of_others() -> None:
    """A step has a token of each sequence first, and chunks up to its bound: it costs what its parts cost together."""
    costs = Linear(prefill_fixed=0.01, prefill_token=0.001, decode_fixed=0.005, decode_sequence=0.0, decode_token=0.0)
    _, world = worlds(costs=costs, max_num_batched_tokens=16)
    # The second comes during the first decode step of the first, which ends at 0.025 s.
    first, second = run(world, requests((0.0, "a", 10, 5), (0.022, "a", 30, 2))).records
    assert first.ttft == pytest.approx(0.01 + 0.001 * 10)
    # Two steps of 15 tokens of the prompt and one of the first; then both decode, and the first ends.
    assert second.ttft == pytest.approx(0.025 + 2 * (0.01 + 0.001 * 16) - 0.022)
    assert first.latency == second.arrival + second.latency == pytest.approx(0.025 + 2 * 0.026 + 0.005)  # type: ignore[operator]


def test_decode_costs_follow_the_context_exactly() -> None:
    costs = Linear(0.01, 0.0, 0.005, 0.0, 0.0001, bend=60.0)
    (record,) = run(worlds(costs=costs)[0], requests((0.0, "a", 40, 41))).records
    steps = [0.005 + 0.0001 * (c if c <= 60 else 2 * c - 60) for c in range(41, 81)]
    assert record.latency == pytest.approx(0.01 + sum(steps))


def test_overheads_are_on_the_way() -> None:
    overheads = Overheads(request=0.1, turn=0.03, between=0.001, token=0.05)
    (record,) = run(worlds(options=Options(overheads))[0], requests((0.0, "a", 40, 2))).records
    # to the queue, half a turn to prefill, its step, the token to the client
    assert record.ttft == pytest.approx(0.1 + 0.015 + 0.011 + 0.05)
    # half a turn each: the hand-over to the unit, the lease to decode; then one step
    assert record.latency == pytest.approx((record.ttft or 0.0) + 0.03 + 0.006)


def test_renewed_leases_cost_no_time() -> None:
    way = 0.003
    (record,) = run(worlds(options=Options(Overheads(turn=2 * way)))[0], requests((0.0, "a", 40, 321))).records
    assert record.ttft == pytest.approx(way + 0.01)
    # However many leases it takes, only the hand-over has to wait.
    assert record.latency == pytest.approx(way + 0.01 + 2 * way + 320 * 0.005)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_prompt_at_a_time_is_an_m_d_1_queue(kind: int, load: float) -> None:
    """Answers of one token, one prompt per step: waiting is rho s / (2 (1 - rho)) on average (Pollaczek-Khinchine)."""
    service, count, chance, now = 0.01, 8_000, random.Random(3), 0.0
    arrivals = []
    for _ in range(count):
        now += chance.expovariate(load / service)
        arrivals.append(TraceRequest(now, "a", 64, 1))
    options = Options(sample_seconds=0.0)
    result = run(worlds(pages=40_000, options=options, quota_pages=40_000, max_num_seqs=500)[kind], arrivals)
    waited = sum((r.ttft or 0.0) - service for r in result.records) / count
    assert waited == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)
    assert result.busy_seconds == pytest.approx(count * service, rel=1e-6)


def test_the_same_workload_gives_the_same_result() -> None:
    chance = random.Random(1)
    load = [TraceRequest(0.05 * i, "a", chance.randint(1, 90), chance.randint(1, 90)) for i in range(60)]
    first, second = (run(worlds()[0], load) for _ in range(2))
    assert first.records == second.records
    assert first.pages == second.pages


@pytest.mark.parametrize("kind", [0, 1])
def test_too_few_pages_preempt_the_last(kind: int) -> None:
    # Two sequences that grow to 13 blocks of 4 pages do not fit into 80 pages together.
    world = worlds(pages=80, quota_pages=80, floor_pages=80)[kind]
    records = run(world, requests((0.0, "a", 60, 140), (0.001, "a", 60, 140))).records
    assert [r.ok for r in records] == [True, True]
    assert records[0].preemptions == 0
    assert records[1].preemptions >= 1
    assert records[0].finish < records[1].finish  # type: ignore[operator]
    assert held(world)[0].peak <= 80


@pytest.mark.parametrize("kind", [0, 1])
def test_states_take_blocks_whatever_the_length(kind: int) -> None:
    # Each sequence has 13 blocks of 4 pages at its end, and 6 for its states, of which only one fits into 80 pages.
    world = worlds(pages=80, quota_pages=80, floor_pages=80, state_blocks=6)[kind]
    records = run(world, requests((0.0, "a", 60, 140))).records
    assert records[0].ok
    assert held(world)[0].peak == (13 + 6) * 4
    assert held(world)[0].held == 0
    world = worlds(pages=80, quota_pages=80, floor_pages=80, state_blocks=8)[kind]
    assert not run(world, requests((0.0, "a", 60, 140))).records[0].ok


def test_what_is_behind_a_window_is_given_back() -> None:
    """A layer with a window of 40 tokens keeps 4 of a sequence's 20 blocks while it decodes, and 5 while a chunk of
    its prompt of at most 16 tokens is computed: 40 - 1 + 16 tokens in a row, which begin anywhere in a block."""
    changes: dict[str, Any] = {
        "pages": 160,
        "quota_pages": 160,
        "floor_pages": 80,
        "window": 40,
        "max_num_batched_tokens": 16,
    }
    load = requests((0.0, "a", 300, 21))

    def peak(windowed_layers: int) -> int:
        world, _ = worlds(windowed_layers=windowed_layers, **changes)
        assert run(world, load).records[0].ok
        assert held(world)[0].held == 0
        return held(world)[0].peak

    assert peak(0) == 20 * 4
    assert peak(1) == 20 * 2 + 5 * 2 - (20 - 19) * 2
    assert peak(2) == 5 * 4
    # More sequences fit at a time.
    several = requests(*((0.0, "a", 40, 261) for _ in range(4)))
    whole, windowed = (run(worlds(windowed_layers=layers, **changes)[0], several) for layers in (0, 1))
    assert windowed.records[-1].finish < whole.records[-1].finish  # type: ignore[operator]


@pytest.mark.parametrize("kind", [0, 1])
def test_quotas_are_kept(kind: int) -> None:
    profiles = [profile("a", quota_pages=120), profile("b", quota_pages=200)]
    simulated = unit(profiles, 320, adapt_quotas=False)
    world = SimulatedUnit([simulated, one_engine(simulated)][kind], Analytic())
    load = [TraceRequest(0.01 * i, "ab"[i % 2], 60, 80) for i in range(60)]
    result = run(world, load)
    assert all(r.ok for r in result.records)
    assert result.peak_pages[0] <= 120
    assert result.peak_pages[1] <= 200
    assert all(a <= 120 and b <= 200 for _, (a, b) in result.pages)


def test_quotas_follow_the_load() -> None:
    """One model alone at work gets more than its fair part of the pool."""
    profiles = [profile("a", quota_pages=200, max_num_seqs=32), profile("b", quota_pages=200)]
    load = [TraceRequest(0.01 * i, "a", 60, 80) for i in range(100)]
    fixed, adapted = (
        run(SimulatedUnit(unit(profiles, 400, adapt_quotas=a), Analytic()), load).peak_pages[0] for a in (False, True)
    )
    assert fixed <= 200 < adapted <= 400


@pytest.mark.parametrize("kind", [0, 1])
def test_jobs_that_share_bandwidth_slow_each_other(kind: int) -> None:
    """Two decode jobs that each ask for 0.8 of the bandwidth take 1.6 times as long side by side."""
    costs = Linear(0.001, 0.0, 0.01, 0.0, 0.0, bandwidth=0.79)
    simulated = unit([profile("a"), profile("b")], 800)

    def tpot(models: str) -> float:
        world = SimulatedUnit([simulated, one_engine(simulated)][kind], Analytic(costs))
        record = run(world, [TraceRequest(0.0, m, 10, 100) for m in models]).records[0]
        assert record.tpot is not None
        return record.tpot

    assert tpot("ab") / tpot("a") == pytest.approx(1.6, rel=0.02)


def test_every_job_is_in_the_timeline_and_none_overlaps_its_engine() -> None:
    load = [TraceRequest(0.02 * i, "a", 40, 30) for i in range(10)]
    for world in worlds(options=Options(timeline=True)):
        result = run(world, load)
        (timeline,) = result.timelines
        jobs = timeline.jobs
        assert len(jobs) == result.jobs
        assert sum(job.tokens for job in jobs) == sum(engine.tokens for engine in result.engines)
        lanes: dict[str, float] = {}
        for job in sorted(jobs, key=lambda job: job.began):
            assert job.began >= lanes.get(job.phase, 0.0) - 1e-9
            assert job.ended > job.began
            lanes[job.phase] = job.ended


def test_what_can_never_fit_is_refused() -> None:
    for world in worlds(pages=80, quota_pages=80, floor_pages=80):
        short, long = run(world, requests((0.0, "a", 60, 10), (0.1, "a", 400, 10))).records
        assert short.ok
        assert "longer than the 320 tokens that a has pages for" in long.error
    model = SimModel(profile("a"), architecture(), "float32", max_len=100)
    simulated = unit([profile("a")], 400, models=(model,))
    for each in (simulated, one_engine(simulated)):
        (record,) = run(SimulatedUnit(each, Analytic()), requests((0.0, "a", 60, 41))).records
        assert record.error == "longer than the 100 tokens of a"


def test_wrong_workloads_are_named() -> None:
    with pytest.raises(SimulationError, match="arrivals fall"):
        simulate([unit([profile("a")], 400)], requests((1.0, "a", 1, 1), (0.0, "a", 1, 1)), Analytic())
    with pytest.raises(ValueError, match="'turn'"):
        Overheads(turn=-1.0)


@pytest.mark.parametrize("policy", ["adbs", "slack", "fcfs", "free"])
def test_models_that_answer_with_vectors_share_a_unit(policy: str) -> None:
    """Their requests end with their prefill; what keeps no KV is not held up by others that hold all pages."""
    profiles = [
        profile("chat", quota_pages=200),
        profile("embedder", pooling=True, quota_pages=200),
        profile("encoder", pooling=True, kv_heads=0, quota_pages=0, floor_pages=0),
    ]
    world = SimulatedUnit(unit(profiles, 400, policy), Analytic(FLAT))
    asked = [
        (0.01 * number, name, 60, 1 if name != "chat" else 30)
        for number in range(40)
        for name in world.machine.pages.of
    ]
    records = run(world, requests(*asked)).records
    assert len(records) == len(asked)
    assert all(record.ok for record in records)
    assert {record.output_tokens for record in records if record.model != "chat"} == {1}
    assert all(pages.held == 0 for pages in held(world))
