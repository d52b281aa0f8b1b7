"""Another version of a model takes the place of the one that serves, and no request is lost by that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from muxserve.cluster.effects import FleetEffects
from muxserve.cluster.models import FOLLOW_SECONDS, FleetModels, Planned
from muxserve.cluster.steps import FleetSteps, JoinedUnit
from muxserve.cluster.unit_set import UnitSet
from muxserve.config import Fleet, Model
from muxserve.control.changes import ChangeError, NoRoomError, Tell
from muxserve.spec import FleetSpec, FollowedFleet, next_version, public_name

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


class Replacing:
    """Replaces models of a fleet by other versions of them, one at a time.

    Args:
        models: those that the fleet has.
    """

    def __init__(self, units: UnitSet, steps: FleetSteps, models: FleetModels, effects: FleetEffects) -> None:
        self._units = units
        self._steps = steps
        self._models = models
        self._effects = effects
        # Versions that there have been, so that none is taken for another one.
        self._had: set[str] = set()

    # 1. Its engines are started beside those of the old version: in the old one's units or, where these have no room,
    #    in units of its own. Gateways build its front end. It is a candidate: no client's request goes to it.
    # 2. Each gateway has it answer a request.
    # 3. New requests go to it. The old version is retired, and finishes the requests that it has.
    # 4. The old version ends.
    #
    # In place, the old version is retired and its engines end before 1; until 3 nobody answers. What fails before 3 is
    # taken back, and in place the old version is started again.

    async def room_for(self, declared: Fleet, tell: Tell, in_place: bool = False) -> None:
        """See `FleetControl.room_for`."""
        (model,) = declared.models
        async with self._steps.lock.alone():
            old, planner, fleet = self._models.version(model.name), self._steps.planner, self._models.fleet
            homes, _ = self._homes(old, model)
            if in_place:
                left = [unit for unit in fleet.units if unit.serves != [old] or fleet.residency]
                residency = planner.without(old, fleet) if fleet.residency else {}
                fleet = msgspec.structs.replace(fleet, units=left, residency=residency)
                homes = [home for home in homes if any(unit.name == home for unit in left)]
            with planner.trying(without=old if in_place else ""):
                await self._plan_version(self._next(declared), homes, fleet, tell)

    async def replace(self, declared: Fleet, tell: Tell, in_place: bool = False) -> None:
        """See `FleetControl.replace`."""
        (model,) = declared.models
        old, before = self._models.version(model.name), self._models.declared.model(model.name)
        homes, count = self._homes(old, model)
        if in_place:
            await self._stand_down(old, tell)
        try:
            new = await self._try(self._next(declared), homes, count, tell)
        except Exception:
            if in_place:
                await self._bring_back(self._models.declared.with_models([before]), old, homes, count, tell)
            raise
        await self._switch(model, new, tell)
        if not in_place:
            await self._steps.until_unused(old, self._patience(old), tell)
        await self._models.take_out(old, tell)

    def _next(self, declared: Fleet) -> Fleet:
        """The same as the version of its only model that comes after all others."""
        return declared.with_name(next_version(declared.models[0].name, self._models.fleet.version_names | self._had))

    def _homes(self, old: str, model: Model) -> tuple[list[str], int]:
        """The units that serve `old`, or could, if engines of the next version can join them, which is declared as
        `model`; and how many replicas that one is to have."""
        count = min(max(1, len(self._steps.replicas(old))), model.replicas.max)
        units = self._steps.replicas(old) or [
            unit
            for unit in self._units.units.values()
            if any(each.name == old for each in unit.planned.unit_spec.models)
        ]
        if model.has_own_unit:
            return [], count
        shared = [u for u in units if all(m.stages == 1 and not m.rolling for m in u.planned.unit_spec.models)]
        return [unit.name for unit in shared[:count]], count

    def _patience(self, model: str) -> float:
        """Seconds in which requests of a version have begun to be served, or have been answered."""
        rules = self._models.fleet.scaling.get(model)
        return max(self._models.fleet.gateway.drain_seconds, rules.wake_limit if rules is not None else 0.0)

    async def _plan_version(self, version: Fleet, homes: Sequence[str], fleet: FleetSpec, tell: Tell) -> Planned:
        """What it takes to serve the only model of `version`: in the first of the units `homes` or, if that has no
        room, in units of its own.

        Raises:
            NoRoomError: neither has room.
            ChangeError: the model cannot be served.
        """
        if not homes or fleet.residency:
            return await self._models.plan(version, "", fleet, tell)
        try:
            return await self._models.plan(version, homes[0], fleet, tell)
        except NoRoomError as error:
            reason = str(error)
        try:
            return await self._models.plan(version, "", fleet, tell)
        except NoRoomError as error:
            raise NoRoomError(f"{reason}; {error}") from None

    async def _try(self, version: Fleet, homes: Sequence[str], count: int, tell: Tell) -> str:
        """Start the only model of `version` as a candidate, with `count` replicas, in the units `homes` if these have
        room, and have it answer a request of each gateway; returns its name.

        Raises:
            ChangeError: it cannot be started, or does not answer; nothing is left of it.
        """
        async with self._steps.lock.alone():
            planned = await self._plan_version(version, homes, self._models.fleet, tell)
            self._had.add(planned.model.name)
            new = await self._models.place(planned, tell, candidate=True)
        try:
            async with self._steps.lock.alone():
                if isinstance(planned, JoinedUnit) and planned.residency is None:
                    for unit in homes[1:]:
                        more = await self._models.plan(version, unit, self._models.fleet, tell)
                        assert isinstance(more, JoinedUnit), "a unit is named"
                        await self._steps.join(more, tell)
                        self._units.publish()
                if not self._models.fleet.residency:
                    missing = count - len(self._steps.replicas(new))
                    await self._steps.start_several(new, max(0, missing), tell)
            await self._until_checked(new, tell)
        except Exception:
            await self._models.take_out(new, tell)
            raise
        return new

    async def _until_checked(self, new: str, tell: Tell) -> None:
        """Wait until a candidate has answered a request of each gateway.

        Raises:
            ChangeError: it has not.
        """
        rules, generation = self._models.fleet.scaling.get(new), self._models.fleet.generation
        seconds = FOLLOW_SECONDS + (rules.wake_limit if rules is not None else 0.0)

        def checked(followed: FollowedFleet) -> bool:
            return followed.generation >= generation and followed.knows(new)

        try:
            async with asyncio.timeout(seconds):
                # Where all gateways are being started again, nobody has checked anything.
                while not (gateways := await self._effects.until_followed(checked)):
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise ChangeError(f"{new} has not answered a request within {seconds:g} s") from None
        reason = next((each.refused[new] for each in gateways if new in each.refused), None)
        if reason is not None:
            raise ChangeError(f"{new} does not answer: {reason}")
        tell(f"{new} has answered a request")

    async def _switch(self, model: Model, new: str, tell: Tell) -> None:
        """Requests for `model`, as it is declared from now on, go to the version `new`."""
        async with self._steps.lock.alone():
            fleet = self._models.fleet
            self._units.change(
                versions={**fleet.versions, model.name: new},
                candidates=tuple(name for name in fleet.candidates if name != new),
            )
            self._units.publish()
            self._models.declare(model)
        await self._models.until_followed(tell)
        tell(f"new requests for {model.name} go to {new}")

    async def _stand_down(self, old: str, tell: Tell) -> None:
        """Retire a version that has no successor yet, and end its engines once they have finished."""
        name = public_name(old)
        async with self._steps.lock.alone():
            self._units.change(versions={**self._models.fleet.versions, name: ""})
            self._units.publish()
        tell(f"requests for {name} are answered with 503 until its next version serves")
        await self._models.until_followed(tell)
        await self._steps.until_unused(old, self._patience(old), tell)
        if self._models.fleet.residency:
            async with self._steps.lock.alone():
                self._units.change(residency=self._steps.planner.without(old, self._models.fleet))
                self._units.publish()
        await self._models.end(old, self._steps.replicas(old), tell)

    async def _bring_back(self, before: Fleet, old: str, homes: Sequence[str], count: int, tell: Tell) -> None:
        """Serve the only model of `before` again, whose version `old` has stood down."""
        (model,) = before.models
        tell(f"{model.name} is started as it was before")
        try:
            await self._switch(model, await self._try(self._next(before), homes, count, tell), tell)
        except Exception as error:
            if not isinstance(error, ChangeError):
                log.exception("%s could not be started again", model.name)
            tell(f"{model.name} is served no longer: {error}")
            self._units.change(
                versions={name: of for name, of in self._models.fleet.versions.items() if name != model.name}
            )
            self._models.undeclare(model.name)
        await self._models.take_out(old, tell)
