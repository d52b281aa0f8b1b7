"""vLLM's `BlockPool` on the blocks of the memory manager.

The manager knows which *process* holds a block; this pool counts which *requests* of the process do. One round trip at
the start of a step (`begin_step`) looks up cached prefixes and reserves the blocks that the step can need; what vLLM's
scheduler then takes from the pool was promised before, so it cannot fail half-way. Blocks given back and blocks newly
full are told to the manager in one message without a reply when the step has run (`end_step`): a block is published
for prefix caching only after its KV is written, and another process can hit it from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, resolve_block_hashes
from vllm.v1.request import Request

from muxserve.engine.binding import Binding
from muxserve.engine.snapshots import snapshot_hashes

Filled = tuple[list[int], list[bytes]]
_NO_IDS = np.empty(0, dtype=np.int32)


class PooledBlockPool(BlockPool):
    """Blocks of one model, seen from one engine process.

    A block's `ref_cnt` counts the local requests that use it, plus one while it is pinned for the current step. When it
    drops to zero the process gives up its hold.
    """

    def __init__(self, num_blocks: int, enable_caching: bool, hash_block_size: int, binding: Binding) -> None:
        super().__init__(num_blocks, enable_caching, hash_block_size)
        self._binding = binding
        self._reserved: list[KVCacheBlock] = []
        self._pinned: list[KVCacheBlock] = []
        self._hits: dict[bytes, KVCacheBlock] = {}
        # Snapshots of states found for this step, by the hash of the block of tokens before them.
        self._snapshots: dict[bytes, list[KVCacheBlock]] = {}
        self._released: list[int] = []
        self._behind: list[KVCacheBlock] = []
        self._publish_ids: list[int] = []
        self._publish_hashes: list[bytes] = []
        self._filled_ids: list[int] = []
        self._filled_hashes: list[bytes] = []

    # ------------------------------------------------------------ the two ends of a step

    def begin_step(self, need: int, lookups: Sequence[Sequence[BlockHash]] = ()) -> None:
        """Reserve up to `need` blocks and pin the cached prefixes of `lookups` (block hashes in order).

        Fewer blocks than `need` are reserved when the quota or the pool holds no more.

        Raises:
            MemoryManagerGone: the memory manager died.
        """
        # What a failed step left; blocks that are given back now may soon be another request's.
        self._leave_window()
        need -= len(self._reserved)
        if need <= 0 and not lookups:
            return
        publish_ids, publish_hashes = self._take_published()
        result = self._binding.client.step(
            self._binding.view,
            publish_ids=publish_ids,
            publish_hashes=publish_hashes,
            release=self._take_released(),
            lookups=lookups,
            reserve=max(need, 0),
            partial=True,
        )
        for hashes, ids in zip(lookups, result.lookups, strict=True):
            for block_hash, block_id in zip(hashes, ids, strict=False):
                block = self.blocks[int(block_id)]
                block.ref_cnt += 1
                self._pinned.append(block)
                self._hits[bytes(block_hash)] = block
        blocks = self.blocks
        self._reserved.extend(blocks[i] for i in result.reserved.tolist())

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks at the beginning of `hashes` were found for this step."""
        hits = self._hits
        return next((count for count, each in enumerate(hashes) if each not in hits), len(hashes))

    def unpin(self) -> None:
        """Give back what was found for this step, so far as no request has taken it."""
        pinned, self._pinned = self._pinned, []
        self._hits.clear()
        self._snapshots.clear()
        self.free_blocks(pinned)

    def begin_behind_snapshots(self, prompts: Sequence[Sequence[BlockHash]], count: int) -> list[tuple[int, int]]:
        """Pin the cached prefixes of `prompts` (block hashes in order) as far as they can begin there: up to the last
        block behind which there is a snapshot of `count` blocks, which is pinned as well.

        Returns, of each prompt, so many blocks, and how many are cached. Those that are of no use are given back before
        the next reservation: the step may need their pages.

        Raises:
            MemoryManagerGone: the memory manager died.
        """
        used = {block.block_id for block in self._pinned}
        since = len(self._pinned)
        self.begin_step(0, prompts)
        cached = [list(hashes[: self.cached_blocks(hashes)]) for hashes in prompts]
        # Those with most before them first: there may be room in the quota for some only.
        ends = sorted((end, index) for index, hashes in enumerate(cached) for end in range(1, len(hashes) + 1))
        behind = dict.fromkeys(cached[index][end - 1] for end, index in reversed(ends))
        # Their first blocks tell which there are.
        self.begin_step(0, [snapshot_hashes(each, 1) for each in behind if each not in self._snapshots])
        begins = [
            next((end for end in range(len(hashes), 0, -1) if self._pin_snapshot(hashes[end - 1], count)), 0)
            for hashes in cached
        ]
        for hashes, end in zip(cached, begins, strict=True):
            used.update(self._hits[each].block_id for each in hashes[:end])
        used.update(block.block_id for blocks in self._snapshots.values() for block in blocks)
        idle = [block for block in self._pinned[since:] if block.block_id not in used]
        self._pinned[since:] = [block for block in self._pinned[since:] if block.block_id in used]
        self._hits = {each: block for each, block in self._hits.items() if block.block_id in used}
        # The end of a sequence is evicted first.
        self.free_blocks(reversed(idle))
        return [(end, len(hashes)) for end, hashes in zip(begins, cached, strict=True)]

    def _pin_snapshot(self, behind: BlockHash, count: int) -> bool:
        """Whether the snapshot behind that block is there as a whole; then it is pinned. Its first block was looked up
        before."""
        if behind in self._snapshots:
            return True
        if snapshot_hashes(behind, 1)[0] not in self._hits:
            return False
        hashes = [BlockHash(each) for each in snapshot_hashes(behind, count)]
        if count > 1:
            self.begin_step(0, [hashes[1:]])
        if self.cached_blocks(hashes) < count:
            return False
        self._snapshots[behind] = [self._hits[each] for each in hashes]
        return True

    def behind_snapshot(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first blocks of a prompt it can begin behind in this step."""
        return next((end for end in range(len(hashes), 0, -1) if hashes[end - 1] in self._snapshots), 0)

    def snapshot(self, behind: BlockHash) -> list[KVCacheBlock]:
        """The blocks of the snapshot that was found for this step behind that block of tokens."""
        return self._snapshots[behind]

    def keep_snapshot(self, behind: BlockHash, count: int) -> list[KVCacheBlock]:
        """Blocks for a snapshot behind that block of tokens, published when the micro-batch just scheduled is through;
        none if it is there already, or pages for it are not.

        Raises:
            MemoryManagerGone: the memory manager died.
        """
        if behind in self._snapshots:
            return []
        self.begin_step(count)
        if len(self._reserved) < count:
            return []
        blocks = self._snapshots[behind] = self.get_new_blocks(count)
        self._pinned += blocks
        self._filled_ids += [block.block_id for block in blocks]
        self._filled_hashes += snapshot_hashes(behind, count)
        return blocks

    def take_filled(self) -> Filled:
        """Blocks that the micro-batch just scheduled fills, with their hashes. They are published (`publish`) when it
        has gone through every stage: until then no stage but the first may have written them."""
        filled = (self._filled_ids, self._filled_hashes)
        self._filled_ids, self._filled_hashes = [], []
        return filled

    def publish(self, filled: Filled) -> None:
        """Their KV is written; others may find them from the end of this step on."""
        self._publish_ids += filled[0]
        self._publish_hashes += filled[1]

    def end_step(self) -> None:
        """Tell the manager what the step gave back and filled, and return what it did not use.

        Raises:
            MemoryManagerGone: the memory manager died.
        """
        self.unpin()
        if self._reserved:
            self._released.extend(block.block_id for block in self._reserved)
            self._reserved.clear()
        if self._released or self._publish_ids:
            publish_ids, publish_hashes = self._take_published()
            self._binding.client.post(
                self._binding.view,
                publish_ids=publish_ids,
                publish_hashes=publish_hashes,
                release=self._take_released(),
            )
        self._leave_window()

    def behind_window(self, blocks: Iterable[KVCacheBlock]) -> None:
        """No token to come of the request that has `blocks` sees them in layers with a window. Their pages there are
        given back at the step's end, and not those of blocks that other requests have as well."""
        self._behind += [block for block in blocks if block.ref_cnt == 1]

    def _leave_window(self) -> None:
        """To be called when what is filled has been published: pages of published blocks are cached."""
        if not self._behind:
            return
        # Some may have been given back, or found by another request, since.
        ids = [block.block_id for block in self._behind if block.ref_cnt == 1]
        self._behind.clear()
        if ids:
            # Waits for the answer: the next step must find the page table as it is then.
            self._binding.client.leave_window(self._binding.view, ids)

    def exchange(self) -> None:
        """Give back at once what the step has freed so far, and reserve as much of it as there is.

        For preemption: what a victim held must be there for the one that asked, or vLLM would go on preempting.

        Raises:
            MemoryManagerGone: the memory manager died.
        """
        released = self._take_released()
        if not released.size:
            return
        # A victim's step is not run: what it would have filled must not be found by others.
        gone = set(released.tolist())
        kept = [(i, h) for i, h in zip(self._filled_ids, self._filled_hashes, strict=True) if i not in gone]
        self._filled_ids, self._filled_hashes = [i for i, _ in kept], [h for _, h in kept]
        result = self._binding.client.step(self._binding.view, release=released, reserve=released.size, partial=True)
        self._reserved.extend(self.blocks[i] for i in result.reserved.tolist())

    def hand_off(self, key: str, blocks: Sequence[KVCacheBlock], ttl_seconds: float) -> None:
        """Move a finished prefill's hold on `blocks` to the hand-off `key`; other local requests keep theirs.

        Raises:
            MemoryManagerGone: the memory manager died.
        """
        if self._publish_ids:
            publish_ids, publish_hashes = self._take_published()
            self._binding.client.post(self._binding.view, publish_ids=publish_ids, publish_hashes=publish_hashes)
        self._leave_window()
        done = []
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                done.append(block.block_id)
        self._binding.client.hand_off(
            self._binding.view,
            key,
            np.array([block.block_id for block in blocks], dtype=np.int32),
            ttl_seconds,
            release=np.array(done, dtype=np.int32),
        )

    def adopt(self, key: str) -> list[KVCacheBlock]:
        """Take over the blocks handed off under `key`.

        Raises:
            MemoryManagerError: no such hand-off, it has expired or was dropped.
            MemoryManagerGone: the memory manager died.
        """
        # A hold given up here but not yet told must not be taken for the hold that the hand-off brings.
        if self._released or self._publish_ids or self._behind:
            self.end_step()
        blocks = [self.blocks[i] for i in self._binding.client.adopt(self._binding.view, key).tolist()]
        for block in blocks:
            block.ref_cnt += 1
        return blocks

    def forget(self) -> None:
        """Drop all holds without telling anyone: the manager that knew them is gone."""
        self._reserved.clear()
        self._pinned.clear()
        self._hits.clear()
        self._snapshots.clear()
        self._released.clear()
        self._behind.clear()
        self._publish_ids.clear()
        self._publish_hashes.clear()
        self.take_filled()
        for block in self.blocks:
            block.ref_cnt = 0

    def _take_published(self) -> tuple[np.ndarray, bytes]:
        ids, hashes = np.array(self._publish_ids, dtype=np.int32), b"".join(self._publish_hashes)
        self._publish_ids.clear()
        self._publish_hashes.clear()
        return ids, hashes

    def _take_released(self) -> np.ndarray:
        if not self._released:
            return _NO_IDS
        released = np.array(self._released, dtype=np.int32)
        self._released.clear()
        return released

    # ------------------------------------------------------------ what vLLM calls

    def get_cached_block(self, block_hash: BlockHash, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        block = self._hits.get(block_hash)
        return None if block is None else [block]

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        if not self.enable_caching or num_cached_blocks >= num_full_blocks:
            return
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            if not block.is_null:
                self._filled_ids.append(block.block_id)
                self._filled_hashes.append(hashes[index])

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks > len(self._reserved):
            raise ValueError(f"{num_blocks} blocks asked, {len(self._reserved)} reserved for this step")
        taken = self._reserved[:num_blocks]
        del self._reserved[:num_blocks]
        for block in taken:
            block.ref_cnt += 1
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._released.append(block.block_id)

    def get_num_free_blocks(self) -> int:
        return len(self._reserved)

    @property
    def counters(self) -> Any:
        """What the memory manager counts for the model."""
        return self._binding.view.counters

    def get_usage(self) -> float:
        counters = self._binding.view.counters
        return counters.used_pages / max(1, counters.quota_pages)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Nothing to do: only external KV connectors evict single blocks, and the unit has none."""

    def reset_prefix_cache(self) -> bool:
        self._binding.client.reset_cache(self._binding.view)
        return True
