"""The decode engine of one model under leases, as `muxserve.engine` runs it: continuous batching and preemption.

It reports as live engines do (`muxserve.engine.lease`): when something ended, when half of the lease is used, when it
is over, and after the first step with new sequences. Where the unit says that all reports would only renew the lease,
it leaps over those too.
"""

from __future__ import annotations

from muxserve.scheduling.engines import EngineState, LeaseState
from muxserve.scheduling.policy import Renewals
from muxserve.scheduling.quanta import Length
from muxserve.scheduling.types import Phase
from muxserve.simulator.leaps import BOUNDARY, IDLE, STALLED, STEPPING, LeapingEngine
from muxserve.simulator.leases import Lease, Leased, LeasedHost
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimModel

_NEVER = float("inf")


class DecodeEngine(LeapingEngine, Leased):
    """The decode engine of one model."""

    def __init__(self, unit: LeasedHost, model: SimModel, order: int, pages: ModelPages) -> None:
        super().__init__(unit, model, Phase.DECODE, order, pages)
        self._without_lease(unit)
        self._steps = 0
        self._end = 0
        self._begun = 0.0
        self._fresh = False
        self._half_told = False
        self.returned: list[SimRequest] = []
        self._told_at = 0.0
        self._told_counter = 0
        self._told_generated = 0
        # It leaps over renewals of its lease: how these are, and until when there are none but these.
        self.far = False
        self._contended = False
        self._until = _NEVER

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

    # ------------------------------------------------------------ leaps over renewals

    def steady(self, lease: LeaseState, known_step: float) -> bool:
        """It is in a step under `lease`, less than half of which is used. Half of its steps will be used before half of
        its time (by the scheduler's clock, which began first), and so it will be with the next ones, since steps take
        about as long as the scheduler believes."""
        if self.state != STEPPING or self.returned or self._pending is not None:
            return False
        if lease.left * 2 <= lease.steps or self._steps < 2:
            return False
        batch = self.batch
        if batch.step_seconds() > 2.0 * known_step:
            return False
        return 2.0 * batch.time_of(self._end - self._steps // 2) < lease.granted_at + lease.deadline

    def extend(self, renewals: Renewals) -> None:
        """Leap on, as far as leases are renewed without further ado."""
        self.far = True
        self._contended, self._until = renewals
        end = self._bounded(min(self.batch.next_end(), self.batch.until))
        if end > self._planned:
            self._reach(end)

    def _bounded(self, end: int) -> int:
        """The first step to end when it is not renewals alone any more, if that is before `end`."""
        if self._until == _NEVER:
            return end
        batch = self.batch
        last = batch.done_by(self._until)
        return min(end, last if batch.time_of(last) >= self._until else last + 1)

    def cut(self, now: float) -> None:
        """Leap no further than to the next report."""
        if not self.far:
            return
        self.far = False
        if self.state == STEPPING:
            self._replan(min(self._next_news(), self._planned), now)

    def _replan(self, end: int, now: float) -> None:
        self.sync(now, -1)
        self.pages.commit(-self.pages.committed)
        self._planned = self._commit(max(end, self._synced))
        self.host.look(self)

    def catch_up(self, now: float, state: EngineState, inclusive: bool) -> None:
        """Do what happened at the boundaries before `now` (`inclusive`: and at it) at which there was something to
        report: new sequences had their first step, or half of a lease was used, for which the scheduler's turn renewed
        it. `state` is the ledger's."""
        batch, lease, planned = self.batch, state.lease, self._planned
        assert lease is not None
        report = self._next_report()
        if report >= planned:
            return
        size, time_of, stepped = len(batch.running), batch.time_of, state.stepped
        quanta, contended = self.unit.policy.quanta, self._contended
        told, told_at, told_tokens = self._told_counter, self._told_at, self._told_generated
        # New sequences were not in the steps before this leap.
        before = batch.generated - size * batch.counter
        renewed_with = -1.0
        while report < planned:
            time = time_of(report)
            if time > now or (time == now and not inclusive):
                break
            tokens = before + size * report
            stepped(time - told_at, tokens - told_tokens, report - told)
            told, told_at, told_tokens = report, time, tokens
            if self._fresh:
                self._fresh = False
                half = self._end - self._steps // 2
                if report < half:
                    lease.left = self._end - report
                    report = half
                    continue
            renewed_with = state.step_seconds
            steps = quanta.decode_steps(renewed_with, contended)
            report += steps - steps // 2
        self.jobs += told - self._told_counter
        self.tokens += told_tokens - self._told_generated
        self._told_counter, self._told_at, self._told_generated = told, told_at, told_tokens
        if renewed_with >= 0.0:
            self._renewed(lease, told, quanta.decode(renewed_with, contended), told_at)

    def _renewed(self, lease: LeaseState, counter: int, length: Length, now: float) -> None:
        """The lease is renewed after step `counter`."""
        lease.steps = lease.left = self._steps = length.steps
        lease.granted_at = self._begun = now
        lease.deadline = self._deadline = now + length.seconds
        self._end = counter + length.steps
        self._half_told = False

    def between(self) -> bool:
        """It stands between two steps, and has no other lease to take there."""
        return self.state == BOUNDARY and self._pending is None

    def renew(self, state: EngineState, contended: bool, now: float) -> None:
        """Between two steps, renew the lease."""
        lease = state.lease
        assert lease is not None
        self._renewed(lease, self.batch.counter, self.unit.policy.quanta.decode(state.step_seconds, contended), now)

    def _next_report(self) -> int:
        """After which step of a leap over renewals there is something to report."""
        return self._end - (self._steps - 1 if self._fresh else self._steps // 2)

    def stands_at_report(self, now: float) -> bool:
        """There is something to report at this very moment. To be asked after `catch_up`."""
        report = self._next_report()
        return self.state == STEPPING and report < self._planned and self.batch.time_of(report) == now

    def report_now(self, now: float) -> None:
        """The boundary at this moment is one to report at."""
        self._planned = self._next_report()
        self.far = False
        self.boundary(now)

    def retime(self, slow: float, now: float) -> None:
        if not self.far or self.state != STEPPING:
            super().retime(slow, now)
            return
        state = self.unit.usage(self)
        self.catch_up(now, state, True)
        super().retime(slow, now)
        assert state.lease is not None
        if not self.steady(state.lease, state.step_seconds):
            self.cut(now)
        elif self._until != _NEVER:
            # Other steps than before are those that end by then.
            self._replan(self._bounded(self._planned), now)

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
