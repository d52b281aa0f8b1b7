"""The steps that changes of a running fleet are made of: replicas and units up, and down."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from muxserve import wire
from muxserve.cluster.effects import FleetEffects
from muxserve.cluster.events import PartId
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.unit_set import RunningUnit, UnitSet
from muxserve.cluster.units import PlannedUnit
from muxserve.config import Fleet
from muxserve.control.changes import ChangeError, NoRoomError, Tell
from muxserve.gpu.budget import Needs
from muxserve.gpu.unit import SizingError
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.rules import RollingRules
from muxserve.spec import FleetSpec, FollowedFleet, ModelSpec, ResidencySpec, UnitSpec, public_name

# Where a request can be in a unit (`muxserve.scheduling`).
_PLACES = ("queued", "prefilling", "handed", "decoding", "moving")


def live_requests(state: dict[str, object], model: str) -> int:
    """The requests of `model` in the unit whose `StateReply` is given."""
    models = state.get("models")
    of = models.get(model) if isinstance(models, dict) else None
    return sum(int(of.get(place, 0)) for place in _PLACES) if isinstance(of, dict) else 0


# Replicas that were asked to drain get so much longer than what the gateways allow their requests at the end.
_DRAIN_MARGIN = 30.0
# A unit that has not said by then how many requests it has may have any number of them.
_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.2
# A unit that is being started again is waited for so long.
_READY_SECONDS = 30.0


@dataclass(frozen=True)
class Addition:
    """A model that is new in the fleet, and the units that serve it at first. `key_levels` etc. stay as they are."""

    model: ModelSpec
    units: tuple[PlannedUnit, ...]
    scaling: ScalingRules | None = None

    @property
    def rolling(self) -> RollingRules | None:
        """By what its prefill rolls over its replicas, if it does."""
        return next((unit.rolling for unit in self.units), None)


@dataclass(frozen=True)
class JoinedUnit:
    """A unit that is to have `model`, too: the whole of it, planned anew over the pools that it has. `planned` is what
    it is started as when it has to be started again, `needs` what the model is thought to take of each of its GPUs,
    `residency` by what memory decides in the unit from then on, if it does."""

    model: ModelSpec
    unit_spec: UnitSpec
    planned: PlannedUnit
    needs: tuple[Needs, ...] = ()
    scaling: ScalingRules | None = None
    residency: ResidencySpec | None = None


class BrokenModelError(ChangeError):
    """The engines of a model failed at their start; it is not for want of room."""


def _not_started(failure: GaveUp, part: PartId, words: str = "") -> ChangeError:
    """Why a change could not be made for which `part` was to be started; in `words`, if these say more."""
    kind: type[ChangeError] = BrokenModelError if part.model else ChangeError
    if isinstance(failure.__cause__, SizingError):
        kind = NoRoomError
    return kind(words or f"{part} cannot start: {failure}")


def _not_joined(model: str, unit: RunningUnit, failure: GaveUp) -> ChangeError:
    words = f"{model} cannot join {unit.name}: {failure.part}: {failure}"
    return _not_started(failure, failure.part, words)


class UnitPlanner(Protocol):
    """Makes units that fit into what is left. Called in a thread, since it may read files and download."""

    def unit(self, model: str, name: str, fleet: FleetSpec) -> PlannedUnit:
        """A unit `name` with a replica of that model alone.

        Raises:
            NoRoomError: there is no room, in words.
        """

    def addition(self, declared: Fleet, names: Callable[[], str], fleet: FleetSpec, tell: Tell) -> Addition:
        """What it takes to serve the only model of `declared`, too; from `names` come names for its units.

        Raises:
            NoRoomError: there is no room, in words.
            ChangeError: the model cannot be served, in words.
        """

    def joined(self, declared: Fleet, unit: PlannedUnit, fleet: FleetSpec, tell: Tell) -> JoinedUnit:
        """What it takes to serve the only model of `declared` in that running unit, too; as the next version if the
        unit has had another model of that name.

        Raises:
            NoRoomError: its pools or the machine have no room, in words.
            ChangeError: the model cannot be served there, in words.
        """

    def forget(self, model: str) -> None:
        """The model is not served any more."""

    def trying(self, without: str = "") -> contextlib.AbstractContextManager[None]:
        """What is planned meanwhile is not kept; it is planned as if the model `without` were not served any more."""

    def without(self, model: str, fleet: FleetSpec) -> dict[str, ResidencySpec]:
        """By what memory decides in the units of `fleet`, by name, when it does not have that model any more."""

    def settings(self, wanted: Fleet, fleet: FleetSpec) -> FleetSpec:
        """`fleet` with what gateways and the global scheduler read of `wanted`: keys, tenants, shared names, rules by
        which memory decides, and of the models that both have limits, objectives, aliases and bounds of replicas.

        Raises:
            ChangeError: what it may take of the memory is too little, or more than there is.
        """


class ChangeLock:
    """Held by one change of the fleet at a time; or shared by models that memory wakes and puts to sleep in units that
    are there, each by one step at a time. Who wants it alone goes before those that would share it next."""

    def __init__(self) -> None:
        self._entry = asyncio.Lock()
        self._models: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._sharing = 0
        self._nobody_shares = asyncio.Event()
        self._nobody_shares.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Nothing else is changed meanwhile."""
        async with self._entry:
            await self._nobody_shares.wait()
            yield

    @contextlib.asynccontextmanager
    async def shared(self, model: str) -> AsyncIterator[None]:
        """Other models may be started and ended meanwhile."""
        async with self._models[model]:
            async with self._entry:
                self._sharing += 1
                self._nobody_shares.clear()
            try:
                yield
            finally:
                self._sharing -= 1
                if not self._sharing:
                    self._nobody_shares.set()


class FleetSteps:
    """One step after the other. Whoever calls holds `lock`, so that only one change is made of them at a time; what is
    only waited for is waited for without it, while `leaving` keeps other changes away.

    Args:
        planner: makes new units; None: there is nothing but the units that were started.
    """

    def __init__(self, units: UnitSet, planner: UnitPlanner | None, effects: FleetEffects) -> None:
        self._units = units
        self._planner = planner
        self._effects = effects
        self.lock = ChangeLock()
        # Replicas that are about to end, (model, unit), and units that end as a whole.
        self._leaving: set[tuple[str, str]] = set()
        self._ending: set[str] = set()
        # Set when fewer are about to end.
        self._left = asyncio.Event()
        # Replicas that somebody waits for to be drained: (model, unit).
        self._draining: dict[tuple[str, str], asyncio.Future[None]] = {}

    @property
    def planner(self) -> UnitPlanner:
        """What makes new units.

        Raises:
            ChangeError: there is none.
        """
        if self._planner is None:
            raise ChangeError("this fleet has no place for more units")
        return self._planner

    def replicas(self, model: str) -> list[RunningUnit]:
        """The units that serve it, without those where it is about to end."""
        units = self._units.units.values()
        return [u for u in units if u.announced and model in u.serves and not self.is_leaving(model, u.name)]

    def is_leaving(self, model: str, unit: str) -> bool:
        """Whether the replica of `model` in `unit` is about to end."""
        return (model, unit) in self._leaving

    @contextlib.contextmanager
    def leaving(self, models: Iterable[str], unit: RunningUnit, whole: bool = False) -> Iterator[None]:
        """Replicas of a unit are about to end, and with `whole` the unit: no other change touches them meanwhile."""
        new = {(model, unit.name) for model in models} - self._leaving
        ends = {unit.name} - self._ending if whole else set()
        self._leaving |= new
        self._ending |= ends
        try:
            yield
        finally:
            self._leaving -= new
            self._ending -= ends
            self._left.set()

    async def until_left(self, model: str, tell: Tell) -> None:
        """Wait until no replica of any version of `model` is about to end."""

        def leaving() -> bool:
            return any(public_name(each) == model for each, _ in self._leaving)

        if leaving():
            tell(f"waiting for the {model} that is still being removed")
        while leaving():
            self._left.clear()
            await self._left.wait()

    async def live(self, unit: RunningUnit, model: str) -> int | None:
        """The requests of a model that a unit has; None if it does not say."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                return live_requests(await unit.handle.state(), model)
        return None

    async def until_empty(self, model: str, units: Sequence[RunningUnit], seconds: float) -> bool:
        """Wait for units to have no request of a model, for at most `seconds`; whether they have none. One that does
        not say may have some."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(count != 0 for count in await asyncio.gather(*(self.live(unit, model) for unit in units))):
                    await asyncio.sleep(_LOOK_SECONDS)
                return True
        return False

    async def until_unused(self, model: str, seconds: float, tell: Tell) -> None:
        """Wait until the last request of a version has ended to which the fleet of now sends no new ones. Clients that
        read their answers slowly are not waited for: after `seconds`, and again and again, it is enough that units have
        none."""
        generation = self._units.fleet.generation

        def unused(followed: FollowedFleet) -> bool:
            return followed.generation >= generation and model not in followed.leaving

        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(seconds, _LOOK_SECONDS)):
                    await self._effects.until_followed(unused)
                    return
            if await self.until_empty(model, self.replicas(model), _ANSWER_SECONDS):
                return
            tell(f"{model} still has requests")

    def drained(self, model: str, unit: str) -> bool:
        """The global scheduler says that a replica has nothing left; whether somebody has waited for that."""
        waiting = self._draining.get((model, unit))
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        return waiting is not None

    def resend(self) -> None:
        """Tell a new global scheduler what is to be drained."""
        for model, unit in list(self._draining):
            self._effects.tell_scheduler(wire.DrainReplicas(unit, [model]))

    # ------------------------------------------------------------ steps: up

    async def start_several(self, model: str, count: int, tell: Tell) -> None:
        """Start replicas, all or none."""
        started: list[RunningUnit] = []
        try:
            for _ in range(count):
                started.append(await self._start_one(model, tell))
        except BaseException:
            for unit in started:
                await self.end_replicas([model], unit, tell)
            raise

    def _idle(self, model: str) -> list[RunningUnit]:
        """The units that are up, declare `model` and do not serve it."""
        return [
            unit
            for unit in self._units.units.values()
            if model not in unit.serves
            and self.ready(unit)
            and any(each.name == model for each in unit.planned.unit_spec.models)
        ]

    async def _until_idle(self, model: str) -> list[RunningUnit]:
        """The same of a model that memory decides on, as soon as there is one: its unit may be being started again. A
        unit more would take memory of its own, which nobody has set aside.

        Raises:
            ChangeError: there is none for too long.
        """
        try:
            async with asyncio.timeout(_READY_SECONDS):
                while not (idle := self._idle(model)):
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            raise ChangeError(f"the unit of {model} is not up at present") from None
        return idle

    async def _start_one(self, model: str, tell: Tell) -> RunningUnit:
        resident = self._units.fleet.is_resident(model)
        idle = await self._until_idle(model) if resident else self._idle(model)
        if idle:
            unit = idle[0]
            tell(f"starting {model} in {unit.name}")
            try:
                await unit.handle.start_model(model)
            except GaveUp as failure:
                raise _not_started(failure, failure.part) from None
        else:
            planned = await asyncio.to_thread(self.planner.unit, model, self._units.next_name(), self._units.fleet)
            offered = next(each for each in self._units.fleet.models if each.name == model)
            longest = planned.unit_spec.model(model).max_len
            if longest < offered.max_len:
                raise ChangeError(f"a replica more would hold {longest} tokens of a request, not {offered.max_len}")
            tell(f"starting {planned.name} with {model}")
            unit = await self.bring_up(planned)
            self._units.announce(unit)
        unit.serves.add(model)
        self._units.publish()
        tell(f"{model} is served by {unit.name}")
        return unit

    def ready(self, unit: RunningUnit) -> bool:
        """Whether the unit is up and stays."""
        return unit.announced and unit.name not in self._ending and unit.handle.ready.is_set()

    async def join(self, joined: JoinedUnit, tell: Tell) -> RunningUnit:
        """Have a running unit serve a model more.

        Raises:
            ChangeError: it takes none, or its engines cannot start; the unit then serves what it did, but has the new
                quotas.
        """
        name = joined.model.name
        unit = await self.declare(joined, tell)
        tell(f"starting {name} in {unit.name}")
        try:
            await unit.handle.start_model(name)
        except GaveUp as failure:
            raise _not_joined(name, unit, failure) from None
        unit.serves.add(name)
        return unit

    async def declare(self, joined: JoinedUnit, tell: Tell, asleep: bool = False) -> RunningUnit:
        """Have a running unit take a model into its pools that is started later; `asleep`: when memory decides that.

        Raises:
            ChangeError: it takes none; nothing has changed.
        """
        name = joined.model.name
        unit = self._units.units.get(joined.unit_spec.unit)
        if unit is None or not self.ready(unit):
            raise ChangeError(f"{joined.unit_spec.unit} is not up at present; try again when `muxserve status` says so")
        tell(f"making room for {name} in {unit.name}")
        try:
            await unit.handle.join(joined.unit_spec, name, joined.needs, asleep)
        except GaveUp as failure:
            raise _not_joined(name, unit, failure) from None
        unit.planned = joined.planned
        return unit

    async def bring_up(self, planned: PlannedUnit) -> RunningUnit:
        """Start a unit; nobody is told of it yet.

        Raises:
            ChangeError: it cannot start; nothing of it is left.
        """
        name = planned.name
        try:
            unit = await self._units.start(planned, announced=False)
        except GaveUp as failure:
            raise ChangeError(f"{name} cannot start: {failure}") from None
        up = asyncio.create_task(unit.handle.ready.wait())
        end = asyncio.create_task(unit.handle.wait())
        ends: set[asyncio.Future[Any]] = {up, end}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                end.result()
        except GaveUp as failure:
            await self._units.end(name)
            raise _not_started(failure, failure.part.within(name)) from None
        except BaseException:
            await self._units.end(name)
            raise
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        self._units.keep(unit)
        return unit

    # ------------------------------------------------------------ steps: down

    async def least_loaded(self, model: str, units: Sequence[RunningUnit], count: int) -> list[RunningUnit]:
        """Those that are missed least: that are not up; with the fewest requests, among these with the fewest other
        models; that do not say how many they have."""
        live = await asyncio.gather(*(self.live(unit, model) for unit in units))
        known = [-1 if not unit.handle.up(model) else n for unit, n in zip(units, live, strict=True)]
        order = sorted(
            range(len(units)), key=lambda i: (math.inf if (n := known[i]) is None else n, len(units[i].serves), -i)
        )
        return [units[i] for i in order[:count]]

    async def drain_and_end(self, models: Sequence[str], unit: RunningUnit, tell: Tell) -> None:
        """Have replicas of a unit, which are `leaving`, emptied, and end them. What is left when the time is over is
        computed again in other units, so nothing is lost by that. To be called without the lock."""
        waiting = {
            (model, unit.name): asyncio.get_running_loop().create_future()
            for model in models
            if self._units.fleet.placed_by_scheduler(model)
        }
        if waiting:
            tell(f"draining {', '.join(model for model, _ in waiting)} in {unit.name}")
            self._draining.update(waiting)
            seconds = self._units.fleet.gateway.drain_seconds + _DRAIN_MARGIN
            try:
                generation = self._units.fleet.generation
                self._effects.tell_scheduler(wire.DrainReplicas(unit.name, [model for model, _ in waiting], generation))
                _, late = await asyncio.wait(waiting.values(), timeout=seconds)
                if late:
                    tell(f"{unit.name} is not empty after {seconds:g} s; what is left is computed again elsewhere")
            finally:
                for key in waiting:
                    self._draining.pop(key, None)
        async with self.lock.alone():
            await self.end_replicas(models, unit, tell)

    async def end_replicas(self, models: Sequence[str], unit: RunningUnit, tell: Tell) -> None:
        """Have nobody sent there any more, and end the engines; and the unit, if there is nothing left in it."""
        unit.serves.difference_update(models)
        # Where memory decides who is awake, any of its models may be woken the next moment.
        stays = bool(self._units.fleet.residency) and unit.name not in self._ending
        if unit.serves or stays:
            self._units.publish()
            for model in models:
                try:
                    await unit.handle.stop_model(model)
                except GaveUp as failure:
                    tell(f"{failure.part} of {unit.name} may not have ended: {failure}")
            tell(f"{', '.join(models)} is not served by {unit.name} any more")
            if self._units.fleet.residency:
                for model in models:
                    self._effects.tell_scheduler(wire.ReplicaEnded(model, unit.name))
        else:
            unit.announced = False
            self._units.publish()
            await self._units.end(unit.name)
            tell(f"{unit.name} has ended")
