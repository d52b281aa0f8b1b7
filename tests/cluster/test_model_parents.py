"""Processes that have loaded a model and fork its engines, over processes that only pretend."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from muxserve.cluster.starts import WARM
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import Fleet, alive, fake_unit_spec, running


@pytest.fixture
async def fleet(run_dir: RunDir) -> AsyncIterator[Fleet]:
    async for each in running(Fleet(run_dir, [fake_unit_spec(run_dir.path)])):
        each.tell("model-parents")
        await each.serving()
        yield each


async def test_the_memory_of_a_stopped_model_is_free(fleet: Fleet) -> None:
    parents = fleet.host.memory_parents().models
    await fleet.host.stop_model("one")
    assert fleet.host.memory_parents().models == {"two": parents["two"]}  # nothing of the other counts as awake
    assert not alive(parents["one"])
    assert alive(parents["two"])
    assert not fleet.host.up("one")
    assert fleet.journal().count("end one") == 1
    await fleet.host.start_model("one")
    assert fleet.host.memory_parents().models["one"] != parents["one"]
    assert fleet.host.up("one")


async def test_a_model_may_be_put_to_sleep_before_its_unit_is_up(idle_fleet: Fleet) -> None:
    """Nobody waits for engines that were stopped while they started."""
    idle_fleet.start()
    await idle_fleet.until(lambda: bool(idle_fleet.controller.units.units) and idle_fleet.ups(WARM) > 0)
    assert not idle_fleet.host.ready.is_set()
    await idle_fleet.host.stop_model("two")
    await idle_fleet.until(idle_fleet.host.ready.is_set)
    assert idle_fleet.host.up("one")
    assert not idle_fleet.host.up("two")
