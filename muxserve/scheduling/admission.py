"""Which waiting requests an engine that prefills may take now, and which engines have a job.

A request is admitted when the blocks of its prompt and of its first token fit into its model's quota and into the pool.
Blocks that earlier admissions still have to take, and one block of growth per running sequence, are set aside first. A
head of the queue that does not fit waits, and nobody overtakes it: smaller requests would starve it. Several models may
admit in one decision: their quotas are parts of the pool, so that none takes another's pages.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.state import ModelState

_UNLIMITED = sys.maxsize


class Admission(NamedTuple):
    """Requests to admit together, and the prompt tokens that they bring."""

    request_ids: tuple[str, ...]
    tokens: int


def admissible(
    ledger: UnitLedger,
    model: ModelState,
    limit: int | None = None,
    ahead: bool = False,
    most: int = 0,
) -> Admission | None:
    """What `model` may admit, up to `limit` pages if that is less than its quota; None when nothing.

    Bounded by the tokens of one step (a longer prompt goes alone, in several steps), `ahead` of a running job by those
    of one more step, or by `most` prompt tokens in the engine; and by the seats of the engine that decodes. A request
    is admitted whatever the headroom if its model holds nothing else.
    """
    tokens_left = (most or model.batch_tokens * (2 if ahead else 1)) - model.outstanding
    if tokens_left <= 0 or not model.queue or not ledger.memory_up:
        return None
    seated = model.in_engines
    blocks_left = room(model, seated, limit)
    if not _fits(model, seated, blocks_left, limit):
        return None
    chosen: list[str] = []
    tokens = 0
    for live in model.queue.first(min(model.max_seqs - seated, tokens_left)):
        needed = live.tokens
        if chosen and (tokens + needed > tokens_left or live.blocks > blocks_left):
            break
        blocks_left -= live.blocks
        tokens += needed
        chosen.append(live.request_id)
        if tokens >= tokens_left:
            break
    return Admission(tuple(chosen), tokens)


def entering(ledger: UnitLedger, model: ModelState, limit: int | None = None) -> Admission | None:
    """What may enter the engine of both phases of `model`, beside its sequences: prompts that its steps will take soon,
    as many as `EngineSetup.waiting_tokens` says."""
    return admissible(ledger, model, limit, ahead=True, most=model.profile.engines.waiting_tokens)


def head_fits(ledger: UnitLedger, model: ModelState, limit: int | None = None) -> bool:
    """Whether somebody waits for `model` whose oldest request could be admitted, tokens of a step apart."""
    if not model.queue or not ledger.memory_up:
        return False
    seated = model.in_engines
    return _fits(model, seated, room(model, seated, limit), limit)


def missing_pages(model: ModelState, limit: int | None = None) -> int:
    """Pages that the oldest request of `model` waits for, which others hold or may still take; 0: for none."""
    if not model.queue or not model.pages_per_block:
        return 0
    blocks, seated = model.queue.head().blocks, model.in_engines
    if not seated and _fits_alone(blocks, model, limit):
        return 0
    return max(0, blocks - room(model, seated, limit)) * model.pages_per_block


def _fits(model: ModelState, seated: int, blocks_left: int, limit: int | None) -> bool:
    """Whether the oldest request finds a seat and its blocks."""
    if seated >= model.max_seqs or not model.up:
        return False
    blocks = model.queue.head().blocks
    return blocks <= blocks_left or (not seated and _fits_alone(blocks, model, limit))


def room(model: ModelState, seated: int, limit: int | None = None) -> int:
    """Blocks for new requests, beside those promised and one for each of the `seated` sequences to grow into; no limit
    where a block has no pages."""
    if not model.pages_per_block:
        return _UNLIMITED
    pool = model.pool
    quota = model.quota if limit is None or limit > model.quota else limit
    in_quota = quota - model.used - model.promised
    in_pool = pool.available - pool.promised
    return (in_quota if in_quota < in_pool else in_pool) // model.pages_per_block - seated


def _fits_alone(blocks: int, model: ModelState, limit: int | None) -> bool:
    """An otherwise empty model may take all that it may have, also what requests that were cancelled still hold."""
    pages = blocks * model.pages_per_block
    quota = model.quota if limit is None or limit > model.quota else limit
    return pages <= quota and pages <= model.pool.available - model.pool.promised


def wants_prefill(ledger: UnitLedger, model: ModelState, now: float, limit: int | None = None) -> bool:
    """Whether `model` has a prefill job for its prefill engine to run now: an unfinished one, or a request that may be
    admitted. An engine of both phases has none."""
    engine = model.prefill
    if model.both or engine.lease is not None or not engine.takes_work:
        return False
    if engine.inside:
        return engine.retry_at <= now
    return head_fits(ledger, model, limit)


def wants_decode(ledger: UnitLedger, model: ModelState, now: float, limit: int | None = None) -> bool:
    """Whether `model` has a job for the engine that decodes to run now: what is in it or was handed over, and for an
    engine of both phases a prompt that may be admitted."""
    engine = model.decode
    if engine.lease is not None or not engine.takes_work:
        return False
    if engine.inside or engine.incoming:
        return engine.retry_at <= now
    return model.both and head_fits(ledger, model, limit)


def prefill_steps(model: ModelState, tokens: int) -> int:
    """Steps that a prefill job takes which brings `tokens` more; one to spare costs nothing, as an engine without work
    takes none."""
    return -(-(model.outstanding + tokens) // model.batch_tokens) + 1
