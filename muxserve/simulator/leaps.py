"""What all engines have, and how an engine that decodes leaps over steps.

An engine is in a step, or at the boundary between two, or idle. What is told to it takes effect at the next boundary.
An engine that decodes asks to be looked at again only at the next boundary at which anything can happen: until then its
steps are a closed form, in time (`DecodeBatch`) and in pages (`ModelPages`).
"""

from __future__ import annotations

from typing import Protocol

from muxserve.costs import EngineCosts, Load
from muxserve.scheduling.types import Phase
from muxserve.simulator.batch import DecodeBatch
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import Overheads, SimModel
from muxserve.simulator.timeline import Timeline

IDLE, BOUNDARY, STEPPING, STALLED = range(4)
NO_LOAD = Load(0.0, 0.0)
_NEVER = float("inf")


class Host(Protocol):
    """The unit around an engine."""

    overheads: Overheads
    timeline: Timeline | None
    load_tolerance: float
    jobs_changed: bool

    def costs(self, model: SimModel, share: int, own: int, phase: Phase) -> EngineCosts:
        """Costs of the model's engine on `share` millionths of the unit; `own` is what the engine usually has."""
        ...

    def look(self, engine: Engine) -> None:
        """`engine.planned_time` has changed."""
        ...

    def at_boundary(self, engine: Engine) -> None:
        """The engine could begin a step."""
        ...

    def freed(self, pages: ModelPages, now: float) -> None:
        """Pages came free."""
        ...

    def finished(self, request: SimRequest, now: float) -> None:
        """A request has all its tokens."""
        ...


class Engine:
    """What all engines have. `order` is the engine's place in the unit; `version` tells events that are out of date."""

    def __init__(self, model: SimModel, phase: str, order: int, pages: ModelPages) -> None:
        self.model = model
        self.phase = phase
        self.order = order
        self.pages = pages
        self.state = IDLE
        self.version = 0
        self.planned_time = _NEVER
        self.slow = 1.0
        self.load = NO_LOAD
        self.active = False
        self.jobs = 0
        self.tokens = 0
        self.busy_seconds = 0.0
        self._active_since = 0.0

    def boundary(self, now: float) -> None:
        """The planned step is over."""
        raise NotImplementedError

    def kick(self, now: float) -> None:
        """Begin the next step, if there is one to run."""
        raise NotImplementedError

    def retime(self, slow: float, now: float) -> None:
        """Jobs beside this one came, went or changed."""
        raise NotImplementedError

    def interrupt(self, now: float) -> None:
        """Stop at the next boundary."""

    def plan(self) -> float:
        """Fix when to look at this engine again, and return that."""
        return self.planned_time

    def _runs(self, host: Host, load: Load, now: float) -> None:
        """A job with this load begins, or goes on."""
        if not self.active:
            self.active = True
            self._active_since = now
            self.load = load
            host.jobs_changed = True
            return
        known, tolerance = self.load, host.load_tolerance
        if abs(known[0] - load[0]) > tolerance or abs(known[1] - load[1]) > tolerance:
            self.load = load
            host.jobs_changed = True

    def _rests(self, host: Host, now: float) -> None:
        """No job runs."""
        if self.active:
            self.active = False
            self.busy_seconds += now - self._active_since
            host.jobs_changed = True


class LeapingEngine(Engine):
    """An engine that decodes. It is planned to be looked at again after step `_planned`; the blocks of all steps before
    `_synced` are held, those of the steps from there on are committed."""

    host: Host

    def __init__(self, host: Host, model: SimModel, phase: str, order: int, pages: ModelPages) -> None:
        super().__init__(model, phase, order, pages)
        pages.grower = self
        self.host = host
        self.batch = self.make_batch(model.profile.block_tokens)
        self._costs: EngineCosts | None = None
        self._dirty = True
        self._planned = self._synced = self._traced = 0
        self._traced_at = 0.0

    def make_batch(self, block_tokens: int) -> DecodeBatch:
        """The batch to work on."""
        return DecodeBatch(block_tokens)

    def leaping(self) -> bool:
        """It is in a decode step."""
        return self.state == STEPPING

    # ------------------------------------------------------------ steps

    def _arrive(self, counter: int, now: float) -> None:
        """Stand at the boundary after step `counter`."""
        pages, batch = self.pages, self.batch
        if pages.committed:
            begun = batch.growth(self._synced, counter)
            if begun:
                pages.begin(begun * pages.per_block)
            if pages.committed:
                pages.commit(-pages.committed)
        if self.host.timeline is not None:
            self._trace(counter)
        batch.advance(counter)
        self.state = BOUNDARY
        self.version += 1

    def _begin(self, now: float) -> None:
        """A new run: another batch, or another cost."""
        host, batch, costs = self.host, self.batch, self._costs
        assert costs is not None
        size = len(batch.running)
        cost = costs.decode(size, batch.context)
        overhead = host.overheads.decode_step
        if overhead:
            cost = cost._replace(fixed=cost.fixed + overhead)
        batch.slow = self.slow
        batch.begin(cost, now)
        self._dirty = False
        self._traced, self._traced_at = batch.counter, now
        self._runs(host, costs.decode_load(size, batch.context), now)

    def _leap(self, end: int) -> None:
        """Go on up to step `end`, at least over one step, as far as there are pages."""
        self.state = STEPPING
        self._synced = self.batch.counter + 1
        self._planned = self._commit(end if end > self._synced else self._synced)
        self.host.look(self)

    # ------------------------------------------------------------ leaps

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

    def _reach(self, end: int) -> None:
        """Leap on to step `end`, which is further than planned, as far as there are pages."""
        pages, batch = self.pages, self.batch
        blocks = batch.growth(self._planned, end)
        if blocks:
            spare = pages.spare_blocks()
            if blocks > spare:
                end = batch.furthest(self._planned, end, spare)
                blocks = batch.growth(self._planned, end)
            pages.commit(blocks * pages.per_block)
        self._planned = end
        self.host.look(self)

    def plan(self) -> float:
        self.planned_time = self.batch.time_of(self._planned)
        return self.planned_time

    def sync(self, now: float, viewer: int) -> None:
        """Account for the blocks of all steps begun by `now` (`Grower.sync`)."""
        if not self.leaping():
            return
        batch = self.batch
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
            self.host.look(self)

    def interrupt(self, now: float) -> None:
        """Stop at the next boundary."""
        if not self.leaping():
            return
        batch = self.batch
        done = batch.done_by(now)
        if done > batch.counter and batch.time_of(done) == now:
            self._arrive(done, now)
            self.host.at_boundary(self)
            return
        self.sync(now, -1)
        if self._planned > self._synced:
            self.pages.commit(-self.pages.committed)
            self._planned = self._synced
            self.host.look(self)

    def retime(self, slow: float, now: float) -> None:
        self.slow = slow
        if not self.leaping():
            return
        if self.host.timeline is not None:
            self._trace(self.batch.done_by(now))
        self.batch.retime(slow, now)
        self.host.look(self)

    def _trace(self, counter: int) -> None:
        """Write the steps up to `counter` into the timeline."""
        timeline, batch = self.host.timeline, self.batch
        assert timeline is not None
        size = len(batch.running)
        for step in range(self._traced + 1, counter + 1):
            end = batch.time_of(step)
            timeline.job(self.model.name, "decode", self._traced_at, end, size, size)
            self._traced_at = end
        self._traced = max(self._traced, counter)
