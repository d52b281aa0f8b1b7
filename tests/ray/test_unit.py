"""A unit's handle on its own: an actor that is played, without Ray."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from muxserve.cluster.events import Event, PartId, Ready, Up, to_line
from muxserve.cluster.ray import unit
from muxserve.cluster.ray.calls import ActorQuestions
from muxserve.cluster.ray.unit import RayUnit, with_joined
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.units import PlannedUnit
from muxserve.gpu.budget import Needs
from muxserve.spec import GpuSpec, Listen, UnitSpec
from tests.global_scheduler.support import entry
from tests.support.patience import PATIENCE

DEPLOYMENT = msgspec.structs.replace(
    entry("u0", ["m", "n"], run_dir="/nowhere/0123456789").unit_spec, listen=Listen("127.0.0.1", 1, 2)
)


class RayError(Exception):
    """What Ray raises when an actor is away."""


RAY: Any = SimpleNamespace(exceptions=SimpleNamespace(RayError=RayError, ActorDiedError=type("Died", (RayError,), {})))


class Actor:
    """Says what it is given to say, and notes what it is told. Commands are answered unless there is another answer."""

    def __init__(self) -> None:
        self.life = 0
        self.told: list[str] = []
        self.joins: list[dict[str, Any]] = []
        self.answers: dict[str, dict[str, Any] | None] = {}
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self.hear, self.say, self.place = (
            SimpleNamespace(remote=call) for call in (self._hear, self._say, self._place)
        )

    def line(self, event: Event) -> None:
        self._lines.put_nowait(to_line(event))

    def up(self, model: str, phases: tuple[str, ...]) -> None:
        for part in (PartId("unit"), *(PartId("engine", model, phase) for phase in phases)):
            self.line(Up(part, 1, 0.1))

    def restart(self) -> None:
        self.life += 1
        self._lines.put_nowait("")

    def sized(self, unit_spec: UnitSpec = DEPLOYMENT) -> None:
        said = {"event": "Sized", "unit_spec": msgspec.to_builtins(unit_spec)}
        self._lines.put_nowait(json.dumps(said))

    async def _place(self) -> dict[str, Any]:
        return {
            "life": str(self.life),
            "node": "here",
            "host": "127.0.0.1",
            "unit_spec": msgspec.json.encode(DEPLOYMENT).decode(),
            "problem": "",
            "note": "",
        }

    async def _hear(self, said: int, seconds: float) -> dict[str, Any]:
        line = await self._lines.get()
        lines = [line] if line else []
        return {"life": str(self.life), "lines": lines, "said": said + len(lines), "ended": None}

    async def _say(self, line: str) -> None:
        command = json.loads(line)
        if command["do"] == "join":
            self.joins.append(command)
        self.told.append(" ".join([command["do"], *([command["model"]] if "model" in command else [])]))
        answer = self.answers.get(command["do"], {})
        if answer is not None:
            self._lines.put_nowait(json.dumps({"reply": command["id"], **answer}))


class Played:
    """A handle and its actor."""

    def __init__(self, serves: tuple[str, ...]) -> None:
        self.actor, self.events = Actor(), list[Event]()
        place = {
            "life": "0",
            "node": "here",
            "host": "127.0.0.1",
            "unit_spec": msgspec.json.encode(DEPLOYMENT).decode(),
        }
        unit = PlannedUnit(DEPLOYMENT, serves)
        self.unit = RayUnit(
            RAY,
            unit=unit,
            migrates=False,
            actor=self.actor,
            group=None,
            place=place,
            emit=self.events.append,
            patience=60.0,
        )

    async def until(self, wanted: Any) -> None:
        async with asyncio.timeout(PATIENCE):
            while not wanted():
                await asyncio.sleep(0)

    def end(self) -> None:
        self.unit._follower.cancel()


async def test_a_model_is_up_when_its_scheduler_and_engines_are() -> None:
    played = Played(("m",))
    assert not played.unit.up("m")
    played.actor.up("m", ("prefill",))
    await played.until(lambda: len(played.events) == 2)
    assert not played.unit.up("m")
    played.actor.up("m", ("decode",))
    await played.until(lambda: played.unit.up("m"))
    assert not played.unit.up("n")
    played.end()


async def test_a_model_is_read_ahead_where_the_unit_is() -> None:
    played = Played(("m",))
    await played.unit.prefetch("n")
    assert played.actor.told == ["prefetch n"]
    played.end()


async def test_an_end_that_failed_is_told() -> None:
    played = Played(("m", "n"))
    played.actor.answers["stop_model"] = {"error": "RuntimeError: no", "part": None}
    with pytest.raises(GaveUp, match="RuntimeError: no"):
        await played.unit.stop_model("n")
    assert played.unit.entry.serves == ["m"]
    played.end()


async def test_a_host_that_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActorQuestions.ask, "__defaults__", (0.01,))
    monkeypatch.setattr(unit, "_START_SECONDS", 0.02)
    played = Played(("m",))
    played.actor.answers = {"start_model": None, "stop_model": None}
    with pytest.raises(GaveUp, match=r"its host has not answered within 0.02 s"):
        await played.unit.start_model("n")
    with pytest.raises(GaveUp, match=r"its host has not answered within 0.01 s"):
        await played.unit.stop_model("n")
    assert played.unit._questions._asked == {}
    played.end()


async def test_a_unit_that_was_started_again_serves_what_it_served_last() -> None:
    played = Played(("m",))
    await played.unit.start_model("n")
    await played.unit.stop_model("m")
    played.unit.start_migrator()
    await played.until(lambda: len(played.actor.told) == 3)
    played.actor.restart()
    played.actor.sized()
    await played.until(lambda: Up(PartId("host"), 0, 0.0) in played.events)
    assert len(played.actor.told) == 3, "it is still being started"
    played.actor.line(Ready(0.1))
    await played.until(lambda: len(played.actor.told) == 6)
    assert played.actor.told[3:] == ["start_migrator", "stop_model m", "start_model n"]
    assert played.unit.entry.serves == ["n"]
    played.end()


async def test_a_unit_on_gpus_is_where_it_was_until_its_next_life_has_gpus_and_pools() -> None:
    played = Played(("m",))
    assert not played.unit.sized.is_set()
    pools = [msgspec.structs.replace(pool, num_pages=7) for pool in DEPLOYMENT.pools]
    first = msgspec.structs.replace(DEPLOYMENT, gpu=GpuSpec(["GPU-a"]), pools=pools)
    played.actor.sized(first)
    await played.until(played.unit.sized.is_set)
    assert played.unit.entry.unit_spec == first
    assert {str(part) for part in played.unit.parts} >= {"MPS server", "weights of m"}
    played.actor.restart()
    await played.until(lambda: played.unit._life == "1")
    assert played.unit.entry.unit_spec == first
    assert Up(PartId("host"), 0, 0.0) not in played.events
    then = msgspec.structs.replace(first, gpu=GpuSpec(["GPU-b"], "off"), listen=Listen("127.0.0.9", 1, 2))
    played.actor.sized(then)
    await played.until(lambda: Up(PartId("host"), 0, 0.0) in played.events)
    assert played.unit.entry.unit_spec == then
    assert PartId("mps") not in played.unit.parts
    played.end()


async def test_a_first_life_that_ends_before_its_pools_are_known_is_told_when_the_next_has_them() -> None:
    played = Played(("m",))
    played.actor.restart()
    await played.until(lambda: played.unit._life == "1")
    played.actor.sized()
    await played.until(lambda: Up(PartId("host"), 0, 0.0) in played.events)
    played.end()


async def test_a_life_that_cannot_hold_what_was_offered_is_none() -> None:
    played = Played(("m",))
    played.actor.sized()
    await played.until(played.unit.sized.is_set)
    played.actor.restart()
    longest = DEPLOYMENT.models[0].max_len
    models = [msgspec.structs.replace(model, max_len=longest - 1) for model in DEPLOYMENT.models]
    played.actor.sized(msgspec.structs.replace(DEPLOYMENT, models=models))
    with pytest.raises(GaveUp, match=rf"on 127.0.0.1 hold {longest - 1} tokens of m, which was offered with {longest}"):
        await asyncio.wait_for(played.unit.wait(), 10)
    assert played.unit.entry.unit_spec == DEPLOYMENT


def with_a_third(unit_spec: UnitSpec) -> UnitSpec:
    third = msgspec.structs.replace(unit_spec.models[0], name="third", quota_pages=10)
    return msgspec.structs.replace(unit_spec, models=[*unit_spec.models, third])


async def test_a_model_joins_and_joins_again_when_the_unit_has_been_started_again() -> None:
    played = Played(("m",))
    needs = [Needs("third", 0, 3, 2, 1, 1)]
    await played.unit.join(with_a_third(DEPLOYMENT), "third", needs)
    await played.unit.start_model("third")
    assert played.unit.entry.unit_spec == with_a_third(DEPLOYMENT)
    assert played.unit.entry.serves == ["m", "third"]
    played.actor.restart()
    played.actor.sized()
    await played.until(lambda: Up(PartId("host"), 0, 0.0) in played.events)
    assert played.unit.entry.unit_spec == with_a_third(DEPLOYMENT)
    played.actor.line(Ready(0.1))
    await played.until(lambda: len(played.actor.told) == 4)
    assert played.actor.told == ["join third", "start_model third"] * 2
    assert [each["needs"] for each in played.actor.joins] == [[msgspec.to_builtins(each) for each in needs]] * 2
    assert msgspec.convert(played.actor.joins[1]["unit_spec"], UnitSpec) == with_a_third(DEPLOYMENT)
    played.end()


async def test_a_model_that_the_host_does_not_take_has_not_joined() -> None:
    played = Played(("m",))
    part = msgspec.to_builtins(PartId("weights", "third"))
    played.actor.answers["join"] = {"error": "GPU 0 has 1 GiB left", "part": part}
    with pytest.raises(GaveUp, match="GPU 0 has 1 GiB left") as caught:
        await played.unit.join(with_a_third(DEPLOYMENT), "third")
    assert caught.value.part == PartId("weights", "third")
    assert played.unit.entry.unit_spec == DEPLOYMENT
    played.end()


def test_pools_of_another_size_are_divided_in_the_same_way() -> None:
    before = with_a_third(DEPLOYMENT)
    pools = [msgspec.structs.replace(pool, num_pages=pool.num_pages // 2) for pool in DEPLOYMENT.pools]
    begun = msgspec.structs.replace(DEPLOYMENT, pools=pools, gpu=GpuSpec(["GPU-b"]))
    now = with_joined(begun, before, {"third": ()})
    assert (now.pools, now.gpu) == (begun.pools, begun.gpu)
    part = pools[0].num_pages / before.pools[0].num_pages
    assert [model.name for model in now.models] == [model.name for model in before.models]
    assert [each.quota_pages for each in now.models] == [int(each.quota_pages * part) for each in before.models]
    assert with_joined(begun, before, {}) is begun
