"""Residency: which models are awake, decided by demand under a limit of memory (weights and KV in one balance).

Pure: from requests, measurements and the time it decides which models to wake and which to put to sleep. A model sleeps
only because another one needs its memory, or is about to. Requests for sleeping models wait, grouped by model, so that
one wake serves all of them. The parts:

| module | what it decides or knows |
|---|---|
| `model_sizes` | the bytes of each model, and the balance of the memory |
| `wake_times` | the seconds that wakes and sleeps take |
| `arrival_rates` | how often requests come for each model |
| `wake_order` | which model is woken next, and how many at a time |
| `sleep_order` | which model sleeps when another one needs its memory |
| `room_ahead` | which idle models sleep before anybody needs their memory |
| `wakes_ahead` | which models are woken once before anybody asks for them |
| `pool_room` | how much of the memory the KV pools may take |

Whatever is measured, nobody waits for ever. A model for which there would be no room if all others slept is woken
beyond the limit when it has waited for `max_wait` and nobody else is awake, or its requests are refused where that is
more than there can be (`ceiling`). The last model that is awake serves on while it has requests, although the limit is
exceeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muxserve.scheduling.arrival_rates import ModelRates
from muxserve.scheduling.model_sizes import Balance, ModelSizes
from muxserve.scheduling.pool_room import PoolRoom
from muxserve.scheduling.residency_types import (
    Change,
    Refuse,
    Residence,
    ResidencyRules,
    Sleep,
    Standing,
    Stay,
    Wake,
    WakeCosts,
)
from muxserve.scheduling.room_ahead import RoomAhead
from muxserve.scheduling.sleep_order import SleepOrder
from muxserve.scheduling.wake_order import WakeConcurrency, WakeOrder
from muxserve.scheduling.wake_times import WakeTimes
from muxserve.scheduling.wakes_ahead import WakesAhead

# What requests for a model wait for, by where it is.
_WHILE = {
    Residence.ASLEEP: "its wake",
    Residence.WAKING: "its wake, which has begun",
    Residence.AWAKE: "its engines, which are being started again",
    Residence.LEAVING: "its next wake: it finishes what runs and sleeps first",
}


@dataclass(slots=True)
class _Round:
    """One decision under way: the models by name, and the bytes for them (`room`). `decided`: the
    models that the decision puts to sleep or has stay."""

    now: float
    standings: Mapping[str, Standing]
    room: int
    balance: Balance
    queue: list[str]
    changes: list[Change]
    decided: set[str]


class Residency:
    """Decides for the models of one memory.

    Args:
        models: what each takes, by name.
    """

    def __init__(self, rules: ResidencyRules, models: dict[str, WakeCosts]) -> None:
        self.sizes = ModelSizes()
        self.times = WakeTimes(rules.sleep_seconds)
        self.rates = ModelRates()
        self.pools = PoolRoom()
        # Time alone may change what the last decision was: somebody waits, or memory ahead is missing.
        self.restless = False
        # By model that requests wait for, what it waits for itself, in words, as of the last decision.
        self.waits_for: dict[str, str] = {}
        # Bytes beyond the limit that models take and may come to take, and nobody is about to give back, as of then.
        self.excess = 0
        self._wakes_ahead = WakesAhead()
        self.change(rules, models)

    def change(self, rules: ResidencyRules, models: dict[str, WakeCosts]) -> None:
        """Other rules or models; the measurements of models whose costs are the same are kept."""
        self.rules, self._models = rules, models
        self.sizes.change(models)
        self.times.change(rules.wakes.cores, models)
        self.rates.change(rules.windows, models)
        self._wake_order = WakeOrder(rules, models, self.times)
        self._concurrency = WakeConcurrency(rules, models, self.times)
        self._sleep_order = SleepOrder(rules, models, self.sizes, self.times, self.rates)
        self._room_ahead = RoomAhead(rules, models, self.sizes, self.times, self.rates, self._sleep_order)
        self._wakes_ahead.change(rules, models, self.sizes, self.rates, self._sleep_order)

    # ------------------------------------------------------------ what is learned

    def arrived(self, model: str, now: float) -> None:
        """A request for the model has come, whether it is awake or not."""
        self.rates.of(model).add(now)

    def woke(self, model: str, seconds: float) -> None:
        """The wake of the model has taken so long."""
        self.times.woke(model, seconds)
        self.sizes.woke(model)

    # ------------------------------------------------------------ decisions

    @property
    def preparing(self) -> bool:
        """Whether a model is to be woken ahead when nothing else is to be done, or there is room."""
        return self._wakes_ahead.preparing

    def queue(self, now: float, standings: Iterable[Standing]) -> list[str]:
        """The sleeping models that requests wait for, in the order in which they are to be woken."""
        return self._wake_order.queue(now, standings)

    def decide(self, now: float, fixed: int | None, standings: Iterable[Standing]) -> list[Change]:
        """What changes at `now`.

        Args:
            fixed: bytes that are not of models, as measured; None: as declared.
            standings: of all models.

        1. If more is taken than there is, KV pools give back what was lent to them, and models are put to sleep.
        2. The groups of waiting requests, in the order of `queue`:
           a. if there is room, the model is woken, or waits for the wakes of others;
           b. if leaving models and KV pools make room, it waits for them;
           c. otherwise those whose absence costs least are put to sleep;
           d. if that is not enough, it waits, and from `max_wait` on so does everybody behind it;
           e. if there would be no room for it although all others slept, they are put to sleep, and it is woken beyond
              the limit, or refused.
        3. Leaving models that requests wait for stay if their memory is promised to nobody.
        4. KV pools get what their requests wait for.
        5. Memory for the next wakes is kept free.
        6. If nothing else is to be done, a model is woken ahead. KV pools give back what they were lent of its memory.
        7. KV pools are lent what the next wake leaves.
        """
        by_name = {each.model: each for each in standings}
        self.times.follow(now, by_name.values())
        waiting = [each for each in by_name.values() if each.waiting]
        self.restless = any(each.residence is not Residence.AWAKE for each in waiting)
        self.waits_for = {each.model: _WHILE[each.residence] for each in waiting}
        room = self.rules.limit - (self.rules.fixed if fixed is None else fixed + self.rules.fixed_margin)
        balance = self.sizes.balance(room, by_name.values())
        if (kv := self.rules.kv) is not None:
            balance.free -= self.pools.taken(kv)
            balance.promised += self.pools.promised(now)
            balance.lent = self.pools.lent(kv)
            balance.cover()
            room -= kv.least  # when all models sleep
        changes: list[Change] = []
        if balance.available < 0:  # 1
            victims = self._sleep_order.beyond_limit(now, -balance.available, list(by_name.values()))
            balance.promised += sum(self.sizes.taken(each) for each in victims)
            changes += [Sleep(each.model, "more memory is taken than there is") for each in victims]
        self.excess = max(0, -balance.available)
        queue = self.queue(now, by_name.values())
        decided = {change.model for change in changes}
        this = _Round(now, by_name, room, balance, queue, changes, decided)
        if self._serve_queue(this):  # 2
            self._let_stay(this)  # 3
            self._serve_pools(this)  # 4
            changes += self._room_ahead.sleeps(now, balance, by_name, decided)  # 5
            self.restless |= self._room_ahead.short
            if not changes:  # 6
                changes += self._wakes_ahead.changes(now, balance, by_name.values())
            self._lend(this)  # 7
        self.pools.give(balance.recalled, now)
        self._wakes_ahead.note(changes)
        return changes

    # ------------------------------------------------------------ inside

    def _serve_queue(self, this: _Round) -> bool:
        """Step 2; False: a model has waited for so long that nothing else may take the memory that comes free."""
        wakes = sum(each.residence is Residence.WAKING for each in this.standings.values())
        at_a_time = self._concurrency.at_a_time(this.now, this.queue, this.standings)
        balance = this.balance
        for position, model in enumerate(this.queue):
            need, waited = self.sizes.needs(model), this.now - min(this.standings[model].waiting)
            if need <= balance.free:  # a
                balance.free -= need
                if wakes < at_a_time:
                    wakes += 1
                    this.changes.append(Wake(model))
                    self.waits_for[model] = _WHILE[Residence.WAKING]
                else:
                    self.waits_for[model] = "the wakes of other models"
                continue
            missing = need - balance.available
            if missing > 0:
                candidates = [each for each in this.standings.values() if each.model not in this.decided]
                busy = waited >= self.rules.patience
                victims = self._sleep_order.victims(this.now, missing, candidates, busy)
                if victims is None:
                    self.waits_for[model] = f"{missing} bytes of memory, until others may sleep"
                    if waited < self.rules.max_wait:  # d
                        continue
                    beyond = self._beyond(this, model)  # e
                    this.changes += beyond
                    if any(isinstance(change, Refuse) for change in beyond):
                        continue
                    behind = this.queue[position + 1 :]
                    self.waits_for |= dict.fromkeys(behind, f"memory that {model} gets first, which has waited longer")
                    return False
                for victim in victims:  # c
                    this.decided.add(victim.model)
                    balance.promised += self.sizes.taken(victim)
                    this.changes.append(Sleep(victim.model, f"memory for {model}"))
            self.waits_for[model] = "the memory of a model that is about to sleep, or of KV pools"  # b
            balance.reserve(need)
        return True

    def _beyond(self, this: _Round, model: str) -> list[Change]:
        """Step 2e for a model that has waited for `max_wait`: nothing if all others together make room in a while."""
        standings = list(this.standings.values())
        others = [each for each in standings if each.model != model and not self._models[each.model].pinned]
        pinned = [each for each in standings if self._models[each.model].pinned]
        missing = self.sizes.needs(model) - self.sizes.balance(this.room, pinned).free
        if missing <= 0:
            return []
        ceiling = self.rules.ceiling
        if ceiling is not None and missing > ceiling - self.rules.limit:
            self.waits_for[model] = f"{missing} bytes of memory that are missing although all others sleep"
            return [Refuse(model, missing)]
        self.waits_for[model] = f"its wake beyond the limit: {missing} bytes are missing although all others sleep"
        awake = [each for each in others if each.residence is Residence.AWAKE and each.model not in this.decided]
        if all(each.residence is Residence.ASLEEP for each in others):
            return [Wake(model, missing)]
        if len(awake) < sum(each.residence is not Residence.ASLEEP for each in others):
            return []  # some are being woken, or about to sleep
        if not all(self._sleep_order.may_leave(each, this.now) for each in awake):
            return []
        return [Sleep(each.model, f"memory for {model}, which exceeds the limit by itself") for each in awake]

    def _let_stay(self, this: _Round) -> None:
        """Step 3; models with the oldest request first."""
        waiting = [each for each in this.standings.values() if each.waiting]
        for each in sorted(waiting, key=lambda each: min(each.waiting)):
            taken = self.sizes.taken(each)
            if each.residence is Residence.LEAVING and this.balance.promised >= taken:
                this.balance.promised -= taken
                this.changes.append(Stay(each.model))
                this.decided.add(each.model)

    def _serve_pools(self, this: _Round) -> None:
        """Step 4: requests of awake models that wait for pages get free memory, and that of idle models. When they have
        waited for `max_wait`, busy models leave for the one that has waited longest."""
        if (kv := self.rules.kv) is None:
            return
        balance = this.balance
        more = min(self.pools.wanting(kv), max(0, balance.free))
        self.pools.take(more)
        balance.free -= more
        missing = self.pools.missing(kv)
        waited = self.pools.waits(this.now, missing > 0)
        self.restless |= missing > 0
        missing -= max(0, balance.promised)
        if missing <= 0:
            return
        oldest = self.pools.oldest
        candidates = [each for each in this.standings.values() if each.model not in {*this.decided, oldest}]
        victims = self._sleep_order.victims(this.now, missing, candidates, waited >= self.rules.max_wait)
        for victim in victims or ():
            this.decided.add(victim.model)
            balance.promised += self.sizes.taken(victim)
            this.changes.append(Sleep(victim.model, f"memory for the KV cache of {oldest}"))
        balance.promised = max(0, balance.promised - missing)

    def _lend(self, this: _Round) -> None:
        """Step 7: KV pools get what the next wake leaves, while nobody waits for one."""
        if (kv := self.rules.kv) is None or this.queue:
            return
        woken = {change.model for change in this.changes if isinstance(change, Wake)}
        asleep = [each.model for each in this.standings.values() if each.residence is Residence.ASLEEP]
        keep = max((self.sizes.needs(model) for model in asleep if model not in woken), default=0)
        more = self.pools.lend(kv, this.balance.free - keep)
        self.pools.take(more)
        this.balance.free -= more
