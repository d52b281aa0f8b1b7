"""Prefix caching: the index of a model's full blocks by what they hold, as the memory manager has it.

A block that is full can be found by others once the step that filled it is over. One that is held is counted
once, however many hold it. When the last lets go it stays, *cached*, and its pages count against no quota. They go
when somebody needs pages: those of the model that asks first, then those of the others, the least recently used first.
Of two blocks with the same content the one that was published first is found.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from muxserve.workload.trace import Content

if TYPE_CHECKING:
    from muxserve.simulator.pages import ModelPages
    from muxserve.simulator.requests import SimRequest

# What a block holds, and all before it: a hash of the pieces before that of its last token, that one's name, and how
# much of it there is up to the block's end.
Key = tuple[int, str, int]


def extend_keys(found: list[Key], content: Content, blocks: int, size: int) -> None:
    """Have the keys of the first `blocks` blocks of `size` tokens, of which some may be there."""
    before, begins, end, last = 0, 0, (len(found) + 1) * size, len(content) - 1
    for place, (name, tokens) in enumerate(content):
        if len(found) >= blocks:
            return
        ends = begins + tokens if place < last else 1 << 60
        while end <= ends and len(found) < blocks:
            found.append((before, name, end - begins))
            end += size
        begins = ends
        before = hash((before, name, tokens))


class PrefixIndex:
    """Of one model. `pages` counts what it has in use."""

    def __init__(self, pages: ModelPages, block_tokens: int) -> None:
        self.pages = pages
        self.block_tokens = block_tokens
        # Blocks that are held, by how many; and cached ones, the least recently used first, with when they became so.
        self._held: dict[Key, int] = {}
        self._cached: OrderedDict[Key, int] = OrderedDict()
        self.evictions = 0
        self.lookups = 0
        self.hits = 0

    @property
    def cached_blocks(self) -> int:
        """Blocks that are there and held by nobody."""
        return len(self._cached)

    @property
    def oldest(self) -> int:
        """When its least recently used block became cached; 0 without any."""
        return next(iter(self._cached.values())) if self._cached else 0

    def keys(self, request: SimRequest, blocks: int) -> list[Key]:
        """Of the request's first `blocks` blocks. Its answer goes on with the last piece of its prompt."""
        found = request.keys
        extend_keys(found, request.content, blocks, self.block_tokens)
        return found if len(found) == blocks else found[:blocks]

    # ------------------------------------------------------------ requests

    def look_up(self, request: SimRequest, blocks: int) -> int:
        """Hold the longest prefix of its first `blocks` blocks that is there, and return how many these are. It ends
        early where waking a cached block would exceed the quota."""
        pages, pool = self.pages, self.pages.pool
        held, cached, per_block = self._held, self._cached, self.pages.block_pages
        self.lookups += blocks
        hits = 0
        for key in self.keys(request, blocks):
            holders = held.get(key, 0)
            if not holders:
                if key not in cached or pages.held + per_block > pages.quota:
                    break
                del cached[key]
                pool.cached -= per_block
                pages.hold(per_block)
            held[key] = holders + 1
            hits += 1
            request.shared.append(key)
        request.published = hits
        self.hits += hits
        return hits

    def publish(self, request: SimRequest, tokens: int) -> None:
        """The KV of its first `tokens` tokens is written."""
        blocks, first = tokens // self.block_tokens, request.published
        if blocks <= first:
            return
        held, cached = self._held, self._cached
        for key in self.keys(request, blocks)[first:]:
            if key not in held and key not in cached:
                held[key] = 1
                request.shared.append(key)
        request.published = blocks

    def let_go(self, request: SimRequest) -> int:
        """It gives up its blocks, the last ones first; returns how many of them are, or were, for others to find."""
        pages, pool, held, per_block = self.pages, self.pages.pool, self._held, self.pages.block_pages
        count = len(request.shared)
        for key in reversed(request.shared):
            holders = held[key] - 1
            if holders:
                held[key] = holders
                continue
            del held[key]
            self._cached[key] = pool.next_stamp()
            pool.cached += per_block
            pages.held -= per_block
            pool.held -= per_block
        request.shared = []
        request.published = 0
        return count

    def evict(self) -> None:
        """The least recently used cached block goes."""
        self._cached.popitem(last=False)
        self.pages.pool.cached -= self.pages.block_pages
        self.evictions += 1
