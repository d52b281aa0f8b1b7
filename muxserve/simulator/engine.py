"""Steps of an engine: prefill in chunks, alone or beside decodes, and decode, in which it leaps over steps.

An engine is in a step, or at the boundary between two, or idle. What is told to it takes effect at the next boundary.
While it decodes it asks to be looked at again only at the next boundary at which anything can happen: until then its
steps are a closed form, in time (`DecodeBatch`) and in pages (`ModelPages`).

Who says when it takes which step is another matter: a unit's scheduler, by leases (`leased`). An engine whose layers
are a pipeline is in `stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from muxserve.costs import Load
from muxserve.costs.step_costs import StepCosts, StepWork
from muxserve.scheduling.types import PREFILL, Phase
from muxserve.simulator.batch import DecodeBatch
from muxserve.simulator.job import BOUNDARY, NO_LOAD, STEPPING, Job
from muxserve.simulator.machine import UnitMachine
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimModel


class PrefillStep(NamedTuple):
    """What a prefill step did: requests that ended with it, those that have a token and go on, and its tokens."""

    finished: list[SimRequest]
    through: list[SimRequest]
    tokens: int


class Engine(Job):
    """An engine of a model, on a unit's machine, with the model's pages."""

    def __init__(self, machine: UnitMachine, model: SimModel, phase: Phase, pages: ModelPages) -> None:
        super().__init__(phase, machine.clock.place())
        self.machine = machine
        self.model = model
        self.pages = pages
        self.jobs = 0
        self.tokens = 0
        self.busy_seconds = 0.0
        self._active_since = 0.0
        self._costs: StepCosts | None = None

    def _computes_on(self, share: float) -> None:
        """Its steps are on that part of the devices from now on."""
        if share != self.share:
            self.share = share
            self.machine.compute.changed |= self.active
        self._costs = self.machine.costs(self.model, share, self.phase)

    def _runs(self, load: Load, seconds: float, now: float) -> None:
        """A job with this load begins, or goes on, whose step takes so many seconds alone."""
        compute, grain = self.machine.compute, seconds / self.model.architecture.layers
        if not self.active:
            self.active = True
            self._active_since = now
            self.load, self.grain = load, grain
            compute.changed = True
            return
        known, tolerance = self.load, self.machine.load_tolerance
        if (
            abs(known[0] - load[0]) > tolerance
            or abs(known[1] - load[1]) > tolerance
            or (compute.crowded and abs(self.grain - grain) > tolerance * self.grain)
        ):
            self.load, self.grain = load, grain
            compute.changed = True

    def _rests(self, now: float) -> None:
        """No job runs."""
        if self.active:
            self.active = False
            self.busy_seconds += now - self._active_since
            self.machine.compute.changed = True


class StepEngine(Engine):
    """An engine that takes one step at a time. While it decodes it is planned to be looked at again after step
    `_planned`; the blocks of all steps before `_synced` are held, those of the steps from there on are committed.
    `chunks` of prompts are computed by the step that runs, perhaps beside a token of each sequence that decodes; steps
    that only decode have none.
    """

    def __init__(self, machine: UnitMachine, model: SimModel, phase: Phase, pages: ModelPages) -> None:
        super().__init__(machine, model, phase, pages)
        if phase is not PREFILL:
            pages.grower = self
        self.batch = self.make_batch(model.profile.kv.block_tokens)
        self.batch.counts = pages.counts
        # Joined, and have not been in a decode step yet.
        self.joined: list[SimRequest] = []
        self.chunks: list[tuple[SimRequest, int]] = []
        self._dirty = True
        self._planned = self._synced = self._traced = 0
        self._traced_at = 0.0
        # The prefill step: its seconds alone, how many of these are done at `_at`.
        self._duration = self._work = self._at = self._started = 0.0

    def make_batch(self, block_tokens: int) -> DecodeBatch:
        """The batch to work on."""
        return DecodeBatch(block_tokens, self.order << 40)

    def leaping(self) -> bool:
        """It is in a step that only decodes."""
        return self.state == STEPPING and not self.chunks

    def releasing(self, now: float) -> None:
        """Sequences are about to give pages back."""

    def victim(self, running: Sequence[SimRequest]) -> SimRequest:
        """Which of the sequences gives way first; the last to have joined."""
        return running[-1]

    # ------------------------------------------------------------ steps with prompts

    def _begin_chunks(self, work: StepWork, now: float) -> None:
        """Compute `chunks`, and whatever else is in `work`."""
        machine, costs = self.machine, self._costs
        assert costs is not None
        self._duration = costs.seconds(work) + machine.overheads.between
        self._work, self._at, self._started = 0.0, now, now
        self.state = STEPPING
        self._dirty = True
        self._runs(NO_LOAD if machine.compute.lone() else costs.load(work), self._duration, now)
        self.planned_time = now + self._duration * self.slow
        machine.look(self)

    def _end_chunks(self, now: float, decoded: int = 0) -> PrefillStep:
        """The chunks are computed, and `decoded` sequences beside them have a token more."""
        machine = self.machine
        finished: list[SimRequest] = []
        through: list[SimRequest] = []
        tokens, size = 0, self.model.profile.kv.block_tokens
        for request, chunk in self.chunks:
            tokens += chunk
            request.computed += chunk
            if request.content:
                self.pages.publish(request, request.computed)
            if request.computed < request.prompt + request.made:
                continue
            filled = -(-request.computed // size)
            request.got_token(now + machine.overheads.token)
            if request.made >= request.output:
                finished.append(request)
                self.pages.give_up(request, request.blocks)
                machine.finished(request, now)
            else:
                through.append(request)
                # What it needed for the last chunk of its prompt.
                if spare := request.blocks - self.pages.counts.held(filled, request):
                    self.pages.release(spare)
            request.blocks = 0
        if machine.timeline is not None and tokens:
            what, sequences = "mixed" if decoded else "prefill", len(self.chunks) + decoded
            machine.timeline.job(self.model.name, what, self._started, now, sequences, tokens + decoded)
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
        request.blocks, request.computed = found * self.pages.counts.block, found * self.model.profile.kv.block_tokens
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
        if self.machine.timeline is not None:
            self._trace(counter)
        batch.advance(counter)
        self.state = BOUNDARY
        self.version += 1

    def _end_decode(self, now: float) -> list[SimRequest]:
        """Sequences that have their last token leave."""
        batch, pages, machine = self.batch, self.pages, self.machine
        finished = batch.ended()
        if finished:
            self.releasing(now)
            for request in finished:
                pages.give_up(request, self._remove(request))
                machine.finished(request, now)
            self._dirty = True
        return finished

    def _begin(self, now: float) -> None:
        """A new run: another batch, or another cost."""
        machine, batch, costs = self.machine, self.batch, self._costs
        assert costs is not None
        size = len(batch.running)
        cost = costs.decode(size, batch.context)
        overhead = machine.overheads.between
        if overhead:
            cost = cost._replace(fixed=cost.fixed + overhead)
        batch.slow = self.slow
        batch.begin(cost, now)
        self._dirty = False
        self._traced, self._traced_at = batch.counter, now
        load = NO_LOAD if machine.compute.lone() else costs.engine.decode_load(size, batch.context)
        self._runs(load, cost.seconds(batch.context), now)

    def _go_on(self, now: float) -> None:
        """The next decode step begins now."""
        if self._dirty or not self.active or self.batch.counter >= self.batch.until:
            self._begin(now)
        else:
            self.batch.resume()
        if self.joined:
            self._first_steps(now)

    def _first_steps(self, now: float) -> None:
        """Those that joined are in a step for the first time."""
        for request in self.joined:
            # One that gave way again before its first step has no place in the batch.
            if request.serial and request.decoding_since is None:
                request.decoding_since = now
        self.joined.clear()

    def _preempt(self, now: float) -> list[SimRequest]:
        """There are too few pages for the next step: as vLLM does, the last to have joined make room for the first, of
        the lowest execution priority. Returns those that gave way."""
        batch, pages = self.batch, self.pages
        self.releasing(now)
        period, counter = batch.block_tokens, batch.counter
        waiting = list(batch.running)
        served: set[SimRequest] = set()
        gone: list[SimRequest] = []
        position = 0
        while position < len(waiting):
            request = waiting[position]
            if (request.base + counter) % period == 0:
                while not pages.take(batch.growth_of(request), now, self.order):
                    victim = self.victim(waiting)
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
        return gone

    # ------------------------------------------------------------ leaps

    def _leap(self, end: int) -> None:
        """Go on up to step `end`, at least over one step, as far as there are pages."""
        self.state = STEPPING
        self._synced = self.batch.counter + 1
        self._planned = self._commit(end if end > self._synced else self._synced)
        self.machine.look(self)

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
            self.machine.look(self)

    def interrupt(self, now: float) -> None:
        if not self.leaping():
            return
        batch = self.batch
        done = batch.done_by(now)
        if done > batch.counter and batch.time_of(done) == now:
            self._arrive(done, now)
            self.machine.at_boundary(self)
            return
        self.sync(now, -1)
        if self._planned > self._synced:
            self.pages.commit(-self.pages.committed)
            self._planned = self._synced
            self.machine.look(self)

    def retime(self, slow: float, now: float) -> None:
        if self.state == STEPPING and self.chunks:
            self._work += (now - self._at) / self.slow
            self._at = now
            self.planned_time = now + max(0.0, self._duration - self._work) * slow
            self.machine.look(self)
        self.slow = slow
        if not self.leaping():
            return
        if self.machine.timeline is not None:
            self._trace(self.batch.done_by(now))
        self.batch.retime(slow, now)
        self.machine.look(self)

    def _trace(self, counter: int) -> None:
        """Write the steps up to `counter` into the timeline."""
        timeline, batch = self.machine.timeline, self.batch
        assert timeline is not None
        size = len(batch.running)
        for step in range(self._traced + 1, counter + 1):
            end = batch.time_of(step)
            timeline.job(self.model.name, "decode", self._traced_at, end, size, size)
            self._traced_at = end
        self._traced = max(self._traced, counter)
