"""The records of which a unit's ledger is made. Only the ledger writes them; policies read."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from muxserve.scheduling.fairness import INPUT, QueueKey, TenantCounters, WaitingTenants
from muxserve.scheduling.leases import LeaseState, Work
from muxserve.scheduling.types import (
    BOTH,
    DECODE,
    DECODING,
    PREFILL,
    QUEUED,
    ModelProfile,
    Phase,
    PoolProfile,
    QueuedRequest,
    share_units,
)


class Event(StrEnum):
    """What became of a request."""

    CAME = "came"
    PREFILLED = "prefilled"
    LEFT = "left"


class Note(NamedTuple):
    """One event. A request that came has so many `tokens`, may generate `max_tokens` more at most, and perhaps brought
    its KV with it (`with_kv`). A preempted request leaves, and comes again. A request that left is `over` if nobody
    serves it any more."""

    event: Event
    request_id: str
    tokens: int = 0
    max_tokens: int = 0
    with_kv: bool = False
    over: bool = False


# The first two parts of a key.
QueueRank = tuple[int, int]


class LiveRequest:
    """A request that is not finished. `lease_id` is the lease that brought it into its present engine, 0 in none. It
    decodes since `decoding_since` (None: not yet), when each sequence there had been given `entered_at` tokens."""

    __slots__ = (
        "arrival",
        "blocks",
        "decoding_since",
        "entered_at",
        "execution",
        "group",
        "key",
        "lease_id",
        "max_tokens",
        "model",
        "output_tokens",
        "place",
        "priority",
        "prompt_tokens",
        "request_id",
        "resumed",
        "tenant",
        "weight",
    )

    def __init__(self, request: QueuedRequest, model: ModelState) -> None:
        self.request_id = request.request_id
        self.model = model
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.max_tokens = request.max_tokens
        self.arrival = request.arrival
        self.resumed = request.resumed
        service = request.service
        self.priority = service.priority
        self.execution = service.execution
        self.group = service.group
        self.tenant = service.tenant
        self.weight = service.weight
        self.place = QUEUED
        self.lease_id = 0
        self.entered_at = 0.0
        self.decoding_since: float | None = None
        self.blocks = model.blocks_of_prompt(self.tokens)
        self.key: QueueKey = (0, 0, 0, 0.0, 0)

    @property
    def tokens(self) -> int:
        """Tokens whose KV a prefill must compute."""
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True, eq=False)
class EngineState(Work):
    """One engine. `inside` are the requests that it holds, `incoming` those waiting to enter with its next lease.
    `last_lease` is the last that it was given, `entered_with` the last with which any came in; `leases` counts those
    that it was given while it had none. It waits for a lease since `wait_since` (None: it has one, or no work).

    An engine of both phases has two accounts of its work: steps that do nothing but prefill are in `prefills`, all
    others in its own. `rounds` is how many tokens each of its sequences has been given, in so far as steps tell: fewer
    than steps where several micro-batches alternate. `queue` are the requests that enter it without another engine.
    """

    phase: Phase
    share: int
    inside: Mapping[str, LiveRequest]
    incoming: Mapping[str, LiveRequest]
    up: bool = False
    suspect: bool = False
    lease: LeaseState | None = None
    entered_with: int = 0
    last_lease: int = 0
    wait_since: float | None = None
    waits: int = 0
    wait_seconds: float = 0.0
    leases: int = 0
    prefills: Work | None = None
    rounds: float = 0.0
    queue: Sized = ()

    @property
    def takes_work(self) -> bool:
        """It is up, and gives signs of life."""
        return self.up and not self.suspect

    def of(self, phase: Phase) -> Work:
        """The account of steps under a lease of that phase."""
        return self.prefills if self.prefills is not None and phase is PREFILL else self

    def ready(self, now: float) -> bool:
        """It has work, no lease, and is not sitting out a shortage of pages."""
        return self.takes_work and self.lease is None and bool(self.inside or self.incoming) and self.retry_at <= now


@dataclass(slots=True)
class FairTags:
    """Tags that order waiting requests of one priority: start-time fair queueing in its self-clocked form, where a
    client's request is a flow and each of its prompts costs one. `now` is the tag of the last one that was taken."""

    now: int = 0
    # By group that waits: its last tag, and the number of its requests that wait.
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)

    def enter(self, group: str) -> int:
        """The tag of one more request."""
        if not group:
            return self.now + 1
        last, count = self.groups.get(group, (0, 0))
        tag = (last if last > self.now else self.now) + 1
        self.groups[group] = (tag, count + 1)
        return tag

    def leave(self, group: str) -> None:
        """One of `group` waits no longer."""
        if group:
            last, count = self.groups[group]
            if count > 1:
                self.groups[group] = (last, count - 1)
            else:
                del self.groups[group]


class TenantQueue:
    """Waiting requests of one tenant and priority."""

    __slots__ = ("keys", "tags")

    def __init__(self) -> None:
        self.keys: list[QueueKey] = []
        self.tags = FairTags()


class RequestQueue:
    """Waiting requests of one model: resumed ones first, then by priority (lower first). Those of equal priority come
    by tenant as `counters` say (VTC); those of one tenant in order of arrival, and of entry; but requests of one group
    alternate with others: each has a tag one above that of the one before it, and lower tags go first. A request
    without company is tagged when it enters, one above the last that was taken, so that it waits for as many of a group
    as there are rounds before it, and no more.

    A sorted list for each tenant: entering at the end and leaving at the head are what happens, and moving a few
    thousand pointers for others takes less time than a tree's bookkeeping.
    """

    __slots__ = ("_count", "_counters", "_order", "_ranks", "_requests", "_serial", "_several", "blocks")

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        counters.watch(self._counter_changed)
        self._requests: dict[QueueKey, LiveRequest] = {}
        self._serial = 0
        # By what goes before all tags; gone with the last request that has it.
        self._ranks: dict[QueueRank, dict[str, TenantQueue]] = {}
        self._order: list[QueueRank] = []
        # The ranks in which several tenants wait.
        self._several: dict[QueueRank, WaitingTenants] = {}
        self._count = 0
        self.blocks = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: LiveRequest) -> None:
        """Put a request at its place."""
        self._serial += 1
        rank = (0 if request.resumed else 1, request.priority)
        tenants = self._ranks.get(rank)
        if tenants is None:
            tenants = self._ranks[rank] = {}
            insort(self._order, rank)
        tenant = tenants.get(request.tenant)
        if tenant is None:
            self._counters.lift(request.tenant, self._next_tenant(rank, tenants), request.weight)
            tenant = tenants[request.tenant] = TenantQueue()
        key = (*rank, tenant.tags.enter(request.group), request.arrival, self._serial)
        request.key = key
        keys = tenant.keys
        if keys and key < keys[-1]:
            insort(keys, key)
        else:
            keys.append(key)
        if keys[0] is key:
            self._begins_with(rank, request.tenant, tenants)
        self._requests[key] = request
        self._count += 1
        self.blocks += request.blocks

    def remove(self, request: LiveRequest) -> None:
        """Take a request out, wherever it stands."""
        key = request.key
        del self._requests[key]
        rank = key[:2]
        tenants = self._ranks[rank]
        tenant = tenants[request.tenant]
        tags, keys = tenant.tags, tenant.keys
        tags.leave(request.group)
        first = keys[0] == key
        if first:
            del keys[0]
            tags.now = key[2]
        else:
            del keys[bisect_left(keys, key)]
        if not keys:
            del tenants[request.tenant]
            self._counters.waits_no_more(request.tenant)
            if not tenants:
                del self._ranks[rank]
                self._order.remove(rank)
            elif len(tenants) == 1:
                del self._several[rank]
            else:
                self._several[rank].remove(request.tenant)
        elif first:
            self._begins_with(rank, request.tenant, tenants)
        self._count -= 1
        self.blocks -= request.blocks

    def head(self) -> LiveRequest:
        """The next one. The queue must not be empty."""
        rank = self._order[0]
        tenants = self._ranks[rank]
        tenant = self._next_tenant(rank, tenants)
        assert tenant is not None, "ranks go with the last request that has them"
        return self._requests[tenants[tenant].keys[0]]

    def _next_tenant(self, rank: QueueRank, tenants: dict[str, TenantQueue]) -> str | None:
        """The tenant among a rank's `tenants` that is served next."""
        several = self._several.get(rank)
        return next(iter(tenants), None) if several is None else several.least()

    def _begins_with(self, rank: QueueRank, tenant: str, tenants: dict[str, TenantQueue]) -> None:
        """Another request is the first one of `tenant`, who may be new among the rank's `tenants`."""
        several = self._several.get(rank)
        if several is not None:
            several.put(tenant, tenants[tenant].keys[0])
        elif len(tenants) > 1:
            several = self._several[rank] = WaitingTenants(self._counters)
            for each, queue in tenants.items():
                several.put(each, queue.keys[0])

    def _counter_changed(self, tenant: str) -> None:
        for several in self._several.values():
            several.changed(tenant)

    def first(self, count: int) -> Iterator[LiveRequest]:
        """Up to `count` requests from the head, in the order in which they would be admitted one after the other."""
        for rank in self._order:
            tenants = self._ranks[rank]
            if rank in self._several:
                chosen = self._by_tenant(tenants, rank, count)
            else:
                (queue,) = tenants.values()
                chosen = map(self._requests.__getitem__, queue.keys[:count])
            for request in chosen:
                yield request
                count -= 1
                if count <= 0:
                    return

    def _by_tenant(self, tenants: dict[str, TenantQueue], rank: QueueRank, count: int) -> Iterator[LiveRequest]:
        counters = self._counters
        heap = [(level, key, 0, tenant) for level, key, tenant in self._several[rank].first(count)]
        heapify(heap)
        while heap:
            level, key, at, tenant = heap[0]
            request = self._requests[key]
            keys = tenants[tenant].keys
            if at + 1 < len(keys):
                # Resumed ones have paid for their prompts.
                cost = request.tokens * INPUT / counters.weight(tenant) if rank[0] else 0.0
                heapreplace(heap, (level + cost, keys[at + 1], at + 1, tenant))
            else:
                heappop(heap)
            yield request


@dataclass(slots=True, eq=False)
class PoolState:
    """Counts of one pool. `room` pages may be in use now, and `backed` ones have memory. `available` pages could be
    handed out (free, or cached and evictable); `promised` pages are those that admitted requests have not taken yet."""

    profile: PoolProfile
    available: int
    free: int
    models: list[ModelState] = field(default_factory=list)
    promised: int = 0
    room: int = field(init=False)
    backed: int = field(init=False)

    def __post_init__(self) -> None:
        self.room = self.backed = self.profile.pages


@dataclass(slots=True, eq=False)
class Tally:
    """What became of a model's requests. `phase_switches` counts the requests that waited in an engine of both phases,
    with their first token, for it to decode; together they waited for `phase_switch_seconds`."""

    arrived: int = 0
    finished: int = 0
    returned: int = 0
    lost: int = 0
    cancelled: int = 0
    given_back: int = 0
    moved_in: int = 0
    moved_out: int = 0
    moves_aborted: int = 0
    phase_switches: int = 0
    phase_switch_seconds: float = 0.0


class ModelState:
    """One model of the unit: its queue, its engines, its pages. `levels` counts the requests that have a seat by
    execution level. A `retired` model has no engines for the time being, and its pages are for the others.

    `prefill` and `decode` are its two engines, or both are its one engine of `both` phases; of a `pooling` model there
    is the former only, and nothing ever comes to the latter. `fresh` are requests in the
    latter that have had their first token, since when, and wait for a lease under which they decode. Who sets `journal`
    to a list finds there what happens to the requests, and empties it.
    """

    __slots__ = (
        "_seen",
        "_seen_in_prompt",
        "batch_tokens",
        "block_tokens",
        "both",
        "cached",
        "counters",
        "decode",
        "decoding",
        "engines",
        "fresh",
        "handed",
        "index",
        "journal",
        "levels",
        "max_seqs",
        "moving",
        "name",
        "outstanding",
        "pages_per_block",
        "peak",
        "pool",
        "pooling",
        "prefill",
        "prefill_tokens",
        "prefilling",
        "profile",
        "promised",
        "queue",
        "quota",
        "retired",
        "state_blocks",
        "tally",
        "used",
        "windowed_pages",
        "work_since",
    )

    def __init__(self, index: int, profile: ModelProfile, pool: PoolState) -> None:
        self.index = index
        self.profile = profile
        self.name = profile.name
        self.pool = pool
        self.pages_per_block = profile.kv.pages_per_block
        self.block_tokens = profile.kv.block_tokens
        self.state_blocks = profile.kv.state_blocks
        self.windowed_pages = profile.kv.windowed_pages
        self._seen = profile.kv.seen_blocks(1)
        self._seen_in_prompt = profile.kv.seen_blocks(profile.engines.max_num_batched_tokens)
        self.max_seqs = profile.engines.max_num_seqs
        self.batch_tokens = profile.engines.max_num_batched_tokens
        self.counters = TenantCounters(lambda: self.rounds)
        self.queue = RequestQueue(self.counters)
        self.prefilling: dict[str, LiveRequest] = {}
        self.handed: dict[str, LiveRequest] = {}
        self.decoding: dict[str, LiveRequest] = {}
        self.moving: dict[str, LiveRequest] = {}
        self.levels: dict[str, int] = {}
        self.retired = False
        self.both = profile.engines.both
        self.pooling = profile.pooling
        share = share_units(profile.engines.decode_share)
        self.prefill: EngineState
        self.engines: tuple[EngineState, ...]
        if profile.engines.both:
            inside = ChainMap(self.decoding, self.prefilling)
            self.decode = self.prefill = EngineState(
                BOTH, share, inside, self.handed, prefills=Work(), queue=self.queue
            )
            self.engines = (self.decode,)
        else:
            self.prefill = EngineState(PREFILL, share_units(profile.engines.prefill_share), self.prefilling, {})
            self.decode = EngineState(DECODE, share, self.decoding, self.handed)
            self.engines = (self.prefill,) if profile.pooling else (self.prefill, self.decode)
        self.fresh: dict[str, float] = {}
        self.journal: list[Note] | None = None
        self.used = 0
        self.cached = 0
        self.quota = profile.quota_pages
        self.peak = 0
        self.outstanding = 0
        self.prefill_tokens = 0
        self.promised = 0
        self.tally = Tally()
        self.work_since: float | None = None

    def plan(self, profile: ModelProfile) -> None:
        """Its rate, quota and shares are those of `profile` from now on; leases that run keep the shares that they
        have."""
        self.profile = profile
        self.prefill.share = share_units(profile.engines.prefill_share)
        self.decode.share = share_units(profile.engines.decode_share)

    def engine(self, phase: Phase) -> EngineState:
        """The engine that does that phase."""
        return self.prefill if phase is PREFILL else self.decode

    @property
    def up(self) -> bool:
        """All its engines are, and give signs of life."""
        return self.prefill.takes_work and (self.pooling or self.decode.takes_work)

    @property
    def rounds(self) -> float:
        """Tokens that a sequence has been given which decodes from the start, as far as steps were reported."""
        return self.decode.rounds if self.both else self.decode.jobs

    def blocks_of(self, tokens: int) -> int:
        """Blocks for `tokens` and the one token that comes after them, if one does, and for the sequence's states. What
        is given back behind a window is not counted: as many pages as whole blocks have."""
        return self._blocks(tokens, self._seen)

    def blocks_of_prompt(self, tokens: int) -> int:
        """The same, and what the last step of a prompt of so many tokens needs behind its window."""
        return self._blocks(tokens, self._seen_in_prompt)

    def whole_blocks_of(self, tokens: int) -> int:
        """Blocks of so many tokens and the next one, with what is behind windows."""
        return (tokens - self.pooling) // self.block_tokens + 1 + self.state_blocks

    def _blocks(self, tokens: int, seen: int) -> int:
        blocks = (tokens - self.pooling) // self.block_tokens + 1
        if self.windowed_pages and blocks > seen:
            blocks -= (blocks - seen) * self.windowed_pages // self.pages_per_block
        return blocks + self.state_blocks

    @property
    def in_engines(self) -> int:
        """Requests that have a seat: in prefill, handed over, in decode, or moving, which may come back."""
        return len(self.prefilling) + len(self.handed) + len(self.decoding) + len(self.moving)

    @property
    def live(self) -> int:
        """Requests that are not finished."""
        return len(self.queue) + self.in_engines

    def seat(self, level: str, change: int) -> None:
        """A request of that execution level takes a seat (1) or leaves it (-1)."""
        count = self.levels.get(level, 0) + change
        if count:
            self.levels[level] = count
        else:
            del self.levels[level]

    def tokens_of(self, live: LiveRequest) -> int:
        """Tokens that the request has by now, as far as steps were reported: an engine tells more only when it ends or
        leaves, and each step makes one token of each request in the batch."""
        made = int(self.rounds - live.entered_at) if live.place is DECODING else 0
        return min(live.tokens + made, live.prompt_tokens + max(live.max_tokens, live.output_tokens))

    def promise(self, outstanding: int) -> None:
        """Set the tokens that admitted prompts still have to compute, and the pages that this promises away."""
        self.outstanding = outstanding
        waiting = len(self.prefilling)
        filled = -(-outstanding // self.block_tokens)
        blocks = filled + waiting * (1 + self.state_blocks) if waiting else 0
        pages = blocks * self.pages_per_block
        if self.windowed_pages:
            pages -= max(0, filled - waiting * self._seen_in_prompt) * self.windowed_pages
        self.pool.promised += pages - self.promised
        self.promised = pages
