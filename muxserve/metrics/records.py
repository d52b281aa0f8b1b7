"""One request as its client saw it."""

from __future__ import annotations

import msgspec

from muxserve.metrics.definitions import time_per_token


class RequestRecord(msgspec.Struct, gc=False):
    """Times are seconds of one clock, from the start of the workload. `first_token` and `finish` are None until then;
    a request that failed keeps `error`. `preemptions` counts how often it was prefilled again; `cached_tokens` of its
    prompt were in the prefix cache, where that is known."""

    model: str
    arrival: float
    prompt_tokens: int
    output_tokens: int
    first_token: float | None = None
    finish: float | None = None
    error: str = ""
    preemptions: int = 0
    cached_tokens: int = 0

    @property
    def ok(self) -> bool:
        """It was answered completely."""
        return self.finish is not None and not self.error

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first, seconds; None for answers of one token."""
        if self.finish is None or self.first_token is None:
            return None
        return time_per_token(self.first_token, self.finish, self.output_tokens)

    @property
    def latency(self) -> float | None:
        """From arrival to last token, seconds."""
        return None if self.finish is None else self.finish - self.arrival
