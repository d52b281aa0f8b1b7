"""How a decode engine leaps over reports that would only renew its lease, and catches up with what they were."""

from __future__ import annotations

from muxserve.scheduling.engines import EngineState, LeaseState
from muxserve.scheduling.policy import Renewals
from muxserve.scheduling.quanta import Length
from muxserve.scheduling.types import Phase
from muxserve.simulator.leaps import BOUNDARY, STEPPING, LeapingEngine
from muxserve.simulator.leases import Leased, LeasedHost
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import SimModel

_NEVER = float("inf")


class RenewingEngine(LeapingEngine, Leased):
    """The part of a decode engine that knows its lease: `_steps` steps, begun at `_begun`, over with step `_end` or at
    `_deadline`. Up to step `_told_counter` it has reported; `_fresh` sequences are to have their first step.

    While it is `far` it leaps over renewals, with their kind and until when there are none but these.
    """

    def __init__(self, unit: LeasedHost, model: SimModel, order: int, pages: ModelPages) -> None:
        super().__init__(unit, model, Phase.DECODE, order, pages)
        self._without_lease(unit)
        self._steps = 0
        self._end = 0
        self._begun = 0.0
        self._fresh = False
        self._half_told = False
        self._told_at = 0.0
        self._told_counter = 0
        self._told_generated = 0
        self.returned: list[SimRequest] = []
        self.far = False
        self._contended = False
        self._until = _NEVER

    def _next_news(self) -> int:
        """The step after which there will be something to do or to tell."""
        raise NotImplementedError

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
