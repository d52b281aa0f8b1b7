"""What the global scheduler and the unit tell each other about the unit's replicas (`scheduling.loads`)."""

from __future__ import annotations

import logging
import math

import msgspec

from muxserve.replicas.views import InstanceLoad
from muxserve.scheduling.loads import load_of
from muxserve.scheduling.pool_room import pools_load
from muxserve.scheduling.state import ModelState
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.rolling import RollingReports
from muxserve.unit.state import UnitState
from muxserve.wire import Loads, MovingIn, PoolsLoad, SchedulerHello, Terminating

log = logging.getLogger(__name__)

# Changes within this time are reported together; without any, the global scheduler hears that the unit lives.
REPORT_SECONDS = 0.02
SILENCE_SECONDS = 1.0
# A report that differs from the last one only in `used`, and by less than this part of the capacity, is not worth it.
_WORTH_TELLING = 1 / 64


def load_of_replica(state: UnitState, model: ModelState) -> InstanceLoad:
    """How the replica stands now."""
    name = model.name
    layout, terminating = state.unit_spec.layout(name), name in state.terminating
    moving_in, moving_out = state.moving_in.get(name, 0), state.moving_out[name]
    return load_of(state.unit_spec.unit, model, state.policy, layout, terminating, moving_in, moving_out)


def worth_telling(known: list[InstanceLoad], now: list[InstanceLoad]) -> bool:
    """Whether a report says more than the last one."""
    if len(known) != len(now):
        return True
    for old, new in zip(known, now, strict=True):
        if abs(old.used - new.used) >= max(1.0, _WORTH_TELLING * new.capacity):
            return True
        if old != msgspec.structs.replace(
            new, used=old.used, queued_demand=old.queued_demand, step_seconds=old.step_seconds, pages=old.pages
        ):
            return True
    return False


def pools_worth_telling(known: PoolsLoad | None, now: PoolsLoad | None) -> bool:
    """Whether the pools stand differently by more than a little."""
    if known is None or now is None:
        return known is not now
    if (known.target, known.backed, bool(known.model)) != (now.target, now.backed, bool(now.model)):
        return True
    little = _WORTH_TELLING * now.backed
    needs = ((known.needed, now.needed), (known.urgent, now.urgent), (known.wanted, now.wanted))
    return any(abs(old - new) > little for old, new in needs)


class UnitReplicas:
    """The unit's models as replicas."""

    def __init__(self, state: UnitState, table: UnitRequestTable) -> None:
        self._state = state
        self._table = table
        self._rolling = RollingReports(state)
        self._scheduler: bytes | None = None
        self._told: list[InstanceLoad] = []
        self._told_pools: PoolsLoad | None = None
        self._told_at = -math.inf
        self._due = math.inf

    def greeted(self, peer: bytes, hello: SchedulerHello, now: float) -> None:
        """A global scheduler is there; there is one, so that an earlier one is gone."""
        log.info("global scheduler %s", hello.epoch)
        self._scheduler = peer
        self._rolling.greeted(peer)
        self._rolling.tick(now)
        self._tell(self.loads(), now)

    def migrating(self, message: MovingIn) -> None:
        """The migrator says what is on its way in."""
        self._state.moving_in = dict(message.moves)

    def migrator_new(self) -> None:
        """Requests that were on their way in are not any more."""
        self._state.moving_in = {}

    def drain(self, message: Terminating, now: float) -> None:
        """A replica is, or is no longer, being drained; what waits is given back."""
        model = self._state.ledger.by_name.get(message.model)
        if model is None:
            log.warning("%r, which is to be drained, is no model of this unit", message.model)
        elif message.on:
            self._state.terminating.add(model.name)
            self._table.give_back(model, now)
        else:
            self._state.terminating.discard(model.name)

    def loads(self) -> list[InstanceLoad]:
        """How all replicas stand that can serve."""
        if not self._state.ledger.memory_up:
            return []
        return [
            load_of_replica(self._state, model) for model in self._state.ledger.models if model.up and not model.retired
        ]

    def _pools(self) -> PoolsLoad | None:
        state = self._state
        if not state.ledger.memory_up:
            return None
        load = pools_load(state.ledger, state.room, state.ranks)
        load.elastic = all(pool.chunk_bytes for pool in state.unit_spec.pools)
        return load

    def tick(self, now: float) -> None:
        """Report if there is something to report."""
        whole = self._rolling.tick(now)
        if self._scheduler is None:
            self._state.came.clear()
            return
        if whole:
            self._tell(self.loads(), now)
            return
        if now < self._told_at + REPORT_SECONDS:
            self._due = self._told_at + REPORT_SECONDS
            return
        self._due = self._told_at + SILENCE_SECONDS
        loads = self.loads()
        pools = pools_worth_telling(self._told_pools, self._pools())
        if now >= self._due or self._state.came or pools or worth_telling(self._told, loads):
            self._tell(loads, now)

    def wakeup(self) -> float:
        """When `tick` is due although no message came."""
        return min(self._due, self._rolling.wakeup())

    def _tell(self, loads: list[InstanceLoad], now: float) -> None:
        assert self._scheduler is not None
        came, self._state.came = self._state.came, []
        pools = self._told_pools = self._pools()
        self._state.send(self._scheduler, Loads(self._state.unit_spec.unit, self._state.epoch, loads, came, pools))
        self._told, self._told_at, self._due = loads, now, now + SILENCE_SECONDS
