"""Models in one of several units, with weights and KV in one memory."""

from __future__ import annotations

import pytest

from muxserve.scheduling.residency import ResidencyRules, WakeCosts
from muxserve.simulator import FleetResult, RelocationRules, SimResidency, SimUnit, simulate
from muxserve.workload.trace import TraceRequest
from tests.scheduling.machine import profile
from tests.simulator.support import Analytic, requests, unit

NAMES = ("a", "b", "c", "d")
WAKE, PAGES, LIMIT = 0.5, 1200, 1200
# Of a model that is awake, as many as a third of the pages.
WEIGHTS = 400


def units_for(count: int, weights: int = WEIGHTS, fixed: int = 0) -> list[SimUnit]:
    costs = {name: WakeCosts(weights, seconds=WAKE, ttft=2.0) for name in NAMES}
    rules = ResidencyRules(LIMIT, min_residence=0.2, residence_factor=0.5, max_wait=2.0, fixed=fixed)
    residency = SimResidency(rules, costs, elastic=True)
    return [
        unit([profile(name) for name in NAMES], PAGES, name=f"unit{n}", devices=(n,), residency=residency)
        for n in range(count)
    ]


def play(units: list[SimUnit], load: list[TraceRequest], rules: RelocationRules | None = None) -> FleetResult:
    return simulate(units, load, Analytic(), rules=dict.fromkeys(NAMES, rules or RelocationRules()))


def served_in(result: FleetResult, unit: int) -> set[str]:
    return {request.model for request in result.units[unit].requests}


def test_models_that_sleep_are_woken_where_there_is_room() -> None:
    result = play(units_for(2), requests(*((0.01 * n, name, 40, 10) for n, name in enumerate(NAMES))))
    assert [record.error for record in result.records] == [""] * 4
    assert [len(served_in(result, n)) for n in (0, 1)] == [2, 2]
    assert [each.residency.wakes for each in result.units if each.residency] == [2, 2]


def test_a_model_that_is_awake_gets_its_requests_where_it_is() -> None:
    result = play(units_for(2), requests(*((0.1 * n, "a", 40, 10) for n in range(50))))
    assert sorted(len(each.requests) for each in result.units) == [0, 50]


def test_pages_of_weights_are_not_for_caches() -> None:
    load = requests(*((0.02 * n, NAMES[n % 2], 120, 180) for n in range(80)))
    result = play(units_for(1), load)
    assert [record.error for record in result.records] == [""] * 80
    (only,) = result.units
    # Two models are awake, whose weights take two thirds.
    assert max(sum(held) for _, held in only.pages) <= PAGES - 2 * WEIGHTS


def test_idle_models_give_way_to_caches_that_grow() -> None:
    load = [(0.0, "b", 40, 4), (0.0, "c", 40, 4), *((3.0 + 0.02 * n, "a", 120, 180) for n in range(60))]
    (roomy,) = play(units_for(1, fixed=200), requests(*load)).units
    assert roomy.residency is not None
    assert roomy.residency.sleeps >= 1
    assert max(held[0] for _, held in roomy.pages) > PAGES - 3 * WEIGHTS


def test_who_waits_for_a_model_follows_it_to_another_unit() -> None:
    """Four models on two units with room for one each: everybody is served, in one place at a time."""
    load = requests(*((0.05 * n, NAMES[(n // 5) % 4], 40, 20) for n in range(200)))
    result = play(units_for(2, weights=700), load, RelocationRules(period=1.0))
    assert [record.error for record in result.records] == [""] * 200
    assert all(record.first_token is not None for record in result.records)
    assert sum(len(each.requests) for each in result.units) == 200


@pytest.mark.slow
def test_a_model_moves_away_from_pressure_and_nobody_notices() -> None:
    # Two come to each unit; those of the first are asked for much more later.
    first = [(0.01 * n, name, 40, 4) for n, name in enumerate(NAMES)]
    pressed = sorted(served_in(play(units_for(2), requests(*first)), 0))
    assert len(pressed) == 2
    load = requests(*first, *((5.0 + 0.02 * n, pressed[n % 2], 100, 200) for n in range(400)))
    still = play(units_for(2), load, RelocationRules(period=1e6))
    moving = play(units_for(2), load, RelocationRules(period=2.0))
    assert sum(each.migrations for each in still.replicas) == 0
    assert sum(each.migrations for each in moving.replicas) >= 1

    def waited(result: FleetResult) -> float:
        assert [record.error for record in result.records] == [""] * len(load)
        return sum(record.first_token - record.arrival for record in result.records if record.first_token is not None)

    assert waited(moving) < 0.7 * waited(still)


@pytest.mark.slow
def test_one_move_at_a_time_is_enough_for_lasting_pressure() -> None:
    """The rules of a live fleet: the same class, with a least residence."""
    first = [(0.01 * n, name, 40, 4) for n, name in enumerate(NAMES)]
    pressed = sorted(served_in(play(units_for(2), requests(*first)), 0))
    load = requests(*first, *((5.0 + 0.02 * n, pressed[n % 2], 100, 200) for n in range(400)))
    rules = RelocationRules(period=2.0, residence=3.0, together=False)
    moved = play(units_for(2), load, rules)
    assert [record.error for record in moved.records] == [""] * len(load)
    assert sum(each.migrations for each in moved.replicas) == 1
