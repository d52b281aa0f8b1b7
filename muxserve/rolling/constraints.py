"""Whether a member may take one more prefill: EcoServe, Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from muxserve.rolling.member import Member, Objectives, Window


class Verdict(StrEnum):
    """The answer, and if it is no, which constraint says so."""

    FITS = "fits"
    TTFT = "ttft"
    TPOT = "tpot"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Demand:
    """A request that wants a place: its predicted prefill, seconds, and the tokens of KV that it holds at most."""

    request_id: str
    prefill_seconds: float
    tokens: int
    arrival: float = 0.0


def check(member: Member, demand: Demand, objectives: Objectives, now: float) -> Verdict:
    """Algorithm 2.

    TTFT: the predicted prefills admitted since the switch, and this one, `t_total`, must not exceed the objective.
    TPOT: running decodes must have saved at least `t_total` on average, since they wait for so long.
    Memory: what is promised to requests, and this one, must fit.
    """
    total = demand.prefill_seconds * member.bias
    if member.window is Window.PREFILL:
        total += member.admitted_seconds
    if total > objectives.ttft:
        return Verdict.TTFT
    if member.saved(now, objectives.tpot) < total:
        return Verdict.TPOT
    if member.promised + demand.tokens > member.capacity:
        return Verdict.MEMORY
    return Verdict.FITS
