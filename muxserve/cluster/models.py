"""The models that a running fleet has: one comes, in units of its own or in one that runs, and goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from muxserve.cluster.effects import FleetEffects
from muxserve.cluster.steps import Addition, FleetSteps, JoinedUnit
from muxserve.cluster.unit_set import RunningUnit, UnitSet
from muxserve.config import Fleet, Model
from muxserve.control.changes import ChangeError, NoRoomError, Tell
from muxserve.spec import FleetSpec, FollowedFleet, public_name

# A gateway builds a model's front end in a few seconds. One that hangs is killed by then, and reads the fleet's file
# when it comes up again.
FOLLOW_SECONDS = 60.0

# What was planned for a model that is new: units of its own, or one that it joins.
Planned = Addition | JoinedUnit


class FleetModels:
    """The versions of models in a fleet's file, and in its units.

    Args:
        declared: the fleet file; None: there is none.
    """

    def __init__(self, units: UnitSet, steps: FleetSteps, effects: FleetEffects, declared: Fleet | None) -> None:
        self._units = units
        self._steps = steps
        self._effects = effects
        self._declared = declared

    @property
    def fleet(self) -> FleetSpec:
        """The fleet as it is now."""
        return self._units.fleet

    @property
    def declared(self) -> Fleet:
        """What it is to be: the fleet file, with the changes that were made since.

        Raises:
            ChangeError: there is no fleet file.
        """
        if self._declared is None:
            raise ChangeError("this fleet was not started from a fleet file")
        return self._declared

    def follow(self, declared: Fleet) -> None:
        """The fleet is declared so from now on."""
        self._declared = declared

    def declare(self, model: Model) -> None:
        """A model is declared so from now on."""
        if self._declared is not None:
            models = [*self._declared.models]
            at = next((i for i, each in enumerate(models) if each.name == model.name), len(models))
            self._declared = self._declared.with_models([*models[:at], model, *models[at + 1 :]])

    def undeclare(self, name: str) -> None:
        """The fleet is not to have that model any more."""
        if self._declared is not None:
            self._declared = self._declared.with_models([m for m in self._declared.models if m.name != name])

    def version(self, model: str) -> str:
        """The version of a model that answers.

        Raises:
            ChangeError: there is none.
        """
        name = self.fleet.serving(model)
        if all(each.name != name for each in self.fleet.models):
            raise ChangeError(f"there is no model {model} any more")
        return name

    def check(self, model: str) -> None:
        """Whether the fleet has that version of a model.

        Raises:
            ChangeError: it has not.
        """
        if all(each.name != model for each in self.fleet.models):
            raise ChangeError(f"there is no model {model} any more")

    # ------------------------------------------------------------ comes

    async def plan(self, declared: Fleet, to: str, fleet: FleetSpec, tell: Tell) -> Planned:
        """What it takes to serve the only model of `declared` beside those of `fleet`: in the unit `to`; without one in
        units of its own or, where memory decides who is awake, in the unit with the fewest models that has room.

        Raises:
            NoRoomError: none has room.
            ChangeError: the model cannot be served.
        """
        planner = self._steps.planner
        if not to and not fleet.residency:
            return await asyncio.to_thread(planner.addition, declared, self._units.next_name, fleet, tell)

        def size(unit: RunningUnit) -> tuple[int, int]:
            return unit.planned.unit_spec.ranks, len(unit.planned.unit_spec.models)

        reasons: list[str] = []
        for unit in sorted((each for each in self._units.units.values() if to in ("", each.name)), key=size):
            try:
                return await asyncio.to_thread(planner.joined, declared, unit.planned, fleet, tell)
            except NoRoomError as error:
                reasons.append(str(error))
        raise NoRoomError("; ".join(reasons) or f"there is no unit {to} any more")

    async def place(self, planned: Planned, tell: Tell, candidate: bool = False) -> str:
        """Have the fleet serve a model that was planned; returns the name of its version. No client's request goes to a
        `candidate`. To be called with the lock."""
        model, fleet, residency, rolling = planned.model, self.fleet, self.fleet.residency, None
        public = public_name(model.name)
        try:
            if isinstance(planned, Addition):
                units, rolling = await self._bring_up(planned, tell), planned.rolling
                words = f"is served by {', '.join(units) or 'no unit yet'}"
            elif planned.residency is not None:
                unit = await self._steps.declare(planned, tell, asleep=True)
                residency = {**residency, unit.name: planned.residency}
                words = f"sleeps in {unit.name} until somebody asks for it"
            else:
                words = f"is served by {(await self._steps.join(planned, tell)).name}"
        except BaseException:
            self._steps.planner.forget(model.name)
            raise
        versions = {name: of for name, of in fleet.versions.items() if name != public}
        if model.name != public:
            versions[public] = model.name
        models = [*fleet.models]
        # Behind the version that it follows.
        last = max((i for i, each in enumerate(models) if public_name(each.name) == public), default=len(models))
        models.insert(last + 1, model)
        self._units.change(
            models=models,
            scaling={**fleet.scaling, **({} if planned.scaling is None else {model.name: planned.scaling})},
            rolling={**fleet.rolling, **({} if rolling is None else {model.name: rolling})},
            residency=residency,
            versions=fleet.versions if candidate else versions,
            candidates=(*fleet.candidates, *([model.name] if candidate else [])),
        )
        self._units.publish()
        tell(f"{model.name} {words}")
        return model.name

    async def _bring_up(self, addition: Addition, tell: Tell) -> list[str]:
        """Start the units of a model that is new, all or none; their names."""
        started: list[RunningUnit] = []
        try:
            for planned in addition.units:
                tell(f"starting {planned.name} with {addition.model.name}")
                started.append(await self._steps.bring_up(planned))
        except BaseException:
            for unit in started:
                await self._units.end(unit.name)
            raise
        for unit in started:
            self._units.announce(unit)
        return [unit.name for unit in started]

    # ------------------------------------------------------------ goes

    async def take_out(self, model: str, tell: Tell, seconds: float = 0.0) -> None:
        """The fleet has that version of a model no longer; its requests have `seconds` to finish."""
        with contextlib.ExitStack() as leaving:
            async with self._steps.lock.alone():
                self.check(model)
                fleet = self.fleet
                self._units.change(
                    models=[each for each in fleet.models if each.name != model],
                    scaling={name: rules for name, rules in fleet.scaling.items() if name != model},
                    rolling={name: rules for name, rules in fleet.rolling.items() if name != model},
                    residency=self._steps.planner.without(model, fleet) if fleet.residency else {},
                    versions={name: of for name, of in fleet.versions.items() if of != model},
                    candidates=tuple(name for name in fleet.candidates if name != model),
                )
                self._units.publish()
                replicas = self._steps.replicas(model)
                for unit in replicas:
                    leaving.enter_context(self._steps.leaving([model], unit))
            # A gateway that does not know yet would still send requests to engines that end.
            await self.until_followed(tell)
            if seconds and not await self._steps.until_empty(model, replicas, seconds):
                tell(f"{model} may still have requests after {seconds:g} s; they end with it")
            await self.end(model, replicas, tell)

    async def end(self, model: str, replicas: Sequence[RunningUnit], tell: Tell) -> None:
        """End the engines of a version of a model, and all that is kept for its next wake."""
        async with self._steps.lock.alone():
            try:
                for unit in replicas:
                    await self._steps.end_replicas([model], unit, tell)
                for unit in self._units.units.values() if self.fleet.residency else ():
                    await unit.handle.forget(model)
            finally:
                with contextlib.suppress(ChangeError):
                    self._steps.planner.forget(model)

    async def until_followed(
        self, tell: Tell, enough: Callable[[FollowedFleet], bool] = lambda _: True
    ) -> list[FollowedFleet]:
        """Wait until all gateways go by the fleet's file as it is now, and `enough` holds for each. Says so if one does
        not for too long. To be called without the lock."""
        generation = self.fleet.generation
        try:
            async with asyncio.timeout(FOLLOW_SECONDS):
                return await self._effects.until_followed(lambda each: each.generation >= generation and enough(each))
        except TimeoutError:
            tell(f"a gateway has not followed within {FOLLOW_SECONDS:g} s; until it does it serves as before")
            return []
