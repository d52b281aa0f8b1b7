"""Which of the unit's requests are to move, and where to: pairs of replicas, as the global scheduler makes them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from muxserve.replicas.migration import choose_request
from muxserve.replicas.views import InstanceLoad
from muxserve.replicas.virtual_usage import freeness, score
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.state import LiveRequest, ModelState
from muxserve.spec import UnitSpec
from muxserve.unit.loads import instance_of, view_of
from muxserve.wire import Load, Paired

log = logging.getLogger(__name__)

# A pair that was not repeated for so long is over.
PAIR_SECONDS = 2.0
# How often a paired replica looks whether it should give a request away; if it should and none fits the other one,
# which says anew how it stands ten times a second; and after a move that failed: doubled up to the latter.
CHOOSE_SECONDS = 0.02
NONE_FITS_SECONDS = 0.1
RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 2.0
# A request that could not be moved is left alone for a while.
SKIP_SECONDS = 1.0
# For how long the other replica's report may still count a move that has ended: it goes by way of the global scheduler.
STALE_SECONDS = 0.3


@dataclass(slots=True)
class Pair:
    """Where a replica's requests go. `load` is the other one's last report, and what was sent there since; `flying`
    requests are on their way there from here, and others ended at the times in `ended`."""

    destination: str
    address: str
    load: InstanceLoad
    heard_at: float
    try_at: float = 0.0
    retry: float = RETRY_SECONDS
    flying: int = 0
    ended: list[float] = field(default_factory=list)

    def end(self, now: float) -> None:
        """A move there has ended, one way or the other."""
        self.flying = max(0, self.flying - 1)
        self.load.moving_in = max(0, self.load.moving_in - 1)
        self.ended.append(now)


class Pairs:
    """The pairs of this unit's replicas, by model.

    Args:
        load_of: how a replica of this unit stands.
        growth: blocks that a request may need over there beyond those that it has.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        ledger: UnitLedger,
        load_of: Callable[[ModelState], Load],
        growth: int,
    ) -> None:
        self._unit = unit_spec.unit
        self._rules = unit_spec.migration
        self._ledger = ledger
        self._levels = {model.name: unit_spec.priority_levels(model.name) for model in unit_spec.models}
        self._load_of = load_of
        self._growth = growth
        self._pairs: dict[str, Pair] = {}
        self._skipped: dict[str, float] = {}

    def paired(self, message: Paired, now: float) -> None:
        """The global scheduler wants requests moved, or still does."""
        if message.model not in self._ledger.by_name or message.destination == self._unit:
            log.warning("%s of this unit cannot be paired with %s", message.model, message.destination)
            return
        pair = Pair(message.destination, message.address, instance_of(message.destination, message.load), now)
        known = self._pairs.get(message.model)
        if known is not None and known.destination == pair.destination:
            pair.try_at, pair.retry, pair.flying = known.try_at, known.retry, known.flying
            pair.ended = [at for at in known.ended if now - at < STALE_SECONDS]
            pair.load.moving_in = max(pair.flying, pair.load.moving_in - len(pair.ended))
        else:
            log.info("requests of %s may move to %s", message.model, message.destination)
        self._pairs[message.model] = pair

    def unpaired(self, model: str) -> None:
        """No more requests are to leave; those under way arrive."""
        self._pairs.pop(model, None)

    def choose(self, now: float, staying: Set[str]) -> list[tuple[LiveRequest, Pair, int]]:
        """Requests that are to move now, none of `staying`, each with the KV that it takes (tokens)."""
        chosen = []
        for name, pair in list(self._pairs.items()):
            if now - pair.heard_at > PAIR_SECONDS:
                log.info("the global scheduler does not pair %s with %s any more", name, pair.destination)
                del self._pairs[name]
            elif now >= pair.try_at:
                pair.try_at = now + CHOOSE_SECONDS
                found = self._choose(self._ledger.by_name[name], pair, now, staying)
                if found is not None:
                    chosen.append(found)
        return chosen

    def _choose(
        self, model: ModelState, pair: Pair, now: float, staying: Set[str]
    ) -> tuple[LiveRequest, Pair, int] | None:
        rules, levels = self._rules, self._levels[model.name]
        load = self._load_of(model)
        if not model.decode.takes_work or load.moving_out >= rules.in_flight or pair.load.moving_in >= rules.in_flight:
            return None
        # As `choose_request` asks, but without looking at every request.
        if not load.terminating and freeness(instance_of(self._unit, load), levels) >= rules.source_below:
            return None
        if self._skipped:
            self._skipped = {request: until for request, until in self._skipped.items() if until > now}
        view = view_of(self._unit, model, load, levels, staying | self._skipped.keys())
        request = choose_request(view, score(pair.load, levels), rules, levels, self._growth * model.block_tokens)
        if request is None:
            pair.try_at = now + NONE_FITS_SECONDS
            return None
        pair.flying += 1
        pair.load.moving_in += 1
        return self._ledger.requests[request.request_id], pair, request.usage

    def arrived(self, model: str, destination: str, usage: int, level: str, now: float) -> None:
        """A request has moved; the next one may."""
        pair = self._pairs.get(model)
        if pair is not None and pair.destination == destination:
            pair.retry, pair.try_at = RETRY_SECONDS, now
            pair.end(now)
            load = pair.load
            # Until the next report says so.
            load.used += usage
            load.running += 1
            load.levels[level] = load.levels.get(level, 0) + 1

    def failed(self, model: str, destination: str, request_id: str, now: float) -> None:
        """A move has come to nothing: others are not tried at once, and this request not for a while."""
        self._skipped[request_id] = now + SKIP_SECONDS
        pair = self._pairs.get(model)
        if pair is not None and pair.destination == destination:
            pair.end(now)
            pair.try_at = now + pair.retry
            pair.retry = min(2 * pair.retry, LONGEST_RETRY_SECONDS)

    def wakeup(self) -> float:
        """When `choose` is due."""
        return min((pair.try_at for pair in self._pairs.values()), default=math.inf)
