"""Page counts of a unit's pools: who holds how many, and what running decode engines will take.

A decode engine that leaps over many steps takes blocks in the middle of its leap. It *commits* the pages of the whole
leap beforehand; as long as all commitments fit, no step of any leap can run short, and nobody has to look. Counts are
exact at any time all the same: an engine is *synchronised* before they are read, which turns what it has taken by then
from committed to held.

Pages of cached prefixes are held by nobody. Commitments leave them alone, so that none has to go within a leap.

Who may touch what: a model's engines take, commit and give back the model's pages, and so does a request that moves in
or out (`scheduler`). The scheduler alone changes quotas. Everybody else reads.
"""

from __future__ import annotations

import sys
from typing import Protocol

from muxserve.scheduling.types import PoolProfile
from muxserve.simulator.batch import WHOLE_BLOCKS, BlockCounts
from muxserve.simulator.prefixes import PrefixIndex
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimUnit


class Grower(Protocol):
    """An engine that commits pages."""

    def sync(self, now: float, viewer: int) -> None:
        """Account for the blocks of all steps begun by `now`. Steps that begin at this very moment count where their
        engines have an earlier place than `viewer`."""
        ...

    def publish(self, now: float) -> None:
        """Let others find the blocks that its sequences have filled by `now`."""
        ...

    def shrink(self, now: float) -> None:
        """Look again at how far to leap; commitments do not fit any more."""
        ...


class ModelPages:
    """Pages of one model. `held` counts those in use, `committed` those that its running leap will take. `prefixes` is
    None without prefix caching; only requests that say what they consist of have any. Blocks are counted as `counts`
    says; each that is counted has `per_block` pages, and a whole block `block_pages`."""

    __slots__ = (
        "block_pages",
        "committed",
        "counts",
        "grower",
        "held",
        "index",
        "model",
        "peak",
        "per_block",
        "pool",
        "prefixes",
        "quota",
        "told",
    )

    def __init__(
        self,
        index: int,
        model: str,
        pool: SimPool,
        block_pages: int,
        quota: int,
        block_tokens: int = 0,
        counts: BlockCounts = WHOLE_BLOCKS,
    ) -> None:
        self.index = index
        self.model = model
        self.pool = pool
        self.counts = counts
        self.block_pages = block_pages
        self.per_block = block_pages // counts.block
        self.quota = quota
        self.held = 0
        self.committed = 0
        self.peak = 0
        self.told = 0
        self.grower: Grower | None = None
        self.prefixes = PrefixIndex(block_tokens, pool.next_stamp) if block_tokens and block_pages else None
        pool.models.append(self)

    @property
    def oldest(self) -> int:
        """When its least recently used cached block became cached; 0 without any."""
        return self.prefixes.oldest if self.prefixes is not None else 0

    def take(self, blocks: int, now: float, viewer: int, spare: int = 0) -> bool:
        """Hold `blocks` more, if quota and pool have them and `spare` blocks beside. `viewer` is the place of the
        engine that asks."""
        pages, beside = blocks * self.per_block, spare * self.per_block
        pool = self.pool
        held, whole = self.held + pages, pool.held + pages
        if held + self.committed + beside > self.quota or whole + pool.committed + beside > pool.room:
            pool.sync(now, viewer)
            held, whole = self.held + pages, pool.held + pages
            if held + beside > self.quota or whole + beside > pool.room:
                return False
            self.held, pool.held = held, whole
            pool.check(now)
        else:
            self.held, pool.held = held, whole
        if held > self.peak:
            self.peak = held
        if pool.cached:
            pool.make_room(self, now, viewer)
        return True

    def find(self, request: SimRequest, now: float, viewer: int) -> int:
        """Hold the blocks of its prompt that are cached, all but the one of its last token, whose logits are needed;
        returns how many."""
        prefixes = self.prefixes
        if prefixes is None or not request.content:
            return 0
        if self.grower is not None:
            self.grower.publish(now)
        if self.committed:
            self.pool.sync(now, viewer)
        # Cached blocks come back into use as far as the quota goes.
        room = (self.quota - self.held) // self.block_pages
        found, woken = prefixes.look_up(request, (request.tokens - 1) // prefixes.block_tokens, room)
        if woken:
            self._keep(-woken)
            self.peak = max(self.peak, self.held)
        if found:
            self.pool.check(now)
        return found

    def publish(self, request: SimRequest, tokens: int) -> None:
        """The KV of its first `tokens` tokens is written: others may find it."""
        if self.prefixes is not None and request.content:
            self.prefixes.publish(request, tokens)

    def give_up(self, request: SimRequest, blocks: int) -> None:
        """A request gives back the blocks that it holds. Those that others may find stay as long as there is room."""
        if request.shared and self.prefixes is not None:
            shared, cached = self.prefixes.let_go(request)
            self._keep(cached)
            blocks -= shared * self.counts.block
        self.release(blocks)

    def evict(self) -> None:
        """The least recently used cached block goes."""
        assert self.prefixes is not None
        self.prefixes.evict()
        self.pool.cached -= self.block_pages

    def _keep(self, blocks: int) -> None:
        """This many held blocks stay as cached ones (negative: cached blocks are held again)."""
        pages, pool = blocks * self.block_pages, self.pool
        self.held -= pages
        pool.held -= pages
        pool.cached += pages

    def release(self, blocks: int) -> None:
        """Give blocks back."""
        pages = blocks * self.per_block
        self.held -= pages
        self.pool.held -= pages

    def commit(self, pages: int) -> None:
        """Commit pages (negative: take a commitment back)."""
        self.committed += pages
        self.pool.committed += pages

    def begin(self, pages: int) -> None:
        """Hold pages that were committed."""
        self.held += pages
        self.committed -= pages
        pool = self.pool
        pool.held += pages
        pool.committed -= pages
        if self.held > self.peak:
            self.peak = self.held

    def spare_blocks(self) -> int:
        """Blocks that may be committed now."""
        pool = self.pool
        mine = self.quota - self.held - self.committed
        all_ = pool.room - pool.held - pool.committed - pool.cached
        # A model that keeps states alone takes no pages for its tokens.
        return max(0, mine if mine < all_ else all_) // self.per_block if self.per_block else sys.maxsize

    def available_blocks(self) -> int:
        """Blocks that may be taken now, from what is cached as well."""
        pool = self.pool
        mine = self.quota - self.held - self.committed
        all_ = pool.room - pool.held - pool.committed
        # A model that keeps states alone takes no pages for its tokens.
        return max(0, mine if mine < all_ else all_) // self.per_block if self.per_block else sys.maxsize


class SimPool:
    """One pool; `cached` are the pages of prefixes that nobody holds."""

    __slots__ = ("cached", "committed", "held", "models", "profile", "room", "stamp", "told")

    def __init__(self, profile: PoolProfile) -> None:
        self.profile = profile
        # Pages that may be in use now.
        self.room = profile.pages
        self.models: list[ModelPages] = []
        self.held = 0
        self.committed = 0
        self.cached = 0
        self.stamp = 0
        self.told = 0

    def next_stamp(self) -> int:
        """Orders the cached blocks of all models by age."""
        self.stamp += 1
        return self.stamp

    def resize(self, pages: int, now: float) -> None:
        """So many pages may be in use now, or those that are; what is cached beyond them goes."""
        self.sync(now, -1)
        self.room, self.told = min(self.profile.pages, max(pages, self.held)), -1
        while self.held + self.cached > self.room:
            min((each for each in self.models if each.oldest), key=_oldest).evict()
        self.check(now)

    def make_room(self, model: ModelPages, now: float, viewer: int) -> None:
        """`model` has taken pages: what is cached goes as far as they were not free, its own first."""
        pages = self.room
        if self.held + self.committed + self.cached <= pages:
            return
        self.sync(now, viewer)
        while self.held + self.cached > pages:
            (model if model.oldest else min((each for each in self.models if each.oldest), key=_oldest)).evict()
        self.check(now)

    def sync(self, now: float, viewer: int) -> None:
        """Bring all counts up to date."""
        for model in self.models:
            if model.committed and model.grower is not None:
                model.grower.sync(now, viewer)

    def check(self, now: float) -> None:
        """Make leaps shorter until commitments fit, after pages were taken or quotas lowered."""
        for model in self.models:
            if not model.committed or model.grower is None:
                continue
            whole = self.held + self.committed + self.cached
            if model.held + model.committed > model.quota or whole > self.room:
                model.grower.shrink(now)


class UnitPages:
    """All pools of a unit, by name, and what its models hold of these: in the order of the unit's models, and by name
    (`of`)."""

    def __init__(self, spec: SimUnit) -> None:
        self.pools = {profile.name: SimPool(profile) for profile in spec.pools}
        self.models = [
            ModelPages(
                index,
                model.name,
                self.pools[model.profile.kv.pool],
                model.profile.kv.pages_per_block,
                model.profile.quota_pages,
                model.profile.kv.block_tokens if model.prefix_caching else 0,
                BlockCounts.of(model.counted),
            )
            for index, model in enumerate(spec.models)
        ]
        self.of = {pages.model: pages for pages in self.models}

    def count(self, now: float) -> None:
        """Bring all counts up to date; steps that begin at this moment have not begun."""
        for pages in self.models:
            if pages.committed and pages.grower is not None:
                pages.grower.sync(now, -1)


def _oldest(pages: ModelPages) -> int:
    return pages.oldest
