"""One memory for many models: its measurements, and the pure policy that says which of them are awake."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from muxserve.global_scheduler.resident_scheduler import ResidentScheduler
from muxserve.scheduling.residency import Residency
from muxserve.scheduling.residency_types import Refuse, Residence, Sleep, Wake
from muxserve.scheduling.turns import TurnModel, TurnRules, TurnStanding, turn_round, turns_over, waiting_since
from muxserve.spec import ResidencySpec
from muxserve.wire import MemoryReport, PoolsLoad

# What is no model comes to take more while it works (a gateway's requests), and counts for so long after it was seen.
_FIXED_SECONDS = 30.0
# What a unit was told of its pools was lost if it has not said so after that time.
AGAIN_SECONDS = 0.2


class MemoryBalance:
    """Carries out what `Residency` decides on the schedulers of the models.

    Nothing is woken before the first report: what is taken already is not known.
    """

    def __init__(self, spec: ResidencySpec) -> None:
        self.policy = Residency(spec.rules, spec.models)
        self._models = spec.models
        self._turns = spec.turns
        self._total: int | None = None
        # Measurements of everything that is no model, with their times.
        self._measured: deque[tuple[float, int]] = deque()
        # The pools stand otherwise than when it was decided last; and when they were told what to take.
        self._pools_changed = False
        self._told, self._told_at = 0, -math.inf
        self._held: dict[str, int] = {}
        # Models on GPUs: the host's memory of each, bytes, and those whose engines stay while they sleep.
        self._copies: dict[str, int] = {}
        self._resting: set[str] = set()

    @property
    def models(self) -> Iterable[str]:
        """Those that memory decides on."""
        return self._models

    @property
    def _fixed(self) -> int | None:
        """Bytes of everything that is no model: the maximum of the latest measurements, if there are any."""
        return max((fixed for _, fixed in self._measured), default=None)

    def change(self, spec: ResidencySpec) -> None:
        """Other rules or models."""
        self._models, self._turns = spec.models, spec.turns
        self.policy.change(spec.rules, spec.models)

    def reported(self, message: MemoryReport, schedulers: Mapping[str, ResidentScheduler], now: float) -> None:
        """The controller has measured."""
        self._total = message.total
        fixed = max(0, message.total - sum(message.models.values()) - message.pools)
        while self._measured and self._measured[0][0] < now - _FIXED_SECONDS:
            self._measured.popleft()
        self._measured.append((now, fixed))
        self._held = message.models
        self._copies, self._resting = message.copies, set(message.resting)
        for name, scheduler in schedulers.items():
            held = message.models.get(name)
            # Memory that was read before the model was awake is not what it takes.
            whole = scheduler.residence is Residence.AWAKE and scheduler.since < now - message.seconds
            if held is not None and whole:
                self.policy.sizes.measured(name, held, message.wake_peaks.get(name, 0))
            awake = scheduler.residence in (Residence.AWAKE, Residence.LEAVING)
            if held is None and awake and not scheduler.serves:
                scheduler.ended("", now)  # the word of it was lost with the scheduler before this one
            if name in message.starting:
                scheduler.starting(now)
            elif scheduler.residence is Residence.WAKING and not scheduler.serves:
                scheduler.lost(now - message.seconds)
            elif held is not None and scheduler.residence is Residence.LEAVING:
                scheduler.stop_again(now)
            scheduler.changed = True

    def pools_reported(self, load: PoolsLoad) -> None:
        """The unit has said how its KV pools stand."""
        if self.policy.rules.kv is not None:
            self.policy.pools.reported(load)
            self._pools_changed = True

    def room(self, now: float) -> int | None:
        """The bytes that the pools are to be told to take; None: they know."""
        pools = self.policy.pools
        if (
            pools.target is None
            or pools.settled
            or (pools.target == self._told and now - self._told_at < AGAIN_SECONDS)
        ):
            return None
        self._told, self._told_at = pools.target, now
        return pools.target

    def decide(self, schedulers: Mapping[str, ResidentScheduler], now: float) -> None:
        """Wake models and put them to sleep, if anything has changed or a moment may have come that was waited for."""
        if self._total is None:
            for scheduler in schedulers.values():
                scheduler.words = "the first measurement of memory"
            return
        if self._turns is not None:
            self._end_turns(schedulers, self._turns, now)
        changed = self._pools_changed or any(scheduler.changed for scheduler in schedulers.values())
        if not (self.policy.restless or changed):
            return
        self._pools_changed = False
        standings = []
        for name, scheduler in schedulers.items():
            scheduler.changed = False
            news = scheduler.taken_news()
            for _ in range(news.arrivals):
                self.policy.arrived(name, now)
            for seconds in news.wakes:
                self.policy.woke(name, seconds)
            for seconds in news.sleeps:
                self.policy.times.slept(seconds)
            # A report from before it slept, or was woken, says nothing of it now.
            held = self._held.get(name, 0) if scheduler.residence in (Residence.AWAKE, Residence.LEAVING) else 0
            standings.append(scheduler.standing(now, held, self._stopped(name, schedulers, now)))
        changes = self.policy.decide(now, self._fixed, standings)
        for name, scheduler in schedulers.items():
            scheduler.words = self.policy.waits_for.get(name, "")
            if scheduler.residence is Residence.AWAKE and not self.policy.excess:
                scheduler.beyond = 0
        for change in changes:
            scheduler = schedulers[change.model]
            if isinstance(change, Wake):
                self._held.pop(change.model, None)
                scheduler.wake(now, change.beyond)
            elif isinstance(change, Sleep):
                scheduler.put_to_sleep(change.reason, change.ahead, now)
            elif isinstance(change, Refuse):
                needs = self.policy.sizes.needs(change.model)
                missing = f"{change.missing} of them are missing although all others sleep"
                scheduler.refuse(f"that needs {needs} bytes, and {missing}", now)
            else:
                scheduler.stay(now)

    def _stopped(self, model: str, schedulers: Mapping[str, ResidentScheduler], now: float) -> Collection[float] | None:
        """From when on requests of the model whose turn was over count as waiting; None where there are no turns."""
        if (rules := self._turns) is None:
            return None
        costs = self._models[model]
        others = any(each.asked_anew for name, each in schedulers.items() if name != model)
        stopped = schedulers[model].stopped(costs.ttft, costs.tpot)
        return waiting_since(now, stopped, rules, costs.ttft, self.policy.times.seconds(model), others)

    def _end_turns(self, schedulers: Mapping[str, ResidentScheduler], rules: TurnRules, now: float) -> None:
        """End the turns that are over."""
        if not any(each.residence is Residence.LEAVING for each in schedulers.values()):
            return
        for name in turns_over(now, self._turn_standings(schedulers), rules):
            schedulers[name].end_turn()

    def _turn_standings(self, schedulers: Mapping[str, ResidentScheduler]) -> list[TurnStanding]:
        kv = self.policy.rules.kv
        memory = max(1, self.policy.rules.limit - (self._fixed or 0) - (kv.least if kv is not None else 0))
        return [
            scheduler.turn(
                TurnModel(
                    name,
                    self._models[name].ttft,
                    self._models[name].tpot,
                    0.0,
                    self.policy.times.seconds(name),
                    min(1.0, self.policy.sizes.expected(name) / memory),
                )
            )
            for name, scheduler in schedulers.items()
        ]

    def _turns_state(self, schedulers: Mapping[str, ResidentScheduler], now: float) -> dict[str, object] | None:
        """Whose turn it is, for how long, and who is next; None where models take no turns."""
        if self._turns is None:
            return None
        standings = self._turn_standings(schedulers)
        found = turn_round([each.model for each in standings if each.running or each.waits], self._turns)
        names = [each.model.name for each in standings if each.waits]
        waiting = [schedulers[name].standing(now, 0, self._stopped(name, schedulers, now)) for name in names]
        return {
            "now": {
                each.model.name: {
                    "seconds": round(now - each.awake_since, 3),
                    "length_seconds": round(found.lengths[each.model.name], 3),
                    "leaving": each.leaving,
                    "running": each.running,
                }
                for each in standings
                if each.running and each.awake_since is not None and math.isfinite(each.awake_since)
            },
            "next": self.policy.queue(now, waiting),
            "round_seconds": round(found.seconds, 3),
            "in_time": round(found.attainment, 4),
            "ended": sum(scheduler.figures.turns for scheduler in schedulers.values()),
        }

    def state(self, schedulers: Mapping[str, ResidentScheduler], now: float) -> dict[str, object]:
        """How memory and models stand, as JSON-ready data; bytes and seconds."""
        models: dict[str, object] = {}
        for name, scheduler in schedulers.items():
            figures = scheduler.figures
            woken = figures.last_wake_at
            models[name] = {
                "residence": scheduler.residence.value,
                "seconds": round(now - scheduler.since, 3) if math.isfinite(scheduler.since) else None,
                "held_bytes": 0 if scheduler.residence is Residence.ASLEEP else self._held.get(name, 0),
                "needs_bytes": self.policy.sizes.needs(name),
                "copy_bytes": self._copies.get(name, 0),
                "engines_rest": name in self._resting and scheduler.residence is Residence.ASLEEP,
                "rate": self.policy.rates.of(name).most(now),
                "waiting": scheduler.waits,
                "waits_for": scheduler.waits_for(now) or None,
                "trouble": scheduler.trouble(now) or None,
                "wakes": figures.wakes,
                "failed_wakes": figures.failed_wakes,
                "last_wake_seconds": round(figures.last_wake_seconds, 4) if figures.wakes else None,
                "last_wake_ago_seconds": round(now - woken, 3) if math.isfinite(woken) else None,
                "waited": figures.waited,
                "waited_seconds": round(figures.waited_seconds, 4),
                "refused": figures.refused,
                "evictions": figures.evictions,
                "evictions_ahead": figures.ahead,
                "turns": figures.turns,
                "last_eviction": figures.last_reason or None,
            }
        return {
            "limit_bytes": self.policy.rules.limit,
            "used_bytes": self._total,
            "fixed_bytes": self._fixed or 0,
            # What the KV pools may take of it, where they take what models leave.
            "pools_bytes": self.policy.pools.target,
            # What is taken and reserved beyond the limit, since nobody would be served otherwise.
            "excess_bytes": self.policy.excess,
            # What all wakes and sleeps have taught: see `muxserve.scheduling.wake_times`.
            "wake_scale": round(self.policy.times.pace.scale, 4),
            "wake_drag": round(self.policy.times.pace.drag, 4),
            "sleep_seconds": round(self.policy.times.sleep_seconds, 4),
            "turns": self._turns_state(schedulers, now),
            "models": models,
        }


# Figures of a memory that add up over the units of a fleet.
_SUMS = ("limit_bytes", "used_bytes", "fixed_bytes", "pools_bytes", "excess_bytes")


def together(units: Mapping[str, dict[str, object]]) -> dict[str, object] | None:
    """The states of the memories of several units as one: the models of all, each with its unit, and sums; what each
    unit says besides is under `units`. None without any."""
    if len(units) <= 1:
        return next(iter(units.values()), None)
    models: dict[str, object] = {}
    for unit, state in units.items():
        of = state.pop("models")
        assert isinstance(of, dict)
        models.update({name: {**each, "unit": unit} for name, each in of.items()})
    sums: dict[str, object] = {}
    for key in _SUMS:
        figures = [figure for state in units.values() if isinstance(figure := state[key], int)]
        sums[key] = sum(figures) if figures else None
    return {**sums, "units": dict(units), "models": models}
