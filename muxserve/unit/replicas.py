"""How the unit's models stand as replicas, and what the global scheduler and the unit tell each other about them.

Loads are in the terms of `muxserve.replicas`: tokens of KV. The capacity of a replica is the most that its model can
ever be given. What others of the unit hold of that counts as used, so that a replica is as free as it really is; where
all seats are taken, everything is. All sums are at hand: a report costs the same however many requests there are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

import msgspec

from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad, InstanceView, RequestView
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.rolling import RollingReports
from muxserve.unit.state import UnitState
from muxserve.wire import Loads, MovingIn, SchedulerHello, Terminating

log = logging.getLogger(__name__)

# Changes within this time are told together; without any, the global scheduler hears that the unit lives.
REPORT_SECONDS = 0.02
SILENCE_SECONDS = 1.0
# A report that differs from the last one only in `used`, and by less than this part of the capacity, is not worth it.
_WORTH_TELLING = 1 / 64


def load_of(
    unit: str,
    model: ModelState,
    policy: Policy,
    layout: str,
    terminating: bool = False,
    moving_in: int = 0,
    moving_out: int = 0,
) -> InstanceLoad:
    """The replica as the global scheduler is to see it."""
    block, per_block, pool, queue = model.block_tokens, model.pages_per_block, model.pool, model.queue
    capacity = policy.capacity(model)
    left = min(capacity - model.used - model.promised, pool.available - pool.promised)
    if model.in_engines >= model.max_seqs:
        left = 0  # room for KV is no use to a request without a seat
    most = capacity // per_block
    return InstanceLoad(
        name=unit,
        model=model.name,
        capacity=most * block,
        layout=layout,
        used=(most - max(0, left) // per_block) * block,
        running=model.in_engines,
        waiting=len(queue),
        head_demand=queue.head().blocks * block if queue else 0,
        queued_demand=queue.blocks * block,
        levels=dict(model.levels),
        terminating=terminating,
        moving_in=moving_in,
        moving_out=moving_out,
    )


def load_of_replica(state: UnitState, model: ModelState) -> InstanceLoad:
    """How the replica stands now."""
    name = model.name
    layout, terminating = state.unit_spec.layout(name), name in state.terminating
    moving_in, moving_out = state.moving_in.get(name, 0), state.moving_out[name]
    return load_of(state.unit_spec.unit, model, state.policy, layout, terminating, moving_in, moving_out)


def view_of(model: ModelState, load: InstanceLoad, levels: Levels, staying: Collection[str]) -> InstanceView:
    """The replica as it sees itself, request by request, with the sums of `load`. Requests that decode can be moved,
    those in `staying` apart. Takes time in proportion to the requests that have a seat."""
    block = model.block_tokens
    known = {level.name for level in levels}
    running = []
    for live in model.decoding.values():
        usage = model.blocks_of(model.tokens_of(live)) * block
        level = live.execution if live.execution in known else levels.default
        running.append(RequestView(live.request_id, usage, execution=level, movable=live.request_id not in staying))
    # What they hold is in the sums; only how many there are, and of which level, must be known.
    for others in (model.prefilling, model.handed, model.moving):
        for live in others.values():
            level = live.execution if live.execution in known else levels.default
            running.append(RequestView(live.request_id, execution=level, movable=False))
    return InstanceView(
        name=load.name,
        capacity=load.capacity,
        model=model.name,
        running=running,
        waiting=[RequestView("", demand=load.head_demand, queued=True)] if load.waiting else [],
        # Negative where requests share blocks: what they hold together is less than the sum.
        reserved=load.used - sum(view.usage for view in running),
        terminating=load.terminating,
        moving_in=load.moving_in,
        moving_out=load.moving_out,
    )


def worth_telling(known: list[InstanceLoad], now: list[InstanceLoad]) -> bool:
    """Whether a report says more than the last one."""
    if len(known) != len(now):
        return True
    for old, new in zip(known, now, strict=True):
        if abs(old.used - new.used) >= max(1.0, _WORTH_TELLING * new.capacity):
            return True
        if old != msgspec.structs.replace(new, used=old.used, queued_demand=old.queued_demand):
            return True
    return False


class UnitReplicas:
    """The unit's models as replicas."""

    def __init__(self, state: UnitState, table: UnitRequestTable) -> None:
        self._state = state
        self._table = table
        self._rolling = RollingReports(state)
        self._scheduler: bytes | None = None
        self._told: list[InstanceLoad] = []
        self._told_at = -math.inf
        self._due = math.inf

    def greeted(self, peer: bytes, hello: SchedulerHello, now: float) -> None:
        """A global scheduler is there; there is one, so that an earlier one is gone."""
        log.info("global scheduler %s", hello.epoch)
        self._scheduler = peer
        self._rolling.greeted(peer)
        self._rolling.turn(now)
        self._tell(self.loads(), now)

    def migrating(self, message: MovingIn) -> None:
        """The migrator says what is on its way in."""
        self._state.moving_in = dict(message.moves)

    def migrator_new(self) -> None:
        """What was on its way in is not any more."""
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

    def turn(self, now: float) -> None:
        """Report if there is something to report."""
        whole = self._rolling.turn(now)
        if self._scheduler is None:
            return
        if whole:
            self._tell(self.loads(), now)
            return
        if now < self._told_at + REPORT_SECONDS:
            self._due = self._told_at + REPORT_SECONDS
            return
        self._due = self._told_at + SILENCE_SECONDS
        loads = self.loads()
        if now >= self._due or worth_telling(self._told, loads):
            self._tell(loads, now)

    def wakeup(self) -> float:
        """When `turn` is due although no message came."""
        return min(self._due, self._rolling.wakeup())

    def _tell(self, loads: list[InstanceLoad], now: float) -> None:
        assert self._scheduler is not None
        self._state.send(self._scheduler, Loads(self._state.unit_spec.unit, self._state.epoch, loads))
        self._told, self._told_at, self._due = loads, now, now + SILENCE_SECONDS
