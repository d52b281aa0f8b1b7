"""A lease, and the work that an engine has done, as the ledger keeps them. Policies only read."""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.scheduling.types import Phase

_SMOOTHING = 0.2
_FIRST_RETRY_SECONDS = 0.001
_LAST_RETRY_SECONDS = 0.02


@dataclass(slots=True)
class LeaseState:
    """A lease as far as its engine has reported. `left` steps of `steps` are left; `deadline` bounds it in time.

    `share` is what it names, and `held` what its engine may still compute on: more, from when its share is reduced
    until the engine has met the smaller lease between two steps.
    """

    lease_id: int
    steps: int
    left: int
    granted_at: float
    deadline: float
    share: int
    renewable: bool
    phase: Phase
    held: int
    # The first of the leases in a row under which the engine computes on no more than `share`.
    share_since: int
    # The one request that is computed under it, if it is for one alone.
    alone: str = ""
    # The first of the leases in a row that say the same of that.
    alone_since: int = 0
    # The engine has reported under one of these; before, it may still compute something else.
    confirmed: bool = False

    def due(self, now: float) -> bool:
        """Half used up, in steps or in time: renew it now if the engine is to go on without a gap."""
        return self.left * 2 <= self.steps or now - self.granted_at >= self.deadline - now


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """Steps that an engine has run, and how long one takes it by now (`step_seconds`, 0 when not known). After one that
    found no pages it is not tried again before `retry_at`."""

    jobs: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    step_seconds: float = 0.0
    retry_at: float = 0.0
    retry_delay: float = 0.0

    def stepped(self, seconds: float, tokens: int, steps: int = 1) -> None:
        """Count steps that took `seconds` in all, and learn how long one takes."""
        self.jobs += steps
        self.tokens += tokens
        self.busy_seconds += seconds
        known, mean = self.step_seconds, seconds / steps
        self.step_seconds = mean if known == 0.0 else mean + (1.0 - _SMOOTHING) ** steps * (known - mean)

    def starved(self, now: float) -> None:
        """A step computed nothing: wait, longer each time."""
        self.retry_delay = min(max(self.retry_delay * 2, _FIRST_RETRY_SECONDS), _LAST_RETRY_SECONDS)
        self.retry_at = now + self.retry_delay

    def fed(self) -> None:
        """There is no shortage."""
        self.retry_at = self.retry_delay = 0.0
