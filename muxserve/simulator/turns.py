"""Models of a unit that take turns, on the simulator's clock: what runs of a model is stopped between two steps, stays
as it is while others have their turns, and goes on when the model is awake again.

`muxserve.scheduling.turns` says whose turn is over. Prompts that are in an engine are computed to their end first;
those that wait there for one wait with the model. The KV of what was stopped stays as cached prefixes do, until
somebody needs the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from muxserve.scheduling.residency import Residence
from muxserve.scheduling.turns import (
    StoppedRequest,
    TurnModel,
    TurnRules,
    TurnStanding,
    next_due,
    turns_over,
    waiting_since,
)
from muxserve.simulator.engine import STEPPING
from muxserve.simulator.leased import PhaseEngine
from muxserve.simulator.requests import SimRequest

if TYPE_CHECKING:
    from muxserve.simulator.resident import ResidentModel, ResidentUnit

# How often a model that stops is looked at: what has been prefilled meanwhile stops, too.
_SWEEP_SECONDS = 0.02


@dataclass(slots=True)
class _Stopped:
    """A request that decodes, and was stopped at that time."""

    request: SimRequest
    at: float


class TurnTaking:
    """Stops models of `unit` and lets them go on. `stopped` are their requests, by model; `switches`
    counts how often a model was stopped."""

    # No dataclass: mypyc evaluates the types of its fields, and the unit's does not exist yet when this is imported.
    def __init__(self, unit: ResidentUnit, rules: TurnRules) -> None:
        self.unit = unit
        self.rules = rules
        self.stopped: dict[str, list[_Stopped]] = {}
        self.switches = 0
        self._stopping: set[str] = set()

    # ------------------------------------------------------------ what the policies are told

    def waits(self, name: str) -> bool:
        """Whether requests of the model were stopped, and are to go on."""
        return bool(self.stopped.get(name))

    def since(self, name: str, now: float) -> list[float]:
        """From when on each request that was stopped counts as waiting (`waiting_since`)."""
        costs, wake_seconds = self.unit.residency.models[name], self.unit.awake.wake_seconds(name)
        stopped = [
            StoppedRequest(each.at, next_due(each.request.arrival, each.request.made, costs.ttft, costs.tpot))
            for each in self.stopped.get(name, ())
        ]
        others = (each for each in self.unit.residents.values() if each.name != name)
        somebody = any(each.waiting and each.residence is Residence.ASLEEP for each in others)
        return waiting_since(now, stopped, self.rules, costs.ttft, wake_seconds, somebody)

    def _standing(self, model: ResidentModel) -> TurnStanding:
        unit, name = self.unit, model.name
        residency = unit.residency
        costs, rules = residency.models[name], residency.rules
        awake = model.residence in (Residence.AWAKE, Residence.LEAVING)
        return TurnStanding(
            TurnModel(
                name,
                costs.ttft,
                costs.tpot,
                unit.ledger.by_name[name].decode.step_seconds,
                unit.awake.wake_seconds(name),
                costs.bytes / (rules.limit - rules.fixed),
            ),
            model.awake_since if awake else None,
            model.residence is Residence.LEAVING,
            model.running,
            self.unit.wanted(name) and model.residence is not Residence.WAKING,
        )

    # ------------------------------------------------------------ stopping

    def decide(self, now: float) -> None:
        """Stop the models whose turns are over."""
        residents = self.unit.residents.values()
        if not any(each.residence is Residence.LEAVING and each.running for each in residents):
            return
        standings = [
            self._standing(each) for each in residents if each.running or each.waiting or self.waits(each.name)
        ]
        for name in turns_over(now, standings, self.rules):
            if name not in self._stopping:
                self._stopping.add(name)
                self.switches += 1
                self._sweep(name, now)

    def _sweep(self, name: str, now: float) -> None:
        """Stop what can be stopped now; the rest a little later."""
        unit, model = self.unit, self.unit.residents[name]
        if model.residence is not Residence.LEAVING or not model.running:
            self._stopping.discard(name)
            return
        unit.wait_again(name, now)
        engine = unit.decoder(name)
        if not isinstance(engine, PhaseEngine):
            raise TypeError("a pipeline has a unit to itself, where nobody takes turns")
        if engine.state == STEPPING:
            engine.calls.append(partial(self._between_steps, name))
            engine.interrupt(now)
        else:
            self._between_steps(name, now)
        unit.clock.at(now + _SWEEP_SECONDS, partial(self._sweep, name))

    def _between_steps(self, name: str, now: float) -> None:
        unit, model = self.unit, self.unit.residents[name]
        engine = unit.decoder(name)
        if model.residence is not Residence.LEAVING or not isinstance(engine, PhaseEngine):
            return
        stopped = self.stopped.setdefault(name, [])
        for request in list(engine.batch.running):
            blocks = unit.detach(request, now)
            unit.page_of[name].give_up(request, blocks)
            stopped.append(_Stopped(request, now))
            unit.stands_still(request, now)
        unit.sleep_if_done(model, now)

    # ------------------------------------------------------------ going on

    def go_on(self, name: str, now: float) -> None:
        """The model is awake: what was stopped is prefilled, less the blocks that are still there."""
        for each in self.stopped.pop(name, []):
            each.request.preempted(now)
            self.unit.begin_again(each.request, now)
