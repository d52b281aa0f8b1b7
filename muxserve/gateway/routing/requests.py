"""Every request in flight of a gateway, and its tokens: each reaches the front end once and in order.

Pure: no socket, no clock, no vLLM import; it takes token messages and the time, and answers what to deliver. Tokens
of one request come from several engines on connections of their own, from different units when it moved, and from
engines that die with their last message on the way. `Router` decides where requests are served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from muxserve.vllm.pin import FINISH_ABORT
from muxserve.wire import Failures, Message, Place, RequestSpec, ServedBefore, Submit

# Nothing was heard of a request for this long: its unit is asked again, see `RequestTable.quiet`.
QUIET_SECONDS = 5.0


class Output(Protocol):
    """The part of vLLM's `EngineCoreOutput` that is looked at here."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any
    new_prompt_logprobs_tensors: Any
    new_sampling_mask: Any
    pooling_output: Any
    finish_reason: Any
    prefill_stats: Any


@dataclass(slots=True, eq=False)
class Tracked:
    """A request in flight. `request_id` is its name on the wire, `front_id` its name in the model's front end.

    `unit` is where it is served or was sent to; "" while it has no unit. (`request_id`, `attempt`) is in one unit at a
    time: within an attempt it goes to another unit by migration only, which `moves` counts. `refused_by` are units that
    gave it back because they are drained or too small; `repeated_at` are units that were sent this attempt twice.
    `prefix` has the keys of its prompt's beginnings (`prefix_keys`), where anybody wants them. `images` are its images'
    files, which stay as long as it refers to them. It is without a unit that is up since `stalled_at`.
    `choice` numbers the requests for one prompt that come from one HTTP request. Times are seconds of the monotonic
    clock. `context` belongs to the caller.
    """

    request_id: str
    front_id: str
    spec: RequestSpec
    arrival: float
    choice: int = 0
    prefix: bytes = b""
    images: Sequence[object] = ()
    context: Any = None
    attempt: int = 0
    tries: int = 1
    unit: str = ""
    refused_by: tuple[str, ...] = ()
    emitted: list[int] = field(default_factory=list)
    early: dict[int, Output] = field(default_factory=dict)
    gap_since: float | None = None
    prompt_logprobs_told: bool = False
    cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    heard_at: float = 0.0
    patience: float = QUIET_SECONDS
    stalled_at: float | None = None
    repeated_at: set[str] = field(default_factory=set)
    moves: int = 0
    # How often engines failed with it, as its last unit said.
    failures: Failures = field(default_factory=Failures)

    @property
    def model(self) -> str:
        """The name of the model that it asks for."""
        return self.spec.model

    def submit(self) -> Submit:
        """The message that asks a unit to serve the request, or what is left of it."""
        return Submit(self.request_id, self.attempt, self.spec, self.arrival, list(self.emitted), self.failures)

    def place(self, since: float) -> Place:
        """The message that asks the global scheduler for a unit, which the request has been without for so long."""
        # Not since it came: what it has been through must not count as waiting for a replica.
        demand = self.spec.prompt_tokens + len(self.emitted) + 1
        return Place(
            self.request_id,
            self.model,
            demand,
            since,
            self.spec.service,
            max_tokens=max(1, self.spec.max_tokens - len(self.emitted)),
            prefix=self.prefix,
            before=ServedBefore(self.arrival, len(self.emitted)) if self.emitted else None,
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


# A request whose every try ended with a dead process, without one token in between, is likely what kills them.
MAX_TRIES = 8

# An engine that dies right after its last message may take that message with it. Tokens that arrive behind the hole
# are held back this long before the request is served again from where the hole begins.
GAP_SECONDS = 2.0

# Likewise its last words of all: then nobody has the request any more, and nobody says so. So its unit is asked again
# for a request of which nothing was heard for `QUIET_SECONDS`; again after twice as long, and so on up to this.
LONGEST_QUIET_SECONDS = 60.0


@dataclass(slots=True)
class TakenTokens:
    """What a token message brought: `ready` in order for the front end; `dropped` requests that their engine gave up
    although nobody had cancelled them."""

    ready: list[tuple[Tracked, Output]] = field(default_factory=list)
    dropped: list[Tracked] = field(default_factory=list)


class RequestTable:
    """All requests in flight of one gateway process, whose wire ids begin with `epoch`."""

    def __init__(self, epoch: str, max_tries: int = MAX_TRIES, gap_seconds: float = GAP_SECONDS) -> None:
        self.epoch = epoch
        self.max_tries = max_tries
        self.gap_seconds = gap_seconds
        self._count = 0
        self._by_id: dict[str, Tracked] = {}
        self._by_front: dict[tuple[str, str], Tracked] = {}
        self._gapped: set[Tracked] = set()
        self._at: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> Tracked | None:
        """The request of that wire id."""
        return self._by_id.get(request_id)

    def all(self) -> list[Tracked]:
        """Every request in flight, oldest first."""
        return list(self._by_id.values())

    # ------------------------------------------------------------ the front end's side

    def new_id(self) -> str:
        """A wire id that no request of this gateway has had. Short, whatever id the client chose."""
        self._count += 1
        return f"{self.epoch}-{self._count}"

    def add(self, request: Tracked) -> None:
        """Track a new request."""
        request.heard_at = request.arrival
        self._at[request.unit] += 1
        self._by_id[request.request_id] = request
        self._by_front[request.model, request.front_id] = request

    def cancel(self, model: str, front_ids: Iterable[str]) -> list[Tracked]:
        """Forget these requests of `model`; returns those that were in flight."""
        gone = []
        for front_id in front_ids:
            request = self._by_front.get((model, front_id))
            if request is not None:
                self.remove(request)
                gone.append(request)
        return gone

    # ------------------------------------------------------------ the engines' side

    def outputs(self, entries: Sequence[tuple[str, int, int]], outputs: Sequence[Output], now: float) -> TakenTokens:
        """Take one token message: `entries[i] = (request id, attempt, offset)` belongs to `outputs[i]`.

        Outputs of unknown requests and of other attempts are dropped, tokens that were seen are cut off, outputs
        behind a gap wait until it closes.
        """
        taken = TakenTokens()
        for (request_id, attempt, offset), output in zip(entries, outputs, strict=True):
            request = self._by_id.get(request_id)
            if request is None or request.attempt != attempt:
                continue
            if offset > len(request.emitted):
                request.early[offset] = output
                if request.gap_since is None:
                    request.gap_since = now
                    self._gapped.add(request)
                continue
            self._deliver(request, offset, output, now, taken)
            if request.early and request.request_id in self._by_id:
                self._close_gap(request, now, taken)
        return taken

    def overdue(self, now: float) -> list[Tracked]:
        """Requests with a gap that did not close in time: they are to be served anew under another id."""
        return [r for r in self._gapped if r.gap_since is not None and now - r.gap_since >= self.gap_seconds]

    def quiet(self, now: float, units: Container[str]) -> list[Tracked]:
        """Requests at `units` to be submitted there again as they are, since nothing was heard of them for long.

        A unit scheduler that has the request takes no notice. One that believes it finished serves its remaining
        tokens.
        """
        found = []
        for request in self._by_id.values():
            if now - request.heard_at >= request.patience and request.unit in units:
                request.heard_at = now
                request.patience = min(2 * request.patience, LONGEST_QUIET_SECONDS)
                request.repeated_at.add(request.unit)
                found.append(request)
        return found

    # ------------------------------------------------------------ where they are

    def at(self, unit: str) -> list[Tracked]:
        """The requests of that unit, oldest first."""
        return [request for request in self._by_id.values() if request.unit == unit] if self._at[unit] else []

    def count(self, unit: str) -> int:
        """How many requests that unit has."""
        return self._at[unit]

    def assign(self, request: Tracked, unit: str) -> None:
        """`request` is at `unit` from now on; "": nowhere."""
        self._at[request.unit] -= 1
        self._at[unit] += 1
        request.unit = unit

    def next_attempt(self, request: Tracked, died: bool) -> bool:
        """`request` leaves its unit for a new attempt; what comes of the one before is dropped from now on.

        Args:
            died: the attempt failed.

        Returns:
            False if it has failed too often already; then it is forgotten.
        """
        if died and request.tries >= self.max_tries:
            self.remove(request)
            return False
        request.attempt += 1
        request.tries += died
        request.repeated_at.clear()
        request.moves = 0
        request.early.clear()
        request.gap_since = None
        self._gapped.discard(request)
        self.assign(request, "")
        return True

    def rename(self, request: Tracked) -> None:
        """Give `request` a new id, since an engine may still have it under the old one."""
        del self._by_id[request.request_id]
        request.request_id = self.new_id()
        self._by_id[request.request_id] = request

    def remove(self, request: Tracked) -> None:
        """Forget `request`."""
        if self._by_id.pop(request.request_id, None) is not None:
            self._at[request.unit] -= 1
        self._by_front.pop((request.model, request.front_id), None)
        self._gapped.discard(request)

    # ------------------------------------------------------------ inside

    def _close_gap(self, request: Tracked, now: float, taken: TakenTokens) -> None:
        early = request.early
        for offset in sorted(early):
            if offset > len(request.emitted):
                break
            self._deliver(request, offset, early.pop(offset), now, taken)
            if request.request_id not in self._by_id:
                return
        if not early:
            request.gap_since = None
            self._gapped.discard(request)

    def _deliver(self, request: Tracked, offset: int, output: Output, now: float, taken: TakenTokens) -> None:
        seen = len(request.emitted) - offset
        if seen and output.new_token_ids:
            cut(output, seen)
        if output.new_prompt_logprobs_tensors is not None:
            if request.prompt_logprobs_told:
                output.new_prompt_logprobs_tensors = None
            request.prompt_logprobs_told = True
        if output.new_token_ids:
            request.emitted += output.new_token_ids
            request.tries = 1
            request.last_token_at = request.heard_at = now
            request.patience = QUIET_SECONDS
            if request.first_token_at is None:
                request.first_token_at = now
                if output.prefill_stats is not None:
                    request.cached_tokens = output.prefill_stats.num_cached_tokens
        elif output.pooling_output is not None:
            request.first_token_at = request.last_token_at = now  # all there is of the answer
            if output.prefill_stats is not None:
                request.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finish_reason is None:
            if not output.new_token_ids and seen:
                return  # nothing new
        elif output.finish_reason == FINISH_ABORT:
            output.finish_reason = None
            taken.dropped.append(request)
            if not output.new_token_ids:
                return
        else:
            self.remove(request)
        output.request_id = request.front_id
        taken.ready.append((request, output))


class Failure(Enum):
    """Why a request ends without its answer: it can `never` be served; no replica was there `late` into its wait; its
    model is `degraded`, and tried again at a time that is known; it makes engines fail (`error`); it may be `again`
    tried."""

    NEVER = "never"
    LATE = "late"
    DEGRADED = "degraded"
    ERROR = "error"
    AGAIN = "again"


@dataclass(slots=True)
class RouterOutbox:
    """What `Router` wants done, each in order: messages by unit, messages to the global scheduler, requests that end
    with an error (no longer in the table), and what is to be counted: (request, reason) of those that are served
    again, and (request, source, destination) of those that moved."""

    units: list[tuple[str, Message]] = field(default_factory=list)
    scheduler: list[Message] = field(default_factory=list)
    failed: list[tuple[Tracked, str, Failure]] = field(default_factory=list)
    again: list[tuple[Tracked, str]] = field(default_factory=list)
    moved: list[tuple[Tracked, str, str]] = field(default_factory=list)
