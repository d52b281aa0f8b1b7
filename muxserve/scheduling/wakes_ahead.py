"""Models are woken once before anybody asks for them, where that shortens later wakes: on GPUs their weights are copied
to the host's memory then, and with hibernation their memory gets into a file when they sleep after it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from muxserve.scheduling.arrival_rates import ModelRates
from muxserve.scheduling.model_sizes import ModelSizes
from muxserve.scheduling.residency_types import Change, Residence, ResidencyRules, Sleep, Standing, Wake, WakeCosts
from muxserve.scheduling.sleep_order import SleepOrder

# A model that could not get into its file tries again after the first delay, then after twice that and so on up to the
# second one, seconds.
_RETRY, _RETRY_MOST = 10.0, 600.0


@dataclass(slots=True)
class _Preparation:
    """How far one model is: `begun`: a wake of it has begun; `slept`: it was put to sleep with time for its memory to
    move into a file; `back`: it was woken again after that. It could not get into a file `failures` times, and does not
    try again before `retry`."""

    costs: WakeCosts
    begun: bool = False
    slept: bool = False
    back: bool = False
    failures: int = 0
    retry: float = -math.inf


class WakesAhead:
    """Which model is woken, or sleeps for a moment, while there is nothing else to do. Only models that nobody has ever
    asked for sleep for this. `preparing`: some model is to be prepared still, when there is time and room."""

    def __init__(self) -> None:
        self.preparing = False
        self._models: dict[str, _Preparation] = {}

    def change(
        self,
        rules: ResidencyRules,
        models: Mapping[str, WakeCosts],
        sizes: ModelSizes,
        rates: ModelRates,
        order: SleepOrder,
    ) -> None:
        """Other rules or models; models whose costs are the same stay as far as they are."""
        self._rules, self._sizes, self._rates, self._order = rules, sizes, rates, order
        self.preparing = rules.wakes_ahead or rules.files_ahead
        self._models = {
            name: known
            if (known := self._models.get(name)) is not None and known.costs == costs
            else _Preparation(costs)
            for name, costs in models.items()
        }

    def note(self, changes: Iterable[Change]) -> None:
        """These changes are carried out, whoever decided them."""
        for change in changes:
            if isinstance(change, Wake):
                self._models[change.model].begun = True
            elif isinstance(change, Sleep) and change.ahead:
                self._models[change.model].slept = True

    def unfiled(self, model: str, now: float) -> None:
        """The model was put to sleep with time for its memory to move into a file, and it did not: the disk is behind,
        or the file system full. Without effect where models get into no files."""
        if not self._rules.files_ahead:
            return
        known = self._models[model]
        known.slept = known.back = False
        known.retry = now + min(_RETRY * 2**known.failures, _RETRY_MOST)
        known.failures += 1
        self.preparing = True

    def changes(self, now: float, free: int, standings: Collection[Standing]) -> list[Change]:
        """The next change, if nobody waits, nothing runs, and no model comes or goes:

        1. a model that was never awake is woken, or one that could not get into its file; others sleep for that;
        2. with files: one of the awake models that has not slept yet sleeps;
        3. with files: one that has slept is woken again, once.

        Memory for another wake stays free.
        """
        if not (self._rules.wakes_ahead or self._rules.files_ahead):
            return []
        asleep = [each.model for each in standings if each.residence is Residence.ASLEEP]
        unasked = [
            each
            for each in standings
            if each.residence is Residence.AWAKE
            and self._rates.of(each.model).never
            and not self._models[each.model].costs.pinned
        ]
        failed = {
            name
            for name, known in self._models.items()
            if known.failures and not known.slept and self._rates.of(name).never
        }
        again = {name for name in failed if now >= self._models[name].retry}
        never = [name for name in asleep if not (self._models[name].begun or self._models[name].slept)]
        model = min(never, default=min(again.intersection(asleep), default=None))
        filing = unasked if self._rules.files_ahead else ()
        unfiled = [e for e in filing if not self._models[e.model].slept and e.model not in failed - again]
        self.preparing = model is not None or bool(unfiled or failed)
        settled = all(each.residence in (Residence.AWAKE, Residence.ASLEEP) for each in standings)
        if not settled or any(each.running or each.waiting for each in standings):
            return []
        if model is None:
            return self._into_file(now, unfiled) or self._back(free, asleep)
        missing = self._missing(model, asleep, free)
        if missing <= 0:
            return [Wake(model)]
        victims = self._order.cheapest(now, missing, [each for each in unasked if self._order.may_leave(each, now)])
        if victims is None:
            # Some may leave later.
            self.preparing = bool(failed) or self._order.cheapest(now, missing, unasked) is not None
            return []
        return [Sleep(each.model, f"{model} is to be in a file, too", ahead=True) for each in victims]

    def _into_file(self, now: float, unfiled: Iterable[Standing]) -> list[Change]:
        for each in unfiled:
            if self._order.may_leave(each, now):
                return [Sleep(each.model, "it is to be in a file", ahead=True)]
        return []

    def _back(self, free: int, asleep: Collection[str]) -> list[Change]:
        for name in asleep:
            known = self._models[name]
            if known.slept and not known.back and self._rates.of(name).never and self._missing(name, asleep, free) <= 0:
                known.back = True
                return [Wake(name)]
        return []

    def _missing(self, model: str, asleep: Collection[str], free: int) -> int:
        """Bytes that are missing to wake the model and another one after it."""
        another = max((self._sizes.needs(name) for name in asleep if name != model), default=0)
        return self._sizes.needs(model) + another - free
