"""A request in the simulator."""

from __future__ import annotations

from muxserve.metrics.records import RequestRecord


class SimRequest:
    """One request from arrival to end. `made` counts its output tokens so far, `computed` the tokens whose KV a prefill
    has computed, `blocks` those that a prefill engine holds for it. `lease_id` is the ticket with which it came into
    its present engine.

    While it decodes, `base` + the engine's step counter is the number of tokens in its KV, `ends_at` the counter at
    which it has its last token, and `serial` its place in the order of joining.
    """

    __slots__ = (
        "arrival",
        "base",
        "blocks",
        "computed",
        "ends_at",
        "error",
        "finish",
        "first_token",
        "lease_id",
        "made",
        "model",
        "output",
        "preemptions",
        "prompt",
        "request_id",
        "serial",
    )

    def __init__(self, request_id: str, model: str, arrival: float, prompt: int, output: int) -> None:
        self.request_id = request_id
        self.model = model
        self.arrival = arrival
        self.prompt = prompt
        self.output = output
        self.made = 0
        self.computed = 0
        self.blocks = 0
        self.lease_id = 0
        self.base = 0
        self.ends_at = 0
        self.serial = 0
        self.first_token: float | None = None
        self.finish: float | None = None
        self.preemptions = 0
        self.error = ""

    def record(self) -> RequestRecord:
        """What became of it."""
        return RequestRecord(
            model=self.model,
            arrival=self.arrival,
            prompt_tokens=self.prompt,
            output_tokens=self.made,
            first_token=self.first_token,
            finish=self.finish,
            error=self.error,
            preemptions=self.preemptions,
        )
