"""One model: its pure `GlobalScheduler`, and what the live fleet adds to it.

Replicas are named by their units. What the policy cannot know is kept here: who waits for an answer, which replicas the
controller is starting and stopping, what an operator wants drained, and what was sent to a unit so lately that its
report cannot tell of it yet.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from muxserve.global_scheduler.loads import as_instance, as_load, refresh
from muxserve.global_scheduler.outbox import Outbox
from muxserve.replicas.decisions import Decision, Dispatch, Drain, Pair, Refuse, Resume, Start, Stop, Unpair
from muxserve.replicas.dispatch import NewRequest
from muxserve.replicas.global_scheduler import GlobalScheduler
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import Levels, PriorityError
from muxserve.replicas.scaling import ScalingRules
from muxserve.replicas.views import InstanceLoad
from muxserve.wire import (
    Load,
    NotPlaced,
    Place,
    Placed,
    StartReplicas,
    StopReplica,
    Terminating,
    Unpaired,
)

log = logging.getLogger(__name__)

# From the answer to a gateway until the unit's report has the request: two messages on one machine, and the least time
# between two reports.
SETTLE_SECONDS = 0.03
# A replica that died is being started again; after this long it is not counted on any more.
GONE_SECONDS = 60.0
# What could not be started is not asked for again before this long, twice as long after each further failure.
RETRY_SECONDS = (2.0, 30.0)
# A unit that reports otherwise than it was told is told again, but not with every report.
TELL_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Rules:
    """By what a model is scheduled."""

    levels: Levels
    migration: MigrationRules | None = None
    scaling: ScalingRules | None = None


@dataclass(slots=True)
class Replica:
    """What is known of the model's replica in one unit that is up. `recent` has time and demand of what was sent there
    lately; `terminating` is what the unit says, `load.terminating` what it should say."""

    load: InstanceLoad
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    terminating: bool = False
    told_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Asker:
    """A gateway that waits for an answer."""

    peer: bytes
    request_id: str
    demand: int


class ModelDesk:
    """Events of one model in, messages out.

    Args:
        serves: the units that are to serve the model, up or not.
    """

    def __init__(self, model: str, rules: Rules, serves: Iterable[str], out: Outbox) -> None:
        self.model = model
        self.rules = rules
        self.serves = set(serves)
        self.asked = 0
        self._out = out
        self._scheduler = self._make()
        self._up: dict[str, Replica] = {}
        self._died: dict[str, float] = {}
        # Whom to answer, by the key under which the request waits: ids are unique within one gateway only.
        self._askers: dict[str, Asker] = {}
        self._leaving: set[str] = set()
        self._stopping: set[str] = set()
        # Starts that failed count as asked for until their time has come, so that nobody asks again at once.
        self._failed: list[float] = []
        self._retry = RETRY_SECONDS[0]
        self._why_not = ""

    def _make(self) -> GlobalScheduler:
        return GlobalScheduler(
            self.model, self.rules.levels, migration=self.rules.migration, scaling=self.rules.scaling
        )

    # ------------------------------------------------------------ the fleet changes

    def change(self, rules: Rules, serves: Iterable[str], now: float) -> None:
        """The controller has written another fleet file."""
        before, self.serves = self.serves, set(serves)
        # What it was asked for has begun, as far as there is more than before.
        self.asked = max(0, self.asked - len(self.serves - before))
        for unit in before - self.serves:
            self.gone(unit, now)
            self._died.pop(unit, None)
            self._leaving.discard(unit)
            self._stopping.discard(unit)
        if rules != self.rules:
            self.rules = rules
            self._rebuild(now)
        self._dispatch(now)

    def _rebuild(self, now: float) -> None:
        old, self._scheduler = self._scheduler, self._make()
        for source in old.pairs:
            self._out.to_unit(source, Unpaired(self.model))
        for unit, replica in self._up.items():
            self._scheduler.report(replica.load)
            if unit in self._leaving or unit in self._stopping:
                self._scheduler.drain(unit)
        while (popped := old.queue.pop()) is not None:
            request, since = popped
            try:
                self._scheduler.levels[request.scheduling]
                self._scheduler.levels[request.execution]
                self._scheduler.queue.push(request, since)
            except PriorityError as error:
                self._answer(request.request_id, str(error), late=False)

    def close(self) -> None:
        """The model is no longer offered."""
        self._refuse_all(f"{self.model} is no longer served", late=False)

    # ------------------------------------------------------------ replicas

    def report(self, unit: str, load: Load, now: float) -> None:
        """A unit says how its replica stands."""
        replica = self._up.get(unit)
        if replica is None:
            instance = as_instance(unit, load)
            instance.terminating = load.terminating
            replica = self._up[unit] = Replica(instance)
            self._died.pop(unit, None)
            self._retry, self._why_not = RETRY_SECONDS[0], ""
            self._scheduler.report(instance)
            if unit in self._leaving or unit in self._stopping:
                self._carry_out(self._scheduler.drain(unit), now)
            log.info("%s is up in %s: %d tokens of KV", self.model, unit, load.capacity)
        else:
            refresh(replica.load, load)
            while replica.recent and now - replica.recent[0][0] >= SETTLE_SECONDS:
                replica.recent.popleft()
            for _, demand in replica.recent:
                replica.load.enqueue(demand)
            self._scheduler.report(replica.load)
        replica.terminating, wanted = load.terminating, replica.load.terminating
        if load.terminating != wanted and now - replica.told_at >= TELL_AGAIN_SECONDS:
            self._tell(unit, wanted, now)
        self._dispatch(now)

    def gone(self, unit: str, now: float) -> None:
        """The replica is not up any more."""
        if self._up.pop(unit, None) is not None:
            self._died[unit] = now
            self._scheduler.down(unit)
            log.info("%s is down in %s", self.model, unit)

    def drain(self, unit: str, now: float) -> None:
        """The controller wants the replica drained, and to hear when it is."""
        if unit not in self._up or unit in self._stopping:
            # Nothing of it runs, or it has been told already.
            self._leaving.add(unit)
            self._stopping.add(unit)
            self._out.to_controller(StopReplica(self.model, unit))
        elif unit not in self._leaving:
            self._leaving.add(unit)
            self._carry_out(self._scheduler.drain(unit), now)

    def start_failed(self, reason: str, now: float) -> None:
        """The controller could not start a replica."""
        log.warning("a replica of %s could not be started: %s", self.model, reason)
        self._why_not = reason
        if self.asked:
            self.asked -= 1
            self._failed.append(now + self._retry)
            self._retry = min(2 * self._retry, RETRY_SECONDS[1])

    # ------------------------------------------------------------ requests

    def place(self, peer: bytes, place: Place, now: float) -> None:
        """A gateway asks where a request goes."""
        key = _key(peer, place.request_id)
        request = NewRequest(key, place.demand, place.arrival, place.scheduling, place.execution)
        self._askers[key] = Asker(peer, place.request_id, place.demand)
        self._scheduler.starting = self._starting(now)
        try:
            decisions = self._scheduler.arrive(now, request)
        except PriorityError as error:
            self._answer(key, str(error), late=False)
            return
        self._carry_out(decisions, now)

    def unplace(self, peer: bytes, request_id: str) -> bool:
        """A gateway does not want an answer any more; False: nobody waits here for it."""
        key = _key(peer, request_id)
        return self._askers.pop(key, None) is not None and self._scheduler.cancel(key)

    def forget(self, peer: bytes) -> None:
        """The gateway is gone."""
        for asker in [each for each in self._askers.values() if each.peer == peer]:
            self.unplace(asker.peer, asker.request_id)

    # ------------------------------------------------------------ rounds

    def tick(self, now: float) -> None:
        """One round: pairs, scaling, requests that wait in vain."""
        self._scheduler.starting = self._starting(now)
        self._carry_out(self._scheduler.tick(now), now)
        if self._askers and self.rules.scaling is None and not self.serves - self._leaving - self._stopping:
            self._refuse_all(f"{self.model} has no replica left: all are drained or stopped", late=True)

    def pairs(self) -> list[tuple[str, str, Load]]:
        """Source and destination of each pair of which both are up, with the destination's load."""
        up = self._up
        return [(s, d, as_load(up[d].load)) for s, d in self._scheduler.pairs.items() if s in up and d in up]

    def state(self, now: float) -> dict[str, object]:
        """How the model stands, as JSON-ready data."""
        replicas: dict[str, object] = {}
        for unit, replica in sorted(self._up.items()):
            load = replica.load
            replicas[unit] = {
                "freeness": load.freeness if math.isfinite(load.freeness) else None,
                "capacity": load.capacity,
                "used": load.used,
                "running": load.running,
                "waiting": load.waiting,
                "moving_in": load.moving_in,
                "moving_out": load.moving_out,
                "terminating": load.terminating,
            }
        return {
            "replicas": replicas,
            "starting": self._starting(now),
            "waiting": len(self._scheduler.queue),
            "pairs": dict(self._scheduler.pairs),
        }

    # ------------------------------------------------------------ inside

    def _starting(self, now: float) -> int:
        """Replicas that can be counted on: asked for, being started, or being started again after a death."""
        awaited = self.serves - self._up.keys() - self._leaving - self._stopping
        self._failed = [until for until in self._failed if now < until]
        return self.asked + len(self._failed) + sum(now - self._died.get(unit, now) < GONE_SECONDS for unit in awaited)

    def _dispatch(self, now: float) -> None:
        if self._askers:
            self._scheduler.starting = self._starting(now)
            self._carry_out(self._scheduler.dispatch(now), now)

    def _carry_out(self, decisions: Iterable[Decision], now: float) -> None:
        for decision in decisions:
            match decision:
                case Dispatch(key, unit):
                    self._send_away(key, unit, now)
                case Refuse(key, reason, late):
                    self._answer(key, reason, late)
                case Unpair(source):
                    if source in self._up:
                        self._out.to_unit(source, Unpaired(self.model))
                case Pair():
                    pass  # every round tells of all pairs
                case Start(count):
                    self.asked += count
                    log.info("asking for %d more of %s", count, self.model)
                    self._out.to_controller(StartReplicas(self.model, count))
                case Drain(unit):
                    log.info("draining %s in %s", self.model, unit)
                    self._tell(unit, True, now)
                case Resume(unit):
                    log.info("%s stays in %s", self.model, unit)
                    self._tell(unit, False, now)
                case Stop(unit):
                    self._stop(unit)

    def _send_away(self, key: str, unit: str, now: float) -> None:
        asker = self._askers.pop(key)
        # The policy has counted the request; the next report may not know it yet.
        self._up[unit].recent.append((now, asker.demand))
        self._out.to_client(asker.peer, Placed(asker.request_id, unit))

    def _stop(self, unit: str) -> None:
        # Until it says so itself, it may still begin what a gateway has sent.
        if unit in self._stopping or not self._up[unit].terminating:
            return
        self._stopping.add(unit)
        # From here on it is the controller's, and it does not stay whatever comes.
        self._scheduler.drain(unit)
        log.info("%s in %s is drained", self.model, unit)
        self._out.to_controller(StopReplica(self.model, unit))

    def _tell(self, unit: str, terminating: bool, now: float) -> None:
        self._up[unit].told_at = now
        self._out.to_unit(unit, Terminating(self.model, terminating))

    def _answer(self, key: str, message: str, late: bool) -> None:
        asker = self._askers.pop(key, None)
        if asker is not None:
            if late and self._why_not:
                message = f"{message} (the last start failed: {self._why_not})"
            self._out.to_client(asker.peer, NotPlaced(asker.request_id, message, late))

    def _refuse_all(self, message: str, late: bool) -> None:
        for key in list(self._askers):
            self._scheduler.cancel(key)
            self._answer(key, message, late)


def _key(peer: bytes, request_id: str) -> str:
    return f"{peer.hex()}/{request_id}"
