"""Several replicas of one model: dispatch, moves, priorities, scaling."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.dispatch_policies import Freest, LoadAware, RoundRobinDispatch
from muxserve.costs import Decode, EngineCosts, EngineShape, LatencyModel, Load, ModelArchitecture
from muxserve.costs.architecture import split_layers
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import DEFAULT_LEVELS, Level, Levels
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.member import LatencyTargets
from muxserve.rolling.mitosis import Bounds
from muxserve.rolling.scaling import RollingScalingRules as RollingScaling
from muxserve.simulator import (
    FleetResult,
    Link,
    MigrationCosts,
    Options,
    Pipeline,
    ReplicaRules,
    RingRules,
    SimModel,
    SimulationError,
    SimUnit,
    lone_unit,
    simulate,
)
from muxserve.simulator import unit as simulated_unit
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.fleet import Group
from muxserve.simulator.replicas import Dispatched
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.ring import Ring
from muxserve.workload.trace import TraceRequest
from placement.demand import Demand
from tests.costs.models import llama
from tests.simulator.support import STEPPING
from tests.support.thoroughness import examples

TINY = llama(name="tiny", layers=2, heads=2, kv_heads=2, head_dim=8, hidden=16, intermediate=32, vocab=100)
LEVELS = Levels((Level("high", 1, 400), Level("normal", 0)))
# Copies at once: what it takes is left to the engines' steps.
QUICK = MigrationCosts(bandwidth=1e15, handshake=0.0, commit=0.0)


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

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        return [1.0] * len(loads)


LATENCY: LatencyModel = SteadyModel()


def replicas(count: int, first: int = 0, blocks: int = 100, stages: int = 0) -> list[SimUnit]:
    model = Demand("tiny", TINY, "float16", 256, 2560)
    pipeline = Pipeline(split_layers(TINY.layers, stages), (Link(1e18, 0.0),) * (stages - 1)) if stages else None
    size = stages or 1
    return [
        lone_unit(f"u{n}", "fake", tuple(range(n * size, (n + 1) * size)), model, blocks, pipeline=pipeline,
                  waiting_tokens=4096 if stages else 0, policy="free" if stages else "rolling")
        for n in range(first, first + count)
    ]  # fmt: skip


@dataclass
class DrainDue(TimedEvent):
    """Somebody wants the first replica to go."""

    replicas: Dispatched | Ring

    def handle(self, now: float) -> None:
        self.replicas.drain("u0", now)


def rules(spares: int = 0, stages: int = 0, **more: object) -> ReplicaRules:
    units = tuple(replicas(spares, 10, stages=stages))
    values: dict[str, object] = {"levels": LEVELS, "copying": QUICK, "spares": units, **more}
    return ReplicaRules(**values)  # type: ignore[arg-type]


def load(requests: Sequence[tuple[float, int, int]]) -> list[TraceRequest]:
    return [TraceRequest(arrival, "tiny", prompt, output) for arrival, prompt, output in requests]


def play(
    requests: Sequence[tuple[float, int, int]], units: list[SimUnit], given: ReplicaRules | RingRules, **more: object
) -> FleetResult:
    return simulate(units, load(requests), LATENCY, rules={"tiny": given}, **more)  # type: ignore[arg-type]


def test_one_request_by_hand() -> None:
    result = play([(1.0, 100, 5)], replicas(1), rules())
    (request,) = result.requests
    assert request.first_token == pytest.approx(1.1)
    assert request.finish == pytest.approx(1.1 + 4 * 0.01)
    assert result.jobs == 5


def test_prompts_go_first_and_stall_those_that_decode() -> None:
    first, second = play([(0.0, 100, 10), (0.125, 200, 3)], replicas(1), rules()).requests
    # The second comes in during the third decode step, which ends at 0.13 s.
    assert second.first_token == pytest.approx(0.33)
    assert first.finish == pytest.approx(0.1 + 9 * 0.01 + 0.2)


def test_by_scheduling_priority_then_by_arrival() -> None:
    units = [replace(unit, models=(_seats(unit, 1),)) for unit in replicas(1)]
    levels = ["normal", "normal", "normal", "high"]
    requests = [(n / 1e3, 100, 1) for n in range(4)]
    result = play(requests, units, rules(), priorities=lambda n: (levels[n], "normal"))
    assert [r.finish for r in result.requests] == [pytest.approx(each) for each in (0.1, 0.3, 0.4, 0.2)]


def _seats(unit: SimUnit, count: int) -> SimModel:
    (model,) = unit.models
    return replace(model, profile=model.profile.with_engines(max_num_seqs=count))


def test_low_execution_priority_is_preempted_first() -> None:
    # Each grows to 1,000 of the 1,600 tokens.
    requests = [(0.0, 700, 300), (0.1, 700, 300)]
    plain = play(requests, replicas(1), rules()).requests
    assert [r.preemptions for r in plain] == [0, 1], "the last to have joined"
    assert plain[1].lost > 0.5
    levels = ["normal", "high"]
    result = play(requests, replicas(1), rules(), priorities=lambda n: ("normal", levels[n]))
    assert [r.preemptions for r in result.requests] == [1, 0]
    assert all(r.made == 300 for r in result.requests)


def test_a_request_longer_than_a_replica_is_refused() -> None:
    long, short = play([(0.0, 1_601, 1), (0.0, 10, 2)], replicas(2), rules()).requests
    assert "1616 tokens" in long.error
    assert long.finish is None
    assert short.finish is not None


def fragmented(migration: MigrationRules | None, stages: int = 0) -> FleetResult:
    """Four replicas with two sequences each and some 660 tokens free, and a prompt of 1,100 that fits none of them."""
    small = [(0.001 * n, 400, 390) for n in range(8)]
    given = rules(dispatch=lambda levels: RoundRobinDispatch(), migration=migration, tick=0.01)
    return play([*small, (1.7, 1_100, 2)], replicas(4, stages=stages), given)


@pytest.mark.parametrize("stages", [0, 2])
def test_a_long_prompt_that_fits_nowhere_gets_room_by_migration(stages: int) -> None:
    without = fragmented(None, stages)
    moving = fragmented(MigrationRules(source_below=16, destination_above=32), stages)
    long, rescued = without.requests[-1], moving.requests[-1]
    assert without.replicas[0].migrations == 0 < moving.replicas[0].migrations
    assert long.first_token is not None
    assert rescued.first_token is not None
    assert long.first_token > rescued.first_token + 0.5
    assert all(request.made == request.output for request in moving.requests)
    assert sum(request.moves for request in moving.requests) == moving.replicas[0].migrations


def test_downtime_is_the_last_stage_whatever_the_length() -> None:
    copying = MigrationCosts(bandwidth=1e6, handshake=0.001, commit=0.002)
    downs = []
    for prompt in (200, 1_000):
        given = rules(copying=copying, migration=MigrationRules())
        group = Group(replicas(2), LATENCY, None, {"tiny": given})
        together = group.replicas["tiny"]
        assert isinstance(together, Dispatched)
        # It goes to the first of two idle replicas, which is drained while it decodes.
        group.clock.at(1.5, DrainDue(together))
        request = SimRequest("0", "tiny", 0.0, prompt, 400)
        group.run(iter([request]))
        result = together.finish(group.clock.now)
        assert result.migrations == 1
        assert request.finish is not None
        downs.append(result.downtimes[0])
        # 128 bytes of KV a token.
        assert result.copy_seconds[0] >= (prompt + 40) * 128 / 1e6
    assert downs[1] <= downs[0] * 1.5


def test_scales_out_under_load_and_in_again() -> None:
    scaling = ScalingRules(minimum=1, maximum=4, low=50, high=400, hold=1)
    busy = [(0.05 * n, 100, 200) for n in range(400)]
    later = [(60.0 + n, 20, 5) for n in range(60)]
    given = rules(3, migration=MigrationRules(), scaling=scaling, start_seconds=2.0)
    result = play([*busy, *later], replicas(1), given)
    (together,) = result.replicas
    assert together.peak == 4
    assert all(request.finish is not None for request in result.requests)
    # Four all the time would be needed without scaling in.
    assert together.average < 3
    assert len(result.units) >= 4
    alone = play([*busy, *later], replicas(1), rules())
    slow, quick = (max(r.finish - r.arrival for r in each.requests if r.finish) for each in (alone, result))
    assert quick < slow / 2


def test_nobody_to_serve_and_nobody_to_come_is_said() -> None:
    group = Group(replicas(1), LATENCY, None, {"tiny": rules()})
    together = group.replicas["tiny"]
    assert isinstance(together, Dispatched)
    together.drain("u0", 0.0)
    with pytest.raises(SimulationError, match="1 requests wait"):
        group.run(iter([SimRequest("0", "tiny", 0.0, 10, 1)]))


def scene(
    seed: int, count: int, policy: str, moving: bool, scaling: bool, in_flight: int, stages: int
) -> tuple[list[SimUnit], list[TraceRequest], ReplicaRules, list[tuple[str, str]]]:
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(15) for _ in range(100))
    workload = [TraceRequest(t, "tiny", rng.randint(1, 600), rng.randint(1, 300)) for t in times]
    made = {"freest": Freest, "loadaware": LoadAware, "roundrobin": RoundRobinDispatch}[policy]
    given = rules(
        2,
        stages,
        dispatch=lambda levels: made(),
        migration=MigrationRules(100, 150, in_flight=in_flight) if moving else None,
        scaling=ScalingRules(1, 5, low=50, high=300, hold=0.5) if scaling else None,
        copying=MigrationCosts(bandwidth=2e5, last_stage_blocks=rng.randint(1, 8)),
        start_seconds=0.5,
    )
    priorities = [(rng.choice(["high", "normal"]), rng.choice(["high", "normal"])) for _ in workload]
    return replicas(count, stages=stages), workload, given, priorities


SCENES = st.tuples(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.sampled_from(["freest", "loadaware", "roundrobin"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([0, 0, 1, 2]),
)


@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(SCENES)
def test_every_request_ends_and_no_page_is_lost(drawn: tuple[int, int, str, bool, bool, int, int]) -> None:
    units, workload, given, priorities = scene(*drawn)
    group = Group(units, LATENCY, None, {"tiny": given})
    requests = [SimRequest.of(each, number) for number, each in enumerate(workload)]
    for request, levels in zip(requests, priorities, strict=True):
        request.scheduling, request.execution = levels
    group.run(iter(requests))
    for request in requests:
        assert request.made == request.output
        assert request.first_token is not None
        assert request.finish is not None
        assert request.arrival < request.first_token <= request.finish
    for unit in group.units:
        scheduler = unit.scheduler
        assert not scheduler.live
        assert not scheduler.ledger.requests
        if not (scheduler.moving_in or scheduler.moving_out):
            assert all(pages.held == pages.committed == 0 for pages in unit.machine.pages.models)


# One in which a sequence waits for the end of a step, to leave.
@pytest.mark.slow
@example((1464, 3, "freest", True, False, 3, 0))
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(SCENES)
def test_leaping_is_stepping_with_replicas_too(drawn: tuple[int, int, str, bool, bool, int, int]) -> None:
    drawn = (*drawn[:6], 0)
    found = []
    for stepping in (False, True):
        units, workload, given, priorities = scene(*drawn)
        with pytest.MonkeyPatch.context() as patch:
            if stepping:
                patch.setattr(simulated_unit, "EngineTypes", lambda: STEPPING)
            result = simulate(
                units, workload, LATENCY, Options(sample_seconds=0.0), {"tiny": given}, priorities.__getitem__
            )
        found.append([(r.first_token, r.finish, r.preemptions, r.moves) for r in result.requests])
    assert found[0] == found[1]


def test_a_stale_view_is_refreshed_and_everything_is_served() -> None:
    rng = random.Random(6)
    requests = [(0.03 * n, rng.randint(1, 500), rng.randint(1, 300)) for n in range(150)]
    given = rules(levels=DEFAULT_LEVELS, migration=MigrationRules(100, 200), stale=0.5)
    assert all(r.finish is not None for r in play(requests, replicas(3), given).requests)


# ------------------------------------------------------------ rings


def ring_rules(spares: int = 0, **more: object) -> RingRules:
    values: dict[str, object] = {
        "objectives": LatencyTargets(1.0, 0.03),
        "expected_output": 16,
        "copying": QUICK,
        "spares": tuple(replicas(spares, 10)),
        **more,
    }
    return RingRules(**values)  # type: ignore[arg-type]


def test_a_drained_rolling_replica_gives_its_decodes_to_others() -> None:
    ends = []
    for migration in (None, MigrationRules()):
        group = Group(replicas(2), LATENCY, None, {"tiny": ring_rules(migration=migration)})
        ring = group.replicas["tiny"]
        assert isinstance(ring, Ring)
        requests = [SimRequest(str(n), "tiny", 0.2 * n, 100, 200) for n in range(4)]
        group.clock.at(1.0, DrainDue(ring))
        group.run(iter(requests))
        result = ring.finish(group.clock.now)
        assert all(r.made == 200 for r in requests)
        assert (result.migrations > 0) is (migration is not None)
        assert sum(r.moves for r in requests) == result.migrations
        ends.append(result.replica_seconds)
    assert ends[1] < ends[0], "it is empty sooner"


@pytest.mark.parametrize("told", [False, True])
def test_replicas_take_more_short_answers_at_once_if_requests_say_how_long_they_may_be(told: bool) -> None:
    """As `max_tokens` do live: by it the memory of a replica is promised."""
    units = replicas(2, blocks=12)
    requests = [(0.001 * n, 10, 2) for n in range(8)]
    result = play(requests, units, ring_rules(expected_output=120, max_tokens_told=told))
    served_by = {request.unit for request in result.requests}
    assert len(served_by) == (1 if told else 2)
    assert all(request.made == 2 for request in result.requests)


def test_replicas_take_more_answers_at_once_when_answers_were_short() -> None:
    units = replicas(2, blocks=12)
    before = [(0.1 * n, 10, 2) for n in range(100)]
    requests = [*before, *((20 + 0.001 * n, 10, 2) for n in range(8))]
    used = []
    for learns in (False, True):
        result = play(requests, units, ring_rules(expected_output=120, learns_answers=learns))
        used.append(len({request.unit for request in result.requests[100:]}))
    assert used == [2, 1]


def test_rolling_replicas_come_while_objectives_are_missed_and_go_when_there_is_nothing_to_do() -> None:
    scaling = RollingScaling(target=0.9, window=2.0, patience=1.0, enough=5, most=6, idle=0.2)
    busy = [(0.05 * n, 200, 20) for n in range(600)]
    quiet = [(60.0 + n, 10, 5) for n in range(60)]
    given = ring_rules(4, scaling=scaling, bounds=Bounds(2, 4), start_seconds=0.5)
    result = simulate(replicas(2), load([*busy, *quiet]), LATENCY, rules={"tiny": given})
    (together,) = result.replicas
    assert all(request.finish is not None for request in result.requests)
    assert together.peak == 6
    assert together.average < 5
    fixed = simulate(replicas(2), load(busy), LATENCY, rules={"tiny": ring_rules()})
    late = [[r.first_token - r.arrival > 1.0 for r in each.requests[:600] if r.first_token] for each in (result, fixed)]
    assert sum(late[0]) < sum(late[1]) / 2
