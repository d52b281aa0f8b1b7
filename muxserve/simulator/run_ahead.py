"""An engine of one stage that takes many steps in one loop, while it is alone on its clock and only decodes.

Planning simulates many such engines. Nothing but speed depends on this: `PipelineEngine` takes the same steps one by
one, with the same results.
"""

from __future__ import annotations

from muxserve.simulator.leased import SimReport
from muxserve.simulator.stages import PipelineEngine


class RunAheadEngine(PipelineEngine):
    """A `PipelineEngine` that runs ahead of the clock where nobody can notice."""

    def _look_ahead(self) -> None:
        if self._may_run_ahead():
            self._run_ahead()

    def _may_run_ahead(self) -> bool:
        """One stage has the device to itself, all sequences are in the step that runs, and no prompt waits: so it will
        be until one of them ends or something comes from outside, since budgets depend on nothing else
        (`TokenBudget.next`). The end of this step is nothing to report, or only that half of the lease is used."""
        if (
            len(self.stages) != 1
            or self.spec.in_flight != 1
            or self.calls
            or self._pending is not None
            or self.waiting
            or self.begun
        ):
            return False
        if self.ready or self._admitted or self._untold_prompts or not self.unit.compute.lone():
            return False
        return not (self._finished or self._through or self._returned) and self.scheduler.watcher is None

    def _run_ahead(self) -> None:
        """Take the following steps at once, as they would be taken one by one, as long as each begins before something
        comes from outside, no sequence ends with the one before, and there are blocks for it. Reports of leases that
        are half used are sent and answered on the way."""
        clock, pages, stage, overheads = self.unit.clock, self.pages, self.stages[0], self.unit.overheads
        size, slow, behind, overhead = (
            self.model.profile.block_tokens,
            self.slow,
            self.spec.return_seconds,
            overheads.between,
        )
        (end, batch), count = self._flying[0], self._decoding
        # Its own look at the end of the step that runs is not from outside.
        self.version += 1
        quiet = clock.quiet_until()
        most = min([request.output - request.made for request in batch.decodes]) - 1
        if end >= quiet or most <= 0:
            return
        needs = [0] * size
        for request in batch.decodes:
            spare = request.blocks * size - request.computed
            if spare >= size:
                return
            needs[spare] += 1
        context, free_at = batch.work.context, stage.free_at
        fixed, per_token, until = stage.decode(count, context)
        made: list[float] = []
        begun: list[float] = []
        took: list[float] = []
        while len(made) < most and end < quiet and self._left > 0 and end < self._deadline:
            need = needs[len(made) % size]
            if need and need > pages.spare_blocks():
                break
            if context + count > until:
                fixed, per_token, until = stage.decode(count, context + count)
            begins = end + overhead
            if begins < free_at:
                begins = free_at
            seconds = (fixed + per_token * (context + count)) * slow
            following = begins + seconds + behind
            report: SimReport | None = None
            if not self._half_told and (self._left * 2 <= self._steps or end - self._begun >= self._deadline - end):
                told = end + self.unit.way
                answered = told + self.unit.way
                if not (end < told < answered < following and answered < quiet):
                    break
                self._half_told = True
                report = self._report(self._left, end, len(self.running))
                self._told_at = end
            context += count
            self.busy_seconds += end - self._active_since
            self._active_since = end
            self._rounds += 1.0
            if need:
                pages.take(need, end, self.order)
            self._left -= 1
            self._untold_steps += 1
            self._untold_tokens += count
            made.append(end)
            begun.append(begins)
            took.append(seconds)
            free_at = begins + seconds
            end = following
            if report is not None:
                lease = self.scheduler.answer(report, told)
                quiet = clock.quiet_until()
                if lease is not None:
                    self._entering += lease.admit
                    self._take(lease, answered)
                    if self.waiting or self.ready:
                        break
        steps = len(made)
        self.record.follow(made, begun, took, count)
        self.jobs += steps
        self.tokens += steps * count
        stage.free_at = free_at
        batch.work.context = context
        for request in batch.decodes:
            request.made += steps
            request.computed += steps
            request.blocks = -(-request.computed // size)
        self._flying[0] = (end, batch)
