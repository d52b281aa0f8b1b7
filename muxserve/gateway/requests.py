"""Every request in flight of a gateway, and its tokens: each reaches the front end once and in order.

Pure: no socket, no clock, no vLLM import; it is told token messages and the time, and answers what to deliver. Tokens
of one request come from several engines on connections of their own, from different units when it moved, and from
engines that die with their last message on the way. `Router` decides where requests are served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from muxserve.gateway.tracked import QUIET_SECONDS, Output, Tracked, cut
from muxserve.vllm.pin import FINISH_ABORT

# A request whose every try ended with a dead process, without one token in between, is likely what kills them.
MAX_TRIES = 8

# An engine that dies right after its last message may take that message with it. Tokens that arrive behind the hole
# are held back this long before the request is served again from where the hole begins.
GAP_SECONDS = 2.0

# Likewise its last words of all: then nobody has the request any more, and nobody says so. So its unit is asked again
# for a request of which nothing was heard for `QUIET_SECONDS`; again after twice as long, and so on up to this.
LONGEST_QUIET_SECONDS = 60.0


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
        """Requests with a gap that did not close in time: they are to be served anew under another id."""
        return [r for r in self._gapped if r.gap_since is not None and now - r.gap_since >= self.gap_seconds]

    def quiet(self, now: float, units: Container[str]) -> list[Tracked]:
        """Requests at `units` to be submitted there again as they are, since nothing was heard of them for long.

        A unit scheduler that has the request takes no notice. One that believes it finished serves the rest of it.
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
            self.remove(request)
        output.request_id = request.front_id
        taken.ready.append((request, output))
