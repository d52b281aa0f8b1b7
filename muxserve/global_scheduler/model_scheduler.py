"""One model: its pure `GlobalScheduler`, and what the live fleet adds to it: requests that are on their way to a unit,
whose report cannot count them yet.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from muxserve.global_scheduler.model_scheduler_base import ModelSchedulerBase, Rules, load_state
from muxserve.global_scheduler.outbox import Outbox
from muxserve.replicas.decisions import (
    Decision,
    Dispatch,
    Drain,
    Pair,
    RefuseRequest,
    Resume,
    Start,
    StopInstance,
    Unpair,
)
from muxserve.replicas.dispatch import NewRequest
from muxserve.replicas.global_scheduler import GlobalScheduler
from muxserve.replicas.prefixes import dispatch_policy, keys_of
from muxserve.replicas.priorities import PriorityError
from muxserve.replicas.views import InstanceLoad
from muxserve.wire import Place, Unpaired

log = logging.getLogger(__name__)

# What a unit has not named by then was cancelled on its way, or the gateway is gone.
FORGET_SECONDS = 1.0


class ModelScheduler(ModelSchedulerBase):
    """A model whose requests go to the freest replica, or to one that has a part of their prompt."""

    def __init__(self, model: str, rules: Rules, serves: Iterable[str], out: Outbox) -> None:
        super().__init__(model, rules, serves, out)
        self._scheduler = self._make()
        # By unit: requests sent there that it has not named yet, with the time and their demand.
        self._under_way: defaultdict[str, dict[str, tuple[float, int]]] = defaultdict(dict)

    def _make(self) -> GlobalScheduler:
        rules = self.rules
        policy = dispatch_policy(rules.dispatch, rules.levels)
        return GlobalScheduler(self.model, rules.levels, policy, rules.migration, rules.scaling)

    def _rules_changed(self, now: float) -> None:
        old, self._scheduler = self._scheduler, self._make()
        for source in old.pairs:
            self._out.to_unit(source, Unpaired(self.model))
        for unit, replica in self._up.items():
            self._scheduler.report(replica.load)
            if self._to_go(unit):
                self._scheduler.drain(unit)
        while (popped := old.queue.pop()) is not None:
            request, since = popped
            try:
                self._scheduler.levels[request.scheduling]
                self._scheduler.levels[request.execution]
                self._scheduler.queue.push(request, since)
            except PriorityError as error:
                self._answer(request.request_id, str(error), late=False)

    # ------------------------------------------------------------ replicas

    def _came(self, unit: str, load: InstanceLoad, now: float) -> None:
        self._scheduler.report(load)
        if self._to_go(unit):
            self._drain(unit, now)

    def _stands(self, unit: str, load: InstanceLoad, came: Sequence[str], now: float) -> None:
        under_way = self._under_way[unit]
        for request_id in came:
            under_way.pop(request_id, None)
        for request_id, (since, demand) in list(under_way.items()):
            if now - since >= FORGET_SECONDS:
                del under_way[request_id]
            else:
                load.enqueue(demand)
        self._scheduler.report(load)

    def _went(self, unit: str, now: float) -> None:
        self._under_way.pop(unit, None)
        self._scheduler.down(unit)

    def _drain(self, unit: str, now: float) -> None:
        self._carry_out(self._scheduler.drain(unit), now)

    # ------------------------------------------------------------ requests

    def place(self, peer: bytes, place: Place, now: float) -> None:
        """See `ModelSchedulerBase`."""
        key = request_key(peer, place.request_id)
        prefix = keys_of(place.prefix)
        service = place.service
        request = NewRequest(key, place.demand, place.since, service.scheduling, service.execution, prefix)
        self._waits(key, peer, place, now)
        self._scheduler.starting = self._starting(now)
        try:
            decisions = self._scheduler.arrive(now, request)
        except PriorityError as error:
            self._answer(key, str(error), late=False)
            return
        self._carry_out(decisions, now)
        self._refuse_degraded(now)

    def unplace(self, peer: bytes, request_id: str) -> bool:
        """See `ModelSchedulerBase`."""
        key = request_key(peer, request_id)
        return self._askers.pop(key, None) is not None and self._withdraw(key)

    def _withdraw(self, key: str) -> bool:
        return self._scheduler.cancel(key)

    # ------------------------------------------------------------ rounds

    def _round(self, now: float) -> None:
        self._scheduler.starting = self._starting(now)
        self._carry_out(self._scheduler.tick(now), now)

    def pairs(self) -> list[tuple[str, str, InstanceLoad]]:
        """See `ModelSchedulerBase`."""
        up = self._up
        return [(s, d, up[d].load) for s, d in self._scheduler.pairs.items() if s in up and d in up]

    def state(self, now: float) -> dict[str, object]:
        """See `ModelSchedulerBase`."""
        replicas: dict[str, object] = {
            unit: {
                **load_state(replica.load),
                "freeness": replica.load.freeness if math.isfinite(replica.load.freeness) else None,
            }
            for unit, replica in sorted(self._up.items())
        }
        return {
            "replicas": replicas,
            "starting": self._starting(now),
            "waiting": len(self._scheduler.queue),
            "pairs": dict(self._scheduler.pairs),
        }

    # ------------------------------------------------------------ inside

    def _dispatch(self, now: float) -> None:
        if self._askers:
            self._scheduler.starting = self._starting(now)
            self._carry_out(self._scheduler.dispatch(now), now)

    def _carry_out(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            match decision:
                case Dispatch(key, unit):
                    place = self._send_away(key, unit)
                    if place is not None:
                        # The policy has counted the request; the next report may not know it yet.
                        self._under_way[unit][place.request_id] = now, place.demand
                case RefuseRequest(key, reason, late):
                    self._answer(key, reason, late)
                case Unpair(source):
                    if source in self._up:
                        self._out.to_unit(source, Unpaired(self.model))
                case Pair():
                    pass  # every round tells of all pairs
                case Start(count):
                    self._start(count)
                case Drain(unit):
                    log.info("draining %s in %s", self.model, unit)
                    self._tell(unit, True, now)
                case Resume(unit):
                    log.info("%s stays in %s", self.model, unit)
                    self._tell(unit, False, now)
                case StopInstance(unit):
                    self._stop(unit, now)


def request_key(peer: bytes, request_id: str) -> str:
    """Ids are unique within one gateway only."""
    return f"{peer.hex()}/{request_id}"
