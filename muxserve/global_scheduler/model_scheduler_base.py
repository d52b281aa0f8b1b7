"""What the scheduler of every model has, by whatever policy its requests are placed.

Replicas are named by their units. What no policy can know is kept here: who waits for an answer, which replicas the
controller is starting and stopping, and what an operator wants drained.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from muxserve.global_scheduler.outbox import Outbox
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.prefixes import DispatchName
from muxserve.replicas.priorities import Levels
from muxserve.replicas.scaling import ScalingRules
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.rules import RollingRules
from muxserve.wire import NotPlaced, Place, Placed, StartReplicas, StopReplica, Terminating

log = logging.getLogger(__name__)

# A replica that died is being started again; after this long it is not counted on any more.
GONE_SECONDS = 60.0
# What could not be started is not asked for again before this long, twice as long after each further failure.
RETRY_SECONDS = (2.0, 30.0)
# After this many failed starts in a row nobody should wait for the next one.
DEGRADED_STARTS = 3
# A unit that does not follow an order gets it again, but not with every report.
TELL_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Rules:
    """By what a model is scheduled."""

    levels: Levels
    migration: MigrationRules | None = None
    scaling: ScalingRules | None = None
    rolling: RollingRules | None = None
    dispatch: DispatchName = "prefix"


@dataclass(slots=True)
class Replica:
    """What is known of the model's replica in one unit that is up. `terminating` is what the unit says,
    `load.terminating` what it should say."""

    load: InstanceLoad
    terminating: bool = False
    told_at: float = -math.inf


def load_state(load: InstanceLoad) -> dict[str, object]:
    """How a replica stands, as JSON-ready data."""
    return {
        "capacity": load.capacity,
        "used": load.used,
        "running": load.running,
        "waiting": load.waiting,
        "moving_in": load.moving_in,
        "moving_out": load.moving_out,
        "terminating": load.terminating,
    }


@dataclass(frozen=True, slots=True)
class Asker:
    """A gateway that waits for an answer, since when it does."""

    peer: bytes
    place: Place
    since: float


class ModelSchedulerBase(ABC):
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
        self._up: dict[str, Replica] = {}
        self._died: dict[str, float] = {}
        # Whom to answer, by the key under which the request waits.
        self._askers: dict[str, Asker] = {}
        self._leaving: set[str] = set()
        self._stopping: set[str] = set()
        # Starts that failed count as asked for until their time has come, so that nobody asks again at once.
        self._failed: list[float] = []
        self._retry = RETRY_SECONDS[0]
        self._why_not = ""
        # Starts in a row in which its engines failed.
        self._failed_starts = 0

    # ------------------------------------------------------------ what a policy adds

    @abstractmethod
    def place(self, peer: bytes, place: Place, now: float) -> None:
        """A gateway asks where a request goes."""

    @abstractmethod
    def unplace(self, peer: bytes, request_id: str) -> bool:
        """A gateway does not want an answer any more; False: nobody waits here for it."""

    @abstractmethod
    def pairs(self) -> list[tuple[str, str, InstanceLoad]]:
        """Source and destination of each pair of which both are up, with the destination's load."""

    @abstractmethod
    def state(self, now: float) -> dict[str, object]:
        """How the model stands, as JSON-ready data."""

    @abstractmethod
    def _rules_changed(self, now: float) -> None:
        """`rules` are other ones."""

    @abstractmethod
    def _came(self, unit: str, load: InstanceLoad, now: float) -> None:
        """A replica is up; `load.terminating` is what it says itself, and to become what it should say."""

    @abstractmethod
    def _stands(self, unit: str, load: InstanceLoad, came: Sequence[str], now: float) -> None:
        """A replica that is known has reported, with these requests among what it tells of."""

    @abstractmethod
    def _went(self, unit: str, now: float) -> None:
        """A replica is not up any more."""

    @abstractmethod
    def _drain(self, unit: str, now: float) -> None:
        """A replica that is up is to get nothing more and does not stay, whatever comes."""

    @abstractmethod
    def _dispatch(self, now: float) -> None:
        """Something has changed: place what waits, as far as it can be."""

    @abstractmethod
    def _withdraw(self, key: str) -> bool:
        """The request of that key does not wait any more; False: it did not."""

    @abstractmethod
    def _round(self, now: float) -> None:
        """Pairs, scaling, requests that wait in vain."""

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
            self._rules_changed(now)
        self._dispatch(now)

    def take_over(self, before: ModelSchedulerBase, now: float) -> None:
        """The model's requests are placed by another policy from now on: go on with those that wait at the one
        before, and with the orders to and from the controller."""
        self.asked = max(0, before.asked - len(self.serves - before.serves))
        self._leaving = before._leaving & self.serves
        self._stopping = before._stopping & self.serves
        self._died = {unit: since for unit, since in before._died.items() if unit in self.serves}
        self._failed, self._retry, self._why_not = before._failed, before._retry, before._why_not
        self._failed_starts = before._failed_starts
        for asker in sorted(before._askers.values(), key=lambda each: each.since):
            self.place(asker.peer, asker.place, now)

    def close(self) -> None:
        """The model is no longer offered."""
        self._refuse_all(f"{self.model} is no longer served", late=False)

    # ------------------------------------------------------------ replicas

    def report(self, unit: str, load: InstanceLoad, came: Sequence[str], now: float) -> None:
        """A unit says how its replica stands; `came` have come to the unit since its last report."""
        replica = self._up.get(unit)
        if replica is None:
            replica = self._up[unit] = Replica(msgspec.structs.replace(load, name=unit))
            self._died.pop(unit, None)
            self._retry, self._why_not, self._failed_starts = RETRY_SECONDS[0], "", 0
            self._came(unit, replica.load, now)
            log.info("%s is up in %s: %d tokens of KV", self.model, unit, load.capacity)
        else:
            self._stands(unit, replica.load.refresh(load), came, now)
        replica.terminating, wanted = load.terminating, replica.load.terminating
        if load.terminating != wanted and now - replica.told_at >= TELL_AGAIN_SECONDS:
            self._tell(unit, wanted, now)
        self._dispatch(now)

    def gone(self, unit: str, now: float) -> None:
        """The replica is not up any more."""
        if self._up.pop(unit, None) is not None:
            self._died[unit] = now
            self._went(unit, now)
            log.info("%s is down in %s", self.model, unit)

    def drain(self, unit: str, now: float) -> None:
        """The controller wants the replica drained, and to hear when it is."""
        if unit not in self._up or unit in self._stopping:
            # Nothing of it runs, or the controller has heard it already.
            self._leaving.add(unit)
            self._stopping.add(unit)
            self._out.to_controller(StopReplica(self.model, unit))
        elif unit not in self._leaving:
            self._leaving.add(unit)
            self._drain(unit, now)

    def start_failed(self, reason: str, now: float, broken: bool = False) -> None:
        """The controller could not start a replica; `broken`: since its engines fail, and not for want of room."""
        log.warning("a replica of %s could not be started: %s", self.model, reason)
        self._why_not = reason
        if self.asked:
            self.asked -= 1
            self._failed.append(now + self._retry)
            self._retry = min(2 * self._retry, RETRY_SECONDS[1])
        self._failed_starts = self._failed_starts + 1 if broken else 0
        self._refuse_degraded(now)

    # ------------------------------------------------------------ requests and rounds

    def forget(self, peer: bytes) -> None:
        """The gateway is gone."""
        for asker in [each for each in self._askers.values() if each.peer == peer]:
            self.unplace(asker.peer, asker.place.request_id)

    def tick(self, now: float) -> None:
        """One round: pairs, scaling, requests that wait in vain."""
        self._round(now)
        if self._askers and self.rules.scaling is None and not self.serves - self._leaving - self._stopping:
            self._refuse_all(f"{self.model} has no replica left: all are drained or stopped", late=True)

    def due(self, now: float) -> float:
        """When what waits is to be looked at (`hurry`) if nothing happens until then and no round comes first."""
        return math.inf

    def hurry(self, now: float) -> None:
        """A last moment has come."""
        self._dispatch(now)

    # ------------------------------------------------------------ inside

    def _to_go(self, unit: str) -> bool:
        """Whether the replica in `unit` does not stay, since somebody wants that."""
        return unit in self._leaving or unit in self._stopping

    def _starting(self, now: float) -> int:
        """Replicas that can be counted on: asked for, being started, or being started again after a death."""
        awaited = self.serves - self._up.keys() - self._leaving - self._stopping
        self._failed = [until for until in self._failed if now < until]
        return self.asked + len(self._failed) + sum(now - self._died.get(unit, now) < GONE_SECONDS for unit in awaited)

    def _start(self, count: int) -> None:
        self.asked += count
        log.info("asking for %d more of %s", count, self.model)
        self._out.to_controller(StartReplicas(self.model, count))

    def _stop(self, unit: str, now: float) -> None:
        # Until it says so itself, it may still begin what a gateway has sent.
        if unit in self._stopping or not self._up[unit].terminating:
            return
        self._stopping.add(unit)
        # From here on it is the controller's, and it does not stay whatever comes.
        self._drain(unit, now)
        log.info("%s in %s is drained", self.model, unit)
        self._out.to_controller(StopReplica(self.model, unit))

    def _tell(self, unit: str, terminating: bool, now: float) -> None:
        log.debug("%s in %s: terminating %s", self.model, unit, terminating)
        self._up[unit].told_at = now
        self._out.to_unit(unit, Terminating(self.model, terminating))

    def _waits(self, key: str, peer: bytes, place: Place, now: float) -> None:
        """A gateway asks for a unit for the request of that key. It repeats that while it waits for the answer: the
        request has waited since it was asked for first."""
        before = self._askers.get(key)
        self._askers[key] = Asker(peer, place, now if before is None else before.since)

    def _send_away(self, key: str, unit: str) -> Place | None:
        """The request of that key goes to `unit`; returns it, None if nobody waits for the answer."""
        asker = self._askers.pop(key, None)
        if asker is None:
            return None
        self._out.to_client(asker.peer, Placed(asker.place.request_id, unit))
        return asker.place

    def _answer(self, key: str, message: str, late: bool) -> None:
        asker = self._askers.pop(key, None)
        if asker is not None:
            if late and self._why_not:
                message = f"{message} (the last start failed: {self._why_not})"
            self._out.to_client(asker.peer, NotPlaced(asker.place.request_id, message, late))

    def _refuse_degraded(self, now: float) -> None:
        """Nobody waits for a model each start of which fails. Who comes when it is time for another try asks for it."""
        if not self._up and self._failed_starts >= DEGRADED_STARTS and any(now < until for until in self._failed):
            self._refuse_all(f"{self.model} is degraded", late=True)

    def _refuse_all(self, message: str, late: bool) -> None:
        for key in list(self._askers):
            self._withdraw(key)
            self._answer(key, message, late)
