"""Units whose models are not all awake: the policy of the live fleet on the simulator's clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from muxserve.costs.measured import TURN_SECONDS
from muxserve.costs.profile import Overheads
from muxserve.scheduling.residency_types import ResidencyRules, WakeCosts, WakeRules
from muxserve.scheduling.turns import TurnRules
from muxserve.simulator import Options, SimResidency, WakeContention, simulate
from muxserve.simulator.compute import fair_shares
from muxserve.simulator.result import ResidencyResult, UnitResult
from muxserve.simulator.unit import SimulatedUnit
from tests.scheduling.machine import profile
from tests.simulator.support import Analytic, requests, run, unit

NAMES = ("a", "b", "c")
WAKE = 0.5


def resident(limit: int, awake: tuple[str, ...] = (), **rules: object) -> SimulatedUnit:
    costs = {name: WakeCosts(40, load_bytes=10, seconds=WAKE, ttft=2.0) for name in NAMES}
    residency = SimResidency(ResidencyRules(limit, **rules), costs, awake)  # type: ignore[arg-type]
    return SimulatedUnit(unit([profile(name) for name in NAMES], 1200, residency=residency), Analytic())


def awakened(result: UnitResult) -> ResidencyResult:
    assert result.residency is not None
    return result.residency


def first_tokens(result: UnitResult) -> list[float]:
    found = []
    for record in result.records:
        assert not record.error
        assert record.first_token is not None
        found.append(record.first_token)
    return found


def test_with_room_for_all_nothing_differs_from_a_unit_whose_models_are_awake() -> None:
    load = requests(*((0.03 * n, NAMES[n % 3], 40, 10) for n in range(60)))
    always = run(SimulatedUnit(unit([profile(name) for name in NAMES], 1200), Analytic()), load)
    found = run(resident(200, awake=NAMES), load)
    assert found.records == always.records
    assert awakened(found) == ResidencyResult(0, 0, 0, 3 * 40)


def test_a_herd_is_served_by_one_wake_of_each_model() -> None:
    result = run(resident(200), requests(*((0.001 * n, NAMES[n % 3], 40, 4) for n in range(60))))
    told = awakened(result)
    assert (told.wakes, told.sleeps) == (3, 0)
    assert told.waited > 3
    # One after the other.
    by_model = {name: min(r.first_token or 0.0 for r in result.records if r.model == name) for name in NAMES}
    assert sorted(round(at, 1) for at in by_model.values()) == [WAKE, 2 * WAKE, 3 * WAKE]


def test_a_sleeping_model_answers_later_by_its_wake() -> None:
    load = requests((0.0, "a", 40, 4))
    (asleep,) = first_tokens(run(resident(200), load))
    (awake,) = first_tokens(run(resident(200, awake=("a",)), load))
    assert asleep == pytest.approx(awake + WAKE)


def test_wakes_take_longer_beside_each_other() -> None:
    def waited(drag: float, wakes: int) -> list[float]:
        world = resident(200, wakes=WakeRules(wakes, cores=2))
        assert world.residents is not None
        world.residents.residency = replace(world.residents.residency, contention=WakeContention(drag))
        world.residents.awake.times.pace.drag = drag
        return first_tokens(run(world, requests((0.0, "a", 40, 1), (0.0, "b", 40, 1))))

    alone = waited(0.0, 2)
    assert alone == pytest.approx([WAKE, WAKE], abs=0.1)
    assert waited(0.5, 2) == pytest.approx([at + WAKE / 4 for at in alone], abs=0.01)
    # The second is alone again when the first has ended, but for the model that runs.
    first, second = waited(0.5, 1)
    assert first == pytest.approx(alone[0])
    assert 2 * WAKE < second < 2 * WAKE + 0.1


@pytest.mark.parametrize("limit", [50, 90, 95])
def test_models_that_do_not_fit_take_turns_within_the_limit(limit: int) -> None:
    world = resident(limit, min_residence=0.2, residence_factor=0.5, max_wait=2.0)
    result = run(world, requests(*((0.1 * n, NAMES[(n // 7) % 3], 40, 10) for n in range(200))))
    told = awakened(result)
    assert len(first_tokens(result)) == 200
    assert told.wakes > 3
    assert told.sleeps >= told.wakes - 2
    assert told.peak_bytes <= limit


def test_a_fleet_takes_units_of_both_kinds() -> None:
    residency = SimResidency(ResidencyRules(60), {name: WakeCosts(40, seconds=WAKE) for name in NAMES})
    units = [
        unit([profile(name) for name in NAMES], 1200, residency=residency),
        unit([profile("d")], 400, name="unit1", devices=(1,)),
    ]
    result = simulate(units, requests((0.0, "a", 40, 4), (0.0, "d", 40, 4), (0.0, "b", 40, 4)), Analytic())
    assert [record.error for record in result.records] == [""] * 3
    assert [each.residency is None for each in result.units] == [False, True]


def test_a_unit_must_know_what_its_models_take() -> None:
    residency = SimResidency(ResidencyRules(60), {"a": WakeCosts(40)})
    with pytest.raises(ValueError, match="unit0 needs to know what each of its models takes"):
        SimulatedUnit(unit([profile(name) for name in NAMES], 1200, residency=residency), Analytic())


@pytest.mark.parametrize("policy", ["adbs", "slack", "free", "fcfs"])
@pytest.mark.parametrize("declared", [1, 3, 24])
def test_nobodys_length_depends_on_who_is_declared(policy: str, declared: int) -> None:
    """A request that takes nearly all of the pool: others that sleep have no pages, and those that are awake give
    way."""
    names = [f"m{n}" for n in range(declared)]
    costs = {name: WakeCosts(40, seconds=WAKE, ttft=2.0) for name in names}
    profiles = [profile(name, quota_pages=1200 // declared, floor_pages=1200 // (2 * declared)) for name in names]
    residency = SimResidency(ResidencyRules(100), costs)
    world = SimulatedUnit(unit(profiles, 1200, policy, residency=residency), Analytic())
    rows = [(0.0, "m0", 4000, 100), (0.1, names[-1], 40, 10), (1.5, names[-1], 4500, 10), (1.6, "m0", 40, 10)]
    result = run(world, requests(*rows))
    assert [record.error for record in result.records] == [""] * 4
    assert [record.output_tokens for record in result.records] == [100, 10, 10, 10]


def test_models_that_sleep_have_no_pages() -> None:
    world = resident(200)
    run(world, requests((0.0, "a", 40, 4)))
    quotas = {pages.model: pages.quota for pages in world.machine.pages.models}
    assert (quotas["b"], quotas["c"]) == (0, 0)
    assert quotas["a"] > 400, "others have the use of what sleeping models have none for"


def taking_turns(
    turns: TurnRules | None,
    options: Options | None = None,
    policy: str = "adbs",
    one_engine: tuple[str, ...] = (),
) -> SimulatedUnit:
    """Room for one model of three; a token is due every 100 ms, and takes a tenth of that."""
    costs = {name: WakeCosts(40, seconds=0.1, ttft=1.0, tpot=0.1) for name in NAMES}
    rules = ResidencyRules(60, min_residence=0.1, residence_factor=1.0, max_wait=30.0, patience=0.1)
    residency = SimResidency(rules, costs, turns=turns)
    profiles = [profile(name, both=name in one_engine) for name in NAMES]
    return SimulatedUnit(unit(profiles, 1200, policy, residency=residency), Analytic(), options)


LONG = requests(*((0.01 * n, NAMES[n % 3], 40, 250) for n in range(9)))


def test_what_was_stopped_finds_its_blocks_as_cached_prefixes() -> None:
    """But for the last block, of which others can find nothing, nothing is computed again."""
    one_by_one, world = run(taking_turns(None), LONG), taking_turns(TurnRules(switching=0.3))
    result = run(world, LONG)
    assert awakened(result).switches >= 2
    assert [record.output_tokens for record in result.records] == [250] * 9
    assert all(pages.held == 0 for pages in world.machine.pages.models)
    computed = sum(engine.tokens for engine in result.engines) - sum(engine.tokens for engine in one_by_one.engines)
    again = sum(record.preemptions for record in result.records)
    assert again > 0
    assert 0 <= computed <= 16 * again
    # First tokens come in the first round, not when the models before have ended.
    assert max(first_tokens(result)) < 2.0 < max(first_tokens(one_by_one))


def test_what_finds_no_pages_when_its_turn_comes_is_computed_again() -> None:
    costs = {name: WakeCosts(40, seconds=0.1, ttft=1.0, tpot=0.1) for name in NAMES}
    rules = ResidencyRules(60, min_residence=0.1, residence_factor=1.0, max_wait=30.0, patience=0.1)
    residency = SimResidency(rules, costs, turns=TurnRules(switching=0.3))
    small = [profile(name, quota_pages=100, floor_pages=80) for name in NAMES]
    world = SimulatedUnit(unit(small, 300, residency=residency), Analytic())
    result = run(world, LONG)
    assert [record.output_tokens for record in result.records] == [250] * 9
    assert awakened(result).switches > 0
    assert all(pages.held == 0 for pages in world.machine.pages.models)


@pytest.mark.parametrize("seed", [1, 36, 39, 40])
def test_a_turn_may_end_while_a_report_is_on_its_way(seed: int) -> None:
    """A lease was then kept for an engine that had nothing left, and its model never decoded again."""
    drawn = random.Random(seed)
    rows = [(round(drawn.uniform(0, 3), 3), drawn.choice(NAMES), 40, drawn.randint(5, 120)) for _ in range(24)]
    world = taking_turns(TurnRules(switching=0.3), Options(Overheads(turn=TURN_SECONDS)))
    result = run(world, requests(*sorted(rows)))
    assert [record.output_tokens for record in result.records] == [output for *_, output in sorted(rows)]
    assert awakened(result).switches > 0


@pytest.mark.parametrize("policy", ["slack", "adbs", "free", "fcfs"])
@pytest.mark.parametrize("one_engine", [(), NAMES, ("a",), ("b", "c")], ids=["split", "one", "one of a", "one of b, c"])
def test_turns_end_whatever_engines_and_policies_a_unit_has(one_engine: tuple[str, ...], policy: str) -> None:
    """An engine of both phases knows of a first token before the unit scheduler does. What was stopped in between was
    live in the scheduler for ever, as was its lease, and nobody computed any more."""
    for seed in (16, 18):
        drawn = random.Random(seed)
        rows = [(round(drawn.uniform(0, 3), 3), drawn.choice(NAMES), 40, drawn.randint(5, 120)) for _ in range(60)]
        way = Options(Overheads(turn=TURN_SECONDS))
        world = taking_turns(TurnRules(switching=0.3), way, policy, one_engine)
        result = run(world, requests(*sorted(rows)))
        assert [record.output_tokens for record in result.records] == [output for *_, output in sorted(rows)]
        assert awakened(result).switches > 0


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        (1, 1, (1.0, 1.0)),
        (2, 2, (1 / 1.1, 0.1 / 1.1)),  # two cores' worth for 2.2 of weight
        (1, 2, (1.0, 0.5)),  # the other core is theirs
        (1, 20, (2 / 3, 0.1 * 2 / 3)),
        (3, 0, (2 / 3, 0.1 * 2 / 3)),
        (0, 4, (1.0, 0.5)),
    ],
)
def test_two_cores_are_shared_by_weight(first: int, second: int, shares: tuple[float, float]) -> None:
    assert fair_shares(2, first, second, 0.1) == pytest.approx(shares)
    of_first, of_second = fair_shares(2, first, second, 0.1)
    assert first * of_first + second * of_second == pytest.approx(min(2.0, first + second))


def test_decoding_waits_for_wakes_where_it_gives_way_to_them() -> None:
    """One core: `a` decodes for 1.5 s alone, while `b` is woken for half a second."""

    def ends(weight: float, drag: float = 0.001) -> tuple[float, float]:
        costs = {name: WakeCosts(40, seconds=WAKE, ttft=2.0) for name in NAMES}
        residency = SimResidency(ResidencyRules(200), costs, ("a",), WakeContention(drag, weight))
        world = SimulatedUnit(unit([profile(name) for name in NAMES], 1200, residency=residency), Analytic())
        result = run(world, requests((0.0, "a", 40, 250), (0.2, "b", 40, 1)))
        a, b = result.records
        return a.finish or 0.0, b.first_token or 0.0

    alone, woken = ends(1.0, drag=0.0)  # no CPU
    assert woken == pytest.approx(0.2 + WAKE, abs=0.05)
    # It gets half of the core meanwhile, or a tenth of what the wake gets.
    assert ends(1.0)[0] - alone == pytest.approx(WAKE / 2, abs=0.05)
    assert ends(0.1)[0] - alone == pytest.approx(WAKE * (1 - 0.1 / 1.1), abs=0.05)


def test_turns_do_not_happen_where_all_have_room() -> None:
    load = requests(*((0.03 * n, NAMES[n % 3], 40, 10) for n in range(60)))
    costs = {name: WakeCosts(40, seconds=WAKE) for name in NAMES}
    awake = SimResidency(ResidencyRules(200), costs, NAMES)
    with_turns = SimResidency(ResidencyRules(200), costs, NAMES, turns=TurnRules())
    made = [unit([profile(name) for name in NAMES], 1200, residency=each) for each in (awake, with_turns)]
    found, same = (run(SimulatedUnit(each, Analytic()), load) for each in made)
    assert found.records == same.records
