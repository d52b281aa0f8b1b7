"""Fleets, and a core with its peers played by the test on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from muxserve.global_scheduler.core import SchedulerCore
from muxserve.global_scheduler.outbox import Destination, ToClient, ToUnit
from muxserve.replicas.priorities import ServiceClass
from muxserve.replicas.views import InstanceLoad
from muxserve.spec import (
    FleetSpec,
    GatewaySpec,
    Keys,
    Listen,
    PoolSpec,
    UnitEntry,
)
from muxserve.wire import ControllerHello, Loads, Message, Place, Placed, decode, encode
from tests.support.requests import without
from tests.support.unit_specs import unit_spec_of
from tests.unit.support import model

M = TypeVar("M", bound=Message)

CAPACITY = 10_000
G0, G1, CONTROLLER = ToClient(b"gateway/g0"), ToClient(b"gateway/g1"), ToClient(b"controller")


def entry(name: str, serves: Iterable[str], run_dir: str = "/nowhere", host: str = "") -> UnitEntry:
    """A unit; with `host` one of another machine."""
    models, listen = [model(each) for each in serves], Listen(host, 7001, 7002) if host else None
    unit_spec = unit_spec_of(f"{run_dir}/{name}", models, PoolSpec("main", 32768, 1001), unit=name, listen=listen)
    unit, migrator = unit_spec.unit_address, unit_spec.migrator_address
    if host:
        unit, migrator = f"tcp://{host}:7001", f"tcp://{host}:7002"
    return UnitEntry(unit_spec, unit, migrator, list(serves), remote=bool(host))


def fleet(
    units: Mapping[str, Iterable[str]],
    run_dir: str = "/nowhere",
    hosts: Mapping[str, str] | None = None,
    keys: Keys | None = None,
    **changes: Any,
) -> FleetSpec:
    """Units with the models that they serve."""
    entries = [entry(name, serves, run_dir, (hosts or {}).get(name, "")) for name, serves in units.items()]
    models = sorted({each for unit in entries for each in unit.serves} | set(changes.pop("models", ())))
    return FleetSpec(
        run_dir=run_dir,
        gateway=GatewaySpec("127.0.0.1", 0),
        models=[model(each) for each in models],
        units=entries,
        keys=keys,
        **changes,
    )


def load(name: str = "m", used: int = 0, running: int = 0, **more: Any) -> InstanceLoad:
    return InstanceLoad("", more.pop("capacity", CAPACITY), name, used=used, running=running, **more)


def place(request_id: str, name: str = "m", demand: int = 100, arrival: float = 0.0, **more: Any) -> Place:
    service = ServiceClass(**without(more, "scheduling", "execution"))
    return Place(request_id, name, demand, arrival, service, **{"max_tokens": 16, **more})


class World:
    """A core, the time, and what it has sent."""

    def __init__(self, deployed: FleetSpec, now: float = 100.0) -> None:
        self.now = now
        self.core = SchedulerCore(deployed, "s1", now)
        self.sent: list[tuple[Destination, Message]] = []
        self.turn()

    def turn(self) -> None:
        # Everything goes over the wire.
        self.sent += [(peer, decode(encode(message))) for peer, message in self.core.tick(self.now)]

    def say(self, peer: Destination, message: Message) -> None:
        self.core.handle(peer, decode(encode(message)), self.now)
        self.turn()

    def report(self, unit: str, *loads: InstanceLoad, epoch: str = "e1", came: Iterable[str] = ()) -> None:
        self.say(ToUnit(unit), Loads(unit, epoch, list(loads), list(came)))

    def controller(self) -> None:
        self.say(CONTROLLER, ControllerHello())

    def change(self, deployed: FleetSpec) -> None:
        self.core.change(msgspec.json.decode(msgspec.json.encode(deployed), type=FleetSpec), self.now)
        self.turn()

    def wait(self, seconds: float) -> None:
        """Let time pass, with every turn that is due."""
        end = self.now + seconds
        while (due := self.core.wakeup()) <= end:
            self.now = max(self.now, due)
            self.turn()
        self.now = end

    def heard(self, kind: type[M], peer: Destination | None = None) -> list[M]:
        """Messages of that kind since the last call, and forget all that was sent."""
        found = [m for p, m in self.sent if isinstance(m, kind) and (peer is None or p == peer)]
        self.sent = []
        return found

    def placed(self, request_id: str, name: str = "m", **more: Any) -> str | None:
        """Where a request goes that has just come; None: it waits, or is refused."""
        self.sent = []
        self.say(G0, place(request_id, name, **more))
        units = [placed.unit for placed in self.heard(Placed) if placed.request_id == request_id]
        return units[0] if units else None

    def state(self) -> dict[str, Any]:
        return self.core.state(self.now)
