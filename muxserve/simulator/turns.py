"""Models of a unit that take turns, on the simulator's clock: what runs of a model is stopped between two steps, stays
as it is while others have their turns, and goes on when the model is awake again.

`muxserve.scheduling.turns` says whose turn is over. Prompts that are in an engine are computed to their end first;
those that wait there for one wait with the model. The KV of what was stopped stays as cached prefixes do, until
somebody needs the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from muxserve.scheduling.residency import Residency
from muxserve.scheduling.residency_types import Residence
from muxserve.scheduling.turns import (
    StoppedRequest,
    TurnModel,
    TurnRules,
    TurnStanding,
    next_due,
    turns_over,
    waiting_since,
)
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.job import STEPPING
from muxserve.simulator.leased import PhaseEngine
from muxserve.simulator.machine import UnitMachine
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.resident_model import ResidentModel
from muxserve.simulator.scheduler import LeaseScheduler
from muxserve.simulator.setup import SimResidency

# How often a model that stops is looked at: what has been prefilled meanwhile stops, too.
_SWEEP_SECONDS = 0.02


@dataclass(slots=True)
class _Stopped:
    """A request that decodes, and was stopped at that time."""

    request: SimRequest
    at: float


class TurnResidents(Protocol):
    """What turns ask of the residency of their models."""

    residency: SimResidency
    awake: Residency
    models: dict[str, ResidentModel]

    def wanted(self, name: str) -> bool:
        """Whether requests wait for the model to be awake."""
        ...

    def wait_again(self, name: str, now: float) -> None:
        """What waits in the unit's queue for the model waits for it to be awake again."""
        ...

    def stands_still(self, request: SimRequest, now: float) -> None:
        """The unit computes nothing of the request for now."""
        ...

    def begin_again(self, request: SimRequest, now: float) -> None:
        """A request that was detached is served once more."""
        ...

    def sleep_if_done(self, model: ResidentModel, now: float) -> None:
        """A model that leaves has gone when nothing of it runs."""
        ...


class TurnTaking:
    """Stops models of a unit and lets them go on. `stopped` are their requests, by model; `switches` counts how often
    a model was stopped."""

    def __init__(
        self, machine: UnitMachine, scheduler: LeaseScheduler, residents: TurnResidents, rules: TurnRules
    ) -> None:
        self.machine = machine
        self.scheduler = scheduler
        self.residents = residents
        self.rules = rules
        self.stopped: dict[str, list[_Stopped]] = {}
        self.switches = 0
        self._stopping: set[str] = set()

    # ------------------------------------------------------------ what the policies take

    def waits(self, name: str) -> bool:
        """Whether requests of the model were stopped, and are to go on."""
        return bool(self.stopped.get(name))

    def since(self, name: str, now: float) -> list[float]:
        """From when on each request that was stopped counts as waiting (`waiting_since`)."""
        costs, wake_seconds = self.residents.residency.models[name], self.residents.awake.times.seconds(name)
        stopped = [
            StoppedRequest(each.at, next_due(each.request.arrival, each.request.made, costs.ttft, costs.tpot))
            for each in self.stopped.get(name, ())
        ]
        others = (each for each in self.residents.models.values() if each.name != name)
        somebody = any(each.waiting and each.residence is Residence.ASLEEP for each in others)
        return waiting_since(now, stopped, self.rules, costs.ttft, wake_seconds, somebody)

    def _standing(self, model: ResidentModel) -> TurnStanding:
        name, residency = model.name, self.residents.residency
        costs, rules = residency.models[name], residency.rules
        awake = model.residence in (Residence.AWAKE, Residence.LEAVING)
        return TurnStanding(
            TurnModel(
                name,
                costs.ttft,
                costs.tpot,
                self.scheduler.ledger.by_name[name].decode.step_seconds,
                self.residents.awake.times.seconds(name),
                costs.bytes / (rules.limit - rules.always),
            ),
            model.awake_since if awake else None,
            model.residence is Residence.LEAVING,
            model.running,
            self.residents.wanted(name) and model.residence is not Residence.WAKING,
        )

    # ------------------------------------------------------------ stopping

    def decide(self, now: float) -> None:
        """Stop the models whose turns are over."""
        residents = self.residents.models.values()
        if not any(each.residence is Residence.LEAVING and each.running for each in residents):
            return
        standings = [
            self._standing(each) for each in residents if each.running or each.waiting or self.waits(each.name)
        ]
        for name in turns_over(now, standings, self.rules):
            if name not in self._stopping:
                self._stopping.add(name)
                self.switches += 1
                self.sweep(name, now)

    def sweep(self, name: str, now: float) -> None:
        """Stop what can be stopped now, and what is prefilled meanwhile a little later."""
        model = self.residents.models[name]
        if model.residence is not Residence.LEAVING or not model.running:
            self._stopping.discard(name)
            return
        self.residents.wait_again(name, now)
        engine = self.scheduler.decoder(name)
        if not isinstance(engine, PhaseEngine):
            raise TypeError("a pipeline has a unit to itself, where nobody takes turns")
        if engine.state == STEPPING:
            engine.calls.append(partial(self._between_steps, name))
            engine.interrupt(now)
        else:
            self._between_steps(name, now)
        self.machine.clock.at(now + _SWEEP_SECONDS, _SweepDue(self, name))

    def _between_steps(self, name: str, now: float) -> None:
        model, engine = self.residents.models[name], self.scheduler.decoder(name)
        if model.residence is not Residence.LEAVING or not isinstance(engine, PhaseEngine):
            return
        stopped = self.stopped.setdefault(name, [])
        for request in list(engine.batch.running):
            if not self.scheduler.decodes(request):
                continue  # the report of its first token is under way: the next sweep stops it
            blocks = self.scheduler.detach(request, now)
            self.machine.pages.of[name].give_up(request, blocks)
            stopped.append(_Stopped(request, now))
            self.residents.stands_still(request, now)
        self.residents.sleep_if_done(model, now)

    # ------------------------------------------------------------ going on

    def go_on(self, name: str, now: float) -> None:
        """The model is awake: what was stopped is prefilled, less the blocks that are still there."""
        for each in self.stopped.pop(name, []):
            each.request.preempted(now)
            self.residents.begin_again(each.request, now)


@dataclass(slots=True)
class _SweepDue(TimedEvent):
    """A model that stops is looked at again."""

    turn_taking: TurnTaking
    model: str

    def handle(self, now: float) -> None:
        self.turn_taking.sweep(self.model, now)
