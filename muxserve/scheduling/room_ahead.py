"""Memory for the next wakes is kept free before anybody asks, as long as that costs less than it brings."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from muxserve.scheduling.arrival_rates import ModelRates
from muxserve.scheduling.model_sizes import Balance, ModelSizes
from muxserve.scheduling.residency_types import Residence, ResidencyRules, Sleep, Standing, WakeCosts
from muxserve.scheduling.sleep_order import SleepOrder
from muxserve.scheduling.wake_times import WakeTimes


class RoomAhead:
    """Which idle models sleep so that the next wake finds memory free, and perhaps the one after it.

    A request for a sleeping model waits w seconds for its wake, and w + s if another model has to sleep first, which
    takes s seconds. The difference costs rate * ((w + s)^2 - w^2) / TTFT objective, summed over all sleeping models,
    in the measure of `SleepOrder.absence_cost`. It is compared with the cost of the absence of the models that would
    sleep. Room for a second wake is weighted by the probability that another request comes within those s seconds, and
    so on (Poisson arrivals).
    """

    def __init__(
        self,
        rules: ResidencyRules,
        models: Mapping[str, WakeCosts],
        sizes: ModelSizes,
        times: WakeTimes,
        rates: ModelRates,
        order: SleepOrder,
    ) -> None:
        self._rules, self._models, self._order = rules, models, order
        self._sizes, self._times, self._rates = sizes, times, rates
        # The last call found too little room: time alone may change that.
        self.short = False

    def sleeps(
        self, now: float, balance: Balance, standings: Mapping[str, Standing], decided: Collection[str]
    ) -> list[Sleep]:
        """The idle models that sleep, but for those that something else was `decided` for. Their bytes are added to
        those that `balance` has as promised."""
        self.short = False
        asleep = [e.model for e in standings.values() if e.residence is Residence.ASLEEP and not e.waiting]
        asleep.sort(key=lambda model: (-self._rates.of(model).most(now), model))
        s = self._times.sleep_seconds
        rates, gains = self._gains(now, asleep, s)
        changes: list[Sleep] = []
        need, likely = 0, 1.0
        for number, model in enumerate(asleep[: self._rules.wakes.most]):
            need += self._sizes.needs(model)
            missing = need - balance.available
            if missing > 0:
                candidates = [each for each in standings.values() if each.model not in decided]
                victims = self._order.victims(now, missing, candidates, busy=False)
                cost = sum(self._order.absence_cost(each.model, now) for each in victims or ())
                if victims is None or cost >= likely * max(gains):
                    self.short = True
                    break
                for victim in victims:
                    decided = {*decided, victim.model}
                    balance.promised += self._sizes.taken(victim)
                    changes.append(Sleep(victim.model, "memory for the next wake", ahead=True))
            # The probability that more than `number` requests come while one model is put to sleep.
            likely -= math.exp(-max(rates) * s) * (max(rates) * s) ** number / math.factorial(number)
        return changes

    def _gains(self, now: float, asleep: Collection[str], s: float) -> tuple[list[float], list[float]]:
        """For each window: the arrival rate of the sleeping models together, and the cost that room ahead spares."""
        rates = [0.0] * len(self._rules.windows)
        gains = list(rates)
        for model in asleep:
            w, ttft = self._times.seconds(model), self._models[model].ttft
            for index, rate in enumerate(self._rates.of(model).averages(now)):
                rates[index] += rate
                gains[index] += rate * (2 * w + s) * s / ttft
        return rates, gains
