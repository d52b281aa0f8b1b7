"""Models that are withdrawn, or get another version, while requests are in service."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from muxserve.gateway.front_end import seam, served_models
from muxserve.gateway.front_end.served_models import OfferedModels
from muxserve.gateway.http.served_app import ServedApp
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.status.measure import Measures
from muxserve.spec import FleetSpec, GatewaySpec, ModelSpec
from tests.gateway.unit_specs import model

NOTHING: Any = None


class Broker:
    def detach(self, name: str) -> None: ...


class World:
    """The front ends of a gateway, which vLLM does not build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *models: ModelSpec) -> None:
        self.fleet = FleetSpec("", GatewaySpec("127.0.0.1", 0), list(models), [])
        self.limiter = ConcurrencyLimiter(models, 0, 1, Measures([], CollectorRegistry()))
        self.checked: list[str] = []
        self.left: list[bool] = []
        self.ending = asyncio.Event()
        for name in ("end", "forget_models"):
            monkeypatch.setattr(seam, name, self._end)
        for name in ("register_architectures", "go_on"):
            monkeypatch.setattr(seam, name, lambda *_: None)
        monkeypatch.setattr(served_models, "UnitEngineClient", lambda *_: None)
        monkeypatch.setattr(seam, "make_llm", lambda spec, *_: SimpleNamespace(model=spec, names=()))
        monkeypatch.setattr(seam, "serve", self._serve)
        monkeypatch.setattr(seam, "with_names", self._serve)
        monkeypatch.setattr(seam, "check", self._check)
        broker: Any = Broker()
        self.offered = OfferedModels(
            self.fleet, broker, self.limiter, NOTHING, NOTHING, lambda: self.left.append(True), 0, None
        )

    async def _end(self, *_: Any) -> None:
        self.left.append("m" in self.limiter.gates)

    async def _serve(self, front_end: Any, *_: Any) -> ServedApp:
        return ServedApp(NOTHING, {name: {} for name in front_end.names}, model=front_end.model.name)

    async def _check(self, front_end: Any) -> None:
        self.checked.append(front_end.model.name)
        if front_end.model.dtype == "broken":
            raise ValueError("it says nothing")

    async def become(self, **changes: Any) -> None:
        self.fleet = msgspec.structs.replace(self.fleet, **changes)
        self.offered.learn(self.fleet)
        await self.offered.follow_names()
        for spec in self.fleet.models:
            self.limiter.add(spec)
        for spec in self.offered.unbuilt():
            await self.offered.build(spec)

    @property
    def served(self) -> dict[str, str]:
        return {name: each.model for name, each in self.offered.models.items()}


async def test_a_model_that_leaves_has_a_gate_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in the fleet still, as something else; `/health` and `/fleet` tell of its queue all the time."""
    world = World(monkeypatch, model("m"))
    await world.become()
    world.offered.learn(msgspec.structs.replace(world.fleet, models=[]))
    assert world.served == {}
    await world.offered._leaving["m"]
    assert world.left == [True, True, True]
    assert world.limiter.gates == {}


async def test_clients_reach_one_version_of_a_model_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = model("m"), model("m@2"), model("other")
    world = World(monkeypatch, first, other)
    await world.become()
    candidate: dict[str, Any] = {"models": [first, second, other], "candidates": ("m@2",)}
    await world.become(**candidate)
    assert world.checked == ["m@2"]
    assert world.served == {"m": "m", "other": "other"}
    assert world.offered.adapters().keys() == {"m", "m@2", "other"}
    # A request of the old version is in service.
    world.limiter.gates["m"].arrive(object())
    world.fleet = msgspec.structs.replace(world.fleet, versions={"m": "m@2"}, candidates=())
    world.offered.learn(world.fleet)
    assert world.served == {"m": "m@2", "other": "other"}
    assert list(world.offered.models) == ["m", "other"]
    assert world.offered.leaving == ("m",)
    assert world.offered.adapters().keys() == {"m@2", "other"}
    assert world.offered.unbuilt() == []
    await asyncio.sleep(0)
    world.limiter._leave(world.limiter.gates["m"], 1.0, 1, "")
    await world.offered._leaving["m"]
    assert world.offered.leaving == ()
    assert world.offered.unbuilt() == []


async def test_a_candidate_that_does_not_answer_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, model("m"))
    await world.become()
    with pytest.raises(ValueError, match="it says nothing"):
        await world.become(models=[model("m"), model("m@2", dtype="broken")], candidates=("m@2",))
    assert world.served == {"m": "m"}
    assert world.offered.adapters().keys() == {"m"}


async def test_names_come_and_go_with_the_front_end_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = model("one", aliases=("first",)), model("two")
    world = World(monkeypatch, one, two)
    await world.become(aliases={"chat": {"one": 90, "two": 10}})
    front_ends = dict(world.offered._front_ends)
    assert {name: [*each.cards] for name, each in world.offered.models.items()} == {
        "one": ["one", "first", "chat"],
        "two": ["two", "chat"],
    }
    await world.become(aliases={"chat": {"two": 1}}, models=[model("one", aliases=("1st",)), two])
    assert {name: [*each.cards] for name, each in world.offered.models.items()} == {
        "one": ["one", "1st"],
        "two": ["two", "chat"],
    }
    assert world.offered._front_ends == front_ends
