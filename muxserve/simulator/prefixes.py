"""Prefix caching: the index of a model's full blocks by what they hold, as the memory manager has it.

A block that is full can be found by others once the step that filled it is over. One that is held is counted
once, however many hold it. When the last lets go it stays, *cached*, and its pages count against no quota. They go
when somebody needs pages: those of the model that asks first, then those of the others, the least recently used first.
If two blocks have the same content, the one that was published first is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from muxserve.simulator.block_keys import Key, extend_keys
from muxserve.simulator.requests import SimRequest


class PrefixIndex:
    """The index of one model. It counts blocks; `ModelPages` counts the pages of these. `next_stamp` orders the cached
    blocks of all models of a pool by age."""

    def __init__(self, block_tokens: int, next_stamp: Callable[[], int]) -> None:
        self.block_tokens = block_tokens
        self._next_stamp = next_stamp
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
        """Keys of the request's first `blocks` blocks. Its answer goes on with the last piece of its prompt."""
        found = request.keys
        extend_keys(found, request.content, blocks, self.block_tokens)
        return found if len(found) == blocks else found[:blocks]

    # ------------------------------------------------------------ requests

    def look_up(self, request: SimRequest, blocks: int, room: int) -> tuple[int, int]:
        """Hold the longest prefix of its first `blocks` blocks that is there; of cached ones at most `room`. Returns
        how many these are, and how many of them were cached."""
        held, cached = self._held, self._cached
        self.lookups += blocks
        hits = woken = 0
        for key in self.keys(request, blocks):
            holders = held.get(key, 0)
            if not holders:
                if key not in cached or woken >= room:
                    break
                del cached[key]
                woken += 1
            held[key] = holders + 1
            hits += 1
            request.shared.append(key)
        request.published = hits
        self.hits += hits
        return hits, woken

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

    def let_go(self, request: SimRequest) -> tuple[int, int]:
        """It gives up its blocks, the last ones first. Returns how many of them are, or were, for others to find, and
        how many of these nobody holds any more."""
        held, stamp = self._held, self._next_stamp
        count, cached = len(request.shared), 0
        for key in reversed(request.shared):
            holders = held[key] - 1
            if holders:
                held[key] = holders
                continue
            del held[key]
            self._cached[key] = stamp()
            cached += 1
        request.shared = []
        request.published = 0
        return count, cached

    def evict(self) -> None:
        """The least recently used cached block goes."""
        self._cached.popitem(last=False)
        self.evictions += 1
