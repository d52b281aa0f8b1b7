"""Page counts of a unit's pools: who holds how many, and what running decode engines will take.

A decode engine that leaps over many steps takes blocks in the middle of its leap. It *commits* the pages of the whole
leap beforehand; as long as all commitments fit, no step of any leap can run short, and nobody has to look. Counts are
exact at any time all the same: an engine is *synchronised* before they are read, which turns what it has taken by then
from committed to held.
"""

from __future__ import annotations

from typing import Protocol

from muxserve.scheduling.types import PoolProfile


class Grower(Protocol):
    """An engine that commits pages."""

    def sync(self, now: float, viewer: int) -> None:
        """Account for the blocks of all steps begun by `now`. Of a step that begins at this very moment: those of
        engines in an earlier place than `viewer`."""
        ...

    def shrink(self, now: float) -> None:
        """Look again at how far to leap; commitments do not fit any more."""
        ...


class ModelPages:
    """Pages of one model. `held` counts those in use, `committed` those that its running leap will take."""

    __slots__ = ("committed", "grower", "held", "index", "model", "peak", "per_block", "pool", "quota", "told")

    def __init__(self, index: int, model: str, pool: SimPool, per_block: int, quota: int) -> None:
        self.index = index
        self.model = model
        self.pool = pool
        self.per_block = per_block
        self.quota = quota
        self.held = 0
        self.committed = 0
        self.peak = 0
        self.told = 0
        self.grower: Grower | None = None
        pool.models.append(self)

    def take(self, blocks: int, now: float, viewer: int, spare: int = 0) -> bool:
        """Hold `blocks` more, if quota and pool have them and `spare` blocks beside. `viewer` is the place of the
        engine that asks."""
        pages, beside = blocks * self.per_block, spare * self.per_block
        pool = self.pool
        held, whole = self.held + pages, pool.held + pages
        if held + self.committed + beside > self.quota or whole + pool.committed + beside > pool.profile.pages:
            pool.sync(now, viewer)
            held, whole = self.held + pages, pool.held + pages
            if held + beside > self.quota or whole + beside > pool.profile.pages:
                return False
            self.held, pool.held = held, whole
            pool.check(now)
        else:
            self.held, pool.held = held, whole
        if held > self.peak:
            self.peak = held
        return True

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
        all_ = pool.profile.pages - pool.held - pool.committed
        return max(0, mine if mine < all_ else all_) // self.per_block


class SimPool:
    """One pool."""

    __slots__ = ("committed", "held", "models", "profile", "told")

    def __init__(self, profile: PoolProfile) -> None:
        self.profile = profile
        self.models: list[ModelPages] = []
        self.held = 0
        self.committed = 0
        self.told = 0

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
            if model.held + model.committed > model.quota or self.held + self.committed > self.profile.pages:
                model.grower.shrink(now)
