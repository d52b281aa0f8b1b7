"""Where models are to be awake: by KV pressure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muxserve.scheduling.kv_pressure import LOWER, PRESSED, DemandedModel, Pressure, best_place, placed


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
