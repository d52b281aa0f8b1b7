"""Rolling prefill, whoever dies and whatever is late: every question is answered once, nothing is forgotten, and what
is believed of units is what they have."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.global_scheduler.rolling_world import MODEL, RollingWorld


@settings(max_examples=25, deadline=None)
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
