"""How much of a memory that models share their KV pools may take: what no model needs, and what requests need at least.

The pools keep their addresses and get and give memory in chunks. They have pages for what runs, and `KvRules.least`
beside that for what runs next. Everything above is lent to them: cached prefixes lie there, and whatever a model needs
to be woken is taken from it first. What their requests wait for they get from free memory, then from idle models, and
when somebody has waited for long from busy ones.
"""

from __future__ import annotations

import math

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.long_requests import GROWTH_TOKENS, head_pages
from muxserve.scheduling.quotas import Claim, QuotaAdapter, max_min
from muxserve.scheduling.residency_types import KvRules
from muxserve.scheduling.state import ModelState, PoolState
from muxserve.wire import PoolsLoad

# Chunks that pools are to give back have been given back so soon, or a running request has pages in them.
GIVE_SECONDS = 0.5
# Lent memory follows what is free in steps of this part of the most that the pools may take.
LENT_STEP = 1 / 32


class PoolRoom:
    """The room of the KV pools of one memory. `target`, bytes: what they are to take; None until they have reported."""

    def __init__(self) -> None:
        self.target: int | None = None
        self._load: PoolsLoad | None = None
        # Since when they have been to give back, and since when their requests have waited for memory.
        self._giving_since = -math.inf
        self._short_since: float | None = None

    @property
    def oldest(self) -> str:
        """The model whose oldest request waits for longest; empty if none waits."""
        return "" if self._load is None else self._load.model

    @property
    def settled(self) -> bool:
        """The pools have what they are to have, but for parts of chunks."""
        return self._load is None or self.target is None or self._load.target == self.target

    def reported(self, load: PoolsLoad) -> None:
        """The unit has said how its pools stand."""
        self._load = load
        if self.target is None:
            self.target = load.backed

    @property
    def _gives(self) -> PoolsLoad | None:
        """How pools stand that give and take; None for others, and before any have reported."""
        return self._load if self._load is not None and self._load.elastic else None

    def taken(self, rules: KvRules) -> int:
        """Bytes that count for the pools: those that they have, and those that they may take."""
        if self._load is None or self.target is None:
            return rules.most
        return max(self._load.backed, self.target)

    def promised(self, now: float) -> int:
        """Bytes of these that are about to be given back."""
        if self._load is None or self.target is None or now - self._giving_since > GIVE_SECONDS:
            return 0
        return max(0, self._load.backed - self.target)

    def lent(self, rules: KvRules) -> int:
        """Bytes that the pools can give back although they are not told to yet."""
        if (load := self._gives) is None or self.target is None:
            return 0
        return max(0, min(self.target, load.backed) - load.wanted - rules.least)

    def wanting(self, rules: KvRules) -> int:
        """Bytes that requests wait for, as far as the pools may ever have them."""
        if (load := self._gives) is None or self.target is None:
            return 0
        return max(0, min(load.wanted + rules.least, rules.most) - self.target)

    def missing(self, rules: KvRules) -> int:
        """Bytes that the oldest requests of all models wait for."""
        if (load := self._gives) is None or self.target is None:
            return 0
        return max(0, min(load.urgent, rules.most) - self.target)

    def waits(self, now: float, short: bool) -> float:
        """For how long requests have been `short` of pages by now, seconds."""
        if not short:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        return 0.0 if self._short_since is None else now - self._short_since

    def give(self, size: int, now: float) -> None:
        """The pools are to give back so many bytes more."""
        if self.target is not None and size > 0:
            self.target -= size
            self._giving_since = now

    def take(self, size: int) -> None:
        """The pools may take so many bytes more."""
        if self.target is not None:
            self.target += size

    def lend(self, rules: KvRules, free: int) -> int:
        """The bytes of `free` ones that are worth lending."""
        if self._gives is None or self.target is None:
            return 0
        more = min(free, rules.most - self.target)
        return more if more >= LENT_STEP * rules.most else 0


def pools_load(ledger: UnitLedger, target: int, ranks: int = 1) -> PoolsLoad:
    """How the pools of a unit stand.

    Args:
        target: bytes that they are to take, as far as the unit knows.
        ranks: that have each pool in the same memory.
    """
    load = PoolsLoad(target=target)
    for pool in ledger.pools.values():
        page = pool.profile.page_bytes * ranks
        load.backed += pool.backed * page
        load.needed += sum(map(needed_pages, pool.models)) * page
        load.wanted += min(pool.profile.pages, sum(map(wanted_pages, pool.models))) * page
        load.urgent += min(pool.profile.pages, sum(needed_pages(m) + head_pages(m) for m in pool.models)) * page
    load.model = _oldest_waiting(ledger)
    return load


def needed_pages(model: ModelState) -> int:
    """Pages that the model holds, those that what is in its engines takes within the next second or longer, and while
    it is in service those of a usual request, which nobody should wait for."""
    growth = -(-GROWTH_TOKENS // model.block_tokens) * model.in_engines
    usual = 0 if model.retired else model.blocks_of(max(1, int(model.profile.tokens)))
    return model.used + model.promised + (growth + usual) * model.pages_per_block


def wanted_pages(model: ModelState) -> int:
    """Pages that it could use now."""
    if model.retired:
        return needed_pages(model)
    return max(needed_pages(model), QuotaAdapter.wanted(model), model.used + model.promised + head_pages(model))


def _oldest_waiting(ledger: UnitLedger) -> str:
    """The model whose oldest request waits for longest; empty if none waits."""
    waiting = [model for model in ledger.models if model.queue and not model.retired]
    return min(waiting, key=lambda model: model.queue.head().arrival).name if waiting else ""


def divided(ledger: UnitLedger, size: int, ranks: int = 1) -> dict[str, int]:
    """The pages of each pool when all of them together may take `size` bytes."""
    pools = list(ledger.pools.values())
    if len(pools) == 1:
        return {pools[0].profile.name: _pages(pools[0], size, ranks)}
    whole = [pool.profile.pages * pool.profile.page_bytes * ranks for pool in pools]
    floors = [_asked_pages(pool) * pool.profile.page_bytes * ranks for pool in pools]
    if sum(floors) > size:  # oldest requests wait until what runs has ended
        needed = [min(pool.profile.pages, sum(map(needed_pages, pool.models))) for pool in pools]
        floors = [pages * pool.profile.page_bytes * ranks for pages, pool in zip(needed, pools, strict=True)]
    if sum(floors) > size:
        floors = [floor * size // sum(floors) for floor in floors]
    parts = max_min(size, [Claim(float(most), floor, most) for most, floor in zip(whole, floors, strict=True)])
    return {pool.profile.name: _pages(pool, part, ranks) for pool, part in zip(pools, parts, strict=True)}


def divided_anew(ledger: UnitLedger, size: int, ranks: int = 1) -> dict[str, int] | None:
    """The pages of each pool in another division of the same bytes, where the oldest requests of one pool wait for
    pages that it has no room for and others do not need; None: there is no such pool."""
    if len(ledger.pools) < 2:
        return None
    short = [pool for pool in ledger.pools.values() if pool.room < _asked_pages(pool) and any(map(_waits, pool.models))]
    if not short:
        return None
    found = divided(ledger, size, ranks)
    return found if any(found[pool.profile.name] > pool.room for pool in short) else None


def _waits(model: ModelState) -> bool:
    return bool(model.queue) and not model.retired


def _asked_pages(pool: PoolState) -> int:
    """Pages that the pool's models need with the oldest request of each that waits, as far as it may have them."""
    return min(pool.profile.pages, sum(needed_pages(each) + head_pages(each) for each in pool.models))


def _pages(pool: PoolState, size: int, ranks: int) -> int:
    return max(1, min(pool.profile.pages, size // max(1, pool.profile.page_bytes * ranks)))
