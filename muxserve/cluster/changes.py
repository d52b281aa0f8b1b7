"""Changes of a running fleet: replicas started and ended, units drained, models added and removed.

Asked for by users (`muxserve.control`) and by the global scheduler. One at a time, except that others go on while one
waits for requests to end, and that models that memory decides on are woken and put to sleep beside each other. Each
either happens or leaves everything as it was. A replica is started by giving a unit that declares the model its engines
back, else as a unit of its own; a unit that serves nothing any more is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from muxserve import wire
from muxserve.cluster.effects import FleetEffects
from muxserve.cluster.events import Progress
from muxserve.cluster.fleet_starts import SCHEDULER
from muxserve.cluster.models import FleetModels
from muxserve.cluster.replacing import Replacing
from muxserve.cluster.steps import BrokenModelError, FleetSteps, UnitPlanner
from muxserve.cluster.unit_set import RunningUnit, UnitSet
from muxserve.config import Fleet, Model
from muxserve.control.apply import followed, with_declared_adapter
from muxserve.control.changes import ChangeError, Tell
from muxserve.spec import FleetSpec, ModelSpec, OtherFleet, public_name

log = logging.getLogger(__name__)


def with_adapter(model: ModelSpec, name: str, path: str) -> ModelSpec:
    """`model` with the adapter in `path` under that name; "": without it."""
    others = {each: where for each, where in model.adapters.items() if each != name}
    return msgspec.structs.replace(model, adapters={**others, name: path} if path else others)


class Changes:
    """The changes of one fleet: a `muxserve.control.FleetControl`, and what the global scheduler asks for.

    Args:
        planner: makes new units; None: there is nothing but the units that were started.
        declared: the fleet file; None: this fleet cannot become what another one says.
    """

    def __init__(
        self,
        units: UnitSet,
        planner: UnitPlanner | None,
        effects: FleetEffects,
        declared: Fleet | None = None,
    ) -> None:
        self._units = units
        self._steps = FleetSteps(units, planner, effects)
        self._effects = effects
        self._models = FleetModels(units, self._steps, effects, declared)
        self._replacing = Replacing(units, self._steps, self._models, effects)
        # Which life of the global scheduler an order is from: those of one that has died are void.
        self._life = 0
        # Models that another fleet was to serve, as declared, and the units that served them.
        self._lent: list[tuple[Model, str]] = []
        # The models that are being started because the global scheduler wants it.
        self.starting: list[str] = []

    @property
    def fleet(self) -> FleetSpec:
        """See `FleetControl.fleet`."""
        return self._units.fleet

    @property
    def declared(self) -> Fleet:
        """See `FleetControl.declared`."""
        return self._models.declared

    # ------------------------------------------------------------ asked for by users

    async def adopt(self, wanted: Fleet, tell: Tell) -> None:
        """See `FleetControl.adopt`."""
        async with self._steps.lock.alone():
            planner, declared = self._steps.planner, self.declared
            fleet = planner.settings(wanted, self.fleet)
            self._units.change(
                gateway=fleet.gateway,
                key_levels=fleet.key_levels,
                tenants=fleet.tenants,
                usage_file=fleet.usage_file,
                models=fleet.models,
                scaling=fleet.scaling,
                residency=fleet.residency,
                aliases=fleet.aliases,
                fallbacks=fleet.fallbacks,
            )
            self._units.publish()
            self._models.follow(followed(declared, wanted))
        await self._models.until_followed(tell)
        tell("keys, tenants, names, limits, objectives and rules of memory are as the file says")

    def unfollowed(self, words: str) -> None:
        """See `FleetControl.unfollowed`."""
        if words != self.fleet.unfollowed:
            self._units.change(unfollowed=words)
            self._units.publish()

    async def scale(self, model: str, replicas: int, tell: Tell) -> None:
        """See `FleetControl.scale`."""
        with contextlib.ExitStack() as leaving:
            async with self._steps.lock.alone():
                name = self._models.version(model)
                have = self._steps.replicas(name)
                if replicas >= len(have):
                    await self._steps.start_several(name, replicas - len(have), tell)
                    return
                surplus = await self._steps.least_loaded(name, have, len(have) - replicas)
                for unit in surplus:
                    leaving.enter_context(self._steps.leaving([name], unit))
            await asyncio.gather(*(self._steps.drain_and_end([name], unit, tell) for unit in surplus))

    async def drain(self, unit: str, tell: Tell) -> None:
        """See `FleetControl.drain`."""
        with contextlib.ExitStack() as leaving:
            async with self._steps.lock.alone():
                drained = self._units.units.get(unit)
                if drained is None:
                    raise ChangeError(f"there is no unit {unit} any more")
                models = sorted(drained.serves)
                for model in models:
                    self._check_served_without(model, drained)
                leaving.enter_context(self._steps.leaving(models, drained, whole=True))
            await self._steps.drain_and_end(models, drained, tell)

    async def add(self, declared: Fleet, tell: Tell, to: str = "") -> None:
        """See `FleetControl.add`."""
        (model,) = declared.models
        await self._steps.until_left(model.name, tell)
        async with self._steps.lock.alone():
            planned = await self._models.plan(declared, to, self.fleet, tell)
            name = await self._models.place(planned, tell)
            self._models.declare(model)
        await self._until_offered(name, tell)

    async def _until_offered(self, model: str, tell: Tell) -> None:
        """The fleet has had `model` for a moment: wait until clients of every gateway can ask for it.

        Raises:
            ChangeError: vLLM's front end does not take it; it has been removed again.
        """
        gateways = await self._models.until_followed(tell, lambda followed: followed.knows(model))
        reason = next((each.refused[model] for each in gateways if model in each.refused), None)
        if reason is not None:
            await self.remove(public_name(model), tell)
            raise ChangeError(f"{model} cannot be offered: {reason}")

    async def remove(self, model: str, tell: Tell) -> None:
        """See `FleetControl.remove`."""
        name, seconds = self._models.version(model), self.fleet.gateway.drain_seconds
        self._models.undeclare(model)
        tell(f"no new requests for {model}; running ones have {seconds:g} s to finish")
        await self._models.take_out(name, tell, seconds)

    async def set_adapter(self, model: str, name: str, path: str) -> None:
        """See `FleetControl.set_adapter`."""
        async with self._steps.lock.alone():
            version = self._models.version(model)
            self._units.change(
                models=[with_adapter(each, name, path) if each.name == version else each for each in self.fleet.models]
            )
            self._units.publish()
            with contextlib.suppress(ChangeError):
                self._models.follow(with_declared_adapter(self.declared, model, name, path))
        await self._models.until_followed(
            self._say, lambda each: version not in each.offers or each.offers[version].get(name, "") == path
        )

    async def room_for(self, declared: Fleet, tell: Tell, in_place: bool = False) -> None:
        """See `FleetControl.room_for`."""
        await self._replacing.room_for(declared, tell, in_place)

    async def replace(self, declared: Fleet, tell: Tell, in_place: bool = False) -> None:
        """See `FleetControl.replace`."""
        await self._replacing.replace(declared, tell, in_place)

    async def hand_over(self, tell: Tell) -> None:
        """See `FleetControl.hand_over`."""
        self._units.change(handed_over=True)
        self._units.publish()
        await self._models.until_followed(tell)
        self._effects.stop("another fleet has taken over")

    async def lend(self, models: Sequence[str], sockets: Sequence[str], tell: Tell) -> None:
        """See `FleetControl.lend`."""
        self._units.change(other_fleet=OtherFleet(tuple(sockets)))
        self._units.publish()
        await self._models.until_followed(tell)
        for name in models:
            homes = self._steps.replicas(self._models.version(name))
            self._lent.append((self.declared.model(name), homes[0].name if homes else ""))
        await asyncio.gather(*(self.remove(name, tell) for name in models))

    async def take_back(self, tell: Tell) -> None:
        """See `FleetControl.take_back`."""
        # Models that were in one unit are in one again. Until all are here, clients are asked to come back for them.
        now: dict[str, str] = {}
        while self._lent:
            model, home = self._lent[0]
            there = {*self._units.units}
            to = home if home in there else now.get(home, "")
            await self.add(self.declared.with_models([model]), tell, to)
            now.update((home, name) for name in self._units.units.keys() - there)
            del self._lent[0]
        self._units.change(other_fleet=None)
        self._units.publish()

    # ------------------------------------------------------------ asked for by the global scheduler

    def scheduler_up(self) -> None:
        """A global scheduler has come up: the one before may have been asked for things that the new one knows not."""
        self._life += 1

    def resend(self) -> None:
        """Tell a new global scheduler what is to be drained."""
        self._steps.resend()

    async def handle(self, message: wire.Message) -> None:
        """Do what the global scheduler wants."""
        if isinstance(message, wire.StartReplicas):
            await self._start_wanted(message.model, message.count)
        elif isinstance(message, wire.StopReplica):
            if not self._steps.drained(message.model, message.unit):
                await self._stop_wanted(message)
        else:
            log.warning("unexpected %s from the global scheduler", type(message).__name__)

    async def _start_wanted(self, model: str, count: int) -> None:
        life = self._life
        for _ in range(count):
            # Also while it waits for other changes: a new global scheduler hears of it, and so does one that asked.
            self.starting.append(model)
            try:
                async with self._lock_of(model):
                    if life != self._life:
                        return
                    try:
                        rules = self.fleet.scaling.get(model)
                        if rules is not None and len(self._steps.replicas(model)) >= rules.maximum:
                            raise ChangeError(f"{model} has {rules.maximum} replicas already")
                        self._models.check(model)
                        await self._steps.start_several(model, 1, self._say)
                    except Exception as error:
                        # Whatever it was: a start of which the global scheduler hears nothing is counted on for good.
                        if not isinstance(error, ChangeError):
                            log.exception("a replica of %s could not be started", model)
                        self._say(f"no replica of {model} more: {error}")
                        broken = isinstance(error, BrokenModelError)
                        self._effects.tell_scheduler(
                            wire.StartFailed(model, str(error) or type(error).__name__, broken)
                        )
            finally:
                self.starting.remove(model)

    async def _stop_wanted(self, message: wire.StopReplica) -> None:
        model = message.model
        async with self._lock_of(model):
            unit = self._units.units.get(message.unit)
            if unit is not None and model in unit.serves and not self._steps.is_leaving(model, message.unit):
                await self._steps.end_replicas([model], unit, self._say)

    # ------------------------------------------------------------ details

    def _say(self, text: str) -> None:
        """What the fleet does by itself, in words."""
        self._effects.emit(Progress(SCHEDULER, text))

    def _lock_of(self, model: str) -> AbstractAsyncContextManager[None]:
        """For what the global scheduler wants: a model that memory decides on is woken in a unit that is there, beside
        others."""
        shared = self.fleet.is_resident(model)
        return self._steps.lock.shared(model) if shared else self._steps.lock.alone()

    def _check_served_without(self, model: str, unit: RunningUnit) -> None:
        """Whether `unit` can be done without by a model that may not sleep.

        Raises:
            ChangeError: it cannot.
        """
        rules = self.fleet.scaling.get(model)
        others = [other for other in self._steps.replicas(model) if other is not unit]
        if any(other.handle.up(model) for other in others) or (rules is not None and rules.minimum == 0):
            return
        if others:
            names = ", ".join(other.name for other in others)
            raise ChangeError(f"{model} is up in {unit.name} alone; wait until it is up in {names} again")
        raise ChangeError(f"{model} is served by {unit.name} alone; `muxserve scale {public_name(model)}=2` first")
