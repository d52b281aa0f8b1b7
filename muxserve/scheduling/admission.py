"""Which waiting requests a prefill engine may take now.

A request is admitted when the blocks of its prompt and of its first token fit into its model's quota and into the pool,
beside what earlier admissions still have to take and one block for each running sequence to grow into. The head of the
queue that does not fit waits there, and nobody overtakes it: smaller requests would starve it.
"""

from __future__ import annotations

from typing import NamedTuple

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.state import ModelState


class Admission(NamedTuple):
    """Requests to admit together, and the prompt tokens that they bring."""

    request_ids: tuple[str, ...]
    tokens: int


def admissible(
    ledger: UnitLedger,
    model: ModelState,
    limit: int | None = None,
    reserved: int = 0,
    ahead: bool = False,
    most: int = 0,
) -> Admission | None:
    """What `model` may admit, up to `limit` pages if that is less than its quota; None when nothing.

    Bounded by the tokens of one step (a longer prompt goes alone, in several steps), or `ahead` of a running job by
    those of one more step, and by the seats of the decode engine. `reserved` pages of the pool are spoken for by
    others in the same decision. A request is admitted whatever the headroom if its model holds nothing else. `most`
    bounds the number of requests (0: no bound).
    """
    queue = model.queue
    if not queue or not ledger.memory_up or not (model.prefill.up and model.decode.up):
        return None
    seated = model.in_engines
    seats = model.max_seqs - seated
    tokens_left = model.batch_tokens * (2 if ahead else 1) - model.outstanding
    if seats <= 0 or tokens_left <= 0:
        return None
    pool = model.pool
    quota = model.quota if limit is None else min(limit, model.quota)
    pages = min(quota - model.used - model.promised, pool.available - pool.promised - reserved)
    room = pages // model.pages_per_block - seated
    chosen: list[str] = []
    tokens = 0
    for live in queue.first(most or min(seats, tokens_left)):
        needed = live.tokens
        if chosen and tokens + needed > tokens_left:
            break
        if live.blocks > room and (chosen or seated or not _fits_alone(live.blocks, model, reserved)):
            break
        room -= live.blocks
        tokens += needed
        chosen.append(live.request_id)
        if tokens >= tokens_left:
            break
    return Admission(tuple(chosen), tokens) if chosen else None


def _fits_alone(blocks: int, model: ModelState, reserved: int) -> bool:
    """An otherwise empty model may use its whole quota, whatever a policy would rather leave to others."""
    pages = blocks * model.pages_per_block
    return pages <= model.quota and pages <= model.pool.available - model.pool.promised - reserved


def wants_prefill(
    ledger: UnitLedger, model: ModelState, now: float, limit: int | None = None, reserved: int = 0
) -> bool:
    """Whether `model` has a prefill job to run now: an unfinished one, or a request that may be admitted."""
    engine = model.prefill
    if engine.lease is not None or not engine.up:
        return False
    if engine.inside:
        return engine.retry_at <= now
    return admissible(ledger, model, limit, reserved, most=1) is not None


def prefill_steps(model: ModelState, tokens: int) -> int:
    """Steps that a prefill job takes which brings `tokens` more; one to spare costs nothing, as an engine without work
    takes none."""
    return -(-(model.outstanding + tokens) // model.batch_tokens) + 1
