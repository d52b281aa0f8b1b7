"""Steps of an engine: prefill in chunks, and decode, in which it leaps over steps.

An engine is in a step, or at the boundary between two, or idle. What is told to it takes effect at the next boundary.
While it decodes it asks to be looked at again only at the next boundary at which anything can happen: until then its
steps are a closed form, in time (`DecodeBatch`) and in pages (`ModelPages`).

Who says when it takes which step is another matter: a unit's scheduler by leases (`leased`), or the engine itself
(`stock`). An engine whose layers are a pipeline is in `stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from muxserve.costs import EngineCosts, LatencyModel, Load
from muxserve.costs.profile import Overheads
from muxserve.scheduling.types import PREFILL, Phase
from muxserve.simulator.batch import DecodeBatch
from muxserve.simulator.clock import Clock
from muxserve.simulator.compute import Compute
from muxserve.simulator.job import NO_LOAD, Job
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimModel, SimUnit
from muxserve.simulator.timeline import JobTimeline

IDLE, BOUNDARY, STEPPING, STALLED = range(4)
_NEVER = float("inf")


class PrefillStep(NamedTuple):
    """What a prefill step did: requests that ended with it, those that have a token and go on, and its tokens."""

    finished: list[SimRequest]
    through: list[SimRequest]
    tokens: int


class EngineUnit(Protocol):
    """What an engine asks of the unit that it is in."""

    spec: SimUnit
    latency: LatencyModel
    clock: Clock
    compute: Compute
    timeline: JobTimeline | None
    overheads: Overheads
    way: float
    load_tolerance: float

    def costs(self, model: SimModel, share: int, own: int, phase: Phase) -> EngineCosts:
        """Costs of the model's engine on `share` millionths of the unit; `own` is what the engine usually has."""
        ...

    def look(self, engine: Engine) -> None:
        """What the engine plans has changed."""
        ...

    def at_boundary(self, engine: Engine) -> None:
        """The engine could begin a step."""
        ...

    def finished(self, request: SimRequest, now: float) -> None:
        """A request has its last token."""
        ...

    def freed(self, pages: ModelPages, now: float) -> None:
        """Pages came free."""
        ...

    def releasing(self, pages: ModelPages, now: float) -> None:
        """Decoding sequences are about to give pages back."""
        ...

    def victim(self, running: Sequence[SimRequest]) -> SimRequest:
        """Which of the sequences gives way first."""
        ...


class Engine(Job):
    """What the unit sees of an engine."""

    def __init__(self, unit: EngineUnit, model: SimModel, phase: Phase, pages: ModelPages) -> None:
        super().__init__(phase, unit.clock.place())
        self.unit = unit
        self.model = model
        self.pages = pages
        self.state = IDLE
        self.planned_time = _NEVER
        self.jobs = 0
        self.tokens = 0
        self.busy_seconds = 0.0
        self._active_since = 0.0

    def kick(self, now: float) -> None:
        """Begin the next step, if there is one to run."""
        raise NotImplementedError

    def interrupt(self, now: float) -> None:
        """Stop at the next boundary."""

    def plan(self) -> float:
        """Fix when to look at this engine again, and return that."""
        return self.planned_time

    def _runs(self, load: Load, now: float) -> None:
        """A job with this load begins, or goes on."""
        if not self.active:
            self.active = True
            self._active_since = now
            self.load = load
            self.unit.compute.changed = True
            return
        known, tolerance = self.load, self.unit.load_tolerance
        if abs(known[0] - load[0]) > tolerance or abs(known[1] - load[1]) > tolerance:
            self.load = load
            self.unit.compute.changed = True

    def _rests(self, now: float) -> None:
        """No job runs."""
        if self.active:
            self.active = False
            self.busy_seconds += now - self._active_since
            self.unit.compute.changed = True


class StepEngine(Engine):
    """An engine that takes one step at a time. While it decodes it is planned to be looked at again after step
    `_planned`; the blocks of all steps before `_synced` are held, those of the steps from there on are committed.
    `chunks` are those of the prefill step that runs; none while it decodes.
    """

    def __init__(self, unit: EngineUnit, model: SimModel, phase: Phase, pages: ModelPages) -> None:
        super().__init__(unit, model, phase, pages)
        if phase is not PREFILL:
            pages.grower = self
        self.batch = self.make_batch(model.profile.block_tokens)
        self.batch.counts = pages.counts
        # Joined, and have not been in a decode step yet.
        self.joined: list[SimRequest] = []
        self.chunks: list[tuple[SimRequest, int]] = []
        self._costs: EngineCosts | None = None
        self._dirty = True
        self._planned = self._synced = self._traced = 0
        self._traced_at = 0.0
        # The prefill step: its seconds alone, how many of these are done at `_at`.
        self._duration = self._work = self._at = self._started = 0.0

    def make_batch(self, block_tokens: int) -> DecodeBatch:
        """The batch to work on."""
        return DecodeBatch(block_tokens, self.order << 40)

    def leaping(self) -> bool:
        """It is in a decode step."""
        return self.state == STEPPING and not self.chunks

    # ------------------------------------------------------------ prefill steps

    def _begin_prefill(self, tokens: int, pairs: int, now: float) -> None:
        """Compute `chunks`, of so many tokens and pairs of attention."""
        costs, count = self._costs, len(self.chunks)
        assert costs is not None
        self._duration = costs.prefill(tokens, pairs, count) + self.unit.overheads.between
        self._work, self._at, self._started = 0.0, now, now
        self.state = STEPPING
        self._dirty = True
        self._runs(NO_LOAD if self.unit.compute.lone() else costs.prefill_load(tokens, pairs, count), now)
        self.planned_time = now + self._duration * self.slow
        self.unit.look(self)

    def _end_prefill(self, now: float) -> PrefillStep:
        """The chunks are computed."""
        unit = self.unit
        finished: list[SimRequest] = []
        through: list[SimRequest] = []
        tokens, freed, size = 0, False, self.model.profile.block_tokens
        for request, chunk in self.chunks:
            tokens += chunk
            request.computed += chunk
            if request.content:
                self.pages.publish(request, request.computed)
            if request.computed < request.prompt + request.made:
                continue
            filled = -(-request.computed // size)
            request.got_token(now + unit.overheads.token)
            if request.made >= request.output:
                finished.append(request)
                self.pages.give_up(request, request.blocks)
                unit.finished(request, now)
            else:
                through.append(request)
                # What it needed for the last chunk of its prompt.
                if spare := request.blocks - self.pages.counts.held(filled, request):
                    self.pages.release(spare)
                    freed = True
            request.blocks = 0
        if finished or freed:
            unit.freed(self.pages, now)
        if unit.timeline is not None and tokens:
            unit.timeline.job(self.model.name, "prefill", self._started, now, len(self.chunks), tokens)
        self.chunks = []
        self.jobs += 1
        self.tokens += tokens
        self.state = BOUNDARY
        self.version += 1
        return PrefillStep(finished, through, tokens)

    # ------------------------------------------------------------ decode steps

    def _remove(self, request: SimRequest) -> int:
        """A sequence leaves before the next step; returns the blocks that it holds."""
        if request.content:
            self.pages.publish(request, request.base + self.batch.counter)
        return self.batch.remove(request)

    def publish(self, now: float) -> None:
        """Let others find the blocks that its sequences have filled by `now` (`Grower.publish`)."""
        done = -1
        for request in self.batch.running:
            if request.content:
                if done < 0:
                    done = self.steps_by(now)
                self.pages.publish(request, request.base + done)

    def _find(self, request: SimRequest, now: float) -> None:
        """Nothing of the prompt is computed: begin behind what is cached of it."""
        found = self.pages.find(request, now, self.order)
        request.blocks, request.computed = found * self.pages.counts.block, found * self.model.profile.block_tokens
        if request.first_token is None and not request.preemptions:
            request.cached = request.computed

    def _lose(self, request: SimRequest) -> None:
        """There is no room for the first chunk of the prompt, so what was found of it is not held either."""
        self.pages.give_up(request, request.blocks)
        request.blocks = request.computed = 0

    def _arrive(self, counter: int, now: float) -> None:
        """Stand at the boundary after step `counter`."""
        pages, batch = self.pages, self.batch
        if pages.committed:
            begun = batch.growth(self._synced, counter)
            if begun:
                pages.begin(begun * pages.per_block)
            if pages.committed:
                pages.commit(-pages.committed)
        if self.unit.timeline is not None:
            self._trace(counter)
        batch.advance(counter)
        self.state = BOUNDARY
        self.version += 1

    def _end_decode(self, now: float) -> list[SimRequest]:
        """Sequences that have their last token leave."""
        batch, pages, unit = self.batch, self.pages, self.unit
        finished = batch.ended()
        if finished:
            unit.releasing(pages, now)
            for request in finished:
                pages.give_up(request, self._remove(request))
                unit.finished(request, now)
            self._dirty = True
            unit.freed(pages, now)
        return finished

    def _begin(self, now: float) -> None:
        """A new run: another batch, or another cost."""
        unit, batch, costs = self.unit, self.batch, self._costs
        assert costs is not None
        size = len(batch.running)
        cost = costs.decode(size, batch.context)
        overhead = unit.overheads.between
        if overhead:
            cost = cost._replace(fixed=cost.fixed + overhead)
        batch.slow = self.slow
        batch.begin(cost, now)
        self._dirty = False
        self._traced, self._traced_at = batch.counter, now
        self._runs(NO_LOAD if unit.compute.lone() else costs.decode_load(size, batch.context), now)

    def _go_on(self, now: float) -> None:
        """The next decode step begins now."""
        if self._dirty or not self.active or self.batch.counter >= self.batch.until:
            self._begin(now)
        else:
            self.batch.resume()
        if self.joined:
            for request in self.joined:
                # One that gave way again before its first step has no place in the batch.
                if request.serial and request.decoding_since is None:
                    request.decoding_since = now
            self.joined.clear()

    def _preempt(self, now: float) -> list[SimRequest]:
        """There are too few pages for the next step: as vLLM does, the last to have joined make room for the first, of
        the lowest execution priority. Returns those that gave way."""
        unit, batch, pages = self.unit, self.batch, self.pages
        unit.releasing(pages, now)
        period, counter = batch.block_tokens, batch.counter
        waiting = list(batch.running)
        served: set[SimRequest] = set()
        gone: list[SimRequest] = []
        position = 0
        while position < len(waiting):
            request = waiting[position]
            if (request.base + counter) % period == 0:
                while not pages.take(batch.growth_of(request), now, self.order):
                    victim = unit.victim(waiting)
                    place = waiting.index(victim) if victim is not waiting[-1] else len(waiting) - 1
                    del waiting[place]
                    taken = batch.growth_of(victim) if victim in served else 0
                    pages.give_up(victim, self._remove(victim) + taken)
                    victim.preempted(now)
                    gone.append(victim)
                    if place < position:
                        position -= 1
                    if victim is request:
                        break
                else:
                    served.add(request)
                    position += 1
                    continue
                continue
            position += 1
        self._dirty = True
        unit.freed(pages, now)
        return gone

    # ------------------------------------------------------------ leaps

    def _leap(self, end: int) -> None:
        """Go on up to step `end`, at least over one step, as far as there are pages."""
        self.state = STEPPING
        self._synced = self.batch.counter + 1
        self._planned = self._commit(end if end > self._synced else self._synced)
        self.unit.look(self)

    def _commit(self, end: int) -> int:
        """Commit the pages of the steps up to `end`, or as far as there are any; returns the end."""
        if end <= self._synced:
            return end
        pages, batch = self.pages, self.batch
        blocks = batch.growth(self._synced, end)
        if blocks:
            spare = pages.spare_blocks()
            if blocks > spare:
                end = batch.furthest(self._synced, end, spare)
                blocks = batch.growth(self._synced, end)
            pages.commit(blocks * pages.per_block)
        return end

    def plan(self) -> float:
        if self.state == STEPPING and not self.chunks:
            self.planned_time = self.batch.time_of(self._planned)
        return self.planned_time

    def steps_by(self, now: float) -> int:
        """Decode steps that are done by now."""
        return self.batch.done_by(now) if self.leaping() else self.batch.counter

    def sync(self, now: float, viewer: int) -> None:
        """Account for the blocks of all steps begun by `now` (`Grower.sync`)."""
        batch = self.batch
        if self.state != STEPPING or self.chunks or now < batch.time_of(self._synced):
            return
        begun = batch.done_by(now)
        if batch.time_of(begun) != now or viewer > self.order:
            begun += 1
        if begun > self._synced:
            blocks = batch.growth(self._synced, begun)
            self._synced = begun
            if blocks:
                self.pages.begin(blocks * self.pages.per_block)

    def shrink(self, now: float) -> None:
        """Leap no further than there are pages."""
        self.pages.commit(-self.pages.committed)
        end = self._commit(self._planned)
        if end != self._planned:
            self._planned = end
            self.unit.look(self)

    def interrupt(self, now: float) -> None:
        if not self.leaping():
            return
        batch = self.batch
        done = batch.done_by(now)
        if done > batch.counter and batch.time_of(done) == now:
            self._arrive(done, now)
            self.unit.at_boundary(self)
            return
        self.sync(now, -1)
        if self._planned > self._synced:
            self.pages.commit(-self.pages.committed)
            self._planned = self._synced
            self.unit.look(self)

    def retime(self, slow: float, now: float) -> None:
        if self.state == STEPPING and self.chunks:
            self._work += (now - self._at) / self.slow
            self._at = now
            self.planned_time = now + max(0.0, self._duration - self._work) * slow
            self.unit.look(self)
        self.slow = slow
        if not self.leaping():
            return
        if self.unit.timeline is not None:
            self._trace(self.batch.done_by(now))
        self.batch.retime(slow, now)
        self.unit.look(self)

    def _trace(self, counter: int) -> None:
        """Write the steps up to `counter` into the timeline."""
        timeline, batch = self.unit.timeline, self.batch
        assert timeline is not None
        size = len(batch.running)
        for step in range(self._traced + 1, counter + 1):
            end = batch.time_of(step)
            timeline.job(self.model.name, "decode", self._traced_at, end, size, size)
            self._traced_at = end
        self._traced = max(self._traced, counter)
