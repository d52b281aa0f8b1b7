"""Leases: how long they last, and a lease and the work of an engine as the ledger keeps them. Policies only read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from muxserve.scheduling.types import Grant

_SMOOTHING = 0.2
_FIRST_RETRY_SECONDS = 0.001
_LAST_RETRY_SECONDS = 0.02


class LeaseState:
    """A lease as far as its engine has reported. `left` steps of `steps` are left; `deadline` bounds it in time.

    `share` is what it names, and `held` what its engine may still compute on: more, from when its share is reduced
    until the engine has met the smaller lease between two steps. With `alone` that one request is computed under it.
    """

    __slots__ = (
        "alone",
        "alone_since",
        "confirmed",
        "deadline",
        "granted_at",
        "held",
        "lease_id",
        "left",
        "phase",
        "renewable",
        "share",
        "share_since",
        "steps",
    )

    def __init__(self, grant: Grant, lease_id: int, now: float, alone: str = "") -> None:
        self.lease_id = lease_id
        self.phase = grant.phase
        self.steps = self.left = grant.steps
        self.granted_at = now
        self.deadline = now + grant.seconds
        self.share = self.held = grant.share
        self.renewable = grant.renewable
        self.alone = alone
        # The first of the leases in a row under which the engine computes on no more than `share`.
        self.share_since = lease_id
        # The first of the leases in a row that say the same of `alone`.
        self.alone_since = lease_id
        # The engine has reported under one of these; before, it may still compute something else.
        self.confirmed = False

    def replaces(self, before: LeaseState) -> None:
        """The engine goes on under this lease where it was under the one `before`."""
        self.held = max(self.held, before.held)
        if self.share >= before.share:
            self.share_since = before.share_since
        if self.alone and before.alone == self.alone:
            self.alone_since, self.confirmed = before.alone_since, before.confirmed

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


class Length(NamedTuple):
    """Steps of a lease, and the seconds after which it ends anyway."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Quanta:
    """Lengths of leases.

    A lease is counted in steps, as many as fit into a quantum of time at the engine's usual pace. Its bound in seconds
    is only for steps that take far longer than usual, so it is generous. While others wait (`contended`) the quantum is
    short, but at least two steps, since compute is idle for a moment at each change. When nobody does (`open`) it is
    long, and at least four steps, so that it can be renewed before it ends.
    """

    contended_steps: int = 8
    contended_seconds: float = 0.02
    least_contended_steps: int = 2
    open_steps: int = 64
    open_seconds: float = 0.1
    least_open_steps: int = 4
    prefill_seconds: float = 10.0
    slack: float = 4.0

    def decode(self, step_seconds: float, contended: bool, depth: int = 1) -> Length:
        """Length of a decode lease; `step_seconds` is the engine's usual step, 0 when not known. With `depth`
        micro-batches under way more are still to begin when half of the steps are left."""
        steps = self.decode_steps(step_seconds, contended)
        if depth > 1:
            steps = max(steps, self.least_open_steps * depth)
        quantum = self.contended_seconds if contended else self.open_seconds
        seconds = steps * step_seconds
        return Length(steps, self.slack * (seconds if seconds > quantum else quantum))

    def decode_steps(self, step_seconds: float, contended: bool) -> int:
        """Steps of a decode lease."""
        if contended:
            most, least, quantum = self.contended_steps, self.least_contended_steps, self.contended_seconds
        else:
            most, least, quantum = self.open_steps, self.least_open_steps, self.open_seconds
        if step_seconds <= 0.0:
            return most
        steps = int(quantum / step_seconds)
        if steps < least:
            steps = least
        return most if steps > most else steps

    def prefill(self, step_seconds: float, steps: int) -> Length:
        """Length of a prefill job of `steps` steps."""
        return Length(steps, max(self.prefill_seconds, self.slack * steps * step_seconds))
