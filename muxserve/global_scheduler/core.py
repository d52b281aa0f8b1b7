"""Messages in, messages out: the global scheduler without its sockets and clock.

`handle` takes a message and the time, `tick` returns the messages to send. One `ModelSchedulerBase` per model decides;
here is which units are alive, who is asked what, and what the fleet file says.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from muxserve.global_scheduler.memory_balance import MemoryBalance, together
from muxserve.global_scheduler.model_scheduler import ModelScheduler
from muxserve.global_scheduler.model_scheduler_base import ModelSchedulerBase, Rules
from muxserve.global_scheduler.outbox import Destination, Outbox, ToClient, ToUnit
from muxserve.global_scheduler.resident_scheduler import ResidentScheduler
from muxserve.global_scheduler.rolling_scheduler import RollingModelScheduler
from muxserve.net.sockets import tcp_address
from muxserve.replicas.priorities import Levels
from muxserve.spec import FleetSpec, UnitEntry
from muxserve.wire import (
    ControllerHello,
    DrainReplicas,
    Loads,
    MemoryReport,
    Message,
    NotPlaced,
    Paired,
    Place,
    ReplicaEnded,
    RollingReport,
    SchedulerHello,
    SetRoom,
    StartFailed,
    StateReply,
    StateRequest,
    StopReplica,
    Unplace,
)

log = logging.getLogger(__name__)

# One round: pairs, scaling, and who waits in vain.
TICK_SECONDS = 0.1
# A unit reports every second at least.
SILENCE_SECONDS = 3.0
# A gateway may have read of a new model before we have.
UNKNOWN_MODEL_SECONDS = 1.0


@dataclass(slots=True)
class UnitSeen:
    """A unit of the fleet: whether its scheduler is up, and which models it has reported."""

    heard_at: float
    up: bool = False
    epoch: str = ""
    models: set[str] = field(default_factory=set)


class SchedulerCore:
    """All models of the fleet.

    Args:
        epoch: new for each process.
        now: seconds of the machine's monotonic clock.

    Raises:
        ValueError: the fleet's rules contradict each other.
    """

    def __init__(self, fleet: FleetSpec, epoch: str, now: float) -> None:
        self.epoch = epoch
        self.fleet = fleet
        self._out = Outbox()
        self._model_schedulers: dict[str, ModelSchedulerBase] = {}
        self._units: dict[str, UnitSeen] = {}
        self._entries: dict[str, UnitEntry] = {}
        # By unit in which memory decides which models are awake.
        self._balances: dict[str, MemoryBalance] = {}
        self._resident: dict[str, ResidentScheduler] = {}
        # Orders that came before the fleet file that they are about.
        self._early: list[DrainReplicas] = []
        self._unknown: list[tuple[float, bytes, Place]] = []
        self._started = now
        self._tick_at = now
        self._due_at = math.inf
        self.change(fleet, now)

    # ------------------------------------------------------------ the two sides

    def handle(self, peer: Destination, message: Message, now: float) -> None:
        """Take in a message."""
        match peer, message:
            case ToUnit(name), Loads():
                self._loads(name, message, now)
            case ToUnit(name), RollingReport():
                self._rolled(name, message, now)
            case ToClient(identity), Place():
                self._place(identity, message, now)
            case ToClient(identity), Unplace():
                self._unplace(identity, message)
            case ToClient(identity), ControllerHello():
                log.info("the controller is here")
                self._out.controller_is(identity)
            case ToClient(), StartFailed():
                model_scheduler = self._model_schedulers.get(message.model)
                if model_scheduler is not None:
                    model_scheduler.start_failed(message.reason, now, message.broken)
            case ToClient(), MemoryReport():
                if (balance := self._balances.get(message.unit)) is not None:
                    balance.reported(message, self._residents(balance), now)
            case ToClient(), ReplicaEnded():
                if message.model in self._resident:
                    self._resident[message.model].ended(message.unit, now)
            case ToClient(), DrainReplicas():
                self._drain(message, now)
            case ToClient(identity), StateRequest():
                self._out.to_client(identity, StateReply(self.state(now)))
            case _:
                log.warning("unexpected %s from %s", type(message).__name__, peer)

    def tick(self, now: float) -> list[tuple[Destination, Message]]:
        """Decide on what has been heard; returns messages and whom to send them to, in order."""
        if now >= self._tick_at:
            self._tick_at = now + TICK_SECONDS
            self._round(now)
        elif now >= self._due_at:
            for model_scheduler in self._model_schedulers.values():
                model_scheduler.hurry(now)
        for unit, balance in self._balances.items():
            balance.decide(self._residents(balance), now)
            if (room := balance.room(now)) is not None:
                self._out.to_unit(unit, SetRoom(room))
        self._due_at = min(
            (model_scheduler.due(now) for model_scheduler in self._model_schedulers.values()), default=math.inf
        )
        return self._out.take()

    def wakeup(self) -> float:
        """When `tick` is due although no message came."""
        return min(self._tick_at, self._due_at)

    def unit_gone(self, unit: str, now: float) -> None:
        """The connection to a unit has ended."""
        seen = self._units.get(unit)
        if seen is not None and seen.up:
            log.warning("unit %s is gone", unit)
            self._down(unit, seen, now)

    def returned(self, peer: Destination, message: Message) -> None:
        """A message could not be sent, since there is nobody of that identity."""
        if isinstance(peer, ToClient):
            self._out.returned(peer.identity, message)
            for model_scheduler in self._model_schedulers.values():
                model_scheduler.forget(peer.identity)

    def change(self, fleet: FleetSpec, now: float) -> None:
        """The controller has written another fleet file: units and models have come, gone or changed.

        Raises:
            ValueError: its rules contradict each other; then nothing has changed.
        """
        rules = self._rules(fleet)
        suspected = self._suspects()
        before, self.fleet = self._entries, fleet
        self._entries = {unit.name: unit for unit in fleet.units}
        for name in self._units.keys() - self._entries.keys():
            self._down(name, self._units.pop(name), now)
        for name in self._entries.keys() - self._units.keys():
            self._units[name] = UnitSeen(now)
        for name in self._entries.keys() & before.keys():
            # What it has reported of these models was of no interest until now.
            if self._units[name].up and set(self._entries[name].serves) - set(before[name].serves):
                self._out.to_unit(name, SchedulerHello(self.epoch))
        for name in self._model_schedulers.keys() - rules.keys():
            self._model_schedulers.pop(name).close()
        for name in sorted(rules):
            serves = [unit.name for unit in fleet.replicas(name)]
            before_it = self._model_schedulers.get(name)
            if before_it is not None and type(before_it) is self._kind(name, rules[name]):
                before_it.change(rules[name], serves, now)
                continue
            kind = self._kind(name, rules[name])
            if issubclass(kind, ModelScheduler):
                model_scheduler: ModelSchedulerBase = kind(name, rules[name], serves, self._out)
            else:
                model_scheduler = RollingModelScheduler(name, rules[name], serves, self._out, self.epoch, now)
            self._model_schedulers[name] = model_scheduler
            if before_it is not None:
                # Units report their replicas to it anew; who waits goes on waiting.
                for unit in serves:
                    if self._units[unit].up:
                        self._out.to_unit(unit, SchedulerHello(self.epoch))
                model_scheduler.take_over(before_it, now)
        self._resident = {
            name: each for name, each in self._model_schedulers.items() if isinstance(each, ResidentScheduler)
        }
        known, self._balances = self._balances, {}
        for unit, spec in fleet.residency.items():
            balance = self._balances[unit] = known.get(unit) or MemoryBalance(spec)
            balance.change(spec)
        self._suspect(suspected, now)
        early, self._early = self._early, []
        for drain in early:
            self._drain(drain, now)
        waiting, self._unknown = self._unknown, []
        for until, peer, place in waiting:
            self._place(peer, place, now, until)

    def _kind(self, name: str, rules: Rules) -> type[ModelSchedulerBase]:
        """What schedules a model."""
        if rules.rolling is not None:
            return RollingModelScheduler
        return ResidentScheduler if self.fleet.is_resident(name) and rules.scaling else ModelScheduler

    def _residents(self, balance: MemoryBalance) -> dict[str, ResidentScheduler]:
        """The schedulers of the models that share that memory."""
        return {name: self._resident[name] for name in balance.models if name in self._resident}

    def _suspects(self) -> set[tuple[str, str]]:
        return {(each.unit, model) for each in self.fleet.suspects for model in each.models}

    def _suspect(self, before: set[tuple[str, str]], now: float) -> None:
        """A replica with a process that gives no sign of life counts as gone until it gives them again."""
        suspects = self._suspects()
        for unit, model in suspects - before:
            seen = self._units.get(unit)
            if seen is not None and model in seen.models and model in self._model_schedulers:
                log.warning("%s in %s gives no sign of life", model, unit)
                seen.models.discard(model)
                self._model_schedulers[model].gone(unit, now)
        for unit in {unit for unit, _ in before - suspects}:
            if unit in self._units and self._units[unit].up:
                self._out.to_unit(unit, SchedulerHello(self.epoch))

    def _rules(self, fleet: FleetSpec) -> dict[str, Rules]:
        """The rules of each model of the fleet.

        Raises:
            ValueError: rules contradict each other.
        """
        for rolling in fleet.rolling.values():
            _ = rolling.objectives, rolling.bounds
        return {
            model.name: Rules(
                self._levels(fleet, model.name),
                fleet.migration,
                fleet.scaling.get(model.name),
                fleet.rolling.get(model.name),
                fleet.dispatch if model.prefix_caching else "freest",
            )
            for model in fleet.models
        }

    def _levels(self, fleet: FleetSpec, model: str) -> Levels:
        """The model's levels; the ones that it has if they are equal, which keep what they have worked out."""
        levels, known = fleet.priority_levels(model), self._model_schedulers.get(model)
        return known.rules.levels if known is not None and known.rules.levels == levels else levels

    def state(self, now: float) -> dict[str, object]:
        """Everything as JSON-ready data."""
        return {
            "epoch": self.epoch,
            "generation": self.fleet.generation,
            "uptime_seconds": now - self._started,
            "memory": together({unit: each.state(self._residents(each), now) for unit, each in self._balances.items()}),
            "units": {name: {"up": seen.up, "epoch": seen.epoch} for name, seen in sorted(self._units.items())},
            "models": {
                name: model_scheduler.state(now) for name, model_scheduler in sorted(self._model_schedulers.items())
            },
        }

    # ------------------------------------------------------------ units

    def _loads(self, unit: str, message: Loads, now: float) -> None:
        seen = self._heard(unit, message, now)
        if seen is None:
            return
        loads = {load.model: load for load in message.loads}
        if message.pools is not None and (balance := self._balances.get(unit)) is not None:
            balance.pools_reported(message.pools)
        # What the fleet file does not name is about to go, or its file is about to be read.
        models = {
            name
            for name in self._entries[unit].serves
            if name in loads and name in self._model_schedulers and not self.fleet.is_suspect(unit, name)
        }
        for name in seen.models - models:
            if name in self._model_schedulers:
                self._model_schedulers[name].gone(unit, now)
        seen.models = models
        for name in models:
            self._model_schedulers[name].report(unit, loads[name], message.came, now)

    def _rolled(self, unit: str, message: RollingReport, now: float) -> None:
        seen = self._heard(unit, message, now)
        model_scheduler = self._model_schedulers.get(message.model)
        if (
            seen is None
            or not isinstance(model_scheduler, RollingModelScheduler)
            or self.fleet.is_suspect(unit, message.model)
        ):
            return
        if message.model in self._entries[unit].serves:
            seen.models.add(message.model)
            model_scheduler.rolled(unit, message, now)

    def _heard(self, unit: str, message: Loads | RollingReport, now: float) -> UnitSeen | None:
        """A unit is there; None: what it says is not of interest."""
        seen = self._units.get(unit)
        if seen is None:
            return None  # it left the fleet while this was on its way
        if message.unit != unit:
            log.warning("what listens at the address of unit %s is unit %s", unit, message.unit)
            return None
        if seen.up and seen.epoch != message.epoch:
            log.warning("the scheduler of unit %s was started anew", unit)
            self._down(unit, seen, now)
        if not seen.up:
            log.info("unit %s is up", unit)
        seen.heard_at, seen.up, seen.epoch = now, True, message.epoch
        return seen

    def _down(self, unit: str, seen: UnitSeen, now: float) -> None:
        seen.up = False
        models, seen.models = seen.models, set()
        for name in models:
            if name in self._model_schedulers:
                self._model_schedulers[name].gone(unit, now)

    def _drain(self, message: DrainReplicas, now: float) -> None:
        if message.generation > self.fleet.generation:
            self._early.append(message)
            return
        for name in message.models:
            model_scheduler = self._model_schedulers.get(name)
            if model_scheduler is None:
                self._out.to_controller(StopReplica(name, message.unit))
            else:
                model_scheduler.drain(message.unit, now)

    # ------------------------------------------------------------ requests

    def _place(self, peer: bytes, message: Place, now: float, until: float | None = None) -> None:
        model_scheduler = self._model_schedulers.get(message.model)
        if model_scheduler is not None:
            model_scheduler.place(peer, message, now)
        else:
            self._unknown.append((now + UNKNOWN_MODEL_SECONDS if until is None else until, peer, message))

    def _unplace(self, peer: bytes, message: Unplace) -> None:
        for request_id in message.request_ids:
            if not any(
                model_scheduler.unplace(peer, request_id) for model_scheduler in self._model_schedulers.values()
            ):
                self._unknown = [u for u in self._unknown if (u[1], u[2].request_id) != (peer, request_id)]

    # ------------------------------------------------------------ rounds

    def _round(self, now: float) -> None:
        for name, seen in self._units.items():
            if now - seen.heard_at < SILENCE_SECONDS:
                continue
            if seen.up:
                log.warning("unit %s has been silent for %g s", name, now - seen.heard_at)
                self._down(name, seen, now)
            # It may have forgotten us.
            seen.heard_at = now
            self._out.to_unit(name, SchedulerHello(self.epoch))
        for resident in self._resident.values():
            resident.changed = True  # time itself changes who may go, and who has waited for too long
        for model_scheduler in self._model_schedulers.values():
            model_scheduler.tick(now)
            for source, destination, load in model_scheduler.pairs():
                address = self._migrator(source, destination)
                if address:
                    self._out.to_unit(source, Paired(model_scheduler.model, destination, address, load))
        if self._unknown:
            for until, peer, place in self._unknown:
                if now >= until:
                    reason = f"there is no model {place.model!r} in the fleet"
                    self._out.to_client(peer, NotPlaced(place.request_id, reason, late=False))
            self._unknown = [each for each in self._unknown if now < each[0]]

    def _migrator(self, source: str, destination: str) -> str:
        """Where the destination's migrator is reached from the source; empty: it is not."""
        here, there = self._entries[source], self._entries[destination]
        if not here.remote:
            return there.migrator_address
        # Unix sockets of this machine are no good over there.
        listen = there.unit_spec.listen
        return "" if listen is None else tcp_address(listen.host, listen.migrator_port)
