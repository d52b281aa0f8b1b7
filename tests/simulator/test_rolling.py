"""Rolling prefill and what it is compared with, simulated, with costs that can be worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.costs import EngineShape
from muxserve.metrics.definitions import Objectives as Latencies
from muxserve.rolling.member import Objectives
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.scaling import ScalingRules
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.rolling import (
    Arrangement,
    Independent,
    Rolling,
    RollingOptions,
    Split,
    SplitOptions,
    division,
    largest_budget,
    times,
)
from muxserve.simulator.setup import Link
from muxserve.workload.trace import TraceRequest
from tests.simulator.support import Analytic, Linear, architecture

PREFILL = Linear().prefill(100, 0, 1)
FAST, SLOW = Link(1e12), Link(1e6)
SPEC = InstanceSpec(architecture(), EngineShape("A10"), blocks=200, block_tokens=16, watermark=0.0)


def request(arrival: float, prompt: int = 100, output: int = 10) -> TraceRequest:
    return TraceRequest(arrival, "m", prompt, output)


def rolling(instances: int = 2, spec: InstanceSpec = SPEC, **more: object) -> Rolling:
    slo = more.pop("objectives", Objectives(1.0, 0.1))
    return Rolling(spec, Analytic(), RollingOptions(instances, slo, expected_output=16, **more))  # type: ignore[arg-type]


def split(within: bool = True, link: Link = FAST, streamed: bool = False, spec: InstanceSpec = SPEC) -> Split:
    counts = ((1, 1), (1, 1)) if within else ((1, 0), (0, 1))
    return Split(spec, Analytic(), SplitOptions(*counts, link, link, within_node=within, streamed=streamed))


ALL = {
    "rolling": rolling,
    "prefill first": lambda: Independent(SPEC, Analytic(), 2),
    "chunks": lambda: Independent(SPEC, Analytic(), 2, budget=64),
    "within a node": split,
    "over the network": lambda: split(within=False, link=SLOW, streamed=True),
}


@pytest.mark.parametrize("name", ALL)
def test_one_request_alone(name: str) -> None:
    result = ALL[name]().run([request(0.0)])
    done = result.requests[0]
    assert done.made == 10
    assert done.first_token is not None
    assert done.finish is not None
    chunks = 2 if name == "chunks" else 1
    assert done.first_token == pytest.approx(PREFILL + (chunks - 1) * Linear().prefill_fixed)
    steps = [Linear().decode(1, 101 + n).seconds(101 + n) for n in range(9)]
    assert done.finish - done.first_token - done.switch_wait == pytest.approx(sum(steps))


@pytest.mark.parametrize("name", ALL)
@given(
    lengths=st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=30)
)
@settings(max_examples=15, deadline=None)
def test_everything_is_answered_and_all_memory_comes_back(name: str, lengths: list[tuple[float, int, int]]) -> None:
    arrangement = ALL[name]()
    now, workload = 0.0, []
    for gap, prompt, output in lengths:
        now += gap
        workload.append(request(now, prompt, output))
    result = arrangement.run(workload)
    for done in result.requests:
        assert done.made == done.output
        assert done.finish is not None
        assert done.first_token is not None
        assert done.arrival < done.first_token <= done.finish
        assert done.switch_wait >= 0
    for engine in arrangement.engines.values():
        assert engine.free == SPEC.blocks
        assert not engine.batch.running
        assert not engine.waiting
        assert engine.waiting_tokens == 0
        assert engine.held == 0
    if isinstance(arrangement, Rolling):
        for member in arrangement.scheduler.members.values():
            assert member.idle
            assert (member.pending, member.promised, member.decoding) == (0, 0, 0)


@pytest.mark.parametrize("name", ALL)
def test_the_same_workload_gives_the_same_result(name: str) -> None:
    workload = [request(0.003 * n, 37 * n % 400 + 1, 13 * n % 90 + 1) for n in range(40)]
    first, second = (ALL[name]().run(workload).records() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ALL)
def test_what_cannot_fit_is_refused(name: str) -> None:
    result = ALL[name]().run([request(0.0, 3200, 10), request(0.1)])
    assert "3210 tokens" in result.requests[0].error
    assert result.requests[1].finish is not None
    assert result.attained(Latencies(1.0, 0.1)) == 0.5


@pytest.mark.parametrize("name", ["rolling", "prefill first", "chunks", "within a node"])
def test_memory_that_runs_out_costs_time_not_requests(name: str) -> None:
    arrangement: Arrangement = ALL[name]()
    for engine in arrangement.engines.values():
        engine.free = 30
    result = arrangement.run([request(0.0, 100, 250) for _ in range(6)])
    assert result.preemptions > 0
    assert all(done.made == 250 for done in result.requests)
    assert all(engine.free == 30 for engine in arrangement.engines.values())


def test_rolling_fills_one_window_before_the_next_opens() -> None:
    # Ten prompts of 6 ms each, windows of 20 ms: three go to each of the first ones.
    arrangement = rolling(4, objectives=Objectives(0.02, 0.1))
    where: list[str] = []
    for engine in arrangement.engines.values():
        put = engine.enqueue
        engine.enqueue = lambda r, first=False, put=put, name=engine.name: (where.append(name), put(r, first))  # type: ignore[method-assign,misc]
    arrangement.run([request(0.0) for _ in range(10)])
    assert where[:10] == ["i1"] * 3 + ["i2"] * 3 + ["i3"] * 3 + ["i4"]


def test_the_wait_for_the_phase_switch_is_told_apart() -> None:
    spec = InstanceSpec(SPEC.architecture, SPEC.shape, SPEC.blocks, 16, max_num_batched_tokens=100, watermark=0.0)
    result = rolling(1, spec).run([request(0.0) for _ in range(4)])
    waits = [done.switch_wait for done in result.requests]
    assert waits == pytest.approx([3 * PREFILL, 2 * PREFILL, PREFILL, 0.0])
    first = result.requests[0]
    with_wait, without = times(first, True), times(first, False)
    assert with_wait is not None
    assert without is not None
    assert with_wait[0] == pytest.approx(4 * PREFILL)
    assert without[0] == pytest.approx(PREFILL)
    assert with_wait[1] is not None
    assert without[1] is not None
    assert without[1] - with_wait[1] == pytest.approx(3 * PREFILL / 9)
    tight = Latencies(2 * PREFILL, 1.0)
    assert result.attained(tight, switch=False) == 0.5
    assert result.attained(tight, switch=True) == 0.0


def test_decodes_are_spared_when_they_have_saved_nothing() -> None:
    # 5 ms per step are all that is allowed, and steps take 4.2 ms: a window must wait until enough is saved.
    slo = Objectives(0.05, 0.005)
    workload = [request(0.0, 100, 200), request(0.02, 100, 5)]
    first, second = rolling(1, objectives=slo).run(workload).requests
    assert second.began is not None
    assert second.began > 0.02 + 0.005, "it was not prefilled at once"
    assert times(first, True)[1] <= 0.005  # type: ignore[index,operator]
    eager = Independent(SPEC, Analytic(), 1).run(workload).requests[1]
    assert eager.began is not None
    assert eager.began < second.began


def test_chunks_never_hold_decodes_up_for_long() -> None:
    workload = [request(0.0, 100, 100), request(0.05, 2000, 2)]
    longest = {}
    for name, budget in (("whole", None), ("chunks", 64)):
        arrangement = Independent(SPEC, Analytic(), 1, budget)
        steps: list[float] = []
        engine = arrangement.engines["i1"]
        begin = engine.begin

        def timed(now: float, begin=begin, steps=steps) -> float | None:  # type: ignore[no-untyped-def]
            end = begin(now)
            if end is not None and now > 0.04:
                steps.append(end - now)
            return end

        engine.begin = timed  # type: ignore[method-assign]
        arrangement.run(workload)
        longest[name] = max(steps)
    assert longest["whole"] > 0.1
    assert longest["chunks"] < 0.015


def test_the_budget_is_the_largest_that_keeps_the_objective() -> None:
    costs = Linear()
    budgets = (64, 128, 256, 512)
    assert largest_budget(SPEC, costs, 1.0, 100, 8, budgets) == 512
    assert largest_budget(SPEC, costs, 0.0165, 100, 8, budgets) == 256
    assert largest_budget(SPEC, costs, 1e-6, 100, 8, budgets) == 64


def test_a_slow_network_makes_the_second_token_wait() -> None:
    bytes_of_kv = 100 * SPEC.architecture.kv_bytes_per_token("bfloat16")
    link = Link(bytes_of_kv / 0.5, latency=0.001)
    whole = split(within=False, link=link).run([request(0.0), request(0.0)])
    assert [done.switch_wait for done in whole.requests] == pytest.approx([0.501, 1.001], abs=0.01)
    assert whole.transfers == 2
    # What is sent while it is computed has a head start of the prefill.
    streamed = split(within=False, link=link, streamed=True).run([request(0.0)])
    assert streamed.requests[0].switch_wait == pytest.approx(0.501 - PREFILL)


def test_kv_stays_until_there_is_room_where_it_goes() -> None:
    arrangement = split(within=False)
    decode = next(engine for name, engine in arrangement.engines.items() if "-d" in name)
    decode.free = 14
    result = arrangement.run([request(0.0, 100, 60) for _ in range(4)])
    assert all(done.made == 60 for done in result.requests)
    waits = sorted(done.switch_wait for done in result.requests)
    assert waits[-1] > 50 * 0.004, "the last one waited for another one to end"


def test_the_division_follows_the_work() -> None:
    costs = Linear()
    assert division(costs, SPEC, 8, prompt=2000, output=2, tpot=0.1)[0] == 7
    assert division(costs, SPEC, 8, prompt=10, output=1000, tpot=0.1) == (1, 7)


def test_instances_are_added_while_objectives_are_missed_and_handles_move() -> None:
    rules = ScalingRules(target=0.9, window=2.0, patience=1.0, enough=5, most=8)
    workload = [request(0.01 * n, 400, 20) for n in range(1500)]
    scaled = rolling(2, objectives=Objectives(0.2, 0.01), bounds=Bounds(2, 4), scaling=rules, start_seconds=0.5)
    fixed = rolling(2, objectives=Objectives(0.2, 0.01), bounds=Bounds(2, 4))
    slo = Latencies(0.2, 0.01)
    with_scaling, without = scaled.run(workload), fixed.run(workload)
    assert with_scaling.replicas[-1][1] > 4
    assert with_scaling.moves >= 2
    assert len(scaled.scheduler.macros) == 2
    assert with_scaling.attained(slo, after=10.0) > without.attained(slo, after=10.0)
    assert with_scaling.attained(slo, after=10.0) > 0.9


def test_instances_go_when_there_is_nothing_to_do() -> None:
    rules = ScalingRules(target=0.9, window=5.0, patience=1.0, enough=2, idle=0.2, least=1)
    arrangement = rolling(3, scaling=rules)
    result = arrangement.run([request(0.5 * n, 10, 20) for n in range(60)])
    assert result.replicas[-1][1] == 1
    assert all(done.finish is not None for done in result.requests)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RollingOptions(0, Objectives(1, 1)),
        lambda: SplitOptions((1,), (0,), FAST, FAST, within_node=False, streamed=False),
        lambda: SplitOptions((1, 1), (2, 0), FAST, FAST, within_node=True, streamed=False),
        lambda: SplitOptions((1,), (1, 1), FAST, FAST, within_node=False, streamed=False),
    ],
)
def test_options_must_make_sense(make: object) -> None:
    with pytest.raises(ValueError, match=r"must be|give as many"):
        make()  # type: ignore[operator]
