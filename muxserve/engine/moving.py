"""A decode engine's part in live migration: it shows blocks while it goes on, and lets go of requests between steps.

What is copied meanwhile are whole blocks, which nobody writes any more: KV is only ever appended.
"""

from __future__ import annotations

from collections.abc import Callable

from muxserve.engine.scheduler import PhaseScheduler
from muxserve.wire import Blocks, Detach, Detached, ShowBlocks

# Long enough for the other side to be given up, and for the decode engine to take the request back.
HAND_OFF_SECONDS = 120.0


def shown(scheduler: PhaseScheduler, internal: str, ask: ShowBlocks) -> Blocks:
    """The blocks of the request that vLLM knows as `internal`; none if it does not run in this engine."""
    found = scheduler.running_blocks(internal)
    if found is None:
        return Blocks(ask.request_id, ask.incarnation, ask.since, [], 0)
    ids, computed_tokens = found
    return Blocks(ask.request_id, ask.incarnation, ask.since, ids[ask.since :], computed_tokens)


def detached(scheduler: PhaseScheduler, internal: str, ask: Detach, forget: Callable[[str], object]) -> Detached:
    """Take the request out of the batch and leave its blocks under `ask.key`. `forget` is called with `internal` when
    it is out.

    Raises:
        MemoryManagerGone: the memory manager died, and the request's blocks with it.
    """
    if scheduler.running_blocks(internal) is None:
        return Detached(ask.request_id, ask.incarnation, "", ask.since, [], 0, [])
    gone = scheduler.detach(internal)
    scheduler.pool.hand_off(ask.key, gone.blocks, HAND_OFF_SECONDS)
    forget(internal)
    ids = [block.block_id for block in gone.blocks]
    return Detached(
        ask.request_id, ask.incarnation, ask.key, ask.since, ids[ask.since :], gone.computed_tokens, gone.output_tokens
    )
