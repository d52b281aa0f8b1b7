"""Models that are awake in one of several units, and move between them: placement over time by KV pressure.

`muxserve.scheduling.kv_pressure` says where each model is to be. A model that sleeps is woken where the pressure is
lowest. One that is awake moves when it is much lower elsewhere: it is woken there first, and what runs finishes where
it began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muxserve.scheduling.kv_pressure import DemandedModel, Pressure, best_place, placed
from muxserve.scheduling.residency import ArrivalRates, Residence
from muxserve.simulator.clock import Clock
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.resident import ResidentModel, ResidentUnit
from muxserve.simulator.result import ReplicasResult

# Tokens of a request, and the seconds for which it is served, before any is known.
_TOKENS, _SECONDS = 500.0, 10.0
_SMOOTHING = 0.1
# Fewer requests per second are none: who asks for a model next finds it asleep.
_LEAST_RATE = 0.005


@dataclass(frozen=True, slots=True)
class HomeRules:
    """Every `period` seconds models are placed anew; arrivals count over `window` seconds.

    Raises:
        ValueError: a time that is not above zero.
    """

    period: float = 10.0
    window: float = 30.0

    def __post_init__(self) -> None:
        if not (self.period > 0 and self.window > 0):
            raise ValueError("period and window must be above zero")


@dataclass(slots=True)
class HomedModel:
    """A model: the units that can have it, the one where it is at home, and the one where it is woken to move there."""

    name: str
    units: Mapping[str, ResidentUnit]
    rates: ArrivalRates
    home: str | None = None
    next_home: str | None = None
    tokens: float = _TOKENS
    moves: int = 0


class Homes:
    """Where the models of one fleet are. Each is told to the simulation as a set of replicas, of which one counts."""

    def __init__(self, clock: Clock, rules: HomeRules) -> None:
        self.clock = clock
        self.rules = rules
        self.models: dict[str, HomedModel] = {}
        clock.at(clock.now + rules.period, self._again)

    def add(self, name: str, units: Sequence[ResidentUnit]) -> HomedReplicas:
        """A model that each of these units can have."""
        model = HomedModel(name, {each.spec.name: each for each in units}, ArrivalRates((self.rules.window,)))
        self.models[name] = model
        for unit in units:
            unit.on_wake = self._woke
        return HomedReplicas(self, model)

    def arrive(self, model: HomedModel, request: SimRequest, now: float) -> None:
        """A request goes where its model is, or is to be woken."""
        model.rates.add(now)
        model.tokens += _SMOOTHING * (request.prompt + request.output - model.tokens)
        if model.home is None or self._sleeps(model):
            waits = model.home is not None and self._resident(model).waiting
            place = best_place(self._demanded(model, now), self._pressures(model, now), model.home if waits else None)
            self._settle(model, place, now)
        assert model.home is not None, "it has just been given one"
        model.units[model.home].arrive(request, now)

    # ------------------------------------------------------------ placement

    def _resident(self, model: HomedModel) -> ResidentModel:
        assert model.home is not None, "asked of models with a home"
        return model.units[model.home].residents[model.name]

    def _sleeps(self, model: HomedModel) -> bool:
        """Whether its requests wait for a wake that has not begun."""
        return self._resident(model).residence in (Residence.ASLEEP, Residence.LEAVING)

    def _settle(self, model: HomedModel, place: str, now: float) -> None:
        """It is at home there from now on; who waits for it does so there."""
        before, model.home = model.home, place
        if before is not None and before != place:
            model.units[place].wait(model.units[before].resign(model.name), now)

    def _demanded(self, model: HomedModel, now: float) -> DemandedModel:
        unit = next(iter(model.units.values()))
        rate, costs = model.rates.most(now), unit.residency.models[model.name]
        demand = rate * _SECONDS * model.tokens * unit.token_bytes(model.name) if rate >= _LEAST_RATE else 0.0
        return DemandedModel(model.name, costs.bytes, demand)

    def _pressures(self, asking: HomedModel, now: float) -> dict[str, Pressure]:
        """Of the units that can have a model, without it."""
        found = {name: Pressure(unit.residency.rules.limit) for name, unit in asking.units.items()}
        for other in self.models.values():
            if other is not asking and other.home in found:
                there = self._resident(other)
                if there.residence is not Residence.ASLEEP or there.waiting:
                    found[other.home].add(self._demanded(other, now))
        return found

    def _again(self, now: float) -> None:
        """Place all models anew."""
        groups: dict[frozenset[str], list[HomedModel]] = {}
        for model in self.models.values():
            groups.setdefault(frozenset(model.units), []).append(model)
        for members in groups.values():
            memory = {name: unit.residency.rules.limit for name, unit in members[0].units.items()}
            there = {each.name: each.home for each in members if each.home is not None}
            demanded = [self._demanded(each, now) for each in members if each.home is not None]
            for name, place in placed(demanded, memory, there).items():
                self._move(self.models[name], place, now)
        self.clock.at(now + self.rules.period, self._again)

    def _move(self, model: HomedModel, place: str, now: float) -> None:
        if place == model.home or model.next_home is not None:
            return
        if self._sleeps(model):
            self._settle(model, place, now)
        elif self._resident(model).residence is Residence.AWAKE:
            model.next_home = place
            model.units[place].prepare(model.name, now)

    def _woke(self, unit: ResidentUnit, name: str, now: float) -> None:
        model = self.models[name]
        if model.next_home == unit.spec.name:
            model.home, model.next_home = model.next_home, None
            model.moves += 1


@dataclass
class HomedReplicas:
    """One model of `Homes`, as the simulation knows replicas."""

    homes: Homes
    homed: HomedModel
    result: ReplicasResult = field(init=False)

    def __post_init__(self) -> None:
        self.result = ReplicasResult(self.homed.name, started=1, peak=1, counts=[(0.0, 1)])

    def arrive(self, request: SimRequest, now: float) -> None:
        """A request comes in."""
        self.homes.arrive(self.homed, request, now)

    def finish(self, now: float) -> ReplicasResult:
        """What happened, once all has ended."""
        self.result.seconds = self.result.replica_seconds = now
        self.result.migrations = self.homed.moves
        return self.result
