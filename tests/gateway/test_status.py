"""What the gateway hears of units that answer, and of those that hang."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

from muxserve.gateway.status import fleet_status
from muxserve.gateway.status.collector import FleetCollector
from muxserve.gateway.status.fleet_status import FleetStatus, UnitStatus
from muxserve.spec import UnitEntry
from tests.gateway.unit_specs import model, unit_spec
from tests.support.patience import PATIENCE


class Asked:
    """A unit that answers when the test wants."""

    def __init__(self) -> None:
        self.up = True
        self.questions: list[asyncio.Future[dict[str, object] | None]] = []

    def unit_is_up(self, unit: str) -> bool:
        return self.up

    async def unit_state(self, unit: str, timeout: float) -> dict[str, object] | None:
        question: asyncio.Future[dict[str, object] | None] = asyncio.get_running_loop().create_future()
        self.questions.append(question)
        return await question


def status_of(asked: Asked, clock: list[float]) -> UnitStatus:
    one = unit_spec("/nowhere", [model("m"), model("r", shape="one", rolling=True)], unit="u")
    return UnitStatus(UnitEntry(one, "ipc:///nowhere", "", ["m", "r"]), asked, lambda: clock[0])


async def answer(asked: Asked, state: dict[str, object] | None) -> None:
    while not asked.questions:
        await asyncio.sleep(0)
    asked.questions.pop().set_result(state)


def engines(**up: bool) -> dict[str, object]:
    return {"engines": {name.replace("_", "/"): {"up": is_up} for name, is_up in up.items()}}


async def test_who_asks_at_the_same_time_shares_the_answer() -> None:
    asked, clock = Asked(), [0.0]
    unit = status_of(asked, clock)
    both = asyncio.gather(unit.refresh(), unit.refresh())
    await answer(asked, engines(m_prefill=True, m_decode=True))
    await both
    assert unit.answered
    clock[0] += fleet_status.MAX_AGE_SECONDS
    await unit.refresh()  # fresh enough
    assert not asked.questions
    clock[0] += 0.01
    again = asyncio.ensure_future(unit.refresh())
    await answer(asked, engines(m_prefill=True, m_decode=False))
    await again
    assert unit.engine_up("m", "prefill")
    assert not unit.model_up("m")


async def test_a_model_with_one_engine_is_up_with_it() -> None:
    asked = Asked()
    unit = status_of(asked, [0.0])
    refreshed = asyncio.ensure_future(unit.refresh())
    await answer(asked, engines(r_both=True, m_decode=True))
    await refreshed
    assert unit.model_up("r")
    assert not unit.model_up("m")


async def test_a_unit_that_hangs_holds_up_nobody_twice_and_may_answer_late() -> None:
    asked, clock = Asked(), [0.0]
    unit = status_of(asked, clock)
    first = asyncio.ensure_future(unit.refresh())
    await answer(asked, None)  # it was waited for in vain
    await first
    assert not unit.answered
    await asyncio.wait_for(unit.refresh(), PATIENCE)  # although nobody answers
    await asyncio.wait_for(unit.refresh(), PATIENCE)
    assert not unit.answered
    assert len(asked.questions) == 1
    await answer(asked, engines(m_prefill=True, m_decode=True))
    while not unit.answered:
        await asyncio.sleep(0)
    assert unit.model_up("m")


async def test_a_unit_that_is_not_there_is_not_asked() -> None:
    asked, clock = Asked(), [0.0]
    unit = status_of(asked, clock)
    refreshed = asyncio.ensure_future(unit.refresh())
    await answer(asked, {})
    await refreshed
    asked.up = False
    await unit.refresh()
    assert not unit.answered
    assert not asked.questions


def test_of_a_model_that_was_removed_no_metric_is_left() -> None:
    """The unit that it was in may keep its page table, and a quota of nothing."""
    told = {name: {"used_pages": 1, "phases": {"decode": {"jobs": 3}}} for name in ("here", "gone")}
    unit: Any = SimpleNamespace(name="u0", answered=True, models=lambda: told)
    fleet: Any = SimpleNamespace(units={"u0": unit}, fleet=SimpleNamespace(models=[model("here")]))
    fleet.replica_states = partial(FleetStatus.replica_states, fleet)
    collector = FleetCollector(fleet)
    assert collector._per_model("used_pages") == {("u0", "here"): 1.0}
    assert collector._per_phase("jobs") == {("u0", "here", "decode"): 3.0}
