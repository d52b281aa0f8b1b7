"""Values that go in and out of the scheduling core.

Shares of the unit's compute are whole millionths (`WHOLE` = all of it), so that adding and taking them back a million
times leaves nothing over. Times are seconds of one monotonic clock, real or virtual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from muxserve.replicas.priorities import ServiceClass

WHOLE = 1_000_000


class Phase(StrEnum):
    """What an engine does for its model: of an engine its name, of a lease what the engine does under it.

    An engine of `BOTH` phases may be leased for one of them at a time, or for both in every step.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class StepsDone(NamedTuple):
    """What an engine reports of its steps: `steps` of `seconds` and `tokens` in all, `left` steps of lease `lease_id`,
    and `remaining` requests in it. Without `seconds` no step was run. An engine of both phases says how many
    `prefill_tokens` of the tokens were, and how many `prefill_seconds` went into steps that did nothing else."""

    lease_id: int
    left: int
    seconds: float
    tokens: int
    remaining: int
    steps: int = 1
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0


class RequestPlace(StrEnum):
    """Where a live request is. Every live request is in exactly one.

    One that is `HANDED` waits to be adopted by the engine that decodes; in an engine of both phases a request goes from
    `PREFILLING` to `DECODING` where it is. One that is `MOVING` has left its engine on its way to another unit; its
    blocks wait in the memory manager.
    """

    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDED = "handed"
    DECODING = "decoding"
    MOVING = "moving"


# Where every event asks: to look a member up in its enum takes several times as long as a name.
PREFILL, DECODE, BOTH = Phase
QUEUED, PREFILLING, HANDED, DECODING, MOVING = RequestPlace


def share_units(share: float) -> int:
    """A share in (0, 1] as millionths, rounded down so that n shares of 1/n always fit.

    Raises:
        ValueError: the share is not in (0, 1].
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"a compute share must be above 0 and at most 1, not {share}")
    return max(1, int(share * WHOLE + 1e-6))


@dataclass(frozen=True, slots=True)
class PoolProfile:
    """One page pool. `pages` is what can be handed out, the null page not counted, when all of it has memory; a page
    has `page_bytes` on each rank."""

    name: str
    pages: int
    page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the KV of a model lies in the pages of a pool. Without `kv_heads` it takes none. The states that a sequence
    has take `state_blocks` blocks, whatever its length. In `windowed_layers` of the layers pages behind the last
    `window` tokens are given back."""

    pool: str
    layers: int
    kv_heads: int
    block_tokens: int
    state_blocks: int = 0
    window: int = 0
    windowed_layers: int = 0

    @property
    def pages_per_block(self) -> int:
        """Pages behind one token block."""
        return self.layers * self.kv_heads

    @property
    def windowed_pages(self) -> int:
        """Those of a block's pages that are given back when it is behind the window."""
        return self.windowed_layers * self.kv_heads

    def seen_blocks(self, tokens: int) -> int:
        """Most blocks of a sequence that are not behind the window, when `tokens` of it are computed in a step: the
        tokens that they see are `window` - 1 + `tokens` in a row, which begin anywhere in a block."""
        return -(-(self.window - 1 + tokens) // self.block_tokens) + 1


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The engines of a model. Shares are fractions of the unit.

    With `both` it has one engine of both phases, whose share is `decode_share`, in which up to `depth` micro-batches
    are under way; `waiting_tokens` of prompts may be in it that are not computed yet (0: as many as two steps take).
    `elastic` engines can compute on another share from one lease to the next; for others every lease names the planned
    share.
    """

    prefill_share: float
    decode_share: float
    max_num_seqs: int
    max_num_batched_tokens: int
    both: bool = False
    depth: int = 1
    waiting_tokens: int = 0
    elastic: bool = True


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What scheduling needs to know of a model.

    `rate` is its expected load in requests per second, relative to the other models. `quota_pages` is where its quota
    starts, `floor_pages` what it never falls below but for requests that need more of the pool (`long_requests`).
    `tokens` is the mean length of its requests, prompt and answer, relative to the other models' (1 for all: they are
    alike, or unknown). The requests of a `pooling` model are finished by their prefill: it has no decode engine.
    """

    name: str
    rate: float
    kv: KvLayout
    engines: EngineSetup
    quota_pages: int
    floor_pages: int
    tokens: float = 1.0
    pooling: bool = False

    def with_engines(self, **changes: Any) -> ModelProfile:
        """The same with other values of its `engines`."""
        return replace(self, engines=replace(self.engines, **changes))


class QueuedRequest(NamedTuple):
    """A request as it arrives. `output_tokens` counts tokens already generated in an earlier life, which must be
    computed again like the prompt; `resumed` puts it before those that were never started."""

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrival: float
    service: ServiceClass = ServiceClass()
    output_tokens: int = 0
    resumed: bool = False


class Grant(NamedTuple):
    """Permission for one engine to run, taking `share` millionths of the unit while it lasts.

    A grant to an engine that has a lease replaces what was left of it. `phase` is what it does under the lease, which
    an engine of both phases has a choice of. `admit` names requests that enter the engine with it: from the queue, to
    be prefilled, or handed over, to be adopted. `tokens` bounds the tokens of one step (0: the engine's own bound). A
    grant that is not `renewable` has been recalled: its engine must stop when it ends.
    """

    model: str
    phase: Phase
    steps: int
    seconds: float
    share: int
    admit: tuple[str, ...] = ()
    tokens: int = 0
    renewable: bool = True


class QuotaChange(NamedTuple):
    """A model's new quota. Changes of one decision are applied together."""

    model: str
    pages: int
