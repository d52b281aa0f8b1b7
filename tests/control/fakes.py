"""A fleet that can be changed, without a process behind it, and its controller's end of the socket in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from muxserve.config import Fleet, parse_fleet
from muxserve.control.apply import followed, with_declared_adapter
from muxserve.control.changes import ChangeError, Tell
from muxserve.control.server import ControlServer
from muxserve.replicas.scaling import ScalingRules
from muxserve.spec import FleetSpec, GatewaySpec, ModelSpec, OtherFleet, UnitEntry, save_fleet
from muxserve.spec.run_dir import RunDir
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.unit_specs import model_spec, unit_spec_of


def model(name: str) -> ModelSpec:
    return model_spec(
        name,
        path=f"/models/{name}",
        pool="pool0",
        block_tokens=32,
        num_blocks=100,
        quota_pages=100,
        floor_pages=10,
        max_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_concurrency=8,
        max_queue=8,
    )


def fleet_of(
    run_dir: str, units: dict[str, list[str]], scaling: dict[str, ScalingRules] | None = None, port: int = 0
) -> FleetSpec:
    gateway = GatewaySpec("127.0.0.1", port)
    names = list(dict.fromkeys(name for served in units.values() for name in served))
    entries = []
    for unit, served in units.items():
        unit_spec = unit_spec_of(f"{run_dir}/{unit}", [model(name) for name in served], unit=unit)
        entries.append(UnitEntry(unit_spec, unit_spec.unit_address, unit_spec.migrator_address, list(served)))
    return FleetSpec(run_dir, gateway, [model(name) for name in names], entries, scaling or {})


def declared_of(fleet: FleetSpec) -> Fleet:
    """What a fleet file may have said of it, whose checkpoints need not be there."""
    replicas = {model.name: max(1, len(fleet.replicas(model.name))) for model in fleet.models}
    text = "models:\n" + "".join(
        f"- {{name: {name}, hub: org/{name}, replicas: {n}}}\n" for name, n in replicas.items()
    )
    return parse_fleet(text, "fleet.yaml", Path("/"))


class FakeControl:
    """Does what it is told to a `FleetSpec`, and writes down what it was told."""

    def __init__(self, fleet: FleetSpec, declared: Fleet) -> None:
        self.fleet = fleet
        self.calls: list[tuple[object, ...]] = []
        # What goes wrong, by call.
        self.fails: dict[tuple[object, ...], Exception] = {}
        # Why there is no room for another version of a model, by its name and whether the old one is to end first.
        self.full: dict[tuple[str, bool], Exception] = {}
        self.hold: threading.Event | None = None
        self.declared = declared
        self.adopted: list[Fleet] = []
        self.began = threading.Event()

    async def _called(self, *call: object) -> None:
        self.calls.append(call)
        self.began.set()
        if self.hold is not None:
            await asyncio.to_thread(self.hold.wait, 20)
        if call in self.fails:
            raise self.fails[call]

    def _serve(self, unit: str, models: list[str]) -> None:
        units = [msgspec.structs.replace(u, serves=models) if u.name == unit else u for u in self.fleet.units]
        self.fleet = msgspec.structs.replace(self.fleet, units=units)

    async def adopt(self, wanted: Fleet, tell: Tell) -> None:
        await self._called("adopt")
        self.adopted.append(wanted)
        self.declared = followed(self.declared, wanted)

    def unfollowed(self, words: str) -> None:
        self.fleet = msgspec.structs.replace(self.fleet, unfollowed=words)

    async def scale(self, model: str, replicas: int, tell: Tell) -> None:
        tell(f"{model}: to {replicas}")
        await self._called("scale", model, replicas)
        for unit in self.fleet.units:
            have = len(self.fleet.replicas(model))
            if have < replicas and model not in unit.serves:
                self._serve(unit.name, [*unit.serves, model])
            elif have > replicas and model in unit.serves:
                self._serve(unit.name, [each for each in unit.serves if each != model])

    async def drain(self, unit: str, tell: Tell) -> None:
        tell(f"draining {unit}")
        await self._called("drain", unit)
        units = [each for each in self.fleet.units if each.name != unit]
        self.fleet = msgspec.structs.replace(self.fleet, units=units)

    async def add(self, declared: Fleet, tell: Tell, to: str = "") -> None:
        name = declared.models[0].name
        await asyncio.to_thread(tell, "loading weights")
        await self._called("add", name, declared.models[0].path or declared.models[0].hub, *([to] if to else []))
        self.fleet = msgspec.structs.replace(self.fleet, models=[*self.fleet.models, model(name)])
        self._serve("u0", [*self.fleet.units[0].serves, name])

    async def set_adapter(self, model: str, name: str, path: str) -> None:
        await self._called("set_adapter", model, name, path)
        self.declared = with_declared_adapter(self.declared, model, name, path)

    async def hand_over(self, tell: Tell) -> None:
        await self._called("hand_over")

    async def lend(self, models: Sequence[str], sockets: Sequence[str], tell: Tell) -> None:
        self.fleet = msgspec.structs.replace(self.fleet, other_fleet=OtherFleet(tuple(sockets)))
        await self._called("lend", *models)

    async def take_back(self, tell: Tell) -> None:
        tell("loading weights")
        await self._called("take_back")
        self.fleet = msgspec.structs.replace(self.fleet, other_fleet=None)

    async def room_for(self, declared: Fleet, tell: Tell, in_place: bool = False) -> None:
        reason = self.full.get((declared.models[0].name, in_place))
        if reason is not None:
            raise reason

    async def replace(self, declared: Fleet, tell: Tell, in_place: bool = False) -> None:
        (model,) = declared.models
        await self._called("replace", model.name, in_place)
        others = [model if each.name == model.name else each for each in self.declared.models]
        self.declared = self.declared.with_models(others)

    async def remove(self, model: str, tell: Tell) -> None:
        await self._called("remove", model)
        models = [each for each in self.fleet.models if each.name != model]
        self.fleet = msgspec.structs.replace(self.fleet, models=models)


class Controller:
    """A server with a fake fleet, in a thread with a loop of its own. The fleet's endpoint, where nobody listens, is at
    `port`: a free one, unless it is given."""

    def __init__(
        self, base: Path, units: dict[str, list[str]], scaling: dict[str, ScalingRules] | None = None, port: int = 0
    ) -> None:
        self.run_dir = RunDir(base)
        self.port = port or free_port()
        fleet = fleet_of(str(self.run_dir.path), units, scaling, self.port)
        self.control = FakeControl(fleet, declared_of(fleet))
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    async def _serve(self) -> None:
        self.server = ControlServer(self.control, lambda: self.url)
        save_fleet(self.control.fleet)
        self.server.start()
        self._up.set()
        await self._end.wait()
        await self.server.close()

    @property
    def name(self) -> str:
        return self.run_dir.path.name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(PATIENCE)

    def stop(self) -> None:
        if self._thread.is_alive():
            if self.control.hold is not None:
                self.control.hold.set()
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(PATIENCE)
            self._loop.close()
            self.run_dir.remove()


@contextlib.contextmanager
def running(
    base: Path, units: dict[str, list[str]], scaling: dict[str, ScalingRules] | None = None, port: int = 0
) -> Iterator[Controller]:
    controller = Controller(base, units, scaling, port)
    controller.start()
    try:
        yield controller
    finally:
        controller.stop()


def broken(text: str) -> ChangeError:
    return ChangeError(text)
