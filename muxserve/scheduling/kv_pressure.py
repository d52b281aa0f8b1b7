"""Where models are to be awake so that no device is short of KV cache: placement by KV pressure.

The pressure on a device is the KV cache that the models that are awake there ask for, over what their weights leave of
its memory (Prism, arXiv:2505.04021, has such a ratio for its global scheduler to balance). Pure: told of demands and
places, it answers a place for each model. A model that nobody asks for takes no memory, wherever it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Nobody moves away from a place with less pressure: a move costs a wake, and where caches have room it brings nothing.
# And a model moves only where the pressure is lower by such a part.
PRESSED, LOWER = 0.7, 0.3


@dataclass(frozen=True, slots=True)
class DemandedModel:
    """`weights` are bytes on each device; `demand` are the bytes of KV that its requests are expected to hold."""

    name: str
    weights: int
    demand: float


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
    best = min(pressures, key=lambda name: (*pressures[name].with_model(model), name != here, name))
    if here is None or here == best:
        return best
    short, ratio = pressures[here].with_model(model)
    better_short, better = pressures[best].with_model(model)
    lower = short > better_short or (ratio >= PRESSED and better < (1.0 - LOWER) * ratio)
    return best if lower else here
