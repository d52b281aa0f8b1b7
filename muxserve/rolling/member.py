"""What the scheduler of a macro instance knows of a member, and how it changes with what happens there."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

# The weight of a prefill of usual length in later predictions, and that of the longest.
_WEIGHT, _MOST_WEIGHT = 0.1, 0.5
# Decode steps are assumed for no longer than this after a report: engines report every half lease, so one that is
# silent for longer may have stopped.
_MOST_AHEAD_SECONDS = 0.25


class Window(StrEnum):
    """What a member does at present."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """The latencies to be met, seconds: time to first token, and time per output token after it.

    `spared` says whose saved time decides whether decodes can be kept waiting: None, the mean of all (EcoServe's
    Algorithm 2 to the letter); a number in [0, 1), the one that this part of them has less than (0: the least of all),
    which is this project's.

    Raises:
        ValueError: an objective is not above zero, or `spared` is outside.
    """

    ttft: float
    tpot: float
    spared: float | None = None

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tpot > 0):
            raise ValueError(f"latency objectives must be above zero seconds, not {self.ttft} and {self.tpot}")
        if self.spared is not None and not 0 <= self.spared < 1:
            raise ValueError(f"spared must be at least 0 and below 1, or None, not {self.spared}")


@dataclass(slots=True)
class Admitted:
    """A request of a member: tokens of KV it holds in the end at most, its predicted prefill (seconds), whether that is
    done, and once it decodes its place among the decodes (see `Member.places`), and since when it does. `token_at` is
    when it got its first token, and `first_place` the place that it would have had it decoded since then. `predicted`
    is the prefill before it was corrected."""

    tokens: int
    prefill_seconds: float
    prefilled: bool = False
    place: float | None = None
    since: float | None = None
    token_at: float | None = None
    first_place: float = 0.0
    predicted: float = 0.0


@dataclass(slots=True)
class DecodeClock:
    """The decode steps of a member: `steps` as last reported, and an estimate of those since.

    Replicas report their steps late, by dozens of steps, each of which saves nearly `SLO_TPOT`. Where `step_seconds` is
    known, the estimate assumes steps at that pace while the member decodes and prefills nothing (it `runs`), as it has
    since `resumed_at`. `ahead` are the seconds of assumed steps between the report and `running_since`. The last
    interruption ended a run from `ran_from` to `ran_until`.
    """

    steps: int = 0
    step_seconds: float = 0.0
    running_since: float = 0.0
    resumed_at: float = 0.0
    ran_from: float = 0.0
    ran_until: float = 0.0
    ahead: float = 0.0

    def at(self, now: float, runs: bool) -> float:
        """Decode steps by `now`, estimated ones included."""
        return self.steps + (self._ahead(now, runs) / self.step_seconds if self.step_seconds else 0.0)

    def settle(self, now: float, runs: bool) -> None:
        """Whether the member runs may change: keep the estimate for the time before `now`."""
        self.ahead = self._ahead(now, runs)
        self.running_since = now
        if runs:
            self.ran_from, self.ran_until = self.resumed_at, now
        else:
            self.resumed_at = now

    def counted(self, steps: int, at: float, step_seconds: float, interrupted: bool) -> float:
        """The replica reports its `steps` by `at`. Returns by how many steps the count fell, estimates included: it
        begins anew when engines do; 0 otherwise.

        Args:
            interrupted: a prefill keeps decodes waiting.
        """
        before = self.steps + (self.ahead / self.step_seconds if self.step_seconds else 0.0)
        self.step_seconds, self.ahead = step_seconds, 0.0
        self.running_since = max(at, self.resumed_at)
        if interrupted:
            # Decodes went on until the window opened, after the reported step.
            self.ahead = max(0.0, self.ran_until - max(at, self.ran_from))
        fell = steps < self.steps
        self.steps = steps
        return before - steps - (self.ahead / step_seconds if step_seconds else 0.0) if fell else 0.0

    def _ahead(self, now: float, runs: bool) -> float:
        running = max(0.0, now - self.running_since) if runs else 0.0
        return min(self.ahead + running, _MOST_AHEAD_SECONDS)


@dataclass(slots=True)
class MacroMember:
    """One replica in a macro instance.

    `capacity` and `promised` are tokens of KV: all of the replica, and the most that admitted requests may hold.
    `tpot` is the objective of its decodes, seconds. `window_seconds` sums the predicted prefills of requests admitted
    since the prefill window opened, done or not: the whole length of that window. `pending` and `pending_seconds` are
    the prefills that are not done.

    A sequence that decodes gets a token with each of the member's steps, so its saved time,
    `L * SLO_TPOT - (now - since)`, is the same number for all, `steps * SLO_TPOT - now`, plus a constant of its own,
    its place: `since - steps_at_since * SLO_TPOT`. `places` has them sorted: no event touches more than one. For the
    places counted from first tokens, those of the open window included, a number and a sum are enough.

    `bias` corrects predicted prefills by the measured ones; `usual` is the mean prediction of these. `unattributed`
    are measured seconds of prefills none of which is done yet. A member that is `leaving` gets nothing more.
    """

    name: str
    capacity: int
    tpot: float
    window: Window = Window.DECODE
    window_seconds: float = 0.0
    pending_seconds: float = 0.0
    pending: int = 0
    promised: int = 0
    clock: DecodeClock = field(default_factory=DecodeClock)
    places: list[float] = field(default_factory=list)
    first_tokens: int = 0
    sum_of_first_places: float = 0.0
    bias: float = 1.0
    usual: float = 0.0
    unattributed: float = 0.0
    leaving: bool = False
    requests: dict[str, Admitted] = field(default_factory=dict)
    # Prefilled in this window: they decode once it is over.
    fresh: list[str] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Nothing is there."""
        return not self.requests

    @property
    def decoding(self) -> int:
        """Sequences that decode."""
        return len(self.places)

    def saved(self, now: float, spared: float | None = None) -> float:
        """Saved time of decodes, seconds: `L * SLO_TPOT - (now - first_token_time)` (EcoServe, section 3.4). Infinite
        without any: nobody is kept waiting.

        With None it is the paper's mean over all that have their first token, those of the open window included. With a
        number it is what this part of the running decodes has less than; there time counts from the phase switch after
        the prefill, since the wait for it counts as time to first token, and the open window has none yet.
        """
        if spared is None:
            count = self.first_tokens
            return self.steps_by(now) * self.tpot - now + self.sum_of_first_places / count if count else float("inf")
        if not self.places:
            return float("inf")
        return self.steps_by(now) * self.tpot - now + self.places[int(spared * len(self.places))]

    def steps_by(self, now: float) -> float:
        """Its decode steps by `now`, estimated ones included."""
        return self.clock.at(now, self._running)

    @property
    def _running(self) -> bool:
        return bool(self.places) and self.window is Window.DECODE

    # ------------------------------------------------------------ events

    def admitted(self, request_id: str, tokens: int, prefill_seconds: float, now: float) -> None:
        """A request was sent there. The first one after a decode phase opens the prefill window. A request of
        the same id that was there is its former life, which is over.

        Args:
            tokens: KV that it holds in the end at most.
            prefill_seconds: as predicted, uncorrected.
        """
        if request_id in self.requests:
            self.left(request_id, now)
        self._settle(now)
        seconds = prefill_seconds * self.bias
        if self.window is Window.DECODE:
            self.window, self.window_seconds = Window.PREFILL, 0.0
        self.requests[request_id] = Admitted(tokens, seconds, predicted=prefill_seconds)
        self.window_seconds += seconds
        self.pending_seconds += seconds
        self.pending += 1
        self.promised += tokens

    def prefilled(self, request_id: str, now: float) -> None:
        """Its first token is out. When it was the last one pending, the member goes back to decoding."""
        request = self.requests.get(request_id)
        if request is None or request.prefilled:
            return
        request.prefilled = True
        self._settle(now)
        self._first_token(request, now, now - self.steps_by(now) * self.tpot)
        self.fresh.append(request_id)
        self._done(request, now)

    def stepped(self, steps: int = 1) -> None:
        """Each running decode has got `steps` tokens."""
        self.clock.steps += steps

    def left(self, request_id: str, now: float) -> Admitted | None:
        """A request has ended, was cancelled, lost its KV or went elsewhere. Returns what it was; None: not here."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        self._settle(now)
        self.promised -= request.tokens
        if not request.prefilled:
            self._done(request, now)
        elif request.place is None:
            self.fresh.remove(request_id)
        else:
            del self.places[bisect_left(self.places, request.place)]
        if request.prefilled:
            self.first_tokens -= 1
            # Sums of floats leave something over.
            self.sum_of_first_places = self.sum_of_first_places - request.first_place if self.first_tokens else 0.0
        return request

    def found(self, request_id: str, tokens: int, since: float, now: float, place: float | None = None) -> None:
        """A request is there that has decoded since `since`; without its `place`, which only who has seen it decode
        can know, it has saved nothing."""
        if request_id in self.requests:
            self.left(request_id, now)
        self._settle(now)
        if place is None:
            place = now - self.steps_by(now) * self.tpot
        self.requests[request_id] = request = Admitted(tokens, 0.0, True, place, since)
        self.promised += tokens
        self._first_token(request, since, place)
        insort(self.places, place)

    def counted(self, steps: int, at: float = 0.0, step_seconds: float = 0.0) -> None:
        """The replica reports all its decode steps. With fewer than before, its engines count anew.

        Args:
            at: the time of the last of them.
            step_seconds: how long one takes at present; 0: nothing is estimated between reports.
        """
        interrupted = bool(self.places) and self.window is Window.PREFILL
        shift = self.clock.counted(steps, at, step_seconds, interrupted) * self.tpot
        if not shift:
            return
        self.places = [place + shift for place in self.places]
        self.sum_of_first_places += shift * self.first_tokens
        for request in self.requests.values():
            if request.prefilled:
                request.first_place += shift
            if request.place is not None:
                request.place += shift

    def retimed(self, tpot: float) -> None:
        """Its decodes are held against another objective from the beginning."""
        old, self.tpot = self.tpot, tpot
        for request in self.requests.values():
            if request.place is not None and request.since is not None:
                steps = (request.since - request.place) / old
                request.place = request.since - steps * tpot
            if request.token_at is not None:
                request.first_place = request.token_at - (request.token_at - request.first_place) / old * tpot
        self.places = sorted(r.place for r in self.requests.values() if r.place is not None)
        self.sum_of_first_places = sum(r.first_place for r in self.requests.values() if r.prefilled)

    def clear(self) -> None:
        """Forget its requests; measurements stay."""
        self.requests.clear()
        self.places.clear()
        self.fresh.clear()
        self.window = Window.DECODE
        self.window_seconds = self.pending_seconds = self.sum_of_first_places = self.unattributed = 0.0
        self.pending = self.promised = self.first_tokens = 0

    def saved_by(self, request: Admitted, now: float) -> float:
        """Saved time of one of its requests, seconds; nothing before it decodes."""
        return 0.0 if request.place is None else self.steps_by(now) * self.tpot - now + request.place

    def place_of(self, saved: float, now: float) -> float:
        """The place of a decode that has saved `saved` seconds."""
        return saved + now - self.steps_by(now) * self.tpot

    def observed(self, predicted: float, measured: float, weight: float = _WEIGHT) -> None:
        """A prefill that was predicted, uncorrected, to take `predicted` seconds has taken `measured`."""
        if predicted > 0 and measured > 0:
            self.bias += weight * (measured / predicted - self.bias)

    def measured(self, seconds: float, done: Iterable[str]) -> None:
        """Prefill has taken `seconds` since the last call, and the requests in `done` have their first token now; to be
        called before `prefilled`. The time of a prompt's chunks counts with the last of them.

        A prefill weighs as much as it is long: what short prompts take beyond their prediction, which has little to do
        with their length, would be multiplied by the length of long ones.
        """
        self.unattributed += seconds
        known = [self.requests[request_id] for request_id in done if request_id in self.requests]
        predicted = sum(request.predicted for request in known if not request.prefilled)
        if predicted > 0:
            self.usual = self.usual + _WEIGHT * (predicted - self.usual) if self.usual else predicted
            self.observed(predicted, self.unattributed, min(_MOST_WEIGHT, _WEIGHT * predicted / self.usual))
            self.unattributed = 0.0

    def _first_token(self, request: Admitted, at: float, place: float) -> None:
        request.token_at, request.first_place = at, place
        self.first_tokens += 1
        self.sum_of_first_places += place

    def _settle(self, now: float) -> None:
        """Whether it runs may change."""
        self.clock.settle(now, self._running)

    def _done(self, request: Admitted, now: float) -> None:
        """A prefill is not pending any more."""
        self.pending -= 1
        self.pending_seconds -= request.prefill_seconds
        if self.pending:
            return
        self.pending_seconds = 0.0
        self.window = Window.DECODE
        for request_id in self.fresh:
            decodes = self.requests[request_id]
            decodes.since, decodes.place = now, now - self.steps_by(now) * self.tpot
            insort(self.places, decodes.place)
        self.fresh.clear()
