"""How often requests come for each model: averages over windows of exponential memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muxserve.scheduling.residency_types import WakeCosts


@dataclass(slots=True)
class ArrivalRates:
    """Requests per second of one model, averaged over windows (seconds) of exponential memory. `last`: when the last
    request came."""

    windows: Sequence[float]
    last: float = -math.inf
    _counts: list[float] = field(default_factory=list)

    @property
    def never(self) -> bool:
        """Whether no request has ever come."""
        return not self._counts

    def add(self, now: float) -> None:
        """A request has come."""
        self._counts = [count + 1.0 for count in self._aged(now)]
        self.last = now

    def averages(self, now: float) -> list[float]:
        """The average over each of the windows."""
        return [count / window for count, window in zip(self._aged(now), self.windows, strict=True)]

    def most(self, now: float) -> float:
        """The largest average: a burst counts at once, and a rare request is not forgotten at once."""
        return max(self.averages(now))

    def _aged(self, now: float) -> list[float]:
        if not self._counts:
            return [0.0] * len(self.windows)
        gone = max(0.0, now - self.last)
        return [count * math.exp(-gone / window) for count, window in zip(self._counts, self.windows, strict=True)]


class ModelRates:
    """The arrival rates of all models of one memory, by name."""

    def __init__(self) -> None:
        self._models: dict[str, tuple[WakeCosts, ArrivalRates]] = {}

    def change(self, windows: Sequence[float], models: Mapping[str, WakeCosts]) -> None:
        """Other models; the rates of models whose costs are the same are kept."""
        self._models = {
            name: known
            if (known := self._models.get(name)) is not None and known[0] == costs
            else (costs, ArrivalRates(windows))
            for name, costs in models.items()
        }

    def of(self, model: str) -> ArrivalRates:
        """The rates of one model."""
        return self._models[model][1]
