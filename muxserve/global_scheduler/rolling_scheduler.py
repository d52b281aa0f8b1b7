"""One model whose prefill rolls over its replicas: its pure `RollingScheduler`, and what the live fleet adds to it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from muxserve.global_scheduler.model_scheduler_base import ModelSchedulerBase, Rules
from muxserve.global_scheduler.outbox import Outbox
from muxserve.global_scheduler.rolling_moves import RollingMoves
from muxserve.global_scheduler.rolling_scaler import RollingScaler
from muxserve.global_scheduler.rolling_state import apply, rebuild, show
from muxserve.replicas.decisions import not_ready, too_long
from muxserve.replicas.priorities import PriorityError
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.answers import AnswerLengths
from muxserve.rolling.constraints import PrefillDemand, promise
from muxserve.rolling.member import MacroMember
from muxserve.rolling.rules import RollingRules
from muxserve.rolling.scheduler import RollingScheduler, Sent
from muxserve.wire import Place, Placed, RollingReport, SchedulerHello, Unpaired, Waits

log = logging.getLogger(__name__)

# From the answer to a gateway until the unit has named the request; after this long it will not come.
NAMED_SECONDS = 1.0
# A unit whose load counts more or fewer requests than it has named, for this long on end, is asked to name them all.
DOUBT_SECONDS = 3.0
# A unit is not asked more often than this.
ASK_SECONDS = 1.0


@dataclass(slots=True)
class PendingPlacement:
    """A request on its way to `unit`, expected until then."""

    unit: str
    until: float


class PendingPlacements:
    """Those of one model."""

    def __init__(self) -> None:
        self._sent: dict[str, PendingPlacement] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def unit(self, request_id: str) -> str:
        """Where the request is on its way to; "" if it is not."""
        sent = self._sent.get(request_id)
        return "" if sent is None else sent.unit

    def at(self, unit: str) -> set[str]:
        """Requests on their way to that unit."""
        return {request_id for request_id, each in self._sent.items() if each.unit == unit}

    def sent(self, request_id: str, unit: str, now: float) -> None:
        """The request was sent there."""
        self._sent[request_id] = PendingPlacement(unit, now + NAMED_SECONDS)

    def take_back(self, request_id: str) -> str:
        """The request is not expected any more; returns where it was, or ""."""
        sent = self._sent.pop(request_id, None)
        return "" if sent is None else sent.unit

    def gone(self, unit: str) -> None:
        """The unit is gone, with whatever was on its way."""
        self._sent = {key: each for key, each in self._sent.items() if each.unit != unit}

    def expired(self, now: float) -> list[str]:
        """Requests that have not come in time."""
        return [key for key, each in self._sent.items() if now >= each.until]


class RollingModelScheduler(ModelSchedulerBase):
    """A model whose requests go to the replica whose prefill window is open.

    Its members are what units report (`rolling_state`), and the requests sent there since: each counts with its member
    from the answer to the gateway on, and is forgotten if the unit does not name it soon. A unit that has reported its
    load but not its requests is no member yet; it is asked.

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
        self._answers = AnswerLengths(self._rolling.answer)
        # Members of which the requests are known, but not the load.
        self._apart: dict[str, MacroMember] = {}
        self._placements = PendingPlacements()
        self._moves = RollingMoves()
        # Draining because of the load; those stay when they are needed after all.
        self._draining: set[str] = set()
        self._asked_at: dict[str, float] = {}
        self._doubted: dict[str, float] = {}
        # Requests that no member could ever hold, while there are replicas to come.
        self._held: set[str] = set()

    @property
    def _rolling(self) -> RollingRules:
        assert self.rules.rolling is not None
        return self.rules.rolling

    def _make(self) -> RollingScheduler:
        return RollingScheduler(self._rolling.objectives, self._rolling.bounds)

    def _make_scaler(self, now: float) -> RollingScaler | None:
        bounds = self.rules.scaling
        return None if bounds is None else RollingScaler(bounds, self._rolling.objectives, now)

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
            member = self._apart[unit] = MacroMember(unit, 0, self._rolling.tpot, bias=bias)
        self._answers.add(report.decoded, report.over)
        unnamed = self._placements.at(unit)
        if report.whole:
            before = set(member.requests)
            named = rebuild(member, report, self._rolling, self._answers.expected, unnamed, now)
            for key in named:
                self._moves.forget(key)
            self._forget(before - member.requests.keys())
            self._doubted.pop(unit, None)
        else:
            brought = self._moves.brought(report, member, self._scheduler, now)
            news = apply(member, report, self._rolling, self._answers.expected, unnamed, now, brought)
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

    def _stands(self, unit: str, load: InstanceLoad, came: Sequence[str], now: float) -> None:
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
        """See `ModelSchedulerBase`."""
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

    def _member(self, unit: str) -> MacroMember | None:
        scheduler = self._scheduler
        return self._apart.get(unit) or scheduler.members.get(unit) or scheduler.draining.get(unit)

    def _forget(self, keys: Iterable[str]) -> None:
        if self._scaler is not None:
            self._scaler.forget(keys)

    # ------------------------------------------------------------ rules

    def _rules_changed(self, now: float) -> None:
        old, self._scheduler = self._scheduler, self._make()
        self._scaler = self._make_scaler(now)
        for member in [*self._apart.values(), *old.members.values(), *old.draining.values()]:
            member.retimed(self._rolling.tpot)
        for member in old.draining.values():
            self._scheduler.found_draining(member)
        for member in old.members.values():
            self._scheduler.grow(member, now)
        self._held.clear()
        for key in sorted(self._askers, key=lambda each: self._askers[each].since):
            self._try(key, now)

    # ------------------------------------------------------------ requests

    def place(self, peer: bytes, place: Place, now: float) -> None:
        """See `ModelSchedulerBase`."""
        key = place.request_id
        if self._placements.unit(key) in self._scheduler.members:
            # The answer may have been lost.
            self._out.to_client(peer, Placed(key, self._placements.unit(key)))
            return
        self._bury(key, now)
        if key in self._askers:
            self._withdraw(key)
        self._waits(key, peer, place, now)
        self._try(key, now)
        if key in self._askers:
            self._out.to_client(peer, Waits(key))
            self._wake(now)

    def unplace(self, peer: bytes, request_id: str) -> bool:
        """See `ModelSchedulerBase`. Where it was sent it counts until the unit has not named it in time."""
        asker = self._askers.get(request_id)
        if asker is None or asker.peer != peer:
            return False
        del self._askers[request_id]
        return self._withdraw(request_id)

    def _withdraw(self, key: str) -> bool:
        self._forget([key])
        if key in self._held:
            self._held.discard(key)
            return True
        return self._scheduler.cancel(key)

    def _try(self, key: str, now: float) -> None:
        """Place the request of somebody who asks, or have it wait, or refuse it."""
        place = self._askers[key].place
        try:
            self.rules.levels[place.service.execution]
            rank = self.rules.levels[place.service.scheduling].rank
        except PriorityError as error:
            self._answer(key, str(error), late=False)
            return
        largest = self._largest
        if place.demand > largest > 0:
            if self._coming(now):
                self._held.add(key)  # one that comes up may be larger
            else:
                self._refuse_too_long(key, place.demand)
            return
        tokens = place.demand - 1
        promised = promise(tokens, place.max_tokens, largest, self._answers.expected)
        arrival = min(now, place.since)
        demand = PrefillDemand(key, self._rolling.prefill_seconds(tokens), promised, arrival, rank)
        if self._scaler is not None:
            self._scaler.came(key, arrival)
        self._deliver(self._scheduler.arrive(demand, now), now)

    def _fit(self, now: float) -> None:
        """The largest member may be another one: try again the requests held back, and those that wait for more than it
        has."""
        largest = self._largest
        if largest:
            for demand in [each for each in self._scheduler.waiters() if each.tokens > largest]:
                self._scheduler.cancel(demand.request_id)
                self._try(demand.request_id, now)
        held, self._held = self._held, set()
        for key in held:
            self._try(key, now)

    def _bury(self, key: str, now: float) -> None:
        """A gateway asks for a place for a request: wherever it was, that life is over."""
        self._placements.take_back(key)
        self._moves.forget(key)
        scheduler = self._scheduler
        for member in [*self._apart.values(), *scheduler.members.values(), *scheduler.draining.values()]:
            member.left(key, now)

    def _deliver(self, sent: Sent, now: float) -> None:
        for demand, member in sent:
            key = demand.request_id
            if self._send_away(key, member.name) is not None:
                self._placements.sent(key, member.name, now)
            else:
                member.left(key, now)

    def _dispatch(self, now: float) -> None:
        self._deliver(self._scheduler.retry(now), now)

    def due(self, now: float) -> float:
        """See `ModelSchedulerBase`. Whose last moment has passed has been tried, and waits for memory."""
        due = self._scheduler.due(now)
        return math.inf if due is None or due <= now else due

    def _refuse_too_long(self, key: str, demand: int) -> None:
        self._forget([key])
        self._answer(key, too_long(self.model, demand, self._largest), late=False)

    @property
    def _largest(self) -> int:
        """Capacity of the largest member, tokens."""
        return max((member.capacity for member in self._scheduler.members.values()), default=0)

    def _coming(self, now: float) -> int:
        """Replicas that will be members: those that are up and have not named their requests, too."""
        members = self._scheduler.members
        unknown = sum(unit not in members and not each.load.terminating for unit, each in self._up.items())
        return self._starting(now) + unknown

    # ------------------------------------------------------------ rounds

    def _round(self, now: float) -> None:
        for key in self._placements.expired(now):
            member = self._member(self._placements.take_back(key))
            if member is not None:
                member.left(key, now)
            self._forget([key])
        self._fit(now)
        self._dispatch(now)
        for unit, replica in self._up.items():
            if replica.load.terminating and replica.load.idle:
                self._stop(unit, now)
        self._scale(now)
        self._pair(now)

    def _wake(self, now: float) -> bool:
        """Start what is missing; False: nothing is."""
        if self._scaler is None:
            return False
        missing = self._scaler.missing(len(self._scheduler.members), self._coming(now), len(self._askers))
        if missing:
            self._more(missing, now)
        return missing > 0

    def _scale(self, now: float) -> None:
        scaler, members = self._scaler, self._scheduler.members
        if scaler is None:
            return
        if not members:
            limit = scaler.bounds.wake_limit
            reason = not_ready(self.model, limit)
            for key in [key for key, asker in self._askers.items() if now - asker.since >= limit]:
                self._withdraw(key)
                self._answer(key, reason, late=True)
        if self._wake(now):
            return
        wanted = scaler.wanted([*members.values()], self._coming(now), len(self._askers), now)
        if wanted > 0:
            self._more(wanted, now)
        elif wanted < 0:
            unit, sent = self._scheduler.shrink(now)
            self._deliver(sent, now)
            if unit is not None:
                self._draining.add(unit)
                self._leaves(unit, now)

    def _more(self, count: int, now: float) -> None:
        """`count` replicas more; draining ones first, by the number of their running requests."""
        back = [unit for unit in self._draining if unit in self._scheduler.draining and not self._to_go(unit)]
        back.sort(key=lambda unit: (-self._up[unit].load.running, unit))
        for unit in back[:count]:
            log.info("%s stays in %s", self.model, unit)
            self._draining.discard(unit)
            self._up[unit].load.terminating = False
            self._tell(unit, False, now)
            self._deliver(self._scheduler.resume(unit, now), now)
        if count > len(back):
            self._start(count - len(back))

    # ------------------------------------------------------------ what others see

    def pairs(self) -> list[tuple[str, str, InstanceLoad]]:
        """See `ModelSchedulerBase`. Only who is drained gives requests away, its decodes; what is promised at the other
        one is taken, as it is for requests that are sent there."""
        up, found = self._up, []
        for source, destination in self._moves.pairs.items():
            member = self._scheduler.members.get(destination)
            if source in up and destination in up and member is not None:
                known = up[destination].load
                load = msgspec.structs.replace(known, used=max(known.used, member.promised))
                found.append((source, destination, load))
        return found

    def state(self, now: float) -> dict[str, object]:
        """See `ModelSchedulerBase`."""
        replicas: dict[str, object] = {}
        for unit, replica in sorted(self._up.items()):
            replicas[unit] = show(replica.load, self._member(unit), self._rolling.spared, now)
        return {
            "replicas": replicas,
            "starting": self._starting(now),
            "waiting": len(self._askers),
            "pairs": dict(self._moves.pairs),
            "macro_instances": {name: [m.name for m in macro.ring] for name, macro in self._scheduler.macros.items()},
            "moved": self._scheduler.moved,
            "expected_answer": self._answers.expected,
        }
