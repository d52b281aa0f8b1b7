"""Several units under one controller, over real processes that only pretend: starts, deaths, changes while serving."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muxserve.cluster import models, steps
from muxserve.cluster.controller import EXIT_START
from muxserve.cluster.events import Failed, PartId, Progress, Starting, Up
from muxserve.cluster.steps import Addition, JoinedUnit
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit
from muxserve.config import parse_fleet
from muxserve.control.changes import ChangeError, NoRoomError
from muxserve.planning.specs.unit_specs import settings_of
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.scaling import ScalingRules
from muxserve.scheduling.residency_types import ResidencyRules, WakeCosts
from muxserve.spec import FleetSpec, ResidencySpec, followed_file, load_fleet, load_followed
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import Fleet, alive, fake_unit_spec, running, serving
from tests.support.thoroughness import cases

VLLM, SCHEDULER = PartId("vllm"), PartId("scheduler")
GATEWAYS = [PartId("gateway"), PartId("gateway", index=1)]
GATEWAY = GATEWAYS[0]


def parts(unit: str, *models: str) -> list[PartId]:
    engines = [PartId("engine", model, phase) for model in models for phase in ("prefill", "decode")]
    base = [PartId("memory"), PartId("warm_parent"), PartId("unit"), PartId("migrator")]
    return [part.within(unit) for part in (*base, *engines)]


class FakePlanner:
    """Has room for so many units."""

    def __init__(self, run_dir: RunDir, room: int = 10) -> None:
        self.run_dir, self.room = run_dir, room
        self.full: Exception = ChangeError("the machine is full")
        self.forgotten: list[str] = []
        self.rolling = False

    def unit(self, model: str, name: str, fleet: FleetSpec) -> PlannedUnit:
        if not self.room:
            raise self.full
        self.room -= 1
        unit_spec = fake_unit_spec(self.run_dir.path, unit=name, names=[model], rolling=self.rolling)
        return PlannedUnit(unit_spec, (model,))

    def addition(self, declared: Any, names: Callable[[], str], fleet: FleetSpec, tell: Any) -> Addition:
        (model,) = declared.models
        planned = self.unit(model.name, names(), fleet)
        return Addition(planned.unit_spec.models[0], (planned,), ScalingRules(1, 3))

    def joined(self, declared: Any, unit: PlannedUnit, fleet: FleetSpec, tell: Any) -> JoinedUnit:
        raise NoRoomError(f"{unit.name} has no room")

    def trying(self, without: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def forget(self, model: str) -> None:
        self.forgotten.append(model)

    def settings(self, wanted: Any, fleet: FleetSpec) -> FleetSpec:
        return settings_of(wanted, fleet)


@pytest.fixture
def planner(run_dir: RunDir) -> FakePlanner:
    return FakePlanner(run_dir)


@pytest.fixture
async def idle_pair(run_dir: RunDir, planner: FakePlanner) -> AsyncIterator[Fleet]:
    """Model `one` in two units, `two` in the first alone; two gateways; no request of `two` is ever moved."""
    units = [fake_unit_spec(run_dir.path), fake_unit_spec(run_dir.path, unit="u1", names=["one"])]
    async for each in running(Fleet(run_dir, units, planner, gateways=2, migration=MigrationRules())):
        yield each


@pytest.fixture
async def pair(idle_pair: Fleet) -> Fleet:
    await idle_pair.serving()
    return idle_pair


@pytest.fixture
async def single(run_dir: RunDir, planner: FakePlanner) -> AsyncIterator[Fleet]:
    units = [fake_unit_spec(run_dir.path)]
    async for each in serving(Fleet(run_dir, units, planner, migration=MigrationRules())):
        yield each


@pytest.fixture
async def turns(run_dir: RunDir, planner: FakePlanner) -> AsyncIterator[Fleet]:
    """A model of which each unit has one engine, for both phases."""
    planner.rolling = True
    units = [fake_unit_spec(run_dir.path, unit=name, names=["one"], rolling=True) for name in ("u0", "u1")]
    async for each in serving(Fleet(run_dir, units, planner, migration=MigrationRules())):
        yield each


def declared(name: str) -> Any:
    """As much of a fleet file as the changes read."""
    return SimpleNamespace(models=[SimpleNamespace(name=name)])


def said(texts: list[str]) -> Callable[[str], None]:
    return texts.append


async def test_everything_comes_up_and_goes_down(pair: Fleet) -> None:
    ups = {event.part for event in pair.events if isinstance(event, Up)}
    assert ups == {VLLM, SCHEDULER, *GATEWAYS, *parts("u0", "one", "two"), *parts("u1", "one")}
    assert pair.serves == {"u0": ["one", "two"], "u1": ["one"]}
    await pair.until(lambda: "scheduler got ControllerHello from controller" in pair.journal())
    stops = await pair.stops()
    assert sorted(stops[:2]) == ["gateway-0", "gateway-1"]
    assert stops[2] == "scheduler"
    assert stops[-1] == "vllm"
    assert stops.count("memory") == stops.count("migrator") == 2


async def test_all_units_are_told_which_gateway_died(pair: Fleet) -> None:
    os.kill(pair.pid(GATEWAYS[1]), signal.SIGKILL)
    for unit in ("u0", "u1"):
        await pair.until(lambda unit=unit: f"{unit} got GatewayDown 1" in pair.journal())
    await pair.until(lambda: pair.ups(GATEWAYS[1]) == 2)
    assert pair.ups(GATEWAYS[0]) == 1


async def test_an_engine_concerns_its_unit_only(pair: Fleet) -> None:
    victim = PartId("engine", "one", "decode", "u1")
    os.kill(pair.pid(victim), signal.SIGKILL)
    await pair.until(lambda: pair.ups(victim) == 2)
    await pair.until(lambda: "u1 got EngineDown one" in pair.journal())
    assert "u0 got EngineDown one" not in pair.journal()


async def test_where_phases_take_turns_a_unit_has_one_engine(turns: Fleet) -> None:
    engines = [PartId("engine", "one", "both", unit) for unit in ("u0", "u1")]
    assert [part for part in turns.controller.parts if part.kind == "engine"] == engines
    os.kill(turns.pid(engines[1]), signal.SIGKILL)
    await turns.until(lambda: turns.ups(engines[1]) == 2)
    assert turns.ups(engines[0]) == 1
    await turns.until(lambda: "u1 got EngineDown one" in turns.journal())
    assert [line for line in turns.journal() if "EngineDown" in line] == ["u1 got EngineDown one"]
    await turns.changes.scale("one", 3, said([]))
    assert turns.serves == {"u0": ["one"], "u1": ["one"], "u2": ["one"]}
    assert turns.ups(engines[0].within("u2")) == 1
    await turns.changes.drain("u1", said([]))
    assert not alive(turns.pid(engines[1]))
    assert "stop one-both" in turns.journal()


@pytest.mark.parametrize("victim", cases([SCHEDULER, PartId("migrator", unit="u0")], [SCHEDULER]), ids=str)
async def test_what_only_helps_is_started_again_for_ever(pair: Fleet, victim: PartId) -> None:
    for count in range(2, 9):
        os.kill(pair.pid(victim), signal.SIGKILL)
        await pair.until(lambda count=count: pair.ups(victim) == count)
    others = {event.part for event in pair.events if isinstance(event, Up)} - {victim}
    assert all(pair.ups(part) == 1 for part in others)


async def test_a_unit_that_keeps_dying_is_started_again_as_a_whole(pair: Fleet) -> None:
    (die := pair.run_dir.path / "u1" / "die-unit").write_text("")
    unit, host = PartId("unit", unit="u1"), PartId("host", unit="u1")
    os.kill(pair.pid(unit), signal.SIGKILL)
    down = await pair.down(host)
    assert down.reason == "unit scheduler: exited with status 7"
    die.unlink()
    await pair.until(lambda: pair.ups(unit) == 2 and Progress in {type(e) for e in pair.events[-1:]})
    assert all(pair.ups(part) == 1 for part in (*parts("u0", "one", "two"), VLLM, *GATEWAYS))
    assert not pair.task.done()
    assert pair.serves == {"u0": ["one", "two"], "u1": ["one"]}


@pytest.mark.thorough
async def test_a_unit_that_is_not_up_can_be_taken_out(pair: Fleet) -> None:
    (pair.run_dir.path / "u1" / "die-unit").write_text("")
    host = PartId("host", unit="u1")
    os.kill(pair.pid(PartId("unit", unit="u1")), signal.SIGKILL)
    await pair.down(host)
    await pair.changes.drain("u1", said([]))
    assert pair.serves == {"u0": ["one", "two"]}
    started = [event for event in pair.events if isinstance(event, Starting) and event.part.unit == "u1"]
    await pair.stops()
    assert started == [event for event in pair.events if isinstance(event, Starting) and event.part.unit == "u1"]


@pytest.mark.thorough
async def test_without_another_unit_the_fleet_goes_on_trying(pair: Fleet) -> None:
    broken = pair.tell("die-unit")
    units = [PartId("unit", unit=name) for name in ("u0", "u1")]
    for unit in units:
        os.kill(pair.pid(unit), signal.SIGKILL)
    for name in ("u0", "u1"):
        await pair.down(PartId("host", unit=name))
    broken.unlink()
    await pair.until(lambda: all(pair.ups(unit) == 2 for unit in units))
    assert not any(isinstance(event, Failed) for event in pair.events)


@pytest.mark.parametrize("file", cases(["u1/die-unit", "die-scheduler", "fail-gateway-1"], ["u1/die-unit"]))
async def test_a_start_that_fails_ends_everything(idle_pair: Fleet, file: str) -> None:
    (idle_pair.run_dir.path / "u1").mkdir()
    idle_pair.tell(file)
    assert await idle_pair.start() == EXIT_START
    assert idle_pair.failed.part in (PartId("unit", unit="u1"), SCHEDULER, GATEWAYS[1])
    assert not any(map(alive, idle_pair.pids()))


async def test_a_unit_whose_models_cannot_be_started_is_tried_again_while_the_others_serve(idle_pair: Fleet) -> None:
    (idle_pair.run_dir.path / "u1").mkdir()
    broken = [idle_pair.tell(f"u1/fail-{model.name}-prefill") for model in idle_pair.planned[1].unit_spec.models]
    await idle_pair.serving()
    host = PartId("host", unit="u1")
    down = await idle_pair.down(host)
    assert down.reason.endswith("the weights are of cheese")
    for file in broken:
        file.unlink()
    engines = [part for part in parts("u1", *(m.name for m in idle_pair.planned[1].unit_spec.models)) if part.model]
    await idle_pair.until(lambda: all(idle_pair.ups(engine) for engine in engines))
    assert not any(isinstance(event, Failed) for event in idle_pair.events)


# ---------------------------------------------------------------- changes


async def test_a_replica_more_is_a_unit_of_its_own(single: Fleet) -> None:
    assert single.ups(SCHEDULER) == 0
    texts: list[str] = []
    await single.changes.scale("two", 2, said(texts))
    assert texts == ["starting u1 with two", "two is served by u1"]
    assert single.serves == {"u0": ["one", "two"], "u1": ["two"]}
    assert {event.part for event in single.events if isinstance(event, Up)} >= set(parts("u1", "two"))
    # Now there is something to choose, and there are two to move between.
    await single.until(lambda: single.ups(SCHEDULER) == 1 and single.ups(PartId("migrator", unit="u0")) == 1)
    await single.until(lambda: "gateway-0 sees one,two in u0=one,two u1=two" in single.journal())
    assert single.controller.fleet.generation == 2


async def test_what_can_be_done_without_ends_when_it_is_empty(pair: Fleet) -> None:
    gone = [pair.pid(part) for part in parts("u1", "one")]
    texts: list[str] = []
    await pair.changes.scale("one", 1, said(texts))
    assert texts == ["draining one in u1", "u1 has ended"]
    assert pair.serves == {"u0": ["one", "two"]}
    assert not any(alive(pid) for pid in gone)
    journal = pair.journal()
    assert journal.index("scheduler got DrainReplicas from controller") < journal.index("stop one-prefill")
    for who in ("scheduler", "gateway-0", "gateway-1"):
        await pair.until(lambda who=who: f"{who} sees one,two in u0=one,two" in pair.journal())


async def test_the_busier_replica_stays_and_a_unit_that_serves_more_lends_its_pages(pair: Fleet) -> None:
    (pair.run_dir.path / "u1" / "busy").write_text("3")
    before = {part: pair.pid(part) for part in parts("u0", "one", "two")}
    await pair.changes.scale("one", 1, said([]))
    assert pair.serves == {"u0": ["two"], "u1": ["one"]}
    stopped = {part for part, pid in before.items() if not alive(pid)}
    assert stopped == {part for part in before if part.model == "one"}
    await pair.until(lambda: "u0 got Retire one" in pair.journal())
    await pair.until(lambda: "end one" in pair.journal())
    # Its engines come back where they were.
    await pair.changes.scale("one", 2, said([]))
    assert pair.serves == {"u0": ["one", "two"], "u1": ["one"]}
    assert pair.ups(PartId("engine", "one", "prefill", "u0")) == 2
    await pair.until(lambda: "u0 got Revive one" in pair.journal())


@pytest.mark.thorough
async def test_a_retired_model_stays_so_when_the_unit_scheduler_is_new(pair: Fleet) -> None:
    (pair.run_dir.path / "u1" / "busy").write_text("3")
    await pair.changes.scale("one", 1, said([]))
    await pair.until(lambda: pair.journal().count("u0 got Retire one") == 1)
    os.kill(pair.pid(PartId("unit", unit="u0")), signal.SIGKILL)
    await pair.until(lambda: pair.journal().count("u0 got Retire one") == 2)


async def test_a_drained_unit_ends(pair: Fleet) -> None:
    with pytest.raises(ChangeError, match="two is served by u0 alone"):
        await pair.changes.drain("u0", said([]))
    assert pair.serves == {"u0": ["one", "two"], "u1": ["one"]}
    await pair.changes.drain("u1", said([]))
    assert pair.serves == {"u0": ["one", "two"]}
    with pytest.raises(ChangeError, match="no unit u1"):
        await pair.changes.drain("u1", said([]))


@pytest.mark.thorough
async def test_a_drain_is_told_to_a_new_scheduler_again(pair: Fleet) -> None:
    linger = pair.tell("linger")
    draining = asyncio.create_task(pair.changes.drain("u1", said([])))
    await pair.until(lambda: "scheduler got DrainReplicas from controller" in pair.journal())
    linger.unlink()
    os.kill(pair.pid(SCHEDULER), signal.SIGKILL)
    await draining
    assert pair.serves == {"u0": ["one", "two"]}


async def test_what_sleeps_is_woken_while_another_is_drained(pair: Fleet) -> None:
    linger = pair.tell("linger")
    draining = asyncio.create_task(pair.changes.drain("u1", said([])))
    await pair.until(lambda: "scheduler got DrainReplicas from controller" in pair.journal())
    pair.tell("orders", "start two 1\nstop two u2\nstart one 1")
    # Not in u1, which is about to end, nor does that count as a replica.
    await pair.until(lambda: pair.serves == {"u0": ["one", "two"], "u1": ["one"], "u3": ["one"]})
    with pytest.raises(ChangeError, match="two is served by u0 alone"):
        await pair.changes.drain("u0", said([]))
    assert not draining.done()
    linger.unlink()
    os.kill(pair.pid(SCHEDULER), signal.SIGKILL)
    await draining
    assert pair.serves == {"u0": ["one", "two"], "u3": ["one"]}


@pytest.mark.thorough
async def test_an_order_does_not_end_what_a_user_is_draining(pair: Fleet) -> None:
    (pair.run_dir.path / "u1" / "busy").write_text("1")
    removing = asyncio.create_task(pair.changes.remove("one", said([])))
    await pair.until(lambda: "one" not in [model.name for model in pair.controller.fleet.models])
    pair.tell("orders", "stop one u1\nstart two 1")
    await pair.until(lambda: "u2" in pair.serves)
    assert pair.serves == {"u0": ["one", "two"], "u1": ["one"], "u2": ["two"]}
    (pair.run_dir.path / "u1" / "busy").unlink()
    await removing
    assert pair.serves == {"u0": ["two"], "u2": ["two"]}


@pytest.mark.thorough
async def test_a_replica_that_is_not_up_does_not_count_when_another_is_drained(pair: Fleet) -> None:
    die = pair.run_dir.path / "u1" / "die-unit"
    die.write_text("")
    os.kill(pair.pid(PartId("unit", unit="u1")), signal.SIGKILL)
    await pair.until(lambda: not pair.controller.units.units["u1"].handle.up("one"))
    await pair.changes.scale("two", 2, said([]))
    with pytest.raises(ChangeError, match="one is up in u0 alone; wait until it is up in u1 again"):
        await pair.changes.drain("u0", said([]))
    assert pair.serves == {"u0": ["one", "two"], "u1": ["one"], "u2": ["two"]}
    die.unlink()
    engines = [part for part in parts("u1", "one") if part.kind == "engine"]
    await pair.until(lambda: pair.controller.units.units["u1"].handle.up("one") and all(map(pair.ups, engines)))
    await pair.changes.drain("u0", said([]))
    assert pair.serves == {"u1": ["one"], "u2": ["two"]}


@pytest.mark.thorough
async def test_the_replica_that_is_not_up_is_the_first_to_go(pair: Fleet) -> None:
    (pair.run_dir.path / "u1" / "busy").write_text("3")
    engine = PartId("engine", "one", "decode", "u1")
    pair.tell("u1/die-one-decode")
    os.kill(pair.pid(engine), signal.SIGKILL)
    await pair.until(lambda: not pair.controller.units.units["u1"].handle.up("one"))
    await pair.changes.scale("one", 1, said([]))
    assert pair.serves == {"u0": ["one", "two"]}


@pytest.mark.thorough
async def test_a_unit_that_does_not_answer_is_not_taken_for_empty(
    single: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_ANSWER_SECONDS", 0.05)
    await single.changes.add(declared("three"), said([]))
    mute = single.tell("u1/mute")
    removing = asyncio.create_task(single.changes.remove("three", said([])))
    # It is asked again and again.
    await single.until(lambda: single.journal().count("u1 does not answer") >= 3)
    assert not removing.done()
    mute.unlink()
    await removing
    assert single.serves == {"u0": ["one", "two"]}


@pytest.mark.parametrize("file", cases(["fail-two-decode", "die-memory", "fail-warm"], ["fail-two-decode"]))
async def test_a_replica_that_cannot_start_changes_nothing(single: Fleet, file: str) -> None:
    before = single.controller.fleet
    pids = single.pids()
    single.tell(file)
    with pytest.raises(ChangeError, match=r"u1: .* cannot start: "):
        await single.changes.scale("two", 2, said([]))
    assert single.controller.fleet == before
    assert single.serves == {"u0": ["one", "two"]}
    assert all(alive(pid) for pid in pids)
    new = {event.part for event in single.events if isinstance(event, Starting)} & set(parts("u1", "two"))
    assert new
    assert not any(alive(single.pid(part)) for part in new if single.ups(part))
    (single.run_dir.path / file).unlink()
    await single.changes.scale("two", 2, said([]))
    assert single.serves == {"u0": ["one", "two"], "u2": ["two"]}


@pytest.mark.thorough
async def test_engines_that_cannot_start_again_change_nothing(pair: Fleet) -> None:
    (pair.run_dir.path / "u1" / "busy").write_text("3")
    await pair.changes.scale("one", 1, said([]))
    pair.tell("fail-one-decode")
    with pytest.raises(ChangeError, match="engine one/decode cannot start: the weights are of cheese"):
        await pair.changes.scale("one", 2, said([]))
    assert pair.serves == {"u0": ["two"], "u1": ["one"]}
    assert not pair.task.done()


@pytest.mark.thorough
async def test_all_replicas_or_none(single: Fleet, planner: FakePlanner) -> None:
    planner.room = 2
    with pytest.raises(ChangeError, match="the machine is full"):
        await single.changes.scale("two", 4, said([]))
    assert single.serves == {"u0": ["one", "two"]}
    assert not any(alive(single.pid(part)) for name in ("u1", "u2") for part in parts(name, "two") if single.ups(part))


async def test_a_model_comes_and_goes(single: Fleet, planner: FakePlanner) -> None:
    await single.changes.add(declared("three"), said([]))
    assert single.serves == {"u0": ["one", "two"], "u1": ["three"]}
    assert [model.name for model in single.controller.fleet.models] == ["one", "two", "three"]
    assert single.controller.fleet.scaling == {"three": ScalingRules(1, 3)}
    await single.until(lambda: "gateway-0 sees one,two,three in u0=one,two u1=three" in single.journal())

    busy = single.run_dir.path / "u1" / "busy"
    busy.write_text("1")
    removing = asyncio.create_task(single.changes.remove("three", said([])))
    await single.until(lambda: "gateway-0 sees one,two in u0=one,two u1=three" in single.journal())
    assert not removing.done()
    # One of that name that comes meanwhile waits until it has gone.
    steps: list[str] = []
    adding = asyncio.create_task(single.changes.add(declared("three"), said(steps)))
    await single.until(lambda: "waiting for the three that is still being removed" in steps)
    assert not removing.done()
    busy.unlink()
    await removing
    await adding
    assert single.serves == {"u0": ["one", "two"], "u2": ["three"]}
    await single.changes.remove("three", said([]))
    assert single.serves == {"u0": ["one", "two"]}
    assert single.controller.fleet.scaling == {}
    assert planner.forgotten == ["three", "three"]
    with pytest.raises(ChangeError, match="no model three"):
        await single.changes.remove("three", said([]))


async def test_a_change_is_complete_when_all_gateways_go_by_it(single: Fleet) -> None:
    """Else who asks for a model that has just been added is told that there is none."""
    deaf = single.tell("deaf-gateway")
    adding = asyncio.create_task(single.changes.add(declared("three"), said([])))
    await single.until(lambda: single.serves == {"u0": ["one", "two"], "u1": ["three"]})
    await asyncio.sleep(0)
    assert not adding.done()
    deaf.unlink()
    await adding
    followed = load_followed(followed_file(single.run_dir.path, 0))
    assert followed is not None
    assert followed.offers.keys() == {"one", "two", "three"}
    # What gateways may still send requests to does not end.
    deaf = single.tell("deaf-gateway")
    removing = asyncio.create_task(single.changes.remove("three", said([])))
    await single.until(lambda: "three" not in [model.name for model in load_fleet(single.controller.fleet.file).models])
    await asyncio.sleep(0)
    assert not removing.done()
    assert single.serves == {"u0": ["one", "two"], "u1": ["three"]}
    deaf.unlink()
    await removing
    assert single.serves == {"u0": ["one", "two"]}


@pytest.mark.thorough
async def test_a_gateway_that_is_not_there_or_hangs_holds_up_no_change(
    single: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = single.tell("die-gateway-0")
    os.kill(single.pid(GATEWAY), signal.SIGKILL)
    await single.down(GATEWAY)
    await single.changes.add(declared("three"), said([]))
    die.unlink()
    await single.until(lambda: single.ups(GATEWAY) == 2)
    monkeypatch.setattr(models, "FOLLOW_SECONDS", 0.05)
    deaf = single.tell("deaf-gateway")
    steps: list[str] = []
    await single.changes.remove("three", said(steps))
    assert "a gateway has not followed within 0.05 s; until it does it serves as before" in steps
    deaf.unlink()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("refuse-three", "three cannot be offered: its tokenizer is of cheese"),
        ("fail-three-prefill", "weights are of cheese"),
    ],
)
async def test_a_model_that_cannot_be_offered_or_started_is_not_added(single: Fleet, file: str, words: str) -> None:
    single.tell(file)
    with pytest.raises(ChangeError, match=words):
        await single.changes.add(declared("three"), said([]))
    assert [model.name for model in single.controller.fleet.models] == ["one", "two"]
    assert single.serves == {"u0": ["one", "two"]}


def of_one(dtype: str) -> Any:
    """A fleet file in which model `one` has weights of that type."""
    return parse_fleet(f"models: [{{name: one, hub: org/one, dtype: {dtype}, replicas: 2}}]", "fleet.yaml", Path("/"))


@pytest.fixture
def replaced(single: Fleet) -> Fleet:
    single.changes._models.follow(of_one("float32"))
    return single


def versions(fleet: Fleet) -> tuple[list[str], dict[str, str], tuple[str, ...]]:
    """The models of the fleet's file, which versions answer, and the candidates."""
    written = load_fleet(fleet.controller.fleet.file)
    return [model.name for model in written.models], written.versions, written.candidates


BEFORE: Any = (["one", "two"], {}, ())


async def test_a_model_gets_another_version_and_the_old_one_ends_with_its_last_request(
    replaced: Fleet, planner: FakePlanner
) -> None:
    fleet, steps = replaced, list[str]()
    in_use = fleet.tell("in-use-one")
    replacing = asyncio.create_task(fleet.changes.replace(of_one("bfloat16"), said(steps)))
    await fleet.until(lambda: "new requests for one go to one@2" in steps)
    assert steps.index("one@2 has answered a request") < steps.index("new requests for one go to one@2")
    assert versions(fleet) == (["one", "one@2", "two"], {"one": "one@2"}, ())
    assert fleet.controller.fleet.is_retired("one")
    assert fleet.serves == {"u0": ["one", "two"], "u1": ["one@2"]}
    assert not replacing.done()
    in_use.unlink()
    os.kill(fleet.pid(GATEWAY), signal.SIGHUP)
    await replacing
    assert versions(fleet) == (["one@2", "two"], {"one": "one@2"}, ())
    assert fleet.serves == {"u0": ["two"], "u1": ["one@2"]}
    assert fleet.changes.declared.model("one").dtype == "bfloat16"
    assert planner.forgotten == ["one"]
    # Commands name the model, whichever version it has.
    await fleet.changes.scale("one", 2, said([]))
    assert fleet.serves == {"u0": ["two"], "u1": ["one@2"], "u2": ["one@2"]}
    # Each replica of the old version has one of the new.
    await fleet.changes.replace(of_one("float32"), said([]))
    assert fleet.serves == {"u0": ["two"], "u3": ["one@3"], "u4": ["one@3"]}
    await fleet.changes.remove("one", said([]))
    assert versions(fleet) == (["two"], {}, ())
    assert fleet.changes.declared.models == []


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("refuse-one@2", "one@2 does not answer: its tokenizer is of cheese"),
        ("fail-one@2-prefill", "weights are of cheese"),
    ],
)
async def test_a_version_that_does_not_serve_changes_nothing(replaced: Fleet, file: str, words: str) -> None:
    replaced.tell(file)
    with pytest.raises(ChangeError, match=words):
        await replaced.changes.replace(of_one("bfloat16"), said([]))
    assert versions(replaced) == BEFORE
    assert replaced.serves == {"u0": ["one", "two"]}
    assert replaced.changes.declared.model("one").dtype == "float32"


async def test_without_room_for_both_versions_the_old_one_ends_first_where_that_is_asked_for(
    replaced: Fleet, planner: FakePlanner
) -> None:
    fleet, room, steps = replaced, planner.room, list[str]()
    planner.room, planner.full = 0, NoRoomError("the machine is full")
    for in_place in (False, True):
        with pytest.raises(NoRoomError, match="u0 has no room; the machine is full"):
            await fleet.changes.room_for(of_one("bfloat16"), said([]), in_place)
    with pytest.raises(NoRoomError, match="the machine is full"):
        await fleet.changes.replace(of_one("bfloat16"), said([]))
    assert versions(fleet) == BEFORE
    planner.room = room
    in_use = fleet.tell("in-use-one")
    replacing = asyncio.create_task(fleet.changes.replace(of_one("bfloat16"), said(steps), in_place=True))
    held = "requests for one are answered with 503 until its next version serves"
    await fleet.until(lambda: held in steps)
    # Gateways know its names all the time, and what it has is finished.
    assert versions(fleet) == (["one", "two"], {"one": ""}, ())
    assert fleet.serves == {"u0": ["one", "two"]}
    in_use.unlink()
    os.kill(fleet.pid(GATEWAY), signal.SIGHUP)
    await replacing
    assert versions(fleet) == (["one@2", "two"], {"one": "one@2"}, ())
    (new,) = fleet.serves.keys() - {"u0"}
    assert fleet.serves == {"u0": ["two"], new: ["one@2"]}
    assert steps.index("one is not served by u0 any more") < steps.index(f"starting {new} with one@2")


@pytest.mark.parametrize("again", [True, False])
async def test_a_version_that_fails_in_place_gives_its_place_back(replaced: Fleet, again: bool) -> None:
    fleet, steps = replaced, list[str]()
    fleet.tell("refuse-one@2")
    if not again:
        fleet.tell("refuse-one@3")
    with pytest.raises(ChangeError, match="one@2 does not answer"):
        await fleet.changes.replace(of_one("bfloat16"), said(steps), in_place=True)
    assert "one is started as it was before" in steps
    if again:
        assert versions(fleet) == (["one@3", "two"], {"one": "one@3"}, ())
        assert fleet.changes.declared.model("one").dtype == "float32"
    else:
        assert "one is served no longer: one@3 does not answer: its tokenizer is of cheese" in steps
        assert versions(fleet) == (["two"], {}, ())
        assert fleet.changes.declared.models == []


@pytest.mark.parametrize("again", [True, False])
async def test_whatever_goes_wrong_in_place_the_old_version_is_started_again(
    replaced: Fleet, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    fleet, steps, replacing = replaced, list[str](), replaced.changes._replacing
    plan, failures = replacing._plan_version, [OSError("the checkpoint cannot be read")] * (1 if again else 2)

    async def fails(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await plan(*args)

    monkeypatch.setattr(replacing, "_plan_version", fails)
    with pytest.raises(OSError, match="the checkpoint cannot be read"):
        await replacing.replace(of_one("bfloat16"), said(steps), in_place=True)
    # Nobody is told for ever to come back soon.
    assert "" not in fleet.controller.fleet.versions.values()
    if again:
        assert versions(fleet) == (["one@2", "two"], {"one": "one@2"}, ())
    else:
        assert "one is served no longer: the checkpoint cannot be read" in steps
        assert versions(fleet) == (["two"], {}, ())


async def test_the_global_scheduler_starts_and_stops_replicas(pair: Fleet) -> None:
    pair.tell("orders", "start two 1")
    await pair.until(lambda: pair.serves.get("u2") == ["two"])
    pair.tell("orders", "stop one u1")
    await pair.until(lambda: "u1" not in pair.serves)
    assert pair.serves == {"u0": ["one", "two"], "u2": ["two"]}


@pytest.fixture
async def resident(run_dir: RunDir, planner: FakePlanner) -> AsyncIterator[Fleet]:
    """Memory decides which of the models of the only unit are awake."""
    models = {name: WakeCosts(1 << 20) for name in ("one", "two")}
    residency = {"u0": ResidencySpec(ResidencyRules(1 << 40), models)}
    scaling = {name: ScalingRules(0, 1) for name in models}
    units = [fake_unit_spec(run_dir.path)]
    async for each in serving(Fleet(run_dir, units, planner, residency=residency, scaling=scaling)):
        yield each


async def test_a_model_is_woken_in_its_unit_alone_which_is_waited_for(
    resident: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit more, for a model whose unit is being started again, would take memory that nobody has set aside."""
    resident.tell("orders", "stop two u0")
    await resident.until(lambda: resident.serves == {"u0": ["one"]})
    ready = resident.controller.units.units["u0"].handle.ready
    ready.clear()
    resident.tell("orders", "start two 1")
    await resident.until(lambda: resident.changes.starting == ["two"])
    ready.set()
    await resident.until(lambda: resident.serves == {"u0": ["one", "two"]})
    # For so long only: the global scheduler hears of it, and tries again.
    resident.tell("orders", "stop two u0")
    await resident.until(lambda: resident.serves == {"u0": ["one"]})
    ready.clear()
    monkeypatch.setattr(steps, "_READY_SECONDS", 0.05)
    resident.tell("orders", "start two 1")
    await resident.until(lambda: "start of two failed: the unit of two is not up at present" in resident.journal())
    assert resident.serves == {"u0": ["one"]}
    ready.set()


async def test_a_wake_ends_when_its_unit_is_started_again(resident: Fleet) -> None:
    """Nobody else would end it, and no order for that model would be carried out any more."""
    resident.tell("orders", "stop two u0")
    await resident.until(lambda: resident.serves == {"u0": ["one"]})
    unit = resident.controller.units.units["u0"]
    first: Any = unit.handle
    broken = resident.tell("fail-warm")
    os.kill(resident.pid(PartId("warm_parent")), signal.SIGKILL)
    resident.tell("orders", "start two 1")
    engine = PartId("engine", "two", "prefill")
    await resident.until(lambda: engine in first.parts)
    first._failed.set_exception(GaveUp(PartId("memory"), "it was killed again and again"))
    await resident.until(lambda: any("its unit has been stopped" in line for line in resident.journal()))
    assert resident.changes.starting == []
    broken.unlink()
    await resident.until(lambda: unit.handle is not first and unit.handle.ready.is_set())
    with pytest.raises(GaveUp, match="its unit has been stopped"):
        await first.start_model("two")
    resident.tell("orders", "start two 1")
    await resident.until(lambda: resident.serves == {"u0": ["one", "two"]})


@pytest.mark.thorough
@pytest.mark.parametrize("error", [ChangeError("no place"), OSError("no disk"), RuntimeError("no place, nobody knows")])
async def test_the_global_scheduler_hears_of_a_start_that_fails(
    pair: Fleet, planner: FakePlanner, error: Exception
) -> None:
    planner.room, planner.full = 0, error
    pair.tell("orders", "start two 1")
    await pair.until(lambda: f"start of two failed: {error}" in pair.journal())
    assert not pair.task.done()


async def test_stopped_in_the_middle_of_a_change(single: Fleet) -> None:
    change = asyncio.create_task(single.changes.scale("two", 2, said([])))
    await single.until(lambda: any(isinstance(e, Starting) and e.part.unit == "u1" for e in single.events))
    await single.stops()
    change.cancel()
    await asyncio.gather(change, return_exceptions=True)
