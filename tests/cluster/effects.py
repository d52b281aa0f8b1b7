"""A fleet and a unit that keep what their parts ask of them, and do nothing."""

from __future__ import annotations

from collections.abc import Callable

from muxserve import wire
from muxserve.cluster.effects import FleetEffects, UnitEffects
from muxserve.cluster.events import Event
from muxserve.cluster.processes import Process
from muxserve.cluster.supervision import Part, PartEffects
from muxserve.cluster.warm_link import WarmLink
from muxserve.spec import FleetSpec, FollowedFleet


class FakeEffects(PartEffects):
    """Nothing has served, no death is excused, and nothing is spared."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def exit_status(self, pid: int) -> int | None:
        return None

    def serving(self, part: Part) -> bool:
        return False

    def hopeless(self, part: Part) -> bool:
        return False

    def spared(self, part: Part) -> bool:
        return False

    async def on_down(self, part: Part, reason: str) -> str:
        return ""

    async def explain(self, part: Part, reason: str) -> str:
        return ""


class FakeFleetEffects(FakeEffects, FleetEffects):
    """A fleet that stays as it is."""

    def __init__(self, fleet: FleetSpec) -> None:
        super().__init__()
        self._fleet = fleet
        self.changes = 0
        self.failures: list[BaseException] = []
        self.to_scheduler: list[wire.Message] = []

    @property
    def fleet(self) -> FleetSpec:
        return self._fleet

    def fleet_changed(self) -> None:
        self.changes += 1

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)

    def stop(self, cause: str = "") -> None:
        pass

    def tell_scheduler(self, message: wire.Message) -> None:
        self.to_scheduler.append(message)

    def warm_links(self) -> list[WarmLink]:
        return []

    async def until_sized(self) -> None:
        pass

    async def until_followed(self, enough: Callable[[FollowedFleet], bool]) -> list[FollowedFleet]:
        return []


class FakeUnitEffects(FakeEffects, UnitEffects):
    """A unit without a unit scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[wire.Message] = []
        self.model_parents: dict[str, Process] = {}

    def on_model_parent(self, model: str, process: Process) -> None:
        self.model_parents[model] = process

    async def tell(self, message: wire.Message) -> None:
        self.told.append(message)
