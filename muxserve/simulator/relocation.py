"""Models that are awake in one of several units, and move between them: placement over time by KV pressure.

`muxserve.scheduling.kv_pressure` says where each model is to be, with the class that serves live fleets. A model that
sleeps is woken where the pressure is lowest. One that is awake moves when it is much lower elsewhere: it is woken there
first, and what runs finishes where it began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from muxserve.scheduling.kv_pressure import DemandedModel, KvPressureMoves, ModelMove, MoveRules, Pressure, best_place
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
class RelocationRules:
    """Every `period` seconds models are placed anew, all `together` or one at a time, none that has been in its unit
    for less than `residence` seconds; arrivals count over `window` seconds.

    Raises:
        ValueError: a time that is not above zero.
    """

    period: float = 10.0
    window: float = 30.0
    residence: float = 0.0
    together: bool = True

    def __post_init__(self) -> None:
        if not (self.period > 0 and self.window > 0):
            raise ValueError("period and window must be above zero")

    @property
    def moves(self) -> MoveRules:
        """As `KvPressureMoves` wants them."""
        return MoveRules(self.period, self.residence, together=self.together)


@dataclass(slots=True)
class RelocatableModel:
    """A model: the units that can have it, the one that serves it, and the one where it is woken to move there."""

    name: str
    units: Mapping[str, ResidentUnit]
    rates: ArrivalRates
    unit: str | None = None
    moving_to: str | None = None
    tokens: float = _TOKENS
    moves: int = 0


class Relocation:
    """Where the models of one fleet are. Each is told to the simulation as a set of replicas, of which one counts."""

    def __init__(self, clock: Clock, rules: RelocationRules) -> None:
        self.clock = clock
        self.rules = rules
        self.models: dict[str, RelocatableModel] = {}
        self._moves = KvPressureMoves(rules.moves, clock.now)
        clock.at(clock.now + rules.period, self._again)

    def add(self, name: str, units: Sequence[ResidentUnit]) -> RelocatableReplicas:
        """A model that each of these units can have."""
        model = RelocatableModel(name, {each.spec.name: each for each in units}, ArrivalRates((self.rules.window,)))
        self.models[name] = model
        for unit in units:
            unit.on_wake = self._woke
        return RelocatableReplicas(self, model)

    def arrive(self, model: RelocatableModel, request: SimRequest, now: float) -> None:
        """A request goes where its model is, or is to be woken."""
        model.rates.add(now)
        model.tokens += _SMOOTHING * (request.prompt + request.output - model.tokens)
        if model.unit is None or self._sleeps(model):
            waits = model.unit is not None and model.units[model.unit].wanted(model.name)
            place = best_place(self._demanded(model, now), self._pressures(model, now), model.unit if waits else None)
            self._settle(model, place, now)
        assert model.unit is not None, "it has just been given one"
        model.units[model.unit].arrive(request, now)

    # ------------------------------------------------------------ placement

    def _resident(self, model: RelocatableModel) -> ResidentModel:
        assert model.unit is not None, "asked of models that have a unit"
        return model.units[model.unit].residents[model.name]

    def _sleeps(self, model: RelocatableModel) -> bool:
        """Whether its requests wait for a wake that has not begun."""
        return self._resident(model).residence in (Residence.ASLEEP, Residence.LEAVING)

    def _stopped(self, model: RelocatableModel) -> bool:
        """Whether its unit has the KV of requests that are to go on there, or may come to have it."""
        unit = model.units[model.unit] if model.unit is not None else None
        if unit is None or unit.turn_taking is None:
            return False
        return unit.turn_taking.waits(model.name) or unit.residents[model.name].running > 0

    def _settle(self, model: RelocatableModel, place: str, now: float) -> None:
        """The unit at `place` serves it from now on; who waits for it does so there."""
        before, model.unit = model.unit, place
        if before is not None and before != place:
            model.units[place].wait(model.units[before].resign(model.name), now)

    def _demanded(self, model: RelocatableModel, now: float) -> DemandedModel:
        unit = next(iter(model.units.values()))
        rate, costs = model.rates.most(now), unit.residency.models[model.name]
        demand = rate * _SECONDS * model.tokens * unit.token_bytes(model.name) if rate >= _LEAST_RATE else 0.0
        return DemandedModel(model.name, costs.bytes, demand)

    def _pressures(self, asking: RelocatableModel, now: float) -> dict[str, Pressure]:
        """Of the units that can have a model, without it."""
        found = {name: Pressure(unit.residency.rules.limit) for name, unit in asking.units.items()}
        for other in self.models.values():
            if other is not asking and other.unit in found:
                there = self._resident(other)
                if there.residence is not Residence.ASLEEP or other.units[other.unit].wanted(other.name):
                    found[other.unit].add(self._demanded(other, now))
        return found

    def _again(self, now: float) -> None:
        """Place all models anew."""
        there = {each.name: each.unit for each in self.models.values() if each.unit is not None}
        units = {name: unit for each in self.models.values() for name, unit in each.units.items()}
        memory = {name: unit.residency.rules.limit for name, unit in units.items()}
        demanded = [
            replace(self._demanded(self.models[name], now), places=frozenset(self.models[name].units)) for name in there
        ]
        for move in self._moves.decide(now, demanded, memory, there):
            self._move(self.models[move.name], move, now)
        self.clock.at(now + self.rules.period, self._again)

    def _move(self, model: RelocatableModel, move: ModelMove, now: float) -> None:
        place = move.destination
        if model.moving_to is not None or self._stopped(model):
            return
        if self._sleeps(model):
            self._settle(model, place, now)
        elif self._resident(model).residence is Residence.AWAKE:
            model.moving_to = place
            self._moves.began(move)
            model.units[place].prepare(model.name, now)

    def _woke(self, unit: ResidentUnit, name: str, now: float) -> None:
        model = self.models[name]
        if model.moving_to == unit.spec.name:
            model.unit, model.moving_to = model.moving_to, None
            model.moves += 1
            self._moves.ended(name)


@dataclass
class RelocatableReplicas:
    """One model of `Relocation`, as the simulation knows replicas."""

    relocation: Relocation
    model: RelocatableModel
    result: ReplicasResult = field(init=False)

    def __post_init__(self) -> None:
        self.result = ReplicasResult(self.model.name, started=1, peak=1, counts=[(0.0, 1)])

    def arrive(self, request: SimRequest, now: float) -> None:
        """A request comes in."""
        self.relocation.arrive(self.model, request, now)

    def finish(self, now: float) -> ReplicasResult:
        """What happened, once all has ended."""
        self.result.seconds = self.result.replica_seconds = now
        self.result.migrations = self.model.moves
        return self.result
