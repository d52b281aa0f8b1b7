"""The members of one model's macro instances, as its units tell of them.

Members are what units report (`books`), and what was sent there since: a request counts with its member from the answer
to the gateway on, and is forgotten if the unit does not name it soon. A unit that has reported its load but not its
requests is no member yet; it is asked.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable

from muxserve.global_scheduler.books import apply, rebuild
from muxserve.global_scheduler.desk_base import Desk, Rules
from muxserve.global_scheduler.outbox import Outbox
from muxserve.global_scheduler.placements import Placements
from muxserve.global_scheduler.rolling_moves import Moves
from muxserve.global_scheduler.rolling_scaler import RollingScaler
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.member import Member
from muxserve.rolling.rules import RollingRules
from muxserve.rolling.scheduler import RollingScheduler, Sent
from muxserve.wire import RollingReport, SchedulerHello, Unpaired

log = logging.getLogger(__name__)

# A unit whose load tells of more or fewer requests than it has named, for so long on end, is asked to name them all.
DOUBT_SECONDS = 3.0
# A unit is not asked more often than this.
ASK_SECONDS = 1.0


class RollingMembers(Desk):
    """The part of a `RollingDesk` that has to do with replicas.

    Args:
        epoch: this process, for units that are asked for their requests.

    Raises:
        ValueError: the rules contradict themselves.
    """

    def __init__(self, model: str, rules: Rules, serves: Iterable[str], out: Outbox, epoch: str, now: float) -> None:
        super().__init__(model, rules, serves, out)
        self._epoch = epoch
        self._scheduler = self._make()
        self._scaler = self._make_scaler(now)
        # Members of which the requests are known, but not the load.
        self._apart: dict[str, Member] = {}
        self._placements = Placements()
        self._moves = Moves()
        # Draining because of the load; those stay when they are needed after all.
        self._draining: set[str] = set()
        self._asked_at: dict[str, float] = {}
        self._doubted: dict[str, float] = {}

    @property
    def _rolling(self) -> RollingRules:
        assert self.rules.rolling is not None
        return self.rules.rolling

    def _make(self) -> RollingScheduler:
        return RollingScheduler(self._rolling.objectives, self._rolling.bounds)

    def _make_scaler(self, now: float) -> RollingScaler | None:
        bounds = self.rules.scaling
        return None if bounds is None else RollingScaler(bounds, self._rolling.objectives, now)

    @abstractmethod
    def _deliver(self, sent: Sent, now: float) -> None:
        """Tell gateways where these requests go."""

    @abstractmethod
    def _fit(self, now: float) -> None:
        """The largest member may be another one."""

    # ------------------------------------------------------------ replicas

    def rolled(self, unit: str, report: RollingReport, now: float) -> None:
        """A unit says what has happened to the requests of its replica."""
        member = self._member(unit)
        if member is None:
            if not report.whole:
                return  # what came before is not known; it is asked for when there is a load
            # Predictions are as wrong there as elsewhere, until more is known.
            biases = [other.bias for other in self._scheduler.members.values()]
            bias = sum(biases) / len(biases) if biases else 1.0
            member = self._apart[unit] = Member(unit, 0, self._rolling.tpot, switched_at=now, bias=bias)
        unnamed = self._placements.at(unit)
        if report.whole:
            before = set(member.requests)
            named = rebuild(member, report, self._rolling, unnamed, now)
            for key in named:
                self._moves.forget(key)
            self._forget(before - member.requests.keys())
            self._doubted.pop(unit, None)
        else:
            brought = self._moves.brought(report, member, self._scheduler, now)
            news = apply(member, report, self._rolling, unnamed, now, brought)
            named, ended = news.named, self._moves.left(member, news.ended, now)
            if self._scaler is not None:
                self._scaler.take(report, ended, member, now)
        for key in named:
            expected = self._placements.take_back(key)
            elsewhere = None if expected == unit else self._member(expected)
            if elsewhere is not None:
                elsewhere.left(key, now)
        self._join(unit, now)
        self._dispatch(now)

    def _came(self, unit: str, load: InstanceLoad, now: float) -> None:
        if self._to_go(unit):
            load.terminating = True
        elif load.terminating:
            self._draining.add(unit)
        self._join(unit, now)
        if self._member(unit) is None:
            self._ask(unit, now)

    def _stands(self, unit: str, load: InstanceLoad, now: float) -> None:
        member = self._member(unit)
        if member is None:
            self._ask(unit, now)
            return
        member.capacity = load.capacity
        here, named = load.running + load.waiting, len(member.requests.keys() - self._placements.at(unit))
        if here == named:
            self._doubted.pop(unit, None)
        elif now - self._doubted.setdefault(unit, now) >= DOUBT_SECONDS:
            log.info("%s in %s has %d requests and has named %d", self.model, unit, here, named)
            self._doubted[unit] = now
            self._ask(unit, now)

    def gone(self, unit: str, now: float) -> None:
        """See `Desk`."""
        self._apart.pop(unit, None)
        super().gone(unit, now)

    def _went(self, unit: str, now: float) -> None:
        member = self._member(unit)
        if member is not None:
            self._forget(member.requests)
        self._placements.gone(unit)
        self._draining.discard(unit)
        self._doubted.pop(unit, None)
        self._asked_at.pop(unit, None)
        self._deliver(self._scheduler.gone(unit, now), now)

    def _drain(self, unit: str, now: float) -> None:
        self._draining.discard(unit)
        self._leaves(unit, now)

    def _pair(self, now: float) -> None:
        """Say where the decodes of replicas that are being drained go, and to whom that is over."""
        up = self._up
        if self.rules.migration is None:
            over = self._moves.stop()
        else:
            over = self._moves.pair(
                self._scheduler, up, lambda one, other: up[one].load.layout == up[other].load.layout, now
            )
        for unit in over & up.keys():
            self._out.to_unit(unit, Unpaired(self.model))
        for key, left in self._moves.ended(now):
            if self._scaler is not None:
                self._scaler.ended(key, left.was, left.saved, left.at)

    def _leaves(self, unit: str, now: float) -> None:
        """The replica gets nothing more."""
        load = self._up[unit].load
        if not load.terminating:
            log.info("draining %s in %s", self.model, unit)
            load.terminating = True
            self._tell(unit, True, now)
        self._deliver(self._scheduler.drain(unit, now), now)

    def _join(self, unit: str, now: float) -> None:
        """The replica becomes a member as soon as both its requests and its load are known."""
        replica, member = self._up.get(unit), self._apart.get(unit)
        if replica is None or member is None:
            return
        del self._apart[unit]
        member.capacity = replica.load.capacity
        if replica.load.terminating:
            self._scheduler.found_draining(member)
        else:
            self._deliver(self._scheduler.grow(member, now), now)
            self._fit(now)

    def _ask(self, unit: str, now: float) -> None:
        if now - self._asked_at.get(unit, -math.inf) >= ASK_SECONDS:
            self._asked_at[unit] = now
            self._out.to_unit(unit, SchedulerHello(self._epoch))

    def _member(self, unit: str) -> Member | None:
        scheduler = self._scheduler
        return self._apart.get(unit) or scheduler.members.get(unit) or scheduler.draining.get(unit)

    def _forget(self, keys: Iterable[str]) -> None:
        if self._scaler is not None:
            self._scaler.forget(keys)
