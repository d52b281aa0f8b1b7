"""The lease that an engine holds, and when it reports on it.

An engine with nothing to tell does not report every step: only the first with requests that came with the lease, when
half of the lease is used, so that the unit scheduler can renew it in time, and when it is over. Whatever the unit
scheduler decides on (requests that end, are handed over or returned, steps that found no pages) is told at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from muxserve.wire import HandOver, Lease, Returned, StepReport


class HeldLease:
    """One engine's lease and its account of the steps run under it.

    Args:
        send: sends a report to the unit scheduler.
        counts: requests in the engine, running and waiting.
        every_step: report each step, as prefill engines do: the promised pages follow what they compute.
    """

    def __init__(
        self, send: Callable[[StepReport], None], counts: Callable[[], tuple[int, int]], every_step: bool
    ) -> None:
        self._send = send
        self._counts = counts
        self._every_step = every_step
        self._id = 0
        self._steps = 0
        self._left = 0
        self._begun = 0.0
        self._deadline = 0.0
        self._half_told = False
        self._admitted = False
        self._untold_steps = 0
        self._untold_seconds = 0.0
        self._untold_tokens = 0

    def usable(self) -> bool:
        """Another step may begin."""
        return self._left > 0 and time.monotonic() < self._deadline

    def take(self, lease: Lease) -> None:
        """A new lease replaces what was left of the one before."""
        self._id = lease.lease_id
        self._steps = self._left = lease.steps
        self._begun = time.monotonic()
        self._deadline = self._begun + lease.seconds
        self._half_told = False
        self._admitted = bool(lease.admit)

    def drop(self) -> None:
        """Let go of the lease, and of what was not told yet."""
        self._left = 0
        self._untold_steps = self._untold_tokens = 0
        self._untold_seconds = 0.0

    def stepped(
        self,
        seconds: float,
        tokens: int,
        finished: list[str],
        handed: list[HandOver],
        returned: list[Returned],
    ) -> None:
        """A step took `seconds` and computed `tokens` tokens; report it if that is due."""
        now = time.monotonic()
        self._left -= 1
        if not tokens:
            # The unit scheduler must see that this very step was in vain, not the sum of it and those before.
            self.tell_untold()
        self._untold_steps += 1
        self._untold_seconds += seconds
        self._untold_tokens += tokens
        news = bool(finished or handed or returned) or not tokens or self._every_step or self._admitted
        half = self._left * 2 <= self._steps or now - self._begun >= self._deadline - now
        over = self._left <= 0 or now >= self._deadline
        if news or over or (half and not self._half_told) or not any(self._counts()):
            self._half_told = half
            self._admitted = False
            self._report(finished, handed, returned)

    def tell_untold(self) -> None:
        """Report steps that were not worth a report so far; to be called when no step can follow."""
        if self._untold_steps:
            self._report([], [], [])

    def ended_outside(self, request_ids: list[str]) -> None:
        """Requests ended without a step."""
        self._send(StepReport(self._id, self._remaining(), 0.0, 0, *self._counts(), request_ids, steps=0))

    def _report(self, finished: list[str], handed: list[HandOver], returned: list[Returned]) -> None:
        steps, seconds, tokens = self._untold_steps, self._untold_seconds, self._untold_tokens
        self._untold_steps = self._untold_tokens = 0
        self._untold_seconds = 0.0
        left = self._remaining()
        self._send(
            StepReport(self._id, left, seconds, tokens, *self._counts(), finished, handed, returned, steps=steps)
        )

    def _remaining(self) -> int:
        return self._left if time.monotonic() < self._deadline else 0
