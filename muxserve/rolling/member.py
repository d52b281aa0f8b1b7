"""What the scheduler of a macro instance knows of a member, and how it changes with what happens there.

Everything is sums, so that an event costs the same whatever number of requests a member has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Window(StrEnum):
    """What a member does at present."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Objectives:
    """The latencies to be met, seconds: time to first token, and time per output token after it.

    Raises:
        ValueError: one of them is not above zero.
    """

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tpot > 0):
            raise ValueError(f"latency objectives must be above zero seconds, not {self.ttft} and {self.tpot}")


@dataclass(slots=True)
class Arrived:
    """A request that was admitted to a member: tokens of KV it holds in the end at most, and its predicted prefill."""

    tokens: int
    prefill_seconds: float
    first_token_at: float | None = None
    generated: int = 0


@dataclass(slots=True)
class Member:
    """One replica in a macro instance: plain data, so that it can be sent to another scheduler as it is.

    `capacity` and `promised` are tokens of KV: all there is, and what admitted requests may come to hold. `window` and
    `switched_at` say what it does, and since when. `admitted_seconds` sums the predicted prefills that were admitted
    since the prefill window opened (all of them, done or not: the length that the window will have had).
    `decoding` counts requests with a first token, `generated` their output tokens, `first_tokens` the sum of the times
    of their first tokens. `bias` corrects predicted prefills by what was observed.
    """

    name: str
    capacity: int
    window: Window = Window.DECODE
    switched_at: float = 0.0
    admitted_seconds: float = 0.0
    pending_seconds: float = 0.0
    pending: int = 0
    promised: int = 0
    decoding: int = 0
    generated: int = 0
    first_tokens: float = 0.0
    bias: float = 1.0
    leaving: bool = False
    requests: dict[str, Arrived] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Nothing is there."""
        return not self.requests

    def saved(self, now: float, tpot: float) -> float:
        """Mean saved time of the running decodes, seconds: `L * SLO_TPOT - (now - first_token_time)` (EcoServe,
        section 3.4). Infinite without any: nobody is kept waiting."""
        if not self.decoding:
            return float("inf")
        return (self.generated * tpot - (self.decoding * now - self.first_tokens)) / self.decoding

    # ------------------------------------------------------------ events

    def admitted(self, request_id: str, tokens: int, prefill_seconds: float, now: float) -> None:
        """A request was sent there. The first one after a decode phase opens the prefill window.

        Args:
            tokens: KV that it holds in the end at most.
            prefill_seconds: as predicted, uncorrected.
        """
        seconds = prefill_seconds * self.bias
        if self.window is Window.DECODE:
            self.window, self.switched_at, self.admitted_seconds = Window.PREFILL, now, 0.0
        self.requests[request_id] = Arrived(tokens, seconds)
        self.admitted_seconds += seconds
        self.pending_seconds += seconds
        self.pending += 1
        self.promised += tokens

    def prefilled(self, request_id: str, now: float) -> None:
        """Its first token is out. When it was the last one pending, the member goes back to decoding."""
        request = self.requests[request_id]
        self.pending -= 1
        self.pending_seconds = max(0.0, self.pending_seconds - request.prefill_seconds) if self.pending else 0.0
        request.first_token_at = now
        request.generated = 1
        self.decoding += 1
        self.generated += 1
        self.first_tokens += now
        if not self.pending:
            self.window, self.switched_at = Window.DECODE, now

    def stepped(self, counts: dict[str, int]) -> None:
        """Output tokens that requests have got since the last report."""
        for request_id, tokens in counts.items():
            request = self.requests.get(request_id)
            if request is not None and request.first_token_at is not None:
                request.generated += tokens
                self.generated += tokens

    def decoded(self, tokens: int) -> None:
        """All running decodes together have got `tokens` output tokens: for those who only count sums. Not to be mixed
        with `stepped`."""
        self.generated += tokens

    def left(self, request_id: str, now: float, generated: int | None = None) -> None:
        """A request has ended, was cancelled or went elsewhere. `generated`: its output tokens, if only sums were
        counted."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self.promised -= request.tokens
        if request.first_token_at is None:
            self.pending -= 1
            self.pending_seconds = max(0.0, self.pending_seconds - request.prefill_seconds) if self.pending else 0.0
            if not self.pending and self.window is Window.PREFILL:
                self.window, self.switched_at = Window.DECODE, now
            return
        self.decoding -= 1
        self.generated -= request.generated if generated is None else generated
        self.first_tokens -= request.first_token_at
        if not self.decoding:
            # What sums of floats leave over.
            self.generated, self.first_tokens = 0, 0.0

    def observed(self, predicted: float, measured: float, weight: float = 0.1) -> None:
        """A prefill that was predicted, uncorrected, to take `predicted` seconds has taken `measured`."""
        if predicted > 0 and measured > 0:
            self.bias += weight * (measured / predicted - self.bias)
