"""Models whose memory moves into a file when they are stopped, over processes that only pretend."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest

from muxserve.cluster import model_parents
from muxserve.cluster.starts import WARM
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import Fleet, alive, fake_unit_spec, running


@pytest.fixture
async def fleet(run_dir: RunDir) -> AsyncIterator[Fleet]:
    unit_spec = msgspec.structs.replace(fake_unit_spec(run_dir.path), hibernation=str(run_dir.path))
    async for each in running(Fleet(run_dir, [unit_spec])):
        each.tell("model-parents")
        await each.serving()
        yield each


async def test_a_stopped_model_keeps_the_process_that_has_loaded_it(fleet: Fleet) -> None:
    parent = fleet.host.model_parents["one"]
    await fleet.host.stop_model("one")
    assert "one" not in fleet.host.model_parents  # nothing of it counts as awake
    assert not fleet.host.up("one")
    await fleet.host.start_model("one")
    assert fleet.host.model_parents["one"] == parent
    assert fleet.host.up("one")
    assert fleet.journal().count("hibernate one") == 1
    assert "end one" not in fleet.journal()


async def test_nothing_is_kept_of_a_model_that_is_served_no_longer(fleet: Fleet) -> None:
    parent = fleet.host.model_parents["one"]
    await fleet.host.stop_model("one")
    assert alive(parent)
    await fleet.host.forget("one")
    assert not alive(parent)
    assert fleet.journal().count("end one") == 1
    await fleet.host.forget("one")  # there is nothing more
    await fleet.host.start_model("one")
    assert fleet.host.model_parents["one"] != parent
    assert fleet.host.up("one")


async def test_before_a_model_is_started_again_its_process_is_told(fleet: Fleet) -> None:
    await fleet.host.prefetch("one")  # it is not asleep: its checkpoint is read
    await fleet.host.stop_model("one")
    assert "prefetch one" not in fleet.journal()
    await fleet.host.prefetch("one")
    await fleet.host.start_model("one")
    assert fleet.journal().count("prefetch one") == 1


async def test_whoever_waits_for_memory_does_not_wait_until_all_of_it_is_in_a_file(fleet: Fleet) -> None:
    parent = fleet.host.model_parents["one"]
    await fleet.host.stop_model("one", urgent=True)
    assert not alive(parent)
    assert "hibernate one" not in fleet.journal()
    await fleet.host.start_model("one")
    await fleet.host.stop_model("one")
    await fleet.host.start_model("one")
    parent = fleet.host.model_parents["one"]
    await fleet.host.stop_model("one", urgent=True)  # only what has changed moves
    assert alive(parent)
    assert fleet.journal().count("hibernate one") == 2


@pytest.mark.parametrize("trouble", ["full", "mute"])
async def test_a_model_whose_memory_does_not_move_is_loaded_again(
    fleet: Fleet, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_parents, "_HIBERNATION_SECONDS", 0.2)
    parent = fleet.host.model_parents["one"]
    fleet.tell(f"{trouble}-one")
    await fleet.host.stop_model("one")
    assert not alive(parent)
    await fleet.host.start_model("one")
    assert fleet.host.model_parents["one"] != parent
    assert fleet.host.up("one")


async def test_the_process_of_a_sleeping_model_may_die(fleet: Fleet) -> None:
    parent = fleet.host.model_parents["one"]
    await fleet.host.stop_model("one")
    os.kill(parent, signal.SIGKILL)
    await fleet.until(lambda: not alive(parent))
    await fleet.host.start_model("one")
    assert fleet.host.model_parents["one"] != parent
    assert fleet.host.up("one")


async def test_it_may_die_while_its_memory_moves(fleet: Fleet) -> None:
    parent = fleet.host.model_parents["one"]
    fleet.tell("mute-one")
    stopping = asyncio.create_task(fleet.host.stop_model("one"))
    await fleet.until(lambda: "hibernate one" in fleet.journal())
    os.kill(parent, signal.SIGKILL)
    await stopping
    assert fleet.host.up("two")


async def test_a_model_may_be_put_to_sleep_before_its_unit_is_up(idle_fleet: Fleet) -> None:
    """Nobody waits for engines that were stopped while they started."""
    idle_fleet.start()
    await idle_fleet.until(lambda: bool(idle_fleet.controller.units.units) and idle_fleet.ups(WARM) > 0)
    assert not idle_fleet.host.ready.is_set()
    await idle_fleet.host.stop_model("two")
    await idle_fleet.until(idle_fleet.host.ready.is_set)
    assert idle_fleet.host.up("one")
    assert not idle_fleet.host.up("two")
