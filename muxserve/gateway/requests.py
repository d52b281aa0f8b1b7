"""What the gateway knows of every request in flight, and how a request survives the death of whoever served it.

Pure: no socket, no clock, no vLLM import; it is told messages and the time, and answers what to send and what to
deliver. The front end must see each request's tokens once and in order, whatever engines and unit schedulers die, and
although a request's prefill and decode engine send on connections of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from muxserve.wire import Submit

# Value of vLLM's FinishReason.ABORT; `vllm_seam.check` compares them.
FINISH_ABORT = 2

# A request whose every try ended with a dead process, without one token in between, is likely what kills them.
MAX_TRIES = 8

# An engine that dies right after its last message may take that message with it. Tokens that arrive behind the hole
# are held back this long before the request is served again from where the hole begins.
GAP_SECONDS = 2.0

# Likewise its last words of all: then nobody has the request any more, and nobody says so. So the unit is asked again
# for a request of which nothing was heard for this long; again after twice as long, and so on up to the longest.
QUIET_SECONDS = 5.0
LONGEST_QUIET_SECONDS = 60.0


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

    Times are seconds of the monotonic clock. `context` belongs to the caller.
    """

    request_id: str
    front_id: str
    model: str
    body: bytes
    prompt_tokens: int
    max_tokens: int
    arrival: float
    priority: int = 0
    context: Any = None
    attempt: int = 0
    sent: bool = False
    tries: int = 1
    emitted: list[int] = field(default_factory=list)
    early: dict[int, Output] = field(default_factory=dict)
    gap_since: float | None = None
    prompt_logprobs_told: bool = False
    first_token_at: float | None = None
    last_token_at: float | None = None
    heard_at: float = 0.0
    patience: float = QUIET_SECONDS
    asked: bool = False

    def submit(self) -> Submit:
        """The message that asks the unit to serve the request, or what is left of it."""
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
        )


@dataclass(slots=True)
class Taken:
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

    @property
    def has_gaps(self) -> bool:
        """Whether tokens are held back somewhere, so that `overdue` must be asked from time to time."""
        return bool(self._gapped)

    # ------------------------------------------------------------ the front end's side

    def new_id(self) -> str:
        """A wire id that no request of this gateway has had. Short, whatever id the client chose."""
        self._count += 1
        return f"{self.epoch}-{self._count}"

    def add(self, request: Tracked) -> None:
        """Track a new request."""
        request.heard_at = request.arrival
        self._by_id[request.request_id] = request
        self._by_front[request.model, request.front_id] = request

    def cancel(self, model: str, front_ids: Iterable[str]) -> list[Tracked]:
        """Forget these requests of `model`; returns those that were in flight."""
        gone = []
        for front_id in front_ids:
            request = self._by_front.get((model, front_id))
            if request is not None:
                self._remove(request)
                gone.append(request)
        return gone

    # ------------------------------------------------------------ the engines' side

    def outputs(self, entries: Sequence[tuple[str, int, int]], outputs: Sequence[Output], now: float) -> Taken:
        """Take one token message: `entries[i] = (request id, attempt, offset)` belongs to `outputs[i]`.

        Outputs of unknown requests and of other attempts are dropped, tokens that were seen are cut off, outputs
        behind a gap wait until it closes.
        """
        taken = Taken()
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
        """Requests with a gap that did not close in time: `replace` them."""
        return [r for r in self._gapped if r.gap_since is not None and now - r.gap_since >= self.gap_seconds]

    def quiet(self, now: float) -> list[Tracked]:
        """Requests to be submitted again as they are, since nothing was heard of them for long.

        A unit scheduler that has the request takes no notice. One that believes it finished serves the rest of it.
        """
        found = []
        for request in self._by_id.values():
            if request.sent and now - request.heard_at >= request.patience:
                request.heard_at = now
                request.patience = min(2 * request.patience, LONGEST_QUIET_SECONDS)
                request.asked = True
                found.append(request)
        return found

    def replace(self, request: Tracked) -> bool:
        """Give `request` a new id and a new attempt, since its old one may still be served somewhere.

        False if it has been tried too often already; then it is forgotten.
        """
        if request.tries >= self.max_tries:
            self._remove(request)
            return False
        del self._by_id[request.request_id]
        request.request_id = self.new_id()
        self._by_id[request.request_id] = request
        self._next_attempt(request)
        return True

    # ------------------------------------------------------------ the unit's side

    def lost(self, request_ids: Iterable[str]) -> tuple[list[Tracked], list[Tracked]]:
        """These requests' process died. Returns (to be submitted again, given up after too many tries)."""
        again, given_up = [], []
        for request_id in request_ids:
            request = self._by_id.get(request_id)
            if request is None:
                continue
            if request.tries >= self.max_tries:
                self._remove(request)
                given_up.append(request)
            else:
                self._next_attempt(request)
                again.append(request)
        return again, given_up

    def unit_restarted(self) -> tuple[list[Tracked], list[Tracked]]:
        """The unit scheduler lost its queues. Like `lost` for every request that it had been sent."""
        return self.lost([request.request_id for request in self._by_id.values() if request.sent])

    def unsent(self) -> list[Tracked]:
        """Requests that came while there was no unit scheduler to send them to."""
        return [request for request in self._by_id.values() if not request.sent]

    def refused(self, request_id: str, attempt: int) -> Tracked | None:
        """The unit will never serve this request; it is forgotten. None if that was not about its present attempt."""
        request = self._by_id.get(request_id)
        if request is None or request.attempt != attempt:
            return None
        self._remove(request)
        return request

    # ------------------------------------------------------------ inside

    def _next_attempt(self, request: Tracked) -> None:
        request.attempt += 1
        request.tries += 1
        request.early.clear()
        request.gap_since = None
        self._gapped.discard(request)

    def _remove(self, request: Tracked) -> None:
        self._by_id.pop(request.request_id, None)
        self._by_front.pop((request.model, request.front_id), None)
        self._gapped.discard(request)

    def _close_gap(self, request: Tracked, now: float, taken: Taken) -> None:
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

    def _deliver(self, request: Tracked, offset: int, output: Output, now: float, taken: Taken) -> None:
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
        if output.finish_reason is None:
            if not output.new_token_ids and seen:
                return  # nothing new
        elif output.finish_reason == FINISH_ABORT:
            output.finish_reason = None
            taken.dropped.append(request)
            if not output.new_token_ids:
                return
        else:
            self._remove(request)
        output.request_id = request.front_id
        taken.ready.append((request, output))


def cut(output: Output, seen: int) -> None:
    """Take the first `seen` tokens out of `output`, with all that belongs to them."""
    tokens = len(output.new_token_ids)
    left = max(0, tokens - seen)
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(seen, left) if left else None
    if output.new_sampling_mask is not None:
        output.new_sampling_mask = output.new_sampling_mask.slice_request(seen, left) if left else None
    output.new_token_ids = output.new_token_ids[tokens - left :]
