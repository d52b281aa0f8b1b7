"""How long a request would wait for its first token, and whether it is better refused. Pure: no socket, no clock.

The wait is what is ahead of a request, divided by the rate at which first tokens come out while others wait for theirs.
Prompts of one client take turns with other clients (`scheduling.state.RequestQueue`), so that a client counts once,
however many prompts it has sent; and so do tenants, so that of another tenant no more is ahead than the own one has.

A rate holds for the backlog at which it was measured: engines batch, and make more of many prompts than of one. So it
is kept by how many waited, and one measured with less than half as many is not believed. Where none is known nobody is
refused; nor is anybody while the queue does not stand, or as long as nothing comes out at all: a model that wakes, or
whose engine is restarted, is not overloaded, and those that have waited for it are not held against the others.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from muxserve.spec import ModelSpec

# Where an objective is set: a request that is predicted to miss it by less is served. A prediction may be off by that
# much, since batches and the shares of other models change, and an answer that is late is worth more than none.
OBJECTIVE_SLACK = 2.0
# The queue stands when somebody has waited for this part of the longest wait and has no first token: until then a burst
# is let in, whatever was measured before.
STANDING = 0.25
# Where nothing is set: as CoDel does, only a queue that stands for an interval is taken for one that does not drain by
# itself, that is, one in which nobody has had a first token within the target.
TARGET_SECONDS = 5.0
INTERVAL_SECONDS = 10.0
# A rate is forgotten after a few of these.
MEMORY_SECONDS = 5.0
# First tokens that make a rate.
FEWEST = 4.0
# No token for this many seconds, and for this many times the usual interval: not load holds the requests up.
STALLED_SECONDS = 2.0
STALLED_GAPS = 8.0
SMOOTHING = 0.1


@dataclass(slots=True, eq=False)
class WaitingClient:
    """A client's request that was let in at `since`, seconds. It has `prompts`, of which `submitted` are with units,
    with `tokens` in all, and `answered` have their first token."""

    since: float
    rank: int
    prompts: int
    tenant: str = ""
    submitted: int = 0
    tokens: int = 0
    answered: int = 0

    @property
    def waits(self) -> bool:
        """Some prompt has no first token yet."""
        return self.answered < max(self.prompts, self.submitted)

    @property
    def mean_tokens(self) -> float:
        """Tokens of its prompts, as far as they are known."""
        return self.tokens / self.submitted if self.submitted else 0.0


@dataclass(slots=True)
class PrefillRate:
    """First tokens, and tokens of their prompts, over `seconds`; the older, the less each counts."""

    at: float = 0.0
    prompts: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def age(self, now: float) -> float:
        """What is left of it now."""
        return math.exp((self.at - now) / MEMORY_SECONDS)

    def add(self, prompts: int, tokens: int, seconds: float, now: float) -> None:
        """More of it."""
        left = self.age(now)
        self.prompts = self.prompts * left + prompts
        self.tokens = self.tokens * left + tokens
        self.seconds = self.seconds * left + seconds
        self.at = now


class PredictedWait:
    """The waits of one model at one gateway, which sees its own part of the requests and of the rate.

    Args:
        longest: seconds that a request may wait for its first token; None: as long as it takes.
        patient: only a queue that stands for an interval is bounded.
    """

    def __init__(self, longest: float | None, patient: bool = False) -> None:
        self.longest = longest
        self.patient = patient
        # In order of arrival: those that wait, of these those without any first token, and those whose wait is no
        # sign of load.
        self._waiting: dict[object, WaitingClient] = {}
        self._unanswered: dict[object, WaitingClient] = {}
        self._excused: dict[object, WaitingClient] = {}
        # By rank and tenant.
        self._ranks: Counter[tuple[int, str]] = Counter()
        self._tokens = 0.0
        self._known = 0
        self._measured: dict[int, PrefillRate] = {}
        self._since = 0.0
        self._depth = 0
        self._gap = 0.0
        self._flows = False
        # Nothing has come out since there was nothing that could serve: the next gap says nothing of a rate.
        self._interrupted = False
        self._above: float | None = None

    # ------------------------------------------------------------ events

    def enter(self, key: object, rank: int, prompts: int, now: float, tenant: str = "") -> None:
        """A client's request is let in; lower ranks are served first, and tenants of one rank in turns."""
        if not self._waiting and not self._excused:
            self._since = now
            self._flows = False
            self._above = None
        client = WaitingClient(now, rank, max(1, prompts), tenant)
        self._waiting[key] = self._unanswered[key] = client
        self._ranks[rank, tenant] += 1

    def submitted(self, key: object, tokens: int) -> None:
        """One of its prompts, of `tokens` tokens, is with a unit."""
        client = self._waiting.get(key)
        if client is None:
            return
        self._weigh(client, -1)
        client.submitted += 1
        client.tokens += tokens
        self._weigh(client, 1)

    def answered(self, key: object, tokens: int, now: float) -> None:
        """One of its prompts, of `tokens` tokens, has its first token."""
        client = self._waiting.get(key) or self._excused.get(key)
        if client is None:
            return
        if now > self._since or not self._flows:
            self._depth = len(self._waiting) + len(self._excused)
        gap, self._since = (0.0 if self._interrupted else now - self._since), now
        if gap > 0.0:
            self._gap = gap if not self._flows else self._gap + SMOOTHING * (gap - self._gap)
        self._flows = True
        if not self._interrupted:
            self._measured.setdefault(self._depth.bit_length(), PrefillRate(now)).add(1, tokens, gap, now)
        self._interrupted = False
        client.answered += 1
        if self._unanswered.pop(key, None) is not None:
            self._judge(now - client.since, now)
        if not client.waits:
            self.leave(key)

    def leave(self, key: object) -> None:
        """The client's request has ended."""
        client = self._waiting.pop(key, None)
        if client is None:
            self._excused.pop(key, None)
            return
        self._unanswered.pop(key, None)
        self._uncount(client)

    def interrupted(self) -> None:
        """Requests lost what served them, and are served again, or wait for their model to be woken: what waits now has
        not waited because of load."""
        self._interrupted = True
        self._excused.update(self._waiting)
        for client in self._waiting.values():
            self._uncount(client)
        self._waiting.clear()
        self._unanswered.clear()
        self._measured.clear()
        self._flows = False
        self._above = None

    # ------------------------------------------------------------ what follows

    def seconds(self, now: float, rank: int | None = None, tenant: str = "") -> float | None:
        """The wait of a request of `tenant` that came now, behind what goes before it (without a rank: behind all);
        None if nothing is known of it."""
        depth = len(self._waiting) + 1
        prompts = tokens = seconds = 0.0
        for size, measured in list(self._measured.items()):  # also read by another thread, for metrics
            if size >= depth.bit_length() - 1:
                left = measured.age(now)
                prompts += measured.prompts * left
                tokens += measured.tokens * left
                seconds += measured.seconds * left
        if prompts < FEWEST or seconds <= 0.0:
            return None
        ahead = depth if rank is None else self._ahead(rank, tenant)
        wait = ahead * seconds / prompts
        if self._known and tokens > 0.0:
            # Prompts cost by their number when steps are short, by their tokens when they are long. What was measured
            # of other prompts is right in one of the two at least; nobody is to be refused for the other.
            wait = min(wait, ahead * self._tokens / self._known * seconds / tokens)
        return wait

    def _ahead(self, rank: int, tenant: str) -> int:
        """Requests up to and including one that came now: all of better ranks; of its own those of its tenant, and of
        each other tenant as many as go before it."""
        own = self._ranks[rank, tenant] + 1
        ahead = own
        for (each, other), count in self._ranks.items():
            if each < rank:
                ahead += count
            elif each == rank and other != tenant:
                ahead += min(count, own)
        return ahead

    def refuses(self, now: float, rank: int, tenant: str = "") -> float | None:
        """The predicted wait, seconds, if a request is to be refused for it."""
        if self.longest is None or not self._flows or not self._stands(now):
            return None
        if now - self._since > max(STALLED_SECONDS, STALLED_GAPS * self._gap):
            return None
        wait = self.seconds(now, rank, tenant)
        return wait if wait is not None and wait > self.longest else None

    def _judge(self, waited: float, now: float) -> None:
        """Note since when nobody has had a first token within the target. Once that bounds the queue, waits are about
        as long as the target; it goes on until they are much shorter, and the load with them."""
        if waited >= TARGET_SECONDS:
            if self._above is None:
                self._above = now
        elif self._above is not None:
            bounded = now - self._above >= INTERVAL_SECONDS
            if not bounded or waited < STANDING * TARGET_SECONDS:
                self._above = None

    def _stands(self, now: float) -> bool:
        if self.patient:
            return self._above is not None and now - self._above >= INTERVAL_SECONDS
        oldest = next(iter(self._unanswered.values()), None)
        return oldest is not None and self.longest is not None and now - oldest.since >= STANDING * self.longest

    def _weigh(self, client: WaitingClient, sign: int) -> None:
        if client.submitted:
            self._known += sign
            self._tokens = self._tokens + sign * client.mean_tokens if self._known else 0.0

    def _uncount(self, client: WaitingClient) -> None:
        self._weigh(client, -1)
        of = client.rank, client.tenant
        self._ranks[of] -= 1
        if not self._ranks[of]:
            del self._ranks[of]


class PredictedWaits:
    """The waits of all models of a gateway."""

    def __init__(self) -> None:
        self._of: dict[str, PredictedWait] = {}

    def __getitem__(self, model: str) -> PredictedWait:
        """The waits of that model; without a limit if there are none yet."""
        return self._of.setdefault(model, PredictedWait(None))

    def learn(self, model: ModelSpec) -> None:
        """`model` is served, or its limits are these from now on."""
        wait = self[model.name]
        wait.longest, wait.patient = longest_wait(model)

    def forget(self, model: str) -> None:
        """The model is not served any more."""
        self._of.pop(model, None)


def longest_wait(model: ModelSpec) -> tuple[float | None, bool]:
    """How long a request of `model` may wait for its first token, in seconds (None: without end), and whether that
    bounds a standing queue only."""
    if model.max_wait == "none":
        return None, False
    if model.max_wait != "auto":
        return model.max_wait, False
    if model.slo_ttft_ms is not None:
        return OBJECTIVE_SLACK * model.slo_ttft_ms / 1000.0, False
    return TARGET_SECONDS, True
