"""How a unit's replica of a model stands, in the terms of `muxserve.replicas`: tokens of KV.

The capacity of a replica is the most that its model can ever be given. What others of the unit hold of that counts as
used, so that a replica is as free as it really is; where all seats are taken, everything is. A model that keeps no KV
runs out of seats alone: each counts as one block. All sums are at hand: a load costs the same however many requests
there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from muxserve.replicas.priorities import Levels
from muxserve.replicas.views import InstanceLoad, InstanceView, RequestView
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import LiveRequest, ModelState


def load_of(
    unit: str,
    model: ModelState,
    policy: Policy,
    layout: str = "",
    terminating: bool = False,
    moving_in: int = 0,
    moving_out: int = 0,
    used: int | None = None,
    available: int | None = None,
) -> InstanceLoad:
    """The replica as the global scheduler is to see it. `used` pages of the model and `available` ones of its pool may
    be newer than the ledger's."""
    used = model.used if used is None else used
    available = model.pool.available if available is None else available
    block, per_block, pool, queue = model.block_tokens, model.pages_per_block, model.pool, model.queue
    capacity = policy.capacity(model)
    pages = used + queue.blocks * per_block
    left = min(capacity - used - model.promised, available - pool.promised)
    if not per_block:
        per_block, capacity, left = 1, model.max_seqs, model.max_seqs - model.in_engines
    if model.in_engines >= model.max_seqs:
        left = 0  # room for KV is no use to a request without a seat
    most = capacity // per_block
    return InstanceLoad(
        name=unit,
        model=model.name,
        capacity=most * block,
        layout=layout,
        used=(most - max(0, left) // per_block) * block,
        running=model.in_engines,
        waiting=len(queue),
        head_demand=queue.head().blocks * block if queue else 0,
        queued_demand=queue.blocks * block,
        levels=dict(model.levels),
        terminating=terminating,
        moving_in=moving_in,
        moving_out=moving_out,
        step_seconds=0.0 if model.pooling else model.decode.step_seconds,
        pages=pages if model.pages_per_block else 0,
    )


def view_of(
    model: ModelState,
    load: InstanceLoad,
    levels: Levels,
    staying: Collection[str],
    tokens_of: Callable[[LiveRequest], int] | None = None,
) -> InstanceView:
    """The replica as it sees itself, request by request, with the sums of `load`. Requests that decode can be moved,
    those in `staying` apart. `tokens_of` says what a request has by now (None: as
    far as steps were reported). Takes time in proportion to the requests that have a seat."""
    tokens_of = tokens_of or model.tokens_of
    block = model.block_tokens
    known = {level.name for level in levels}
    running = []
    for live in model.decoding.values():
        usage = model.blocks_of(tokens_of(live)) * block
        level = live.execution if live.execution in known else levels.default
        running.append(RequestView(live.request_id, usage, execution=level, movable=live.request_id not in staying))
    # What they hold is in the sums; only how many there are, and of which level, must be known.
    for others in (model.prefilling, model.handed, model.moving):
        for live in others.values():
            level = live.execution if live.execution in known else levels.default
            running.append(RequestView(live.request_id, execution=level, movable=False))
    return InstanceView(
        name=load.name,
        capacity=load.capacity,
        running=running,
        waiting=[RequestView("", demand=load.head_demand, queued=True)] if load.waiting else [],
        # Negative where requests share blocks: what they hold together is less than the sum.
        reserved=load.used - sum(view.usage for view in running),
        terminating=load.terminating,
        moving_in=load.moving_in,
        moving_out=load.moving_out,
    )
