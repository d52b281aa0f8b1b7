"""Rolling prefill, whoever dies and whatever is late: every question is answered once, nothing is forgotten, and what
is believed of units is what they have."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.global_scheduler.rolling_world import MODEL, FakeUnit, RollingWorld
from tests.support.thoroughness import examples


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32), units=st.integers(1, 7), events=st.integers(0, 600))
def test_every_request_is_placed_once_and_served_whatever_happens(seed: int, units: int, events: int) -> None:
    world = RollingWorld(Random(seed), units)
    for _ in range(events):
        world.event()
        world.check()
    world.calm_down()
    # What was placed just before a death is forgotten within a second.
    for _ in range(12):
        world.beat()
        world.check()
    assert world.disagreements() == []
    world.run_out()
    world.beat(1.5)
    assert world.disagreements() == []
    assert world.refused == 0
    shown = world.core.state(world.now)["models"][MODEL]  # type: ignore[index]
    assert shown["waiting"] == 0


def loaded_and_drained(world: RollingWorld, rounds: int) -> FakeUnit:
    """Requests arrive and are worked on for some rounds; then the replica that has most of them is drained."""
    world.calm_down()
    world.beat()
    for _ in range(8):
        world.arrive()
    world.arrive_all()
    for _ in range(rounds):
        for unit in world.units.values():
            world.work(unit)
        world.now += 0.01
    world.arrive_all()
    drained = max(world.units.values(), key=lambda unit: len(unit.held))
    world.drain(drained)
    return drained


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32), units=st.integers(2, 5), events=st.integers(0, 400))
def test_decodes_of_drained_replicas_move_and_are_forgotten_by_nobody(seed: int, units: int, events: int) -> None:
    world = RollingWorld(Random(seed), units)
    drained = loaded_and_drained(world, 3)
    for _ in range(events):
        world.drained_event(drained)
        world.check()
    for unit in world.units.values():
        world.revive(unit)
    world.arrive_all()
    for _ in range(12):
        world.beat()
        world.check()
    assert world.disagreements() == []
    world.run_out()
    world.beat(1.5)
    assert world.disagreements() == []
    assert world.refused == 0


def test_a_drained_replica_is_empty_before_its_decodes_would_be() -> None:
    moved = 0
    for seed in range(8):
        world = RollingWorld(Random(seed), 3)
        drained = loaded_and_drained(world, 4)
        had = sum(held.prefilled for held in drained.held.values())
        # Its engine does nothing from here on, so that whatever leaves has moved.
        for _ in range(100):
            for unit in world.units.values():
                if unit is not drained:
                    world.work(unit)
            world.beat(0.02)
            world.move(drained)
            world.check()
        assert not [key for key, held in drained.held.items() if held.prefilled]
        assert world.moved == had
        assert world.disagreements() == []
        moved += had
    assert moved > 8
