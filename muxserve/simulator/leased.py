"""Engines under leases, as `muxserve.engine` runs them: chunked prefill and hand-over, continuous batching and
preemption, in engines of one phase each, or in one of both that does what its lease says: prompts, decodes, or prompts
beside decodes in every step.

They report as live engines do (`muxserve.engine.lease`): after each prefill step, when something ended, when half of
the lease is used, when it is over, and after the first step with new sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from muxserve.costs.step_costs import StepWork
from muxserve.scheduling.state import EngineState
from muxserve.scheduling.types import BOTH, PREFILL, Phase, StepsDone, share_units
from muxserve.simulator.engine import StepEngine
from muxserve.simulator.job import BOUNDARY, IDLE, STALLED, STEPPING
from muxserve.simulator.machine import UnitMachine
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimModel


class SimLease(NamedTuple):
    """What an engine is told: `steps` steps of `phase` within `seconds` of taking it, on `share` millionths of the
    unit; requests that `admit` come in with it."""

    lease_id: int
    phase: Phase
    steps: int
    share: int
    seconds: float
    admit: list[SimRequest]


class Scheduler(Protocol):
    """Who grants an engine its leases."""

    # Hears of each report after the scheduler.
    watcher: Callable[[SimReport, float], None] | None

    def report(self, report: SimReport) -> None:
        """An engine's report, which takes its time."""
        ...

    def releasing(self, pages: ModelPages) -> None:
        """Sequences are about to give pages back."""
        ...

    def victim(self, running: Sequence[SimRequest]) -> SimRequest:
        """Which of the sequences gives way first."""
        ...


class LeasedEngine(StepEngine):
    """An engine that holds a lease."""

    account: EngineState

    def __init__(
        self, machine: UnitMachine, scheduler: Scheduler, model: SimModel, phase: Phase, pages: ModelPages
    ) -> None:
        super().__init__(machine, model, phase, pages)
        self.scheduler = scheduler
        self.lease_id = 0
        self.lease_phase = phase
        self._pending: SimLease | None = None
        self._entering: list[SimRequest] = []
        self._granted_share = 0
        self._deadline = 0.0
        # Called at the next boundary, for whom it has to stand between two steps.
        self.calls: list[Callable[[float], None]] = []

    def receive(self, lease: SimLease, now: float) -> None:
        """A lease arrives."""
        self._pending = lease
        self._entering += lease.admit
        if self.state == IDLE:
            self.state = BOUNDARY
            self.machine.at_boundary(self)
        elif self.state == STEPPING:
            self.interrupt(now)

    def computed(self, request: SimRequest, now: float) -> int:
        """Tokens in the KV of a sequence that decodes."""
        raise NotImplementedError

    def has(self, request: SimRequest) -> bool:
        """The sequence is in a batch; it has come with a lease that was taken."""
        raise NotImplementedError

    def in_flight(self, request: SimRequest) -> bool:
        """The sequence is in some micro-batch."""
        return False

    def leave(self, request: SimRequest) -> int:
        """A sequence leaves between two steps, on its way elsewhere; returns its blocks, which stay taken."""
        raise NotImplementedError

    def releasing(self, now: float) -> None:
        self.scheduler.releasing(self.pages)

    def victim(self, running: Sequence[SimRequest]) -> SimRequest:
        return self.scheduler.victim(running)

    def _called(self, now: float) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call(now)

    def _accept(self, lease: SimLease, now: float) -> bool:
        """The lease replaces the one before; whether the engine's costs are others than before."""
        self._pending = None
        self.lease_id = lease.lease_id
        self.lease_phase = lease.phase
        self._deadline = now + lease.seconds
        if self._granted_share == lease.share and self._costs is not None:
            return False
        self._granted_share = lease.share
        profile = self.model.profile
        own = profile.engines.prefill_share if self.phase is PREFILL else profile.engines.decode_share
        self._computes_on(self.machine.share(self.model, lease.share, share_units(own), self.phase))
        return True


class SimReport(NamedTuple):
    """An engine's `StepReport`. Requests that are `through` have their first token."""

    engine: LeasedEngine
    done: StepsDone
    finished: list[SimRequest]
    through: list[SimRequest]
    returned: list[SimRequest]

    @property
    def renews(self) -> bool:
        """All that may follow from it is that a lease to decode is renewed."""
        news, done = self.finished or self.through or self.returned, self.done
        return (
            not news
            and done.tokens > 0
            and not done.prefill_tokens
            and done.left > 0
            and done.remaining > 0
            and self.engine.lease_phase is not PREFILL
        )


class PhaseEngine(LeasedEngine):
    """An engine of one phase, or of both.

    A lease to decode, or of both phases, has `_steps` steps, begun at `_begun`, and is over with step `_end` or at
    `_deadline`. Up to step `_told_counter` the engine has reported; with `_fresh` sequences came in that are to have
    their first step. A prefill lease has `_left` steps left.

    Under a lease of both phases a step computes a token of every sequence and, up to `max_num_batched_tokens` in all,
    chunks of prompts in the order in which they came, as vLLM's scheduler does.
    """

    def __init__(
        self, machine: UnitMachine, scheduler: Scheduler, model: SimModel, phase: Phase, pages: ModelPages
    ) -> None:
        super().__init__(machine, scheduler, model, phase, pages)
        self.prompts: list[SimRequest] = []
        self.returned: list[SimRequest] = []
        self._left = 0
        self._steps = 0
        self._end = 0
        self._begun = 0.0
        self._fresh = False
        self._half_told = False
        self._told_at = 0.0
        self._told_counter = 0
        self._told_generated = 0

    # ------------------------------------------------------------ between steps

    def boundary(self, now: float) -> None:
        if self.lease_phase is PREFILL:
            self._prefilled(now)
        elif self.state == STALLED:
            self._stalled(now)
        elif self.chunks:
            self._mixed(now)
        else:
            self._decoded(now)

    def kick(self, now: float) -> None:
        if self.calls:
            self._called(now)
        if self._pending is not None:
            self._take(self._pending, now)
        if self.lease_phase is PREFILL:
            self._prefill(now)
        else:
            self._decode(now)

    def _take(self, lease: SimLease, now: float) -> None:
        smaller = lease.share < self._granted_share
        self._enter(lease, now)
        if smaller:
            remaining = len(self.prompts) + len(self.batch.running)
            done = StepsDone(lease.lease_id, lease.steps, 0.0, 0, remaining, 0)
            self.scheduler.report(SimReport(self, done, [], [], []))

    def _enter(self, lease: SimLease, now: float) -> None:
        if self._accept(lease, now):
            self._dirty = True
        entering, self._entering = self._entering, []
        if lease.phase is PREFILL:
            self._left = lease.steps
            self.prompts += entering
            return
        self._steps = lease.steps
        self._end = self.batch.counter + lease.steps
        self._begun = now
        self._half_told = self._fresh = False
        for request in entering:
            if lease.phase is BOTH and request.left is None:
                self.prompts.append(request)
                continue
            # It comes with its KV.
            request.blocks = 0
            if request.left is not None:
                request.adopted(now)
            self.batch.add(request)
            self._dirty = self._fresh = True

    def _idle(self, now: float) -> None:
        self.state = IDLE
        self._rests(now)

    def _stall(self, now: float) -> None:
        """The step that begins now computes nothing."""
        if self.batch.counter > self._told_counter:
            # The scheduler must see that this very step was in vain.
            returned, self.returned = self.returned, []
            self._tell_steps(self._end - self.batch.counter, now, [])
            self.returned = returned
        self._rests(now)
        self.state = STALLED
        self.version += 1
        self.planned_time = now + self.machine.overheads.stall
        self.machine.look(self)

    # ------------------------------------------------------------ prefill

    def _prefill(self, now: float) -> None:
        if not self.prompts or self._left <= 0 or now >= self._deadline:
            self._idle(now)
            return
        tokens, pairs = self._choose(self.model.profile.engines.max_num_batched_tokens, now)
        if not tokens:
            self._stall(now)
            return
        if not self.active:
            self._told_at = now
        self._begin_chunks(StepWork(tokens, len(self.chunks), pairs), now)

    def _choose(self, budget: int, now: float) -> tuple[int, int]:
        """Fill a step of `budget` tokens with chunks that find pages; returns its tokens and attention pairs."""
        chunks, size, counts = self.chunks, self.model.profile.kv.block_tokens, self.pages.counts
        tokens = pairs = 0
        for request in self.prompts:
            if tokens >= budget:
                break
            length = request.prompt + request.made
            begins = bool(request.content) and not request.computed
            if begins:
                self._find(request, now)
            chunk = min(length - request.computed, budget - tokens)
            end = request.computed + chunk
            blocks = counts.held(-(-end // size), request, prompt=True) - request.blocks
            if blocks and not self.pages.take(blocks, now, self.order):
                if begins:
                    self._lose(request)
                elif request.computed and not tokens and not self._frees_pages():
                    self._give_up(request, now)
                break
            request.blocks += blocks
            chunks.append((request, chunk))
            tokens += chunk
            pairs += chunk * request.computed + chunk * (chunk + 1) // 2
        return tokens, pairs

    def _frees_pages(self) -> bool:
        """Sequences decode under this lease, and will give pages back."""
        return self.lease_phase is BOTH and bool(self.batch.running)

    def _give_up(self, request: SimRequest, now: float) -> None:
        """A prompt gives up what it has, so that others can go on. It starts again here, or, where sequences decode in
        this engine, when the scheduler says so."""
        self.pages.give_up(request, request.blocks)
        request.blocks = request.computed = 0
        request.preempted(now)
        if self.phase is BOTH:
            self.prompts.remove(request)
            self.returned.append(request)

    def _prefilled(self, now: float) -> None:
        stalled = self.state == STALLED
        done = self._end_chunks(now)
        gone = len(done.finished) + len(done.through)
        if gone:
            # Chunks are taken in order, so those that are through stand in front.
            del self.prompts[:gone]
        batch = self.batch
        if self.phase is BOTH:
            for request in done.through:
                batch.add(request)
            self.joined += done.through
        self._left -= 1
        left = self._left if now < self._deadline else 0
        # Decode steps that were not told before are told now.
        steps, decoded = batch.counter - self._told_counter, batch.generated - self._told_generated
        seconds = self.machine.overheads.stall if stalled else now - (self._told_at if steps else self._started)
        self._told_at, self._told_counter, self._told_generated = now, batch.counter, batch.generated
        self.jobs += steps
        self.tokens += decoded
        returned, self.returned = self.returned, []
        remaining = len(self.prompts) + len(batch.running)
        tokens, spent = done.tokens, seconds if stalled or not steps else now - self._started
        steps_done = StepsDone(self.lease_id, left, seconds, tokens + decoded, remaining, steps + 1, tokens, spent)
        self.scheduler.report(SimReport(self, steps_done, done.finished, done.through, returned))
        self.machine.at_boundary(self)

    # ------------------------------------------------------------ decode

    def _decoded(self, now: float) -> None:
        batch = self.batch
        self._arrive(self._planned, now)
        counter = batch.counter
        finished = self._end_decode(now)
        left = self._end - counter
        over = left <= 0 or now >= self._deadline
        half = left * 2 <= self._steps or now - self._begun >= self._deadline - now
        if finished or self.returned or self._fresh or over or (half and not self._half_told) or not batch.running:
            self._half_told = half
            self._fresh = False
            self._tell_steps(0 if now >= self._deadline else left, now, finished)
        self.machine.at_boundary(self)

    def _tell_steps(self, left: int, now: float, finished: list[SimRequest]) -> None:
        batch = self.batch
        returned, self.returned = self.returned, []
        steps, tokens = batch.counter - self._told_counter, batch.generated - self._told_generated
        seconds, self._told_at = now - self._told_at, now
        self._told_counter, self._told_generated = batch.counter, batch.generated
        self.jobs += steps
        self.tokens += tokens
        remaining = len(self.prompts) + len(batch.running)
        done = StepsDone(self.lease_id, left, seconds, tokens, remaining, steps)
        self.scheduler.report(SimReport(self, done, finished, [], returned))

    def _stalled(self, now: float) -> None:
        """A step that lost all its sequences is over."""
        self._end -= 1
        returned, self.returned = self.returned, []
        self._told_at = now
        left = self._end - self.batch.counter if now < self._deadline else 0
        self.state = BOUNDARY
        self.jobs += 1
        seconds = self.machine.overheads.stall
        done = StepsDone(self.lease_id, left, seconds, 0, len(self.prompts))
        self.scheduler.report(SimReport(self, done, [], [], returned))
        self.machine.at_boundary(self)

    def _decode(self, now: float) -> None:
        """The next step, which computes prompts as well under a lease of both phases."""
        batch = self.batch
        counter, prompts = batch.counter, self.lease_phase is BOTH and bool(self.prompts)
        if not (batch.running or prompts) or counter >= self._end or now >= self._deadline:
            self._idle(now)
            return
        need = batch.needs[counter % batch.block_tokens]
        short = bool(need) and not self.pages.take(need, now, self.order)
        if short:
            self.returned += self._preempt(now)
        tokens = pairs = 0
        # A prompt would take back at once what a sequence has just given up for the others.
        if prompts and not short:
            tokens, pairs = self._choose(self.model.profile.engines.max_num_batched_tokens - len(batch.running), now)
        if not batch.running and not tokens:
            self._stall(now)
            return
        if not self.active:
            self._told_at = now
        if tokens:
            self._first_steps(now)
            self._begin_chunks(StepWork(tokens, len(self.chunks), pairs, len(batch.running), batch.context), now)
            return
        self._go_on(now)
        # A prompt that waits for pages is tried again before each step.
        self._leap(counter + 1 if prompts else self._next_news())

    # ------------------------------------------------------------ both

    def _mixed(self, now: float) -> None:
        """A step with prompts of an engine that decodes as well is over."""
        batch = self.batch
        alone = not batch.running
        batch.advance(batch.counter + 1)
        self._traced, self._traced_at = batch.counter, now
        done = self._end_chunks(now, len(batch.running))
        finished = done.finished + self._end_decode(now)
        for request in done.through:
            batch.add(request)
        self.joined += done.through
        del self.prompts[: len(done.finished) + len(done.through)]
        left = self._end - batch.counter if now < self._deadline else 0
        self._half_told = left * 2 <= self._steps or now - self._begun >= self._deadline - now
        self._fresh = False
        steps, decoded = batch.counter - self._told_counter, batch.generated - self._told_generated
        seconds, self._told_at = now - self._told_at, now
        self._told_counter, self._told_generated = batch.counter, batch.generated
        self.jobs += steps - 1
        self.tokens += decoded
        returned, self.returned = self.returned, []
        tokens, remaining = done.tokens, len(self.prompts) + len(batch.running)
        spent = now - self._started if alone else 0.0
        steps_done = StepsDone(self.lease_id, left, seconds, tokens + decoded, remaining, steps, tokens, spent)
        self.scheduler.report(SimReport(self, steps_done, finished, done.through, returned))
        self.machine.at_boundary(self)

    def computed(self, request: SimRequest, now: float) -> int:
        # What has not been taken in yet stands as it came.
        return request.base + self.steps_by(now) if request.serial else request.tokens - 1

    def has(self, request: SimRequest) -> bool:
        return request.serial != 0

    def leave(self, request: SimRequest) -> int:
        self._dirty = True
        return self._remove(request)

    def _next_news(self) -> int:
        """The step after which there will be something to do or to tell."""
        batch = self.batch
        if self._fresh or self.returned:
            return batch.counter + 1
        end = min(batch.next_end(), self._end, batch.until)
        if not self._half_told:
            end = min(end, self._end - self._steps // 2)
        return end

    def plan(self) -> float:
        if self.state != STEPPING or self.chunks:
            return self.planned_time
        batch = self.batch
        time = batch.time_of(self._planned)
        # Leases are bounded in time as well, and half of that is to be told of too.
        look = self._deadline if self._half_told else (self._begun + self._deadline) / 2
        if time >= look and self._planned > self._synced:
            # Only the number of steps that are done already is known.
            first = max(self._synced, batch.floor + 1, batch.done_by(look))
            while batch.time_of(first) < look:
                first += 1
            if first < self._planned:
                self._planned = first
                time = batch.time_of(first)
        self.planned_time = time
        return time
