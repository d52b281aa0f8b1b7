"""Changes of a running fleet: replicas started and ended, units drained, models added and removed.

Asked for by users (`muxserve.control`) and by the global scheduler. One at a time; each either happens or leaves
everything as it was. A replica is started by giving a unit that declares the model its engines back, else as a unit of
its own; a unit that serves nothing any more is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from muxserve import wire
from muxserve.cluster.live import live_requests
from muxserve.cluster.supervision import GaveUp
from muxserve.cluster.unit_set import Unit, UnitSet
from muxserve.cluster.units import PlannedUnit
from muxserve.config import Fleet
from muxserve.control.changes import ChangeError, Tell
from muxserve.deployment import FleetDeployment, ModelDeployment
from muxserve.replicas.scaling import ScalingRules

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
# Replicas that were asked to drain get so much longer than what the gateways allow their requests at the end.
_DRAIN_MARGIN = 30.0


@dataclass(frozen=True)
class Addition:
    """A model that is new in the fleet, and the units that serve it at first. `key_levels` etc. stay as they are."""

    model: ModelDeployment
    units: tuple[PlannedUnit, ...]
    scaling: ScalingRules | None = None


class Planner(Protocol):
    """Makes units that fit into what is left. Called in a thread, since it may read files and download."""

    def unit(self, model: str, name: str, fleet: FleetDeployment) -> PlannedUnit:
        """A unit `name` with a replica of that model alone.

        Raises:
            ChangeError: there is no room, in words.
        """

    def addition(self, declared: Fleet, names: Callable[[], str], fleet: FleetDeployment, tell: Tell) -> Addition:
        """What it takes to serve the only model of `declared`, too; from `names` come names for its units.

        Raises:
            ChangeError: there is no room, or the model cannot be served, in words.
        """

    def forget(self, model: str) -> None:
        """The model is not served any more."""


class Changes:
    """The changes of one fleet: a `muxserve.control.FleetControl`, and what the global scheduler asks for.

    Args:
        planner: makes new units; None: there is nothing but the units that were started.
        send: tells the global scheduler, if there is one.
        say: told in words what the fleet does by itself.
    """

    def __init__(
        self,
        units: UnitSet,
        planner: Planner | None,
        send: Callable[[wire.Message], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self._units = units
        self._planner = planner
        self._send = send
        self._say = say
        self._lock = asyncio.Lock()
        # Replicas that somebody waits for to be drained: (model, unit).
        self._draining: dict[tuple[str, str], asyncio.Future[None]] = {}
        # Which life of the global scheduler an order is from: those of one that has died are void.
        self._life = 0

    @property
    def fleet(self) -> FleetDeployment:
        """See `FleetControl.fleet`."""
        return self._units.fleet

    # ------------------------------------------------------------ asked for by users

    async def scale(self, model: str, replicas: int, tell: Tell) -> None:
        """See `FleetControl.scale`."""
        async with self._lock:
            self._check(model)
            have = self._replicas(model)
            if replicas >= len(have):
                await self._start_several(model, replicas - len(have), tell)
                return
            surplus = await self._least_loaded(model, have, len(have) - replicas)
            await asyncio.gather(*(self._drain_and_end([model], unit, tell) for unit in surplus))

    async def drain(self, unit: str, tell: Tell) -> None:
        """See `FleetControl.drain`."""
        async with self._lock:
            leaving = self._units.units.get(unit)
            if leaving is None:
                raise ChangeError(f"there is no unit {unit} any more")
            for model in sorted(leaving.serves):
                if len(self._replicas(model)) == 1 and model not in self.fleet.scaling:
                    raise ChangeError(f"{model} is served by {unit} alone; `muxserve scale {model}=2` first")
            await self._drain_and_end(sorted(leaving.serves), leaving, tell)

    async def add(self, declared: Fleet, tell: Tell) -> None:
        """See `FleetControl.add`."""
        async with self._lock:
            if self._planner is None:
                raise ChangeError("this fleet has no place for more units")
            addition = await asyncio.to_thread(
                self._planner.addition, declared, self._units.next_name, self.fleet, tell
            )
            name, started = addition.model.name, []
            try:
                for planned in addition.units:
                    tell(f"starting {planned.name} with {name}")
                    started.append(await self._bring_up(planned))
            except BaseException:
                for unit in started:
                    await self._units.end(unit.name)
                self._planner.forget(name)
                raise
            for unit in started:
                self._units.announce(unit)
            scaling = {} if addition.scaling is None else {name: addition.scaling}
            self._units.change(models=[*self.fleet.models, addition.model], scaling={**self.fleet.scaling, **scaling})
            self._units.publish()
            tell(f"{name} is served by {', '.join(unit.name for unit in started) or 'no unit yet'}")

    async def remove(self, model: str, tell: Tell) -> None:
        """See `FleetControl.remove`."""
        async with self._lock:
            self._check(model)
            fleet = self.fleet
            self._units.change(
                models=[each for each in fleet.models if each.name != model],
                scaling={name: rules for name, rules in fleet.scaling.items() if name != model},
            )
            self._units.publish()
            tell(f"no new requests for {model}; running ones have {fleet.gateway.drain_seconds:g} s to finish")
            replicas = self._replicas(model)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fleet.gateway.drain_seconds):
                    while sum([await self._live(unit, model) for unit in replicas]):
                        await asyncio.sleep(_LOOK_SECONDS)
            for unit in replicas:
                await self._end_replicas([model], unit, tell)
            if self._planner is not None:
                self._planner.forget(model)

    # ------------------------------------------------------------ asked for by the global scheduler

    def scheduler_up(self) -> None:
        """A global scheduler has come up: the one before may have been asked for things that the new one knows not."""
        self._life += 1

    async def resend(self) -> None:
        """Tell a new global scheduler what is to be drained."""
        for model, unit in list(self._draining):
            await self._send(wire.DrainReplicas(unit, [model]))

    async def handle(self, message: wire.Message) -> None:
        """Do what the global scheduler wants."""
        if isinstance(message, wire.StartReplicas):
            await self._start_wanted(message.model, message.count)
        elif isinstance(message, wire.StopReplica):
            waiting = self._draining.get((message.model, message.unit))
            if waiting is None:
                await self._stop_wanted(message.model, message.unit)
            elif not waiting.done():
                waiting.set_result(None)
        else:
            log.warning("unexpected %s from the global scheduler", type(message).__name__)

    async def _start_wanted(self, model: str, count: int) -> None:
        life = self._life
        for _ in range(count):
            async with self._lock:
                if life != self._life:
                    return
                try:
                    rules = self.fleet.scaling.get(model)
                    if rules is not None and len(self._replicas(model)) >= rules.maximum:
                        raise ChangeError(f"{model} has {rules.maximum} replicas already")
                    self._check(model)
                    await self._start_several(model, 1, self._say)
                except ChangeError as error:
                    self._say(f"no replica of {model} more: {error}")
                    await self._send(wire.StartFailed(model, str(error)))

    async def _stop_wanted(self, model: str, name: str) -> None:
        async with self._lock:
            unit = self._units.units.get(name)
            if unit is not None and model in unit.serves:
                await self._end_replicas([model], unit, self._say)

    # ------------------------------------------------------------ steps: up

    async def _start_several(self, model: str, count: int, tell: Tell) -> None:
        """Start replicas, all or none."""
        started: list[Unit] = []
        try:
            for _ in range(count):
                started.append(await self._start_one(model, tell))
        except BaseException:
            for unit in started:
                await self._end_replicas([model], unit, tell)
            raise

    async def _start_one(self, model: str, tell: Tell) -> Unit:
        idle = [
            unit
            for unit in self._units.units.values()
            if unit.announced
            and model not in unit.serves
            and unit.handle.ready.is_set()
            and any(each.name == model for each in unit.planned.deployment.models)
        ]
        if idle:
            unit = idle[0]
            tell(f"starting {model} in {unit.name}")
            try:
                await unit.handle.start_model(model)
            except GaveUp as failure:
                raise ChangeError(f"{failure.part} cannot start: {failure}") from None
        else:
            if self._planner is None:
                raise ChangeError("this fleet has no place for more units")
            planned = await asyncio.to_thread(self._planner.unit, model, self._units.next_name(), self.fleet)
            offered = next(each for each in self.fleet.models if each.name == model)
            longest = planned.deployment.model(model).max_len
            if longest < offered.max_len:
                raise ChangeError(f"a replica more would hold {longest} tokens of a request, not {offered.max_len}")
            tell(f"starting {planned.name} with {model}")
            unit = await self._bring_up(planned)
            self._units.announce(unit)
        unit.serves.add(model)
        self._units.publish()
        tell(f"{model} is served by {unit.name}")
        return unit

    async def _bring_up(self, planned: PlannedUnit) -> Unit:
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
            raise ChangeError(f"{failure.part.within(name)} cannot start: {failure}") from None
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

    async def _least_loaded(self, model: str, units: Sequence[Unit], count: int) -> list[Unit]:
        """Those that are missed least: with the fewest requests, among these with the fewest other models."""
        live = [await self._live(unit, model) for unit in units]
        order = sorted(range(len(units)), key=lambda i: (live[i], len(units[i].serves), -i))
        return [units[i] for i in order[:count]]

    async def _drain_and_end(self, models: Sequence[str], unit: Unit, tell: Tell) -> None:
        """Have replicas of a unit emptied, and end them. What is left when the time is over is computed again in other
        units, so nothing is lost by that."""
        waiting = {
            (model, unit.name): asyncio.get_running_loop().create_future()
            for model in models
            if self.fleet.placed_by_scheduler(model)
        }
        if waiting:
            tell(f"draining {', '.join(model for model, _ in waiting)} in {unit.name}")
            self._draining.update(waiting)
            seconds = self.fleet.gateway.drain_seconds + _DRAIN_MARGIN
            try:
                await self._send(wire.DrainReplicas(unit.name, [model for model, _ in waiting]))
                _, late = await asyncio.wait(waiting.values(), timeout=seconds)
                if late:
                    tell(f"{unit.name} is not empty after {seconds:g} s; what is left is computed again elsewhere")
            finally:
                for key in waiting:
                    self._draining.pop(key, None)
        await self._end_replicas(models, unit, tell)

    async def _end_replicas(self, models: Sequence[str], unit: Unit, tell: Tell) -> None:
        """Have nobody sent there any more, and end the engines; and the unit, if there is nothing left in it."""
        unit.serves.difference_update(models)
        if unit.serves:
            self._units.publish()
            for model in models:
                await unit.handle.stop_model(model)
            tell(f"{', '.join(models)} is not served by {unit.name} any more")
        else:
            unit.announced = False
            self._units.publish()
            await self._units.end(unit.name)
            tell(f"{unit.name} has ended")

    # ------------------------------------------------------------ details

    def _check(self, model: str) -> None:
        if all(each.name != model for each in self.fleet.models):
            raise ChangeError(f"there is no model {model} any more")

    def _replicas(self, model: str) -> list[Unit]:
        return [unit for unit in self._units.units.values() if unit.announced and model in unit.serves]

    async def _live(self, unit: Unit, model: str) -> int:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return live_requests(await unit.handle.state(), model)
        return 0  # nobody is there to have any
