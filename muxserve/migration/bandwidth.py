"""How much may leave per second."""

from __future__ import annotations

import math


class TokenBucket:
    """Lets `rate` bytes per second pass, and at most `burst` seconds' worth at once after a pause.

    A piece may begin as soon as anything is left, and is taken off as a whole: pieces of any size pass, and their
    average is kept. A `rate` of 0 is no limit.

    Raises:
        ValueError: a negative rate, or a burst that is not positive.
    """

    def __init__(self, rate: float, burst: float = 0.02) -> None:
        if rate < 0 or burst <= 0:
            raise ValueError(f"rate must not be negative and burst must be positive, not {rate:g} and {burst:g}")
        self.rate = rate
        self._capacity = rate * burst
        self._left = self._capacity
        self._at = -math.inf

    def ready_at(self, now: float) -> float:
        """When the next piece may begin: `now`, or later."""
        if not self.rate:
            return now
        self._fill(now)
        # A hair more than what is missing: at that moment, whatever the rounding, something is left.
        return now if self._left > 0 else now + (-self._left + 1.0) / self.rate

    def take(self, size: int, now: float) -> None:
        """A piece of `size` bytes begins."""
        if self.rate:
            self._fill(now)
            self._left -= size

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._left = min(self._capacity, self._left + (now - self._at) * self.rate)
            self._at = now
