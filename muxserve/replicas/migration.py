"""Which instances give requests to which, and which request moves: Llumnix, section 4.4.3.

Load balancing, de-fragmentation, isolation of high priorities and draining are one case here: each makes the
freeness of an instance low, and from an instance of low freeness requests move to one of high freeness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from muxserve.replicas.decisions import Pair, Unpair
from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad, InstanceView, RequestView
from muxserve.replicas.virtual_usage import freeness, freeness_with

_FREENESS = attrgetter("freeness")


@dataclass(frozen=True, slots=True)
class MigrationRules:
    """`source_below` and `destination_above` are freeness in tokens per request, that is in decode steps; `in_flight`
    is how many requests may leave, and how many may come to, one instance at a time.

    Llumnix's release moves requests out below a freeness of 3 blocks of 16 tokens (`--migrate-out-threshold`).

    Raises:
        ValueError: the destination's threshold is below the source's, or `in_flight` below 1.
    """

    source_below: float = 48.0
    destination_above: float = 96.0
    in_flight: int = 1

    def __post_init__(self) -> None:
        if self.destination_above < self.source_below:
            raise ValueError(
                "an instance would be source and destination at once: destination_above "
                f"({self.destination_above:g}) must be at least source_below ({self.source_below:g})"
            )
        if self.in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, not {self.in_flight}")


class Pairing:
    """The global scheduler's part: sources and destinations, paired anew in every round."""

    def __init__(self, rules: MigrationRules) -> None:
        self.rules = rules
        self.pairs: dict[str, str] = {}

    def round(self, loads: Iterable[InstanceLoad]) -> list[Pair | Unpair]:
        """One round over all scored instances: what has changed since the last one.

        The instance of the lowest freeness is paired with that of the highest, the second lowest with the second
        highest, and so on, each among those whose KV is laid out alike. An instance that is back within the thresholds,
        or gone, is no source any more; what it has in flight arrives.
        """
        rules = self.rules
        sources: dict[str, list[InstanceLoad]] = {}
        destinations: dict[str, list[InstanceLoad]] = {}
        for load in loads:
            if load.freeness < rules.source_below:
                if load.running:
                    sources.setdefault(load.layout, []).append(load)
            elif load.freeness > rules.destination_above and not load.terminating:
                destinations.setdefault(load.layout, []).append(load)
        pairs: dict[str, str] = {}
        for layout, full in sources.items():
            free = destinations.get(layout, [])
            full.sort(key=_FREENESS)
            free.sort(key=_FREENESS, reverse=True)
            # The shorter of the two ends the pairing.
            pairs.update((s.name, d.name) for s, d in zip(full, free, strict=False))
        changes: list[Pair | Unpair] = [Unpair(name) for name in self.pairs if name not in pairs]
        changes += [Pair(s, d) for s, d in pairs.items() if self.pairs.get(s) != d]
        self.pairs = pairs
        return changes


def choose_request(
    source: InstanceView, destination: InstanceLoad, rules: MigrationRules, levels: Levels, growth: int = 0
) -> RequestView | None:
    """The source instance's part: the request that moves next, or None.

    Low execution priority first, then short ones, which are moved soonest. Only a request that the destination can hold
    moves (`growth` is what it may grow by on the way, tokens), and only if the destination does not become a source by
    it: otherwise it would come back. A terminating source is left by whatever fits. One instance never has more than
    `rules.in_flight` requests on their way out, or in.
    """
    if destination.terminating or destination.name == source.name:
        return None
    if source.moving_out >= rules.in_flight or destination.moving_in >= rules.in_flight:
        return None
    if not source.terminating and freeness(source.load(), levels) >= rules.source_below:
        return None
    room = destination.room - growth
    candidates = [r for r in source.running if r.movable and r.usage <= room]
    for request in sorted(candidates, key=lambda r: (levels[r.execution].rank, r.usage, r.request_id)):
        after = freeness_with(destination, levels, request.usage, request.execution)
        if source.terminating or after >= rules.source_below:
            return request
    return None
