"""A fleet takes over from another one where the machine has no room for both: one group of units after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from muxserve.cluster.effects import FleetEffects
from muxserve.cluster.events import PartId, Progress
from muxserve.cluster.fleet_starts import VLLM
from muxserve.cluster.models import FOLLOW_SECONDS
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.unit_set import UnitSet
from muxserve.cluster.units import PlannedUnit
from muxserve.control.changes import ChangeError
from muxserve.control.previous import PreviousFleet
from muxserve.spec import FleetSpec, OtherFleet, public_name


@dataclass(frozen=True)
class UnitGroup:
    """Units that change together: they `start` when the fleet before has ended its units with the models `names`."""

    start: tuple[PlannedUnit, ...]
    names: frozenset[str]


def groups(units: Sequence[PlannedUnit], before: FleetSpec) -> list[UnitGroup]:
    """The units to start, in an order in which each finds room.

    Units that share a model, here or in the fleet before, are in one group: the memory of a unit is free only when all
    its models have gone. What nobody waits for comes with the last group: models that the fleet before has not, and the
    end of that fleet.
    """
    had = set(before.served_names)
    linked = [frozenset(public_name(model) for model in unit.serves) & had for unit in before.units]
    wanted = [frozenset(public_name(model.name) for model in unit.unit_spec.models) for unit in units]
    joined: list[frozenset[str]] = []
    for names in [*linked, *wanted]:
        if names:
            apart = [each for each in joined if not each & names]
            joined = [*apart, names.union(*(each for each in joined if each & names))]
    found = []
    for names in joined:
        start = tuple(unit for unit, its in zip(units, wanted, strict=True) if its <= names)
        if start:
            found.append(UnitGroup(start, names & had))
    found.sort(key=lambda group: (not group.names, units.index(group.start[0])))
    waited_for = [group for group in found if group.names]
    new = tuple(unit for group in found if not group.names for unit in group.start)
    if not new or not waited_for:
        return waited_for or [UnitGroup(new, frozenset())]
    last = waited_for[-1]
    return [*waited_for[:-1], UnitGroup((*last.start, *new), last.names)]


class Succession:
    """Takes over from `previous`, whose gateways and those of this fleet answer at the same address meanwhile."""

    def __init__(self, previous: PreviousFleet, units: UnitSet, effects: FleetEffects) -> None:
        self._previous = previous
        self._units = units
        self._effects = effects

    # 1. The gateways of this fleet listen, and pass requests on to the fleet before for all models that it still has.
    # 2. For each group: requests for its models wait here from now on. The fleet before ends these models when it has
    #    answered their requests, and passes on to this fleet all that comes to the endpoint's address. The group's
    #    units start.
    # 3. Before the last group the fleet before takes no more connections, and ends.
    #
    # What fails before 3 ends this fleet, and whoever started it has the fleet before take its models back.

    def begin(self) -> None:
        """Have gateways pass on requests for all models that the fleet before has."""
        self._pass_on(frozenset(self._previous.spec.served_names))

    async def run(
        self, planned: Sequence[PlannedUnit], start: Callable[[Sequence[PlannedUnit]], Awaitable[None]]
    ) -> None:
        """Serve all that is `planned`; `start` returns when units are up. The gateways are up.

        Raises:
            GaveUp: the fleet before does not make room, or units cannot start.
        """
        left = frozenset(self._previous.spec.served_names)
        steps = groups(planned, self._previous.spec)
        for step in steps:
            left -= step.names
            last = step is steps[-1]
            self._pass_on(frozenset() if last else left)
            self._units.publish()
            part = PartId("host", unit=step.start[0].name)
            try:
                await self._until_followed()
                await self._make_room(step, last)
            except (ChangeError, TimeoutError) as error:
                raise GaveUp(part, str(error) or "a gateway does not follow the fleet's file") from None
            await start(step.start)

    async def _until_followed(self) -> None:
        generation = self._units.fleet.generation
        async with asyncio.timeout(FOLLOW_SECONDS):
            await self._effects.until_followed(lambda each: each.generation >= generation)

    async def _make_room(self, step: UnitGroup, last: bool) -> None:
        if last:
            await asyncio.to_thread(self._previous.end, self._say)
            # Without it, serving some of the models is better than none.
            self._units.change(takes_over=False)
        else:
            sockets = self._units.fleet.gateway_sockets
            await asyncio.to_thread(self._previous.lend, sorted(step.names), sockets, self._say)

    def _pass_on(self, names: frozenset[str]) -> None:
        other = OtherFleet(self._previous.spec.gateway_sockets, tuple(sorted(names))) if names else None
        self._units.change(other_fleet=other)

    def _say(self, text: str) -> None:
        self._effects.emit(Progress(VLLM, text))
