"""The lease that an engine holds, and when it reports on it.

An engine reports at once what the unit scheduler decides on: requests that end, have their first token, are handed
over or returned, and steps that found no pages. It reports every step that computed prompts, since the pages promised
to prompts depend on it. Other steps are reported three times per lease: the first step with requests that came with
it, the one that uses half of it (so that the scheduler can renew it in time), and the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from muxserve.costs.steps import StepBatch, StepSums
from muxserve.engine.stage_clock import NO_STAGES, StageSeconds
from muxserve.wire import HandOver, Lease, Prefilled, Returned, StepReport


@dataclass(slots=True)
class StepNews:
    """What the unit scheduler decides on, in the terms of `StepReport`."""

    finished: list[str] = field(default_factory=list)
    handed: list[HandOver] = field(default_factory=list)
    returned: list[Returned] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.finished or self.handed or self.returned or self.prefilled)


class HeldLease:
    """One engine's lease and its account of the steps run under it.

    Args:
        send: sends a report to the unit scheduler.
        counts: requests in the engine, running and waiting.
        every_step: report each step, as prefill engines do.
        stages: seconds of each stage of a pipeline since it was last asked.
    """

    def __init__(
        self,
        send: Callable[[StepReport], None],
        counts: Callable[[], tuple[int, int]],
        every_step: bool,
        stages: Callable[[], StageSeconds] = lambda: NO_STAGES,
    ) -> None:
        self._send = send
        self._counts = counts
        self._every_step = every_step
        self._stages = stages
        # Number and share of the last lease; kept when it is dropped.
        self.lease_id = 0
        self.share = 0
        self._phase = "both"
        self._steps = 0
        self._left = 0
        self._begun = 0.0
        self._deadline = 0.0
        self._half_told = False
        self._admitted = False
        self._untold_steps = 0
        self._untold_seconds = 0.0
        self._untold_tokens = 0
        self._untold_prefill_tokens = 0
        self._untold_prefill_seconds = 0.0
        self._prefills = StepSums()
        self._decodes = StepSums()

    def end(self) -> None:
        """What is left of the lease is not used; steps that were not reported yet still are."""
        self._deadline = 0.0

    def usable(self) -> bool:
        """Another step may begin."""
        return self._left > 0 and time.monotonic() < self._deadline

    def take(self, lease: Lease) -> bool:
        """A new lease replaces what was left of the one before. To be called between two steps. True: its share is
        smaller, which is to be reported when everything of it is done, since the other part is for others then."""
        smaller = lease.share < self.share
        self.lease_id = lease.lease_id
        self.share = lease.share
        self._phase = lease.phase
        self._steps = self._left = lease.steps
        self._begun = time.monotonic()
        self._deadline = self._begun + lease.seconds
        self._half_told = False
        self._admitted = bool(lease.admit)
        return smaller

    def drop(self) -> None:
        """Let go of the lease, and of what was not told yet."""
        self._left = 0
        self._settle()

    def stepped(
        self,
        seconds: float,
        tokens: int,
        news: StepNews,
        prefill_tokens: int = 0,
        batch: StepBatch | None = None,
        between: float = 0.0,
    ) -> None:
        """A step took `seconds` and computed `tokens` tokens, of which `prefill_tokens` are of prompts where the engine
        is of both phases; `batch` is what it consisted of. It began `between` seconds after the step before, where it
        followed that at once. Report it if that is due.
        """
        now = time.monotonic()
        self._left -= 1
        if not tokens:
            # The unit scheduler must see that this very step was in vain, not the sum of it and those before.
            self.tell_untold()
        self._untold_steps += 1
        self._untold_seconds += seconds
        self._untold_tokens += tokens
        self._untold_prefill_tokens += prefill_tokens
        if self._phase == "prefill" or 0 < tokens == prefill_tokens:
            self._untold_prefill_seconds += seconds
        if batch is not None and tokens:
            (self._prefills if batch.prompts else self._decodes).add(seconds + between, batch)
        worth = bool(news) or not tokens or bool(prefill_tokens) or self._every_step or self._admitted
        half = self._left * 2 <= self._steps or now - self._begun >= self._deadline - now
        over = self._left <= 0 or now >= self._deadline
        if worth or over or (half and not self._half_told) or not any(self._counts()):
            self._half_told = half
            self._admitted = False
            self._report(news)

    def drained(self, seconds: float, news: StepNews) -> None:
        """A micro-batch came out of the pipeline after `seconds` and none went in, so that nothing of the lease is
        used. The time is told with the steps, which returned when they had put theirs in."""
        self._untold_seconds += seconds
        if self._phase == "prefill":
            self._untold_prefill_seconds += seconds
        if news:
            self._report(news)

    def tell_untold(self) -> None:
        """Report steps that were not worth a report so far; to be called when no step can follow."""
        if self._untold_steps:
            self._report(StepNews())

    def ended_outside(self, request_ids: list[str]) -> None:
        """Requests ended without a step."""
        self._send(StepReport(self.lease_id, self._remaining(), 0.0, 0, *self._counts(), request_ids, steps=0))

    def _report(self, news: StepNews) -> None:
        stepped = self._untold_steps > 0
        running, waiting = self._counts()
        stages = self._stages()
        self._send(
            StepReport(
                lease_id=self.lease_id,
                lease_left=self._remaining(),
                seconds=self._untold_seconds if stepped else 0.0,
                tokens=self._untold_tokens,
                running=running,
                waiting=waiting,
                finished=news.finished,
                handed=news.handed,
                returned=news.returned,
                steps=self._untold_steps,
                prefilled=news.prefilled,
                prefill_tokens=self._untold_prefill_tokens,
                prefill_seconds=self._untold_prefill_seconds if stepped else 0.0,
                bubbles=stages.bubbles,
                computed=stages.computed,
                prefills=self._prefills if self._prefills.steps else None,
                decodes=self._decodes if self._decodes.steps else None,
            )
        )
        if stepped:
            self._settle()

    def _settle(self) -> None:
        """Nothing is untold."""
        self._untold_steps = self._untold_tokens = self._untold_prefill_tokens = 0
        self._untold_seconds = self._untold_prefill_seconds = 0.0
        if self._prefills.steps:
            self._prefills = StepSums()
        if self._decodes.steps:
            self._decodes = StepSums()

    def _remaining(self) -> int:
        return self._left if time.monotonic() < self._deadline else 0
