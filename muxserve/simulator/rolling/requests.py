"""A request among instances that prefill, decode or both."""

from __future__ import annotations

from muxserve.simulator.requests import SimRequest


class PhasedRequest(SimRequest):
    """`decoding_since` is when its first decode step began: what lies between that and its first token is the wait for
    the phase switch. `predicted` is its prefill as predicted, seconds, `began` when its first prefill began, `engine`
    the name of the one that prefills it.
    """

    __slots__ = ("began", "decoding_since", "engine", "predicted")

    def __init__(self, request_id: str, model: str, arrival: float, prompt: int, output: int) -> None:
        super().__init__(request_id, model, arrival, prompt, output)
        self.decoding_since: float | None = None
        self.predicted = 0.0
        self.began: float | None = None
        self.engine = ""

    @property
    def tokens(self) -> int:
        """All that it consists of now; a preempted one computes its outputs again, too."""
        return self.prompt + self.made

    @property
    def switch_wait(self) -> float:
        """Seconds from the first token to the begin of the first decode step; 0 for an answer of one token."""
        if self.decoding_since is None or self.first_token is None:
            return 0.0
        return self.decoding_since - self.first_token
