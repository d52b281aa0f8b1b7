"""Where models are to be awake: by KV pressure."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muxserve.scheduling.kv_pressure import (
    LOWER,
    PRESSED,
    DemandedModel,
    KvPressureMoves,
    ModelMove,
    MoveRules,
    Pressure,
    best_place,
    placed,
)


def test_a_model_is_placed_where_the_pressure_is_lowest() -> None:
    pressures = {"x": Pressure(100, 20, 40.0), "y": Pressure(100, 50, 10.0)}
    assert best_place(DemandedModel("a", 10, 5.0), pressures, None) == "y"  # 15 of 40, beside 45 of 70
    assert best_place(DemandedModel("a", 45, 5.0), pressures, None) == "x"  # 45 of 35, beside 15 of 5


def test_where_weights_do_not_fit_is_worse_than_any_pressure() -> None:
    pressures = {"x": Pressure(100, 60, 0.0), "y": Pressure(100, 40, 500.0)}
    assert best_place(DemandedModel("a", 50, 1.0), pressures, None) == "y"
    # Where it does not fit anywhere, the fewest bytes are missing.
    assert best_place(DemandedModel("a", 90, 1.0), pressures, None) == "y"


def test_a_model_stays_where_caches_have_room() -> None:
    pressures = {"here": Pressure(100, 40, 20.0), "there": Pressure(100)}
    model = DemandedModel("a", 10, 10.0)
    assert best_place(model, pressures, None) == "there"
    assert best_place(model, pressures, "here") == "here"
    pressures["here"].demand = 40.0
    assert best_place(model, pressures, "here") == "there"


def test_models_are_spread_the_most_demanded_first() -> None:
    models = [DemandedModel("idle", 90, 0.0), *(DemandedModel(name, 30, 30.0) for name in "abcd")]
    found = placed(models, {"x": 100, "y": 100}, {"idle": "x"})
    assert found.pop("idle") == "x"
    assert sorted(found.values()) == ["x", "x", "y", "y"]
    assert "idle" not in placed(models, {"x": 100, "y": 100}, {})


DRAWN = st.lists(
    st.tuples(st.integers(1, 60), st.floats(0.0, 50.0), st.sampled_from(["x", "y", "z"])), min_size=1, max_size=8
)


@given(DRAWN)
def test_whoever_moves_finds_less_pressure_and_then_stays(drawn: list[tuple[int, float, str]]) -> None:
    models = [DemandedModel(f"m{n}", weights, demand) for n, (weights, demand, _) in enumerate(drawn)]
    there = {f"m{n}": place for n, (_, _, place) in enumerate(drawn)}
    memory = dict.fromkeys("xyz", 100)
    found = placed(models, memory, there)
    pressures = {name: Pressure(size) for name, size in memory.items()}
    for model in sorted(models, key=lambda each: (-each.demand, each.name)):
        old, new = there[model.name], found[model.name]
        if old != new:
            assert model.demand > 0.0
            (short, ratio), (less, lower) = pressures[old].with_model(model), pressures[new].with_model(model)
            assert short > less or (ratio >= PRESSED and lower < (1.0 - LOWER) * ratio)
        if model.demand > 0.0:
            pressures[new].add(model)
    assert placed(models, memory, found) == found


# ---------------------------------------------------------------- over time


class World:
    """Places and models on a virtual clock; a move takes no time unless a test says otherwise."""

    def __init__(self, models: list[DemandedModel], there: dict[str, str], rules: MoveRules, places: str = "xyz"):
        self.models, self.there, self.now = models, dict(there), 0.0
        self.memory = dict.fromkeys(places, 100)
        self.moves = KvPressureMoves(rules, self.now)
        self.made: list[tuple[float, ModelMove]] = []

    def pressures(self) -> dict[str, Pressure]:
        found = {name: Pressure(size) for name, size in self.memory.items()}
        for model in self.models:
            if model.demand > 0.0:
                found[self.there[model.name]].add(model)
        return found

    def look(self) -> list[ModelMove]:
        return self.moves.decide(self.now, self.models, self.memory, self.there)

    def carry_out(self, move: ModelMove) -> None:
        assert self.there[move.name] == move.source != move.destination
        self.moves.began(move)
        self.there[move.name] = move.destination
        self.moves.ended(move.name)
        self.made.append((self.now, move))

    def wait(self, seconds: float, step: float = 1.0) -> None:
        for _ in range(int(seconds / step)):
            self.now += step
            for move in self.look():
                self.carry_out(move)


def crowded(rules: MoveRules, places: str = "xy") -> World:
    models = [DemandedModel("a", 0, 60.0), DemandedModel("b", 0, 30.0), DemandedModel("c", 0, 10.0)]
    return World(models, {"a": "x", "b": "x", "c": "y"}, rules, places)


def test_a_model_moves_when_its_residence_is_over_and_a_period_ends() -> None:
    world = crowded(MoveRules(period=60, residence=150))
    world.wait(400)
    assert world.made == [(180.0, ModelMove("b", "x", "y", 0.9, 0.4))]


def test_a_model_stays_where_caches_have_room_or_where_it_is_hardly_better_elsewhere() -> None:
    world = crowded(MoveRules(residence=0))
    world.models = [DemandedModel("a", 0, 40.0), DemandedModel("b", 0, 29.0), DemandedModel("c", 0, 1.0)]
    world.wait(600)
    world.models = [DemandedModel("a", 0, 60.0), DemandedModel("b", 0, 30.0), DemandedModel("c", 0, 40.0)]
    world.wait(600)
    assert world.made == []


def test_one_model_moves_at_a_time() -> None:
    models = [DemandedModel(name, 0, 30.0) for name in "abcdef"]
    world = World(models, dict.fromkeys("abcdef", "x"), MoveRules(period=10, residence=0))
    world.now = 10.0
    (move,) = world.look()
    world.moves.began(move)
    for world.now in (20.0, 30.0):
        assert world.look() == []
    world.there[move.name] = move.destination
    world.moves.ended(move.name)
    assert world.look() == []  # the period is not over
    world.now = 40.0
    (other,) = world.look()
    assert other.name != move.name


def test_a_move_that_fails_is_tried_again_ever_more_rarely() -> None:
    world = crowded(MoveRules(period=10, residence=0, retry=30, longest_retry=60), "xyz")
    world.models[0] = DemandedModel("a", 0, 60.0, frozenset("x"))  # only b can move, and only to y
    world.models[1] = DemandedModel("b", 0, 30.0, frozenset("xy"))
    failed = []
    while world.now < 300:
        world.now += 10
        for move in world.look():
            world.moves.began(move)
            world.moves.failed(move.name, world.now)
            failed.append(world.now)
    assert failed == [10, 40, 100, 160, 220, 280]
    # Elsewhere it may be possible.
    world.models[1] = DemandedModel("b", 0, 30.0)
    world.wait(10)
    assert [(move.name, move.destination) for _, move in world.made] == [("b", "z")]


def test_a_model_moves_only_where_it_can_be() -> None:
    world = crowded(MoveRules(period=10, residence=0), "xyz")
    world.models[0] = DemandedModel("a", 0, 60.0, frozenset("x"))
    world.models[1] = DemandedModel("b", 0, 30.0, frozenset("xy"))
    world.wait(10)
    assert [(move.name, move.destination) for _, move in world.made] == [("b", "y")]


def test_rules_that_make_no_sense_are_refused() -> None:
    for wrong in ({"period": 0}, {"residence": -1}, {"retry": 0}, {"retry": 60, "longest_retry": 30}):
        with pytest.raises(ValueError, match="must"):
            MoveRules(**wrong)  # type: ignore[arg-type]


@given(DRAWN)
def test_each_move_lowers_the_pressure_of_the_place_that_it_leaves_and_none_is_undone(
    drawn: list[tuple[int, float, str]],
) -> None:
    models = [DemandedModel(f"m{n}", weights, demand) for n, (weights, demand, _) in enumerate(drawn)]
    there = {f"m{n}": place for n, (_, _, place) in enumerate(drawn)}
    world = World(models, there, MoveRules(period=5, residence=0))
    visited = [tuple(sorted(there.items()))]
    quiet = 0
    while quiet < 3:
        assert len(visited) < 200, "it goes on for ever"
        world.now += 5
        before = world.pressures()
        found = world.look()
        assert len(found) <= 1
        quiet = 0 if found else quiet + 1
        for move in found:
            (model,) = [each for each in models if each.name == move.name]
            highest = before[move.source].now
            world.carry_out(move)
            after = world.pressures()
            assert max(after[move.destination].now, after[move.source].now) < highest
            assert move.pressure == highest[1]
            assert move.then == pytest.approx(after[move.destination].now[1])
            assert model.demand > 0.0
            visited.append(tuple(sorted(world.there.items())))
    assert len(set(visited)) == len(visited), "a model went to and fro under constant demand"


@pytest.mark.slow
@given(DRAWN, st.floats(1.0, 100.0), st.floats(0.0, 500.0))
def test_however_demands_change_no_period_has_two_moves_and_no_model_leaves_early(
    drawn: list[tuple[int, float, str]], period: float, residence: float
) -> None:
    there = {f"m{n}": place for n, (_, _, place) in enumerate(drawn)}
    world = World([], there, MoveRules(period=period, residence=residence))
    names = list(there)
    for turn in range(60):
        world.models = [DemandedModel(name, 0, drawn[n][1] * ((n + turn // 5) % 3)) for n, name in enumerate(names)]
        world.wait(20, step=2.0)
    times = [time for time, _ in world.made]
    assert all(later - sooner >= period for sooner, later in pairwise(times))
    arrived = dict.fromkeys(names, 0.0)
    for time, move in world.made:
        assert time - arrived[move.name] >= min(residence, time)
        arrived[move.name] = time
