"""What came of it, with the wait for the phase switch told apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from muxserve.metrics.definitions import Objectives, time_per_token
from muxserve.metrics.records import RequestRecord
from muxserve.simulator.rolling.requests import PhasedRequest


@dataclass(slots=True)
class PhasedResult:
    """`busy` and `prefill_busy` are seconds by engine: of steps, and of steps that had prompts in them. `transfers`
    counts those of KV, `transfer_seconds` sums from a first token to the KV being there. `replicas` is when their
    number changed, and to what; `moves` counts handles that went to another macro instance."""

    requests: list[PhasedRequest] = field(default_factory=list)
    seconds: float = 0.0
    preemptions: int = 0
    transfers: int = 0
    transfer_seconds: float = 0.0
    moves: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    prefill_busy: dict[str, float] = field(default_factory=dict)
    replicas: list[tuple[float, int]] = field(default_factory=list)

    def within(self, after: float = 0.0, before: float = float("inf")) -> list[PhasedRequest]:
        """Requests that arrived then."""
        return [r for r in self.requests if after <= r.arrival < before]

    def records(self) -> list[RequestRecord]:
        """What became of each request; times to first token are without the wait."""
        return [request.record() for request in self.requests]

    def attained(
        self, objectives: Objectives, switch: bool = True, after: float = 0.0, before: float = float("inf")
    ) -> float:
        """Part of the requests that arrived then and met all objectives; 1.0 of none.

        Args:
            switch: the wait for the phase switch (from the first token to the begin of the first decode step) counts
                as time to first token, not as time per output token; otherwise the other way round.
        """
        requests = self.within(after, before)
        return sum(met(r, objectives, switch) for r in requests) / len(requests) if requests else 1.0


def times(request: PhasedRequest, switch: bool) -> tuple[float, float | None] | None:
    """TTFT and TPOT of an answered request, seconds, the wait for the phase switch in the first or in the second."""
    if request.first_token is None or request.finish is None:
        return None
    wait = request.switch_wait if switch else 0.0
    tpot = time_per_token(request.first_token + wait, request.finish, request.made)
    return request.first_token - request.arrival + wait, tpot


def met(request: PhasedRequest, objectives: Objectives, switch: bool = True) -> bool:
    """Whether it was answered and met all objectives."""
    found = times(request, switch)
    return found is not None and objectives.met(*found).get("all", True)
