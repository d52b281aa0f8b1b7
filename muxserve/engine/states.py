"""Layers that keep one state of a sequence instead of K and V of its tokens (Mamba-2, gated delta nets): which blocks
hold it.

A state has a fixed size and is overwritten by every step. It lies in blocks of the shared pool like K and V: the first
`state_blocks` blocks of a sequence hold the states of all its layers, the others its tokens. So it is reserved, handed
over, preempted and counted with them, and an engine that adopts the blocks goes on with the state where the other one
left it.

With prefix caching a sequence may begin behind a snapshot (`snapshots.py`), which is copied to its own blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.request import Request

from muxserve.costs.state_layers import STATE_ALIGNMENT
from muxserve.engine.binding import current
from muxserve.engine.block_pool import PooledBlockPool
from muxserve.engine.snapshots import snapshot_stops

# Attribute that `PhaseScheduler` sets on vLLM's `SchedulerOutput`.
STATE_NEWS = "muxserve_state_news"


class StatefulBlocks(FullAttentionManager):
    """vLLM's manager of the blocks of attention layers, which also takes those of a sequence's states: together with
    its first token's, so that there is none without the other."""

    block_pool: PooledBlockPool

    def __init__(self, stock: FullAttentionManager, pool: PooledBlockPool, state_blocks: int) -> None:
        """In place of `stock`, which has no requests yet."""
        super().__init__(
            stock.kv_cache_spec,
            block_pool=pool,
            enable_caching=stock.enable_caching,
            kv_cache_group_id=stock.kv_cache_group_id,
            scheduler_block_size=stock.scheduler_block_size,
        )
        # Blocks that hold the states of one sequence, and those that do, by request id.
        self.state_blocks = state_blocks
        self.states: dict[str, list[KVCacheBlock]] = {}
        # Requests that have taken blocks for their states in this step.
        self._fresh: set[str] = set()
        # By request id: how many of the prompt's first blocks are cached, where no snapshot is behind the last of
        # these. Another prompt has begun like them, so that a third may.
        self.junctions: dict[str, int] = {}

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        blocks: int = super().get_num_blocks_to_allocate(request_id, *args, **kwargs)
        return blocks if request_id in self.states else blocks + self.state_blocks

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        if request_id not in self.states:
            self.states[request_id] = self.block_pool.get_new_blocks(self.state_blocks)
            self._fresh.add(request_id)
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._fresh.discard(request_id)
        return [*self.states.pop(request_id, ()), *super().pop_blocks_for_free(request_id)]

    def adopt(self, request_id: str, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Take over `blocks` as an engine has handed them over; returns those that hold tokens."""
        self.states[request_id] = blocks[: self.state_blocks]
        return blocks[self.state_blocks :]

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, **kwargs: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """As vLLM's, up to the last block behind which there is a snapshot for this step."""
        (found,), _ = super().find_longest_cache_hit(block_hashes=block_hashes, max_length=max_length, **kwargs)
        begins = self.block_pool.behind_snapshot(block_hashes[: len(found)])
        return (found[:begins],), begins * self.block_size

    def stops(self, request: Request) -> set[int]:
        """Behind how many tokens of its prompt a snapshot is to be kept."""
        return snapshot_stops(request.num_tokens, self.block_size, self.junctions.get(request.request_id, 0))

    def keep(self, prompts: Iterable[Request]) -> list[StateCopy]:
        """The snapshots of `prompts` that the step just scheduled ends at, as far as there are pages for them. They are
        published with it."""
        kept = []
        for request in prompts:
            computed = request.num_computed_tokens
            if computed in self.stops(request):
                behind = request.block_hashes[computed // self.block_size - 1]
                if blocks := self.block_pool.keep_snapshot(behind, self.state_blocks):
                    kept.append(StateCopy(_ids(self.states[request.request_id]), _ids(blocks)))
        return kept

    def tell(self, output: SchedulerOutput, requests: Mapping[str, Request], kept: list[StateCopy]) -> None:
        """Say in `output` where the states of requests are that the runner does not know, or no longer, whose there
        are, and what is copied before the step and (`kept`) after it."""
        known = output.scheduled_cached_reqs
        come = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        come |= {
            request_id: computed
            for request_id, computed in zip(known.req_ids, known.num_computed_tokens, strict=True)
            if request_id in known.resumed_req_ids
        }
        restored = []
        for request_id, computed in come.items():
            if computed and request_id in self._fresh:
                behind = requests[request_id].block_hashes[computed // self.block_size - 1]
                snapshot = self.block_pool.snapshot(behind)
                restored.append(StateCopy(_ids(snapshot), _ids(self.states[request_id])))
        self._fresh.clear()
        blocks = {request_id: _ids(self.states[request_id]) for request_id in come}
        setattr(output, STATE_NEWS, StateNews(blocks, frozenset(self.states), restored, kept))


def _ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


class StateCopy(NamedTuple):
    """Ids of the blocks that hold the states of a sequence, and of those that are to hold the same."""

    source: list[int]
    target: list[int]


class StateNews(NamedTuple):
    """What a step tells the runner of states: ids of the blocks that hold those of requests which come into the runner
    or back to it, by request id; the ids of all requests that have one; and what is copied before the step, and after
    it."""

    blocks: dict[str, list[int]]
    held: Container[str]
    restored: list[StateCopy]
    kept: list[StateCopy]


def layer_bytes(spec: MambaSpec) -> int:
    """Bytes of one layer's state of one sequence, with what it takes to begin the next one's at a good place."""
    return -(-spec.real_page_size_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


def split(specs: Mapping[str, KVCacheSpec]) -> tuple[dict[str, KVCacheSpec], dict[str, MambaSpec]]:
    """The layers that keep K and V, and those that keep a state."""
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    return {name: spec for name, spec in specs.items() if name not in states}, states


class StateSlots(ABC):
    """Which slot each sequence in the runner has: vLLM's layers know a state by its slot. There are slots for
    `sequences` sequences; slot 0 belongs to nobody. A sequence's states lie on `pages` pages: of its blocks' pages the
    first in the order of their numbers.
    """

    def __init__(self, sequences: int, pages: int) -> None:
        self.count = sequences + 1
        self.pages = pages
        self._free = list(range(sequences, 0, -1))
        self._slots: dict[str, int] = {}

    def follow(self, step: SchedulerOutput) -> None:
        """Give slots to the requests that come into the runner with this step, and take those of others that left it.
        vLLM is told the slot as the one block of the group of these layers."""
        news: StateNews = getattr(step, STATE_NEWS)
        blocks, held = news.blocks, news.held
        for request_id in [each for each in self._slots if each not in held]:
            self._free.append(self._slots.pop(request_id))
        come: dict[int, npt.NDArray[np.int64]] = {}
        for data in step.scheduled_new_reqs:
            data.block_ids = (*data.block_ids, [self._taken(data.req_id, blocks[data.req_id], come)])
        known = step.scheduled_cached_reqs
        for index, (request_id, ids) in enumerate(zip(known.req_ids, known.new_block_ids, strict=True)):
            if ids is not None:
                back = (
                    [self._taken(request_id, blocks[request_id], come)] if request_id in known.resumed_req_ids else []
                )
                known.new_block_ids[index] = (*ids, back)
        if come:
            self.place(come)

    def restore(self, step: SchedulerOutput) -> None:
        """Copy the snapshots behind which prompts begin with this step."""
        news: StateNews = getattr(step, STATE_NEWS)
        for snapshot, states in news.restored:
            self.copy(self._snapshot_pages(snapshot), self._state_pages(states))

    def keep(self, step: SchedulerOutput) -> None:
        """Copy the states of which snapshots are kept, when the step is computed."""
        news: StateNews = getattr(step, STATE_NEWS)
        for states, snapshot in news.kept:
            self.copy(self._state_pages(states), self._snapshot_pages(snapshot))

    def forget(self) -> None:
        """Nothing of the pool is there any more, and nobody has a slot."""
        self._slots.clear()
        self._free = list(range(self.count - 1, 0, -1))

    @abstractmethod
    def place(self, come: Mapping[int, npt.NDArray[np.int64]]) -> None:
        """From this step on slots have the states on these pages."""

    @abstractmethod
    def copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        """Copy pages of the pool onto others."""

    def _taken(self, request_id: str, blocks: list[int], come: dict[int, npt.NDArray[np.int64]]) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._slots[request_id] = self._free.pop()
        come[slot] = self._state_pages(blocks)
        return slot

    def _state_pages(self, blocks: list[int]) -> npt.NDArray[np.int64]:
        """The pages of a sequence's states, from their beginning to their end: in the order of their numbers, so that
        neighbours can be one mapping."""
        return np.sort(_pages_of(blocks))[: self.pages]

    def _snapshot_pages(self, blocks: list[int]) -> npt.NDArray[np.int64]:
        """The same of a snapshot: block by block, so that one of its blocks may be replaced by an equal one."""
        return _pages_of(blocks)[: self.pages]


def _pages_of(blocks: list[int]) -> npt.NDArray[np.int64]:
    return current().view.page_table[blocks].reshape(-1).astype(np.int64)


def pages_for(needed: int) -> int:
    """Pages of the pool for a sequence's states of so many bytes.

    Raises:
        ValueError: they are more than its blocks have.
    """
    place = current()
    pages, page_bytes = place.model.state_blocks * place.model.pages_per_block, place.view.pool.shape[1]
    if needed > pages * page_bytes:
        message = f"a sequence's state has {needed} bytes, but its config.json promised {pages * page_bytes} at most"
        raise ValueError(message)
    # Not all of the last block.
    return -(-needed // page_bytes)
