"""Which awake models are put to sleep when others need their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from muxserve.scheduling.arrival_rates import ModelRates
from muxserve.scheduling.model_sizes import ModelSizes
from muxserve.scheduling.residency_types import Residence, ResidencyRules, Standing, WakeCosts
from muxserve.scheduling.wake_times import WakeTimes

# Models that nobody has asked for sleep in the order of their bytes: their rate counts as this, requests per second.
_LEAST_RATE = 1e-6


class SleepOrder:
    """Idle models sleep before busy ones, and then those first whose absence costs least per byte."""

    def __init__(
        self,
        rules: ResidencyRules,
        models: Mapping[str, WakeCosts],
        sizes: ModelSizes,
        times: WakeTimes,
        rates: ModelRates,
    ) -> None:
        self._rules, self._models = rules, models
        self._sizes, self._times, self._rates = sizes, times, rates

    def absence_cost(self, model: str, now: float) -> float:
        """The cost of the model's sleep per second: the seconds that its requests wait for it, weighted by the part of
        their objective that each wait takes."""
        rate, seconds = max(_LEAST_RATE, self._rates.of(model).most(now)), self._times.seconds(model)
        return rate * seconds * (seconds / self._models[model].ttft)

    def may_leave(self, standing: Standing, now: float) -> bool:
        """Whether the model is awake and has had its minimum residence."""
        if standing.residence is not Residence.AWAKE or self._models[standing.model].pinned:
            return False
        wake = min(self._times.seconds(standing.model), self._rules.max_wait)
        return now - standing.since >= max(self._rules.min_residence, self._rules.residence_factor * wake)

    def victims(self, now: float, missing: int, standings: Iterable[Standing], busy: bool) -> list[Standing] | None:
        """The models that sleep so that `missing` bytes come free, all of which may leave; None: they have fewer bytes.
        `busy`: models with running requests may be among them."""
        leaving = [each for each in standings if self.may_leave(each, now) and (busy or not each.running)]
        return self.cheapest(now, missing, leaving)

    def cheapest(self, now: float, missing: int, candidates: Iterable[Standing]) -> list[Standing] | None:
        """The candidates whose sleep costs least and frees `missing` bytes, and none that is not needed for that; None:
        all of them have fewer bytes."""
        chosen: list[Standing] = []
        freed = 0
        for each in self._in_order(candidates, now):
            if freed >= missing:
                break
            chosen.append(each)
            freed += self._sizes.taken(each)
        if freed < missing:
            return None
        for each in chosen[::-1]:
            if freed - self._sizes.taken(each) >= missing:
                chosen.remove(each)
                freed -= self._sizes.taken(each)
        return chosen

    def beyond_limit(self, now: float, missing: int, standings: Sequence[Standing]) -> list[Standing]:
        """The models that sleep since `missing` bytes more are taken than there are, however short their residence was
        yet. If all awake models would sleep and none is being woken, the one whose absence costs most stays while it
        has requests and during its residence: otherwise nobody would be served."""
        awake = [e for e in standings if e.residence is Residence.AWAKE and not self._models[e.model].pinned]
        victims = self.cheapest(now, missing, awake)
        if victims is None:
            victims = self._in_order(awake, now)
        waking = any(each.residence is Residence.WAKING for each in standings)
        if victims and len(victims) == len(awake) and not waking:
            last = victims[-1]
            if last.running or last.waiting or not self.may_leave(last, now):
                victims = victims[:-1]
        return victims

    def _in_order(self, candidates: Iterable[Standing], now: float) -> list[Standing]:
        def key(each: Standing) -> tuple[bool, float, str]:
            cost = self.absence_cost(each.model, now) / max(1, self._sizes.taken(each))
            return bool(each.running), cost, each.model

        return sorted(candidates, key=key)
