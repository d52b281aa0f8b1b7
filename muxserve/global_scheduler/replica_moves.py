"""Replicas that move between units over time: what the units report, told to `KvPressureMoves`, and its moves, told to
the controller.

The pressure on a unit's pool are the pages that its models hold and that their queues need, averaged over half a
period, of all that it has. A replica moves alone, and only where another unit has a pool with pages of the same size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from muxserve.global_scheduler.outbox import Outbox
from muxserve.replicas.views import InstanceLoad
from muxserve.scheduling.kv_pressure import DemandedModel, KvPressureMoves, ModelMove, MoveRules
from muxserve.spec import FleetSpec, ModelSpec, UnitEntry
from muxserve.wire import MoveEnded, MoveReplica

log = logging.getLogger(__name__)

# Demand is an exponential average over this part of a period, of that many samples.
_WINDOW, _SAMPLES = 0.5, 60

# By model and unit: how each replica stands that is up and stays.
Standing = Mapping[str, Mapping[str, InstanceLoad]]


@dataclass(frozen=True, slots=True)
class _Order:
    """A move that the controller was asked for."""

    model: str
    source: str
    destination: str
    at: float
    reason: str

    def state(self, now: float) -> dict[str, object]:
        return {
            "model": self.model,
            "source": self.source,
            "destination": self.destination,
            "seconds": round(now - self.at, 3),
            "reason": self.reason,
        }


class ReplicaMoves:
    """The moves of one fleet.

    Args:
        now: seconds of the machine's monotonic clock.
    """

    def __init__(self, rules: MoveRules, out: Outbox, now: float) -> None:
        self.rules = rules
        self._policy = KvPressureMoves(rules, now)
        self._out = out
        # Pages that each replica asks for, by its name.
        self._pages: dict[str, float] = {}
        self._sampled = -math.inf
        self._memory: dict[str, int] = {}
        self._demands: dict[str, float] = {}
        self._order: _Order | None = None
        self._last: _Order | None = None
        self._last_end, self._last_error = now, ""
        self._done = self._failed = 0

    def round(self, fleet: FleetSpec, standing: Standing, now: float) -> None:
        """Look at all units; `standing` are their replicas that are up and stay."""
        period = self.rules.period
        if now < self._sampled + period / _SAMPLES:
            return
        kept = 0.0 if math.isinf(self._sampled) else math.exp((self._sampled - now) / (_WINDOW * period))
        self._sampled = now
        up = {unit for replicas in standing.values() for unit in replicas}
        units = [unit for unit in fleet.units if unit.name in up]
        self._memory = {_place(u.name, p.name): p.num_pages * p.page_bytes for u in units for p in u.unit_spec.pools}
        models, there, pages = [], {}, {}
        for unit, spec, load in _replicas(units, standing):
            name = _name(spec.name, unit.name)
            pages[name] = (1.0 - kept) * load.pages + kept * self._pages.get(name, float(load.pages))
            there[name] = _place(unit.name, spec.pool)
            page_bytes = unit.unit_spec.pool(spec.pool).page_bytes
            places = {there[name]} | _destinations(fleet, unit, spec, units, standing)
            models.append(DemandedModel(name, 0, pages[name] * page_bytes, frozenset(places)))
        self._pages = pages
        self._demands = dict.fromkeys(self._memory, 0.0)
        for model in models:
            self._demands[there[model.name]] += model.demand
        for move in self._policy.decide(now, models, self._memory, there):
            self._ask(move, now)

    def ended(self, message: MoveEnded, now: float) -> None:
        """The controller has moved a replica, or could not."""
        name = _name(message.model, message.source)
        if message.error:
            log.warning("%s stays in %s: %s", message.model, message.source, message.error)
            self._failed += 1
            self._policy.failed(name, now)
        else:
            log.info("%s has moved from %s to %s", message.model, message.source, message.destination)
            self._done += 1
            self._policy.ended(name)
        at, reason = (self._order.at, self._order.reason) if self._order is not None else (now, "")
        self._last = _Order(message.model, message.source, message.destination, at, reason)
        self._last_end, self._last_error = now, message.error
        self._order = None

    def state(self, now: float) -> dict[str, object]:
        """As JSON-ready data. `pressures` are parts of each pool, by unit."""
        pressures: dict[str, dict[str, float]] = {}
        for place, demand in self._demands.items():
            unit, _, pool = place.partition("/")
            pressures.setdefault(unit, {})[pool] = round(demand / self._memory[place], 4)
        last = self._last
        return {
            "period_seconds": self.rules.period,
            "residence_seconds": self.rules.residence,
            "moved": self._done,
            "failed": self._failed,
            "moving": None if self._order is None else self._order.state(now),
            "last": None
            if last is None
            else last.state(self._last_end)
            | {"ago_seconds": round(now - self._last_end, 3), "error": self._last_error or None},
            "pressures": pressures,
        }

    def _ask(self, move: ModelMove, now: float) -> None:
        model, _, source = move.name.rpartition(" ")
        destination = move.destination.partition("/")[0]
        reason = f"{move.pressure:.0%} of the pages there are asked for, and then {move.then:.0%} in {destination}"
        log.info("asking for %s to move from %s to %s: %s", model, source, destination, reason)
        self._policy.began(move)
        self._order = _Order(model, source, destination, now, reason)
        self._out.to_controller(MoveReplica(model, source, destination, reason))


def _name(model: str, unit: str) -> str:
    return f"{model} {unit}"


def _place(unit: str, pool: str) -> str:
    return f"{unit}/{pool}"


def _replicas(units: Collection[UnitEntry], standing: Standing) -> Iterator[tuple[UnitEntry, ModelSpec, InstanceLoad]]:
    for unit in units:
        for spec in unit.unit_spec.models:
            load = standing.get(spec.name, {}).get(unit.name)
            # What keeps no KV has no pool.
            if spec.name in unit.serves and load is not None and any(p.name == spec.pool for p in unit.unit_spec.pools):
                yield unit, spec, load


def _destinations(
    fleet: FleetSpec, unit: UnitEntry, spec: ModelSpec, units: Collection[UnitEntry], standing: Standing
) -> set[str]:
    """The pools that the replica of a model can move to.

    1. Its number of replicas follows the load: it comes and goes by itself.
    2. Nothing else is left in its unit: the unit would end, and its memory serve nobody.
    3. Another unit is like this one, serves something and not this model, and has a pool with such pages.
    """
    if spec.name in fleet.scaling or spec.name in fleet.rolling or not _shared(unit):
        return set()
    if not any(unit.name in standing.get(other, {}) for other in unit.serves if other != spec.name):
        return set()
    page_bytes = unit.unit_spec.pool(spec.pool).page_bytes
    return {
        _place(other.name, pool.name)
        for other in units
        if other is not unit and spec.name not in other.serves and _shared(other) and _alike(unit, other)
        for pool in other.unit_spec.pools
        if pool.page_bytes == page_bytes
    }


def _shared(unit: UnitEntry) -> bool:
    return all(each.phases == "multiplexed" for each in unit.unit_spec.models)


def _alike(one: UnitEntry, other: UnitEntry) -> bool:
    a, b = one.unit_spec, other.unit_spec
    return a.ranks == b.ranks and (a.gpu is None) == (b.gpu is None)
