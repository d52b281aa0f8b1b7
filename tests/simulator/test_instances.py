"""Many instances of one model under a global scheduler, simulated."""

from __future__ import annotations

import itertools
import random
from heapq import heappop

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.costs import Decode, EngineCosts, EngineShape, LatencyModel, Load, ModelArchitecture
from muxserve.replicas.dispatch import DispatchPolicy, Freest, LoadAware, RoundRobin
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import DEFAULT_LEVELS, Level, Levels
from muxserve.replicas.scaling import ScalingRules
from muxserve.simulator.instances import Cluster, ClusterResult, InstanceSpec, MigrationCosts, ReplicaOptions, simulate
from muxserve.simulator.instances.cluster import StuckError
from muxserve.workload.trace import TraceRequest

TINY = ModelArchitecture("tiny", 2, 2, 2, 8, 16, 32, 100, 4096, 4096, "float16")
SPEC = InstanceSpec(TINY, EngineShape("fake"), blocks=100, block_tokens=16, watermark=0.0)


class Steady:
    """A prefill takes a millisecond a token, a decode step 10 ms whatever it does."""

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        return tokens / 1e3

    def decode(self, batch: int, context: int) -> Decode:
        return Decode(0.01, 0.0)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        return Load(1.0, 1.0)

    def decode_load(self, batch: int, context: int) -> Load:
        return Load(1.0, 1.0)


class SteadyModel:
    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        return Steady()

    def slowdown(self, device: str, mine: Load, others: tuple[Load, ...]) -> float:
        return 1.0


LATENCY: LatencyModel = SteadyModel()
LEVELS = Levels((Level("high", 1, 400), Level("normal", 0)))
# Copies at once, and steps that it does not slow down: what it takes is left to the handshakes.
QUICK = MigrationCosts(bandwidth=1e15, handshake=0.0, commit=0.0, slowdown=1.0)


def play(requests: list[tuple[float, int, int]], options: ReplicaOptions, **more: object) -> ClusterResult:
    workload = [TraceRequest(arrival, "tiny", prompt, output) for arrival, prompt, output in requests]
    return simulate(SPEC, LATENCY, workload, options, **more)  # type: ignore[arg-type]


def one(**more: object) -> ReplicaOptions:
    return ReplicaOptions(instances=1, levels=LEVELS, **more)  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    result = play([(1.0, 100, 5)], one())
    (request,) = result.requests
    assert request.first_token == pytest.approx(1.1)
    assert request.finish == pytest.approx(1.1 + 4 * 0.01)
    assert (result.steps, result.preemptions) == (5, 0)
    figures = result.figures()
    assert figures["prefill"]["mean"] == pytest.approx(0.1)
    assert figures["decode"]["p99"] == pytest.approx(0.01)
    assert figures["loss"]["p99"] == 0.0


def test_prompts_go_first_and_stall_those_that_decode() -> None:
    result = play([(0.0, 100, 10), (0.125, 200, 3)], one())
    first, second = result.requests
    # The second comes in during the third decode step, which ends at 0.13 s.
    assert second.first_token == pytest.approx(0.33)
    assert first.finish == pytest.approx(0.1 + 9 * 0.01 + 0.2)


def test_prompts_are_batched_but_never_cut() -> None:
    spec = InstanceSpec(TINY, EngineShape("fake"), 1000, max_num_batched_tokens=100)
    workload = [TraceRequest(0.0, "tiny", prompt, 1) for prompt in (10, 40, 50, 300, 20)]
    ends = [r.finish for r in simulate(spec, LATENCY, workload, one()).requests]
    assert ends == [pytest.approx(each) for each in (0.01, 0.1, 0.1, 0.4, 0.42)]


def test_the_last_to_have_joined_is_preempted_and_computed_again() -> None:
    # Each grows to 1,000 of the 1,600 tokens.
    result = play([(0.0, 700, 300), (0.1, 700, 300)], one())
    first, second = result.requests
    assert (first.preemptions, second.preemptions, result.preemptions) == (0, 1, 1)
    assert first.finish is not None
    assert second.finish is not None
    # At 96 tokens each beyond 704 the 100 blocks are taken; the second starts again when the first has gone.
    assert second.lost == pytest.approx(first.finish - (1.4 + 0.01 * 100) + (second.prompt + 101) / 1e3, abs=0.2)
    assert second.made == 300


def test_by_scheduling_priority_then_by_arrival() -> None:
    priorities = [("normal", "normal"), ("normal", "normal"), ("normal", "normal"), ("high", "normal")]
    spec = InstanceSpec(TINY, EngineShape("fake"), 100, max_num_seqs=1)
    workload = [TraceRequest(n / 1e3, "tiny", 100, 1) for n in range(4)]
    result = simulate(spec, LATENCY, workload, one(), priorities.__getitem__)
    ends = [r.finish for r in result.requests]
    assert ends == [pytest.approx(each) for each in (0.1, 0.3, 0.4, 0.2)]


def test_low_execution_priority_is_preempted_first() -> None:
    priorities = [("normal", "normal"), ("normal", "high")]
    result = play([(0.0, 700, 300), (0.1, 700, 300)], one(), priorities=priorities.__getitem__)
    assert [r.preemptions for r in result.requests] == [1, 0]


def test_a_request_longer_than_an_instance_is_refused() -> None:
    result = play([(0.0, 1_500, 101), (0.0, 10, 2)], one())
    long, short = result.requests
    assert "1601 tokens" in long.error
    assert long.finish is None
    assert short.finish is not None


def fragmented(migration: MigrationRules | None) -> ClusterResult:
    """Four instances with two sequences each and 660 tokens free, and a prompt of 1,100 that fits none of them."""
    small = [(0.001 * n, 400, 390) for n in range(8)]
    options = ReplicaOptions(
        instances=4,
        levels=LEVELS,
        dispatch=lambda levels: RoundRobin(),
        migration=migration,
        copying=QUICK,
        tick=0.01,
    )
    return play([*small, (1.5, 1_100, 2)], options)


def test_a_long_prompt_that_fits_nowhere_gets_room_by_migration() -> None:
    without, moving = fragmented(None), fragmented(MigrationRules(source_below=16, destination_above=32))
    long, rescued = without.requests[-1], moving.requests[-1]
    assert without.migrations == 0 < moving.migrations
    assert long.first_token is not None
    assert rescued.first_token is not None
    assert long.first_token - 1.5 > 2 * (rescued.first_token - 1.5)
    for request in moving.requests:
        assert request.made == request.output


def test_downtime_is_the_last_stage_whatever_the_length() -> None:
    copying = MigrationCosts(bandwidth=1e6, handshake=0.001, commit=0.002, slowdown=1.0)
    downs = []
    for prompt in (200, 1_000):
        options = ReplicaOptions(instances=2, levels=LEVELS, copying=copying, migration=MigrationRules())
        cluster = Cluster(SPEC, LATENCY, options)
        # It goes to the first of two idle instances, which is drained while it decodes.
        request = TraceRequest(0.0, "tiny", prompt, 400)
        cluster.at(1.5, lambda now, cluster=cluster: cluster.drain("i0001", now))  # type: ignore[misc]
        result = cluster.run([request])
        assert result.migrations == 1
        downs.append(result.downtimes[0])
        # 128 bytes of KV a token.
        assert result.copy_seconds[0] >= (prompt + 40) * 128 / 1e6
    assert downs[1] <= downs[0] * 1.5


def test_scales_out_under_load_and_in_again() -> None:
    rules = ScalingRules(minimum=1, maximum=4, low=50, high=400, hold=1)
    busy = [(0.05 * n, 100, 200) for n in range(400)]
    later = [(60.0 + n, 20, 5) for n in range(60)]
    options = ReplicaOptions(
        instances=1, levels=LEVELS, migration=MigrationRules(), scaling=rules, start_seconds=2.0, copying=QUICK
    )
    result = play([*busy, *later], options)
    assert result.peak == 4
    assert all(request.finish is not None for request in result.requests)
    # Four all the time would be needed without scaling in.
    assert result.average_instances < 3
    alone = play([*busy, *later], one())
    assert result.figures()["request"]["p99"] < alone.figures()["request"]["p99"] / 2


def test_a_model_without_instances_wakes_for_a_request() -> None:
    rules = ScalingRules(minimum=0, maximum=1, idle_seconds=5)
    options = ReplicaOptions(instances=0, levels=LEVELS, scaling=rules, start_seconds=3.0)
    result = play([(1.0, 100, 2), (100.0, 100, 2)], options)
    assert [r.first_token for r in result.requests] == [pytest.approx(4.1), pytest.approx(103.1)]
    assert result.started == 2
    # Three seconds to start, some to idle, and a tick or two: twice.
    assert result.instance_seconds < 2 * 10


def test_a_request_that_waits_for_too_long_is_refused_with_a_reason() -> None:
    rules = ScalingRules(minimum=0, maximum=1, wake_limit=2)
    options = ReplicaOptions(instances=0, levels=LEVELS, scaling=rules, start_seconds=60.0)
    (request,) = play([(1.0, 100, 2)], options).requests
    assert "wake_limit" in request.error


def test_nobody_to_serve_and_nobody_to_come_is_said() -> None:
    with pytest.raises(StuckError, match="1 requests wait"):
        play([(0.0, 10, 1)], ReplicaOptions(instances=0, levels=LEVELS))


POLICIES: list[DispatchPolicy] = [Freest(), LoadAware(), RoundRobin()]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.sampled_from(["freest", "loadaware", "roundrobin"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_request_ends_and_no_block_is_lost(
    seed: int, instances: int, policy: str, moving: bool, scaling: bool, in_flight: int
) -> None:
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(15) for _ in range(120))
    workload = [TraceRequest(t, "tiny", rng.randint(1, 600), rng.randint(1, 300)) for t in times]
    made = {"freest": Freest, "loadaware": LoadAware, "roundrobin": RoundRobin}[policy]
    options = ReplicaOptions(
        instances=instances,
        levels=LEVELS,
        dispatch=lambda levels: made(),
        migration=MigrationRules(100, 150, in_flight=in_flight) if moving else None,
        scaling=ScalingRules(1, 5, low=50, high=300, hold=0.5) if scaling else None,
        copying=MigrationCosts(bandwidth=2e5, last_stage_blocks=rng.randint(1, 8)),
        start_seconds=0.5,
    )
    cluster = Cluster(SPEC, LATENCY, options)
    priorities = [(rng.choice(["high", "normal"]), rng.choice(["high", "normal"])) for _ in workload]
    result = cluster.run(workload, priorities.__getitem__)
    for each, request in zip(workload, result.requests, strict=True):
        assert request.made == each.output_tokens
        assert request.first_token is not None
        assert request.finish is not None
        assert each.arrival < request.first_token <= request.finish
    # What is still under way when the last request ends is a migration of nobody: let it end.
    while cluster._heap and any(i.moving_in or i.moving_out for i in cluster.instances.values()):
        when, _, callback = heappop(cluster._heap)
        callback(when)
    for instance in cluster.instances.values():
        assert instance.free == SPEC.blocks
        assert instance.reserved == 0
        assert not instance.batch.running
        assert instance.batch.context == 0
        assert sum(instance.batch.needs) == 0


def test_the_same_again_gives_the_same() -> None:
    def run() -> list[float | None]:
        rng = random.Random(5)
        requests = [(0.04 * n, rng.randint(1, 500), rng.randint(1, 300)) for n in range(150)]
        options = ReplicaOptions(instances=3, levels=LEVELS, migration=MigrationRules(100, 200))
        return [request.finish for request in play(requests, options).requests]

    assert run() == run()


def test_a_stale_view_is_refreshed_and_everything_is_served() -> None:
    rng = random.Random(6)
    requests = [(0.03 * n, rng.randint(1, 500), rng.randint(1, 300)) for n in range(150)]
    options = ReplicaOptions(instances=3, levels=DEFAULT_LEVELS, migration=MigrationRules(100, 200), stale=0.5)
    assert all(r.finish is not None for r in play(requests, options).requests)
