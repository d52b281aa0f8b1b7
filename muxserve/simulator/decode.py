"""The decode engine of one model under leases, as `muxserve.engine` runs it: continuous batching and preemption.

It reports as live engines do (`muxserve.engine.lease`): when something ended, when half of the lease is used, when it
is over, and after the first step with new sequences. Where the unit says that all reports would only renew the lease,
it leaps over those too.
"""

from __future__ import annotations

from muxserve.scheduling.types import Phase
from muxserve.simulator.leaps import BOUNDARY, IDLE, STALLED
from muxserve.simulator.leases import Lease
from muxserve.simulator.renewals import RenewingEngine
from muxserve.simulator.requests import SimRequest


class DecodeEngine(RenewingEngine):
    """The decode engine of one model."""

    # ------------------------------------------------------------ between steps

    def boundary(self, now: float) -> None:
        host, batch = self.host, self.batch
        if self.state == STALLED:
            self._stalled(now)
            return
        if self.far:
            self.catch_up(now, self.unit.usage(self), False)
            self.far = False
        self._arrive(self._planned, now)
        counter = batch.counter
        finished = batch.ended()
        if finished:
            pages = self.pages
            self.unit.releasing(pages, now)
            for request in finished:
                pages.release(batch.remove(request))
                host.finished(request, now)
            self._dirty = True
            host.freed(pages, now)
        left = self._end - counter
        over = left <= 0 or now >= self._deadline
        half = left * 2 <= self._steps or now - self._begun >= self._deadline - now
        if finished or self.returned or self._fresh or over or (half and not self._half_told) or not batch.running:
            self._half_told = half
            self._fresh = False
            self._tell(0 if now >= self._deadline else left, now, finished)
        host.at_boundary(self)

    def _tell(self, left: int, now: float, finished: list[SimRequest]) -> None:
        batch = self.batch
        returned, self.returned = self.returned, []
        steps, tokens = batch.counter - self._told_counter, batch.generated - self._told_generated
        seconds, self._told_at = now - self._told_at, now
        self._told_counter, self._told_generated = batch.counter, batch.generated
        self.jobs += steps
        self.tokens += tokens
        self.unit.report(self, left, seconds, tokens, steps, len(batch.running), now, finished, [], returned)

    def _stalled(self, now: float) -> None:
        """A step that lost all its sequences is over."""
        self._end -= 1
        returned, self.returned = self.returned, []
        self._told_at = now
        left = self._end - self.batch.counter if now < self._deadline else 0
        self.state = BOUNDARY
        self.jobs += 1
        self.unit.report(self, left, self.host.overheads.stall, 0, 1, 0, now, [], [], returned)
        self.host.at_boundary(self)

    def kick(self, now: float) -> None:
        host, batch = self.host, self.batch
        if self._pending is not None:
            self._take(self._pending, now)
        counter = batch.counter
        if not batch.running or counter >= self._end or now >= self._deadline:
            self.state = IDLE
            self._rests(host, now)
            return
        need = batch.needs[counter % batch.block_tokens]
        if need and not self.pages.take(need, now, self.order):
            self._preempt(now)
            if not batch.running:
                self._stall(now)
                return
        if self._dirty or not self.active or counter >= batch.until:
            if not self.active:
                self._told_at = now
            self._begin(now)
        else:
            batch.resume()
        self.far = False
        self._leap(self._next_news())

    def _take(self, lease: Lease, now: float) -> None:
        if self._accept(lease, Phase.DECODE, now):
            self._dirty = True
        self._steps = lease.steps
        self._end = self.batch.counter + lease.steps
        self._begun = now
        self._half_told = self._fresh = False
        if self._entering:
            for request in self._entering:
                self.batch.add(request)
            self._entering = []
            self._dirty = self._fresh = True

    def _preempt(self, now: float) -> None:
        """There are too few pages for the next step: as vLLM does, the last to have joined make room for the first."""
        host, batch, pages = self.host, self.batch, self.pages
        self.unit.disturbed(now)
        self.unit.releasing(pages, now)
        period, counter = batch.block_tokens, batch.counter
        waiting = list(batch.running)
        position = 0
        while position < len(waiting):
            request = waiting[position]
            if (request.base + counter) % period == 0:
                while not pages.take(1, now, self.order):
                    victim = waiting.pop()
                    pages.release(batch.remove(victim))
                    victim.preemptions += 1
                    self.returned.append(victim)
                    if victim is request:
                        break
            position += 1
        self._dirty = True
        host.freed(pages, now)

    def _stall(self, now: float) -> None:
        """The step that begins now computes nothing."""
        batch = self.batch
        if batch.counter > self._told_counter:
            self._tell_before_stall(now)
        self._rests(self.host, now)
        self.state = STALLED
        self.version += 1
        self.planned_time = now + self.host.overheads.stall
        self.host.look(self)

    def _tell_before_stall(self, now: float) -> None:
        returned, self.returned = self.returned, []
        self._tell(self._end - self.batch.counter, now, [])
        self.returned = returned

    # ------------------------------------------------------------ leaps

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
        if self.state == STALLED:
            return self.planned_time
        batch = self.batch
        time = batch.time_of(self._planned)
        # Leases are bounded in time as well, and half of that is to be told of too.
        look = self._deadline if self._half_told else (self._begun + self._deadline) / 2
        if time >= look and not self.far and self._planned > self._synced:
            # Of steps that are done already only the number is known.
            first = max(self._synced, batch.floor + 1, batch.done_by(look))
            while batch.time_of(first) < look:
                first += 1
            if first < self._planned:
                self._planned = first
                time = batch.time_of(first)
        self.planned_time = time
        return time
