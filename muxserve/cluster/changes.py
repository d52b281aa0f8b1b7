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
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from muxserve import wire
from muxserve.cluster.effects import FleetEffects
from muxserve.cluster.events import Progress
from muxserve.cluster.fleet_starts import SCHEDULER
from muxserve.cluster.steps import BrokenModelError, FleetSteps, UnitPlanner
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.unit_set import RunningUnit, UnitSet
from muxserve.config import Fleet
from muxserve.control.apply import followed
from muxserve.control.changes import ChangeError, Tell
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.rules import RollingRules
from muxserve.spec import FleetSpec, FollowedFleet, ModelSpec, ResidencySpec

log = logging.getLogger(__name__)

# A gateway builds a model's front end in a few seconds. One that hangs is killed by then, and reads the fleet's file
# when it comes up again.
_FOLLOW_SECONDS = 60.0


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
        self._declared = declared
        # Which life of the global scheduler an order is from: those of one that has died are void.
        self._life = 0
        # The models that are being started because the global scheduler wants it.
        self.starting: list[str] = []

    @property
    def fleet(self) -> FleetSpec:
        """See `FleetControl.fleet`."""
        return self._units.fleet

    @property
    def declared(self) -> Fleet:
        """See `FleetControl.declared`."""
        if self._declared is None:
            raise ChangeError("this fleet was not started from a fleet file")
        return self._declared

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
            )
            self._units.publish()
            self._declared = followed(declared, wanted)
        await self._followed(tell)
        tell("keys, tenants, limits, objectives and rules of memory are as the file says")

    async def scale(self, model: str, replicas: int, tell: Tell) -> None:
        """See `FleetControl.scale`."""
        with contextlib.ExitStack() as leaving:
            async with self._steps.lock.alone():
                self._check(model)
                have = self._steps.replicas(model)
                if replicas >= len(have):
                    await self._steps.start_several(model, replicas - len(have), tell)
                    return
                surplus = await self._steps.least_loaded(model, have, len(have) - replicas)
                for unit in surplus:
                    leaving.enter_context(self._steps.leaving([model], unit))
            await asyncio.gather(*(self._steps.drain_and_end([model], unit, tell) for unit in surplus))

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
            if self.fleet.residency:
                await self._add_sleeping(declared, to, tell)
            elif to:
                await self._join(declared, to, tell)
            else:
                await self._add(declared, tell)
        await self._until_offered(model.name, tell)

    async def _add(self, declared: Fleet, tell: Tell) -> None:
        """The only model of `declared` gets units of its own. To be called with the lock."""
        planner = self._steps.planner
        addition = await asyncio.to_thread(planner.addition, declared, self._units.next_name, self.fleet, tell)
        name, started = addition.model.name, []
        try:
            for planned in addition.units:
                tell(f"starting {planned.name} with {name}")
                started.append(await self._steps.bring_up(planned))
        except BaseException:
            for unit in started:
                await self._units.end(unit.name)
            planner.forget(name)
            raise
        for unit in started:
            self._units.announce(unit)
        self._offer(declared, addition.model, addition.scaling, addition.rolling)
        tell(f"{name} is served by {', '.join(unit.name for unit in started) or 'no unit yet'}")

    async def _join(self, declared: Fleet, to: str, tell: Tell) -> None:
        """The only model of `declared` joins a running unit. To be called with the lock."""
        planner = self._steps.planner
        running = self._units.units.get(to)
        if running is None:
            raise ChangeError(f"there is no unit {to} any more")
        joined = await asyncio.to_thread(planner.joined, declared, running.planned, self.fleet, tell)
        try:
            unit = await self._steps.join(joined, tell)
        except BaseException:
            planner.forget(joined.model.name)
            raise
        self._offer(declared, joined.model, joined.scaling)
        tell(f"{joined.model.name} is served by {unit.name}")

    async def _add_sleeping(self, declared: Fleet, to: str, tell: Tell) -> None:
        """The only model of `declared` joins a running unit in which memory decides who is awake: `to`, or the one with
        the fewest models that has room for it. It sleeps until somebody asks for it. To be called with the lock."""
        planner, (model,) = self._steps.planner, declared.models
        units = sorted(
            (unit for unit in self._units.units.values() if to in ("", unit.name)),
            key=lambda unit: (unit.planned.unit_spec.ranks, len(self.fleet.residency[unit.name].models)),
        )
        reasons: list[str] = []
        for unit in units:
            try:
                joined = await asyncio.to_thread(planner.joined, declared, unit.planned, self.fleet, tell)
                break
            except ChangeError as error:
                reasons.append(str(error))
        else:
            raise ChangeError("; ".join(reasons) or f"there is no unit {to} any more")
        assert joined.residency is not None, "memory decides in its unit"
        try:
            unit = await self._steps.declare(joined, tell, asleep=True)
        except BaseException:
            planner.forget(model.name)
            raise
        residency = {**self.fleet.residency, unit.name: joined.residency}
        self._offer(declared, joined.model, joined.scaling, residency=residency)
        tell(f"{model.name} sleeps in {unit.name} until somebody asks for it")

    def _offer(
        self,
        declared: Fleet,
        model: ModelSpec,
        scaling: ScalingRules | None,
        rolling: RollingRules | None = None,
        residency: dict[str, ResidencySpec] | None = None,
    ) -> None:
        """The fleet has that model, too, the only one of `declared`; its units have it by now."""
        name, fleet = model.name, self.fleet
        self._units.change(
            models=[*fleet.models, model],
            scaling={**fleet.scaling, **({} if scaling is None else {name: scaling})},
            rolling={**fleet.rolling, **({} if rolling is None else {name: rolling})},
            residency=fleet.residency if residency is None else residency,
        )
        self._units.publish()
        if self._declared is not None:
            self._declared = self._declared.with_models([*self._declared.models, *declared.models])

    async def _until_offered(self, model: str, tell: Tell) -> None:
        """The fleet has had `model` for a moment: wait until clients of every gateway can ask for it.

        Raises:
            ChangeError: vLLM's front end does not take it; it has been removed again.
        """
        gateways = await self._followed(tell, lambda followed: followed.knows(model))
        reason = next((each.refused[model] for each in gateways if model in each.refused), None)
        if reason is not None:
            await self.remove(model, tell)
            raise ChangeError(f"{model} cannot be offered: {reason}")

    async def _followed(
        self, tell: Tell, enough: Callable[[FollowedFleet], bool] = lambda _: True
    ) -> list[FollowedFleet]:
        """Wait until all gateways go by the fleet's file as it is now, and `enough` holds for each. Says so if one does
        not for too long. To be called without the lock."""
        generation = self.fleet.generation
        try:
            async with asyncio.timeout(_FOLLOW_SECONDS):
                return await self._effects.until_followed(lambda each: each.generation >= generation and enough(each))
        except TimeoutError:
            tell(f"a gateway has not followed within {_FOLLOW_SECONDS:g} s; until it does it serves as before")
            return []

    async def remove(self, model: str, tell: Tell) -> None:
        """See `FleetControl.remove`."""
        with contextlib.ExitStack() as leaving:
            async with self._steps.lock.alone():
                self._check(model)
                fleet = self.fleet
                self._units.change(
                    models=[each for each in fleet.models if each.name != model],
                    scaling={name: rules for name, rules in fleet.scaling.items() if name != model},
                    rolling={name: rules for name, rules in fleet.rolling.items() if name != model},
                    residency=self._steps.planner.without(model, fleet) if fleet.residency else {},
                )
                self._units.publish()
                if self._declared is not None:
                    left = [each for each in self._declared.models if each.name != model]
                    self._declared = self._declared.with_models(left)
                seconds = fleet.gateway.drain_seconds
                tell(f"no new requests for {model}; running ones have {seconds:g} s to finish")
                replicas = self._steps.replicas(model)
                for unit in replicas:
                    leaving.enter_context(self._steps.leaving([model], unit))
            # A gateway that does not know yet would still send requests to engines that end.
            await self._followed(tell)
            if not await self._steps.until_empty(model, replicas, seconds):
                tell(f"{model} may still have requests after {seconds:g} s; they end with it")
            async with self._steps.lock.alone():
                try:
                    for unit in replicas:
                        await self._steps.end_replicas([model], unit, tell)
                    for unit in self._units.units.values() if self.fleet.residency else ():
                        await unit.handle.forget(model)
                finally:
                    with contextlib.suppress(ChangeError):
                        self._steps.planner.forget(model)

    async def set_adapter(self, model: str, name: str, path: str) -> None:
        """See `FleetControl.set_adapter`."""
        async with self._steps.lock.alone():
            self._check(model)
            self._units.change(
                models=[with_adapter(each, name, path) if each.name == model else each for each in self.fleet.models]
            )
            self._units.publish()
        await self._followed(
            self._say, lambda each: model not in each.offers or each.offers[model].get(name, "") == path
        )

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
        elif isinstance(message, wire.PrefetchModel):
            await self._prefetch_wanted(message.model)
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
                        self._check(model)
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

    async def _prefetch_wanted(self, model: str) -> None:
        """Where it may be started next. Whatever keeps it from that is said when it is started."""
        for unit in list(self._units.units.values()):
            declared = any(each.name == model for each in unit.planned.unit_spec.models)
            if declared and model not in unit.serves:
                with contextlib.suppress(GaveUp):
                    await unit.handle.prefetch(model)

    async def _stop_wanted(self, message: wire.StopReplica) -> None:
        model = message.model
        async with self._lock_of(model):
            unit = self._units.units.get(message.unit)
            if unit is not None and model in unit.serves and not self._steps.is_leaving(model, message.unit):
                await self._steps.end_replicas([model], unit, self._say, message.urgent)

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
        raise ChangeError(f"{model} is served by {unit.name} alone; `muxserve scale {model}=2` first")

    def _check(self, model: str) -> None:
        if all(each.name != model for each in self.fleet.models):
            raise ChangeError(f"there is no model {model} any more")
