"""Where models are to be so that no device is short of KV cache: placement by KV pressure, at first and over time.

The pressure on a device is the KV cache that the models that are awake there ask for, over what their weights leave of
its memory (Prism, arXiv:2505.04021, has such a ratio for its global scheduler to balance). Pure: told of demands and
places, it answers a place for each model (`placed`), or which model is to move next (`KvPressureMoves`). A model that
nobody asks for takes no memory, wherever it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

# Nobody moves away from a place with less pressure: a move costs a wake, and where caches have room it brings nothing.
# And a model moves only where the pressure is lower by such a part.
PRESSED, LOWER = 0.7, 0.3


@dataclass(frozen=True, slots=True)
class DemandedModel:
    """`weights` are bytes on each device; `demand` are the bytes of KV that its requests are expected to hold. `places`
    are those where it can be; None: all."""

    name: str
    weights: int
    demand: float
    places: frozenset[str] | None = None


@dataclass(slots=True)
class Pressure:
    """Of one place: bytes of memory that weights and KV share, of weights, and of KV that is asked for."""

    memory: int
    weights: int = 0
    demand: float = 0.0

    def with_model(self, model: DemandedModel) -> tuple[float, float]:
        """The pressure if the model were there, too: bytes by which weights alone are too large, and the part of the
        rest that caches ask for."""
        left = self.memory - self.weights - model.weights
        if left <= 0:
            return float(-left), math.inf
        return 0.0, (self.demand + model.demand) / left

    @property
    def now(self) -> tuple[float, float]:
        """The pressure of the models that are there, as `with_model` has it."""
        return self.with_model(DemandedModel("", 0, 0.0))

    def add(self, model: DemandedModel) -> None:
        """The model is there."""
        self.weights += model.weights
        self.demand += model.demand


def placed(
    models: Iterable[DemandedModel],
    memory: Mapping[str, int],
    there: Mapping[str, str],
) -> dict[str, str]:
    """Place models one after the other, the one with the most demand first, each where `best_place` says.

    Args:
        memory: bytes of each place.
        there: where models are; one that is nowhere has no place yet. Models that nobody asks for stay so.
    """
    pressures = {name: Pressure(size) for name, size in memory.items()}
    found = {}
    for model in sorted(models, key=lambda each: (-each.demand, each.name)):
        here = there.get(model.name)
        if model.demand <= 0.0:
            if here is not None:
                found[model.name] = here
            continue
        found[model.name] = chosen = best_place(model, pressures, here)
        pressures[chosen].add(model)
    return found


def best_place(model: DemandedModel, pressures: Mapping[str, Pressure], here: str | None) -> str:
    """Where one model is to be, beside what is there: where the pressure is lowest then. It stays `here` as long as
    that is below `PRESSED`, or nowhere lower by `LOWER`."""
    possible = [name for name in pressures if model.places is None or name in model.places]
    best = min(possible, key=lambda name: (*pressures[name].with_model(model), name != here, name))
    if here is None or here == best:
        return best
    return best if _lower(pressures[here].with_model(model), pressures[best].with_model(model)) else here


def _lower(before: tuple[float, float], after: tuple[float, float]) -> bool:
    """Whether the pressure is so much lower that a move is worth it."""
    (short, ratio), (better_short, better) = before, after
    return short > better_short or (short == better_short and ratio >= PRESSED and better < (1.0 - LOWER) * ratio)


# ---------------------------------------------------------------- over time


@dataclass(frozen=True, slots=True)
class MoveRules:
    """Every `period` seconds it is looked whether a model is to move. A model stays for `residence` seconds at least
    where it is. A move that failed is not tried again for `retry` seconds, twice as long after each further failure, up
    to `longest_retry`.

    With `together` all models are placed anew in each period, since sleeping ones move at no cost; otherwise one model
    moves at a time.

    Raises:
        ValueError: a period or retry that is not above zero, or a negative residence.
    """

    period: float = 60.0
    residence: float = 300.0
    retry: float = 120.0
    longest_retry: float = 1920.0
    together: bool = False

    def __post_init__(self) -> None:
        if not (self.period > 0 and self.retry > 0 and self.longest_retry >= self.retry):
            raise ValueError("period and retry must be above zero, and longest_retry at least retry")
        if self.residence < 0:
            raise ValueError("residence must not be below zero")


@dataclass(frozen=True, slots=True)
class ModelMove:
    """A model is to move. `pressure` is that of its place before, `then` that of its new place with it."""

    name: str
    source: str
    destination: str
    pressure: float
    then: float


class KvPressureMoves:
    """Which model moves from where to where, as time passes.

    Whoever carries a move out says that it `began`, and how it ended (`ended`, `failed`).

    Args:
        now: seconds of the clock whose time `decide` is told; the first period begins.
    """

    def __init__(self, rules: MoveRules, now: float) -> None:
        self.rules = rules
        # When it is looked next.
        self.due = now + rules.period
        self.moving: dict[str, ModelMove] = {}
        self._since: dict[str, tuple[str, float]] = {}
        # Of a model and a place: until when it does not move there, and for how long after the next failure.
        self._failed: dict[tuple[str, str], tuple[float, float]] = {}

    def decide(
        self, now: float, models: Iterable[DemandedModel], memory: Mapping[str, int], there: Mapping[str, str]
    ) -> list[ModelMove]:
        """The moves to begin now; nothing before `due`.

        Args:
            models: all that are in a place, each under a name of its own.
            memory: bytes of each place, for weights and KV.
            there: where each of the models is.
        """
        known = list(models)
        self._see(now, {model.name: there[model.name] for model in known})
        if now < self.due:
            return []
        self.due = now + self.rules.period
        bound = [replace(model, places=self._places(model, memory, there[model.name], now)) for model in known]
        pressures = {name: Pressure(size) for name, size in memory.items()}
        for model in bound:
            if model.demand > 0.0:
                pressures[there[model.name]].add(model)
        if self.rules.together:
            wanted = placed(bound, memory, there)
            changed = [model for model in bound if wanted.get(model.name, there[model.name]) != there[model.name]]
            return [_move(model, there[model.name], wanted[model.name], pressures) for model in changed]
        return [] if self.moving else _best_move(bound, pressures, there)

    def began(self, move: ModelMove) -> None:
        """The move is under way."""
        self.moving[move.name] = move

    def ended(self, name: str) -> None:
        """The model is in its new place."""
        move = self.moving.pop(name, None)
        if move is not None:
            self._failed.pop((name, move.destination), None)

    def failed(self, name: str, now: float) -> None:
        """The model stays where it was."""
        move = self.moving.pop(name, None)
        if move is not None:
            key = name, move.destination
            _, seconds = self._failed.get(key, (now, self.rules.retry))
            self._failed[key] = now + seconds, min(2.0 * seconds, self.rules.longest_retry)

    def _see(self, now: float, there: Mapping[str, str]) -> None:
        before, self._since = self._since, {}
        for name, place in there.items():
            known = before.get(name)
            self._since[name] = known if known is not None and known[0] == place else (place, now)
        self._failed = {key: value for key, value in self._failed.items() if key[0] in there}

    def _places(self, model: DemandedModel, memory: Mapping[str, int], here: str, now: float) -> frozenset[str]:
        """Where the model may be by now."""
        if now - self._since[model.name][1] < self.rules.residence:
            return frozenset((here,))
        possible = model.places if model.places is not None else memory.keys()
        shut = {place for (name, place), (until, _) in self._failed.items() if name == model.name and now < until}
        return frozenset(possible) - shut | {here}


def _move(model: DemandedModel, source: str, destination: str, pressures: Mapping[str, Pressure]) -> ModelMove:
    return ModelMove(
        model.name, source, destination, pressures[source].now[1], pressures[destination].with_model(model)[1]
    )


def _best_move(
    models: Iterable[DemandedModel], pressures: Mapping[str, Pressure], there: Mapping[str, str]
) -> list[ModelMove]:
    """The one move that is worth most, if any is:

    1. It begins where the pressure is highest, among the places that a move can help at all.
    2. In its new place the pressure is then lower than it was in the old one, by as much as `best_place` asks for. So
       the higher of the two falls: under constant demand no move is ever undone.
    3. Of several such moves, the one after which the higher pressure of the two places is lowest.
    """
    found: tuple[tuple[object, ...], ModelMove] | None = None
    for model in models:
        source = there[model.name]
        before = pressures[source].now
        if model.demand <= 0.0:
            continue
        rest = replace(pressures[source])
        rest.weights, rest.demand = rest.weights - model.weights, rest.demand - model.demand
        for place in pressures:
            if place == source or (model.places is not None and place not in model.places):
                continue
            after = pressures[place].with_model(model)
            if _lower(before, after):
                rank = (-before[0], -before[1], max(after, rest.now), model.demand, model.name, place)
                if found is None or rank < found[0]:
                    found = rank, _move(model, source, place, pressures)
    return [] if found is None else [found[1]]
