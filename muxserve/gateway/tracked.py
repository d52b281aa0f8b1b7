"""One request in flight, as its gateway holds it. Pure: no socket, no clock, no vLLM import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from muxserve.replicas.priorities import NORMAL
from muxserve.wire import Failures, Place, Submit

# Nothing was heard of a request for this long: its unit is asked again, see `RequestTable.quiet`.
QUIET_SECONDS = 5.0


class Output(Protocol):
    """The part of vLLM's `EngineCoreOutput` that is looked at here."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any
    new_prompt_logprobs_tensors: Any
    new_sampling_mask: Any
    finish_reason: Any


@dataclass(slots=True, eq=False)
class Tracked:
    """A request in flight. `request_id` is its name on the wire, `front_id` its name in the model's front end.

    `unit` is where it is served or was sent to; "" while it has no unit. (`request_id`, `attempt`) is in one unit at a
    time: within an attempt it goes to another unit by migration only, which `moves` counts. `refused_by` are units that
    gave it back because they are drained or too small; `repeated_at` are units that were sent this attempt twice.
    Requests of one `group` come from one HTTP request. Times are seconds of the monotonic clock. `context` belongs to
    the caller.
    """

    request_id: str
    front_id: str
    model: str
    body: bytes
    prompt_tokens: int
    max_tokens: int
    arrival: float
    priority: int = 0
    scheduling: str = NORMAL
    execution: str = NORMAL
    group: str = ""
    context: Any = None
    attempt: int = 0
    tries: int = 1
    unit: str = ""
    refused_by: tuple[str, ...] = ()
    emitted: list[int] = field(default_factory=list)
    early: dict[int, Output] = field(default_factory=dict)
    gap_since: float | None = None
    prompt_logprobs_told: bool = False
    first_token_at: float | None = None
    last_token_at: float | None = None
    heard_at: float = 0.0
    patience: float = QUIET_SECONDS
    repeated_at: set[str] = field(default_factory=set)
    moves: int = 0
    # How often engines failed with it, as its last unit said.
    failures: Failures = field(default_factory=Failures)

    def submit(self) -> Submit:
        """The message that asks a unit to serve the request, or what is left of it."""
        return Submit(
            request_id=self.request_id,
            model=self.model,
            attempt=self.attempt,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            arrival=self.arrival,
            body=self.body,
            output_tokens=list(self.emitted),
            priority=self.priority,
            scheduling=self.scheduling,
            execution=self.execution,
            group=self.group,
            failures=self.failures,
        )

    def place(self, since: float) -> Place:
        """The message that asks the global scheduler for a unit, which the request has been without for so long."""
        # Not since it came: what it has been through must not count as waiting for a replica.
        demand = self.prompt_tokens + len(self.emitted) + 1
        return Place(
            self.request_id,
            self.model,
            demand,
            since,
            self.scheduling,
            self.execution,
            tokens=demand - 1,
            max_tokens=max(1, self.max_tokens - len(self.emitted)),
        )


def cut(output: Output, seen: int) -> None:
    """Take the first `seen` tokens out of `output`, with all that belongs to them."""
    tokens = len(output.new_token_ids)
    left = max(0, tokens - seen)
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(seen, left) if left else None
    if output.new_sampling_mask is not None:
        output.new_sampling_mask = output.new_sampling_mask.slice_request(seen, left) if left else None
    output.new_token_ids = output.new_token_ids[tokens - left :]
