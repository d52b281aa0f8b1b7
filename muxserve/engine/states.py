"""Layers that keep one state of a sequence instead of K and V of its tokens (Mamba-2, gated delta nets): which blocks
hold it.

A state has a fixed size and is overwritten by every step. It lies in blocks of the shared pool like K and V: the first
`state_blocks` blocks of a sequence hold the states of all its layers, the others its tokens. So it is reserved, handed
over, preempted and counted with them, and an engine that adopts the blocks goes on with the state where the other one
left it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from muxserve.costs.architecture import STATE_ALIGNMENT

# Attribute that `PhaseScheduler` sets on vLLM's `SchedulerOutput`.
STATE_NEWS = "muxserve_state_news"


class StatefulBlocks(FullAttentionManager):
    """vLLM's manager of the blocks of attention layers, which also takes those of a sequence's states: together with
    its first token's, so that there is none without the other."""

    def __init__(self, stock: FullAttentionManager, pool: BlockPool, state_blocks: int) -> None:
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

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        blocks: int = super().get_num_blocks_to_allocate(request_id, *args, **kwargs)
        return blocks if request_id in self.states else blocks + self.state_blocks

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        if request_id not in self.states:
            self.states[request_id] = self.block_pool.get_new_blocks(self.state_blocks)
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        return [*self.states.pop(request_id, ()), *super().pop_blocks_for_free(request_id)]

    def adopt(self, request_id: str, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Take over `blocks` as an engine has handed them over; returns those that hold tokens."""
        self.states[request_id] = blocks[: self.state_blocks]
        return blocks[self.state_blocks :]

    def tell(self, output: SchedulerOutput) -> None:
        """Say in `output` where the states of requests are that the runner does not know, or no longer, and whose there
        are."""
        ids = [data.req_id for data in output.scheduled_new_reqs] + [*output.scheduled_cached_reqs.resumed_req_ids]
        blocks = {each: [block.block_id for block in self.states[each]] for each in ids}
        setattr(output, STATE_NEWS, StateNews(blocks, self.states.keys()))


class StateNews(NamedTuple):
    """What a step tells the runner of states: ids of the blocks that hold those of requests which come into the runner
    or back to it, by request id; and the ids of all requests that have one."""

    blocks: dict[str, list[int]]
    held: Container[str]


def layer_bytes(spec: MambaSpec) -> int:
    """Bytes of one layer's state of one sequence, with what it takes to begin the next one's at a good place."""
    return -(-spec.real_page_size_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


def split(specs: Mapping[str, KVCacheSpec]) -> tuple[dict[str, KVCacheSpec], dict[str, MambaSpec]]:
    """The layers that keep K and V, and those that keep a state."""
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    return {name: spec for name, spec in specs.items() if name not in states}, states
