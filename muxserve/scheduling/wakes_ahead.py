"""Models are woken once before anybody asks for them, where that shortens later wakes: on GPUs their weights are copied
to the host's memory then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from muxserve.scheduling.arrival_rates import ModelRates
from muxserve.scheduling.model_sizes import Balance, ModelSizes
from muxserve.scheduling.residency_types import Change, Residence, ResidencyRules, Sleep, Standing, Wake, WakeCosts
from muxserve.scheduling.sleep_order import SleepOrder


class WakesAhead:
    """Which model is woken while there is nothing else to do. Only models that nobody has ever asked for sleep to make
    room for it. `preparing`: some model is to be woken ahead still, when there is time and room."""

    def __init__(self) -> None:
        self.preparing = False
        # The costs of the models that were woken already, or have slept.
        self._woken: dict[str, WakeCosts] = {}

    def change(
        self,
        rules: ResidencyRules,
        models: Mapping[str, WakeCosts],
        sizes: ModelSizes,
        rates: ModelRates,
        order: SleepOrder,
    ) -> None:
        """Other rules or models; a model whose costs are the same is not woken once more."""
        self._rules, self._models, self._sizes, self._rates, self._order = rules, models, sizes, rates, order
        self.preparing = rules.wakes.ahead
        self._woken = {name: costs for name, costs in self._woken.items() if models.get(name) == costs}

    def note(self, changes: Iterable[Change]) -> None:
        """These changes are carried out, whoever decided them."""
        for change in changes:
            if isinstance(change, Wake | Sleep):
                self._woken[change.model] = self._models[change.model]

    def changes(self, now: float, balance: Balance, standings: Collection[Standing]) -> list[Change]:
        """The next change, if nobody waits, nothing runs, and no model comes or goes. A model that was never awake is
        woken, once, when KV pools have given back what it needs. Memory for another wake stays free, or lent to KV
        pools. What is woken takes its bytes from those that are free in `balance`."""
        if not self._rules.wakes.ahead:
            return []
        asleep = [each.model for each in standings if each.residence is Residence.ASLEEP]
        model = min((name for name in asleep if name not in self._woken), default=None)
        self.preparing = model is not None
        settled = all(each.residence in (Residence.AWAKE, Residence.ASLEEP) for each in standings)
        if model is None or not settled or any(each.running or each.waiting for each in standings):
            return []
        another = max((self._sizes.needs(name) for name in asleep if name != model), default=0)
        need = self._sizes.needs(model)
        missing = need + another - balance.available
        if missing <= 0:
            there = need <= balance.free
            balance.reserve(need)
            return [Wake(model)] if there else []
        unasked = [
            each
            for each in standings
            if each.residence is Residence.AWAKE
            and self._rates.of(each.model).never
            and not self._models[each.model].pinned
        ]
        victims = self._order.cheapest(now, missing, [each for each in unasked if self._order.may_leave(each, now)])
        if victims is None:
            # Some may leave later.
            self.preparing = self._order.cheapest(now, missing, unasked) is not None
            return []
        return [Sleep(each.model, f"memory to wake {model} ahead", ahead=True) for each in victims]
