"""What a step of vLLM's scheduler needs of the shared pool, found out before it is taken.

It is reserved in one round trip for the whole batch, so that the scheduler finds what it asks for while it decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler


def demand_of_step(scheduler: Scheduler, held: Mapping[str, Sequence[KVCacheBlock]]) -> tuple[int, list[list[bytes]]]:
    """Blocks that the next step of `scheduler` can take at most, beside those that its requests have (`held`, by id),
    and the hashes, a list for each prompt, whose cached blocks it can use."""
    need, budget = 0, scheduler.max_num_scheduled_tokens
    size = scheduler.block_size
    for request in scheduler.running:
        tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        budget -= tokens
        need += max(0, -(-(request.num_computed_tokens + tokens) // size) - len(held[request.request_id]))
    lookups: list[list[bytes]] = []
    room = scheduler.max_num_active_reqs - len(scheduler.running)
    waiting = (scheduler.waiting,) if scheduler.pause_state == PauseState.UNPAUSED else ()
    for queue in (scheduler.kv_holding_waiting, *waiting):
        for request in queue:
            if budget <= 0 or room <= 0:
                return need, lookups
            if not request.num_computed_tokens and scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request):
                # The last token is computed again even when all its blocks are cached: its logits are needed.
                hashes = request.block_hashes[: (request.num_tokens - 1) // size]
                if hashes:
                    lookups.append(hashes)
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            budget -= tokens
            room -= 1
            # The chunk may start behind a cached prefix, so it can end anywhere up to the prompt's end.
            end = request.num_tokens if request.block_hashes else request.num_computed_tokens + tokens
            need += max(0, -(-end // size) - len(held.get(request.request_id, ())))
    return need, lookups
