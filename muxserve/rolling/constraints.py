"""Whether a member may take one more prefill: EcoServe, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from muxserve.rolling.member import LatencyTargets, MacroMember, Window


class Constraint(StrEnum):
    """The answer, and if it is no, which constraint says so."""

    FITS = "fits"
    TTFT = "ttft"
    TPOT = "tpot"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """A request that wants a place: its predicted prefill, seconds, and the tokens of KV that it holds at most. Who
    waits goes by `rank` (higher first), then by `arrival`."""

    request_id: str
    prefill_seconds: float
    tokens: int
    arrival: float = 0.0
    rank: int = 0

    @property
    def order(self) -> tuple[int, float]:
        """What waiting requests are sorted by."""
        return -self.rank, self.arrival


def promise(tokens: int, max_tokens: int, capacity: int, expected: int) -> int:
    """Tokens of KV that a request is taken to hold in the end, which are no more than the `capacity` of a replica: what
    it has, and what it may make yet (`max_tokens`, which is often all that the model can do), or is `expected` to make
    if that is less. Zeros: nobody knows. Answers that outgrow it are the replica's business, which preempts when it has
    no room."""
    promised = tokens + min(max_tokens or expected, expected)
    return min(promised, max(capacity, tokens)) if capacity else promised


def check(member: MacroMember, demand: PrefillDemand, objectives: LatencyTargets, now: float) -> Constraint:
    """Algorithm 2. Predicted prefills are corrected by the member's bias.

    TTFT: those that the member was given since its prefill window opened, and this one, must not exceed the objective.
    Who came first waits for all of them before it decodes.
    TPOT: running decodes must have saved at least what they wait for. With the mean, as in the paper, that is the same
    sum as for TTFT; with a quantile the prefills that are pending still, and this one, since what is done has passed.
    Memory: what is promised to requests, and this one, must fit.
    """
    seconds = demand.prefill_seconds * member.bias
    window = member.window_seconds if member.window is Window.PREFILL else 0.0
    total = window + seconds
    if total > objectives.ttft:
        return Constraint.TTFT
    waited_for = total if objectives.spared is None else member.pending_seconds + seconds
    if member.saved(now, objectives.spared) < waited_for:
        return Constraint.TPOT
    if member.promised + demand.tokens > member.capacity:
        return Constraint.MEMORY
    return Constraint.FITS
